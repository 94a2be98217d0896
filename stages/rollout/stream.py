"""Generate continuously, across the boundaries of rounds (`--async-mode streaming`).

In rollout.py a round starts its requests and ends with its slowest response. Here a thread keeps groups in flight all
the time, even while new weights are loaded into the engines, and a round takes the groups that finished first.
Everything else is the same: the round's commit holds the samples to train on, the position in the data, and in its
buffer every group that was started but not used, so a restart issues no prompt twice and loses none.

A token that is more than `max_staleness` policy versions older than the policy that is trained on it is masked. A group
whose tokens are all too old is generated once more. A round waits for such a group if the group would otherwise get too
old a second time.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

from penstock.engines.generation import EngineUrls
from penstock.engines.local_gpus import energy_metric
from penstock.stages.rollout.collect import CollectedGroups, Flight, GroupsInFlight, flatten_errors
from penstock.stages.rollout.group import num_trained_tokens
from penstock.stages.rollout.journal import Journal
from penstock.stages.rollout.metrics import rollout_metrics
from penstock.stages.rollout.plugins.filters import load_group_filter
from penstock.stages.rollout.plugins.hooks import Hooks, make_train_data, run_log_function
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound, copy_sample, is_too_old, without_responses
from penstock.stages.rollout.rollout import (
    ResumePoint,
    RolloutContext,
    RoundResult,
    commit_samples,
    open_prompt_intake,
    open_runner,
    round_metrics,
    samples_to_train,
    state_of_round,
)
from penstock.storage.commit import Commit
from penstock.storage.failpoints import failpoint
from penstock.storage.preemption import Preempted
from penstock.storage.samples.sample import Sample

REPEATED = "generated_again"  # metadata of the samples of a group whose first responses became too old
FILL_INTERVAL = 0.05  # seconds between checks whether more groups may be started


class LostRound(Exception):
    """Another driver of the run has committed the round first, with other groups and another position in the data."""


def is_repeated(flight: Flight) -> bool:
    """Return whether a group is generated once more, because all its tokens became too old."""
    return bool((flight.group or flight.prompts)[0].metadata.get(REPEATED))


@dataclass(frozen=True)
class Taken:
    """The samples that a round took from the stream, and the state of the stream at this moment."""

    samples: list[Sample]  # samples to train on
    journal: Journal
    seconds: dict[str, float]
    metrics: dict[str, float]
    state: dict[str, Any]  # field `state` of the commit
    buffer: list[Sample]  # samples of all groups that were started but not used


class RolloutStream:
    """Generates groups in a thread from `start` to `close`. After an exception in `run_round`, close the stream and
    create another one, which continues after the last committed round. The stream's thread enters the context manager
    `engines`. Other threads load new weights into the engines; `engine_version` returns the policy version that all
    engines have loaded. `prefix_of` returns a round's prefix in the store."""

    def __init__(
        self,
        context: RolloutContext,
        engines: Callable[[], AbstractContextManager[EngineUrls]],
        prefix_of: Callable[[int], str],
        round: RolloutRound,
        resume_point: ResumePoint,
        num_rounds: int,
        engine_version: Callable[[], int],
    ) -> None:
        assert context.grader is not None, "the stream needs a grader that outlives its rounds"
        self.context = context
        self.engines = engines
        self.prefix_of = prefix_of
        self.round = round
        self.num_rounds, self.engine_version = num_rounds, engine_version
        self.hooks, self.filter = Hooks(context.config), load_group_filter(context.config)
        self.intake = open_prompt_intake(context, round, resume_point)
        self._num_wasted_tokens = 0  # number of discarded tokens of groups that are generated once more
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()  # set when `_loop` runs or has failed
        self._thread = threading.Thread(target=self._run, name="rollout-stream", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it can generate. Raises its error if it fails before that."""
        self._thread.start()
        self._ready.wait()
        self._raise_failure()

    def close(self) -> None:
        """Cancel the groups in flight and end the thread. Finished groups are in the journal."""
        if self._thread.is_alive():
            if self._loop is not None:
                with suppress(RuntimeError):  # the loop is closed, because the stream has failed
                    self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def run_round(self, rollout_id: int) -> Commit:
        """Wait for the groups of the next round, and commit them. Raises RuntimeError or ConnectionError (the engines
        or all samples failed, or the filter dropped too many groups), TimeoutError after --rollout-timeout, Preempted,
        and LostRound."""
        self._raise_failure()
        try:
            taken = self._run_in_loop(self._take(rollout_id))
        except CancelledError:
            self._thread.join()
            self._raise_failure()
            raise Preempted("the stream was closed") from None
        prefix = self.prefix_of(rollout_id)
        attempt = self.context.store.new_attempt(prefix)
        with taken.journal.flushed_on_error():
            failpoint("stream-round-taken")
            commit = commit_samples(
                self.context,
                prefix,
                replace(self.round, rollout_id=rollout_id),
                taken.samples,
                taken.seconds,
                lambda: (
                    rollout_metrics(taken.samples)
                    | taken.metrics
                    | run_log_function(self.context.config, rollout_id, taken.samples, sum(taken.seconds.values()))
                ),
                buffer=taken.buffer,
                policy_version=max(sample.policy_versions[1] for sample in taken.samples),
                state=taken.state,
                attempt=attempt,
            )
        taken.journal.delete_entries()
        if commit.attempt != attempt:  # the stream's state continues from groups that this commit does not have
            raise LostRound
        return commit

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Taken]) -> Taken:
        """Return the result of a coroutine that runs in the stream's thread. Raises CancelledError if the thread ends
        first."""
        assert self._loop is not None
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise CancelledError from None
        while not wait([future], timeout=1.0).done:  # a loop that is being closed may no longer run the coroutine
            if not self._thread.is_alive():
                raise CancelledError
        return future.result()

    # ---- the stream's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.engines() as urls:
                asyncio.run(self._generate(urls))
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _generate(self, urls: EngineUrls) -> None:
        """Keep groups in flight until `close` is called, a stop is requested or a group fails."""
        context = self.context
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        assert context.grader is not None
        prefix = self.prefix_of(self.round.rollout_id)
        journal = Journal(context.store, prefix, self.round, context.config)
        journal.load_finished_groups()
        async with open_runner(context, urls, journal, context.grader, self.hooks) as (self.runner, _):
            self._since, self._counters = time.perf_counter(), context.read_counters()
            try:
                async with asyncio.TaskGroup() as tasks:
                    self.groups = GroupsInFlight(self.runner, self.filter, tasks)
                    works = (self._fill(), self.runner.flush_journal_periodically())
                    background = [tasks.create_task(work) for work in works]
                    self._ready.set()
                    await self._closed.wait()
                    for task in [*background, *self.groups.running.values()]:
                        task.cancel()
            except BaseExceptionGroup as failures:
                raise next(flatten_errors(failures)) from None
            finally:
                self.runner.journal.flush()

    async def _fill(self) -> None:
        """Keep as many groups in flight or waiting as this round and the later rounds need that may train on tokens of
        the engines' current policy version."""
        config, groups, version = self.context.config, self.groups, self.engine_version()
        max_dropped = config.max_waves * config.rollout_batch_size
        surplus = max(0, (config.over_sampling_batch_size or 0) - config.rollout_batch_size)
        while True:
            if version != self.engine_version():
                version = self.engine_version()
                groups.changed.set()
            if self.context.stop is not None:
                self.context.stop.raise_if_requested()
            if len(groups.dropped) > max_dropped:
                raise RuntimeError(
                    f"the dynamic sampling filter has dropped {len(groups.dropped)} groups since the last round: use "
                    "prompts that the policy solves only sometimes, use a less strict filter, or raise --max-waves"
                )
            end = min(self.num_rounds, version + self.round.max_staleness + 1)
            num_rounds = end - self.round.rollout_id
            room = num_rounds * config.rollout_batch_size + surplus - len(groups.running) - len(groups.finished)
            if room > 0:
                for group in self.intake.next_groups(room):
                    first = min(
                        (sample.policy_versions[0] for sample in group if any(sample.loss_mask)), default=version
                    )
                    groups.start(Flight(without_responses(group), first), group)
            await asyncio.sleep(FILL_INTERVAL)

    async def _take(self, rollout_id: int) -> Taken:
        """Wait until the groups of the next round are finished, and take them."""
        config, round = self.context.config, self.round
        assert rollout_id == round.rollout_id, f"round {rollout_id} was taken instead of {round.rollout_id}"
        oldest, size = rollout_id - round.max_staleness, config.rollout_batch_size
        try:
            async with asyncio.timeout(None) as limit:
                await self._wait_for_groups(oldest, size, limit)
        except TimeoutError:
            raise TimeoutError(
                f"only {len(self.groups.finished)} of {size} groups were finished within --rollout-timeout "
                f"{config.rollout_timeout:g} s: raise --rollout-timeout, or use more engines"
            ) from None
        finished = self.groups.finished
        finished.sort(key=lambda flight: flight.version if is_repeated(flight) else math.inf)  # stable
        taken = finished[:size]  # they stay in `finished` until `_end_round`, because `_fill` must count them
        kept = sorted((flight.group or [] for flight in taken), key=lambda group: group[0].group_id)
        for sample in (sample for group in kept for sample in group if sample.rollout_id != rollout_id):
            sample.metadata.setdefault("start_rollout_id", sample.rollout_id)
            sample.rollout_id = rollout_id
        await asyncio.to_thread(self.hooks.run_sample_filter, kept)
        await asyncio.to_thread(
            self.hooks.run_round_hook, kept + [group for group, _ in self.groups.dropped], self.intake.source
        )
        samples, num_masked = samples_to_train(kept, config, round)
        samples = await asyncio.to_thread(make_train_data, samples, config, self.context.tokenizer)
        return self._end_round(kept, samples, num_masked)

    async def _wait_for_groups(self, oldest: int, number: int, limit: asyncio.Timeout) -> None:
        """Wait until `number` finished groups have tokens of policy version `oldest` or newer. Also wait for groups
        that are generated once more because they got too old, if they would otherwise get too old again. `limit` gets
        the deadline of --rollout-timeout; the time before the engines have policy version `oldest` does not count."""
        while True:
            if self.engine_version() >= oldest:  # otherwise even new groups would be too old
                if limit.when() is None:
                    limit.reschedule(asyncio.get_running_loop().time() + self.context.config.rollout_timeout)
                self._repeat_stale_groups(oldest)
                if len(self.groups.finished) >= number and not self._must_await_repeated_groups(oldest, number):
                    return
            if self.context.on_progress is not None:
                self.context.on_progress(min(len(self.groups.finished), number), number)
            await self.groups.wait_for_change()

    def _must_await_repeated_groups(self, oldest: int, number: int) -> bool:
        """Return whether the round must wait for groups that are generated once more. It must if, after it has taken
        `number` finished groups, more repeated groups remain than later rounds can take before the groups get too old.
        """
        running = [flight.version for flight in self.groups.running if is_repeated(flight)]
        finished = [flight.version for flight in self.groups.finished if is_repeated(flight)]
        for version in {*running, *finished}:
            num_running, num_finished = (sum(v <= version for v in versions) for versions in (running, finished))
            num_left = num_running + max(0, num_finished - number)
            if num_running and num_left > max(0, version - oldest) * number:
                return True
        return False

    def _repeat_stale_groups(self, oldest: int) -> None:
        """Generate finished groups again if all their tokens come from policy versions before `oldest`."""
        for flight in list(self.groups.finished):
            group = flight.group or []
            if is_too_old(group, oldest) and not is_repeated(flight):
                self.groups.finished.remove(flight)
                self._num_wasted_tokens += num_trained_tokens(group)
                self.runner.journal.finished.pop(group[0].group_id, None)
                for sample in flight.prompts:
                    sample.metadata[REPEATED] = True
                again = Flight(flight.prompts, self.engine_version())
                self.groups.start(again, [copy_sample(sample) for sample in flight.prompts])

    def _end_round(self, kept: list[Group], samples: list[Sample], num_masked: int) -> Taken:
        """Return what the round commits, and begin the next round. No other coroutine runs during this call, so every
        group is either in flight, finished, dropped or kept."""
        config, round, runner, groups = self.context.config, self.round, self.runner, self.groups
        del groups.finished[: config.rollout_batch_size]
        waiting = [flight.group or [] for flight in groups.finished]
        dropped = sorted(groups.dropped, key=lambda entry: entry[0][0].group_id)
        counters = self.context.read_counters()
        result = RoundResult(
            CollectedGroups(kept, waiting, dropped, num_batches=1),
            runner,
            seconds={"generate": time.perf_counter() - self._since},
            energy=energy_metric("perf/rollout_energy_joules", self._counters, counters),
        )
        metrics = round_metrics(result, self.intake, round, samples, result.seconds, num_masked)
        unused = [flight.prompts for flight in groups.running] + waiting + self.intake.buffered_groups
        groups.count_idle_seconds()
        metrics.pop("rollout/num_waves", None)
        metrics["rollout/num_buffered_groups"] = float(len(unused))
        metrics["rollout/num_waiting_groups"] = float(len(waiting))
        metrics["rollout/num_running_groups"] = float(len(groups.running))
        metrics["perf/engine_idle_ratio"] = min(1.0, groups.idle_seconds / result.seconds["generate"])
        metrics["rollout/wasted_tokens"] += self._num_wasted_tokens
        state = state_of_round(result, self.intake, samples, round, config.num_shown_samples)
        ids = [group[0].group_id for group in [*kept, *unused]]
        assert len(set(ids)) == len(ids), "a group is in two places of the stream"
        buffer = [copy_sample(sample) for group in unused for sample in group]
        taken = Taken(samples, runner.journal, result.seconds, metrics, state, buffer)

        self.round = replace(round, rollout_id=round.rollout_id + 1, policy_version=self.engine_version())
        self.intake.begin_round(self.round)
        prefix = self.prefix_of(self.round.rollout_id)
        runner.begin_round(self.round, Journal(self.context.store, prefix, self.round, config))
        groups.dropped, groups.idle_seconds, self._num_wasted_tokens = [], 0.0, 0
        self._since, self._counters = time.perf_counter(), counters
        return taken

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
