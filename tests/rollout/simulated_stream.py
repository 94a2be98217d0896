"""A `RolloutStream` in simulated time, with scripted engines and a scripted trainer, for test_stream.py.

The stream's event loop has a clock that jumps to the next timer instead of waiting, so seconds cost nothing and results
do not depend on the speed of the machine. The clock runs only while a round waits for groups, and in `run_for`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import KEYS, Bench, ScriptedClient

from penstock.engines.generation import Generation, TokenCounts
from penstock.stages.rewards.outcome import Outcome
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point
from penstock.stages.rollout.stream import RolloutStream, Taken
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit
from penstock.storage.preemption import StopRequest
from penstock.storage.samples.sample import Sample
from penstock.storage.store import Store

HANG = 60.0  # real seconds; only a hang exceeds it
END_TOKEN = 1


class Clock:
    """The time of simulated event loops. It runs up to `limit`."""

    def __init__(self) -> None:
        self.now = self.limit = 0.0
        self.thread_seconds = 0.0  # of a call in another thread
        self.changed = threading.Condition()

    def resume(self) -> None:
        """Let the clock run until `pause`."""
        self.limit = float("inf")

    def pause(self) -> None:
        """Stop the clock. Only the event loop's thread may call this."""
        self.limit = self.now

    def run_for(self, seconds: float) -> None:
        """Let the clock run for some simulated seconds."""
        end = self.now + seconds
        with self.changed:
            self.limit = end
            assert self.changed.wait_for(lambda: self.now >= end, HANG), "the event loop has ended"

    def advance(self, seconds: float) -> bool:
        """Advance by at most `seconds`. Return False if the clock has reached its limit."""
        with self.changed:
            before, self.now = self.now, min(self.now + seconds, max(self.limit, self.now))
            self.changed.notify_all()
            return self.now > before


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in the time of a `Clock`."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._select_now = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._clock.now

    def _select(self, timeout: float | None = None) -> Any:
        events = self._select_now(0)
        if events or timeout is None or timeout <= 0:
            return events or self._select_now(timeout)
        return [] if self._clock.advance(timeout) else self._select_now(0.0005)  # paused: other threads work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Simulate the time of all event loops of the test."""

    chance = random.Random(0)

    async def run_inline(function: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(clock.thread_seconds)
        await yield_to_others(chance.randrange(3))
        return function(*args)

    clock = Clock()
    monkeypatch.setattr(asyncio.events, "new_event_loop", lambda: SimulatedLoop(clock))
    monkeypatch.setattr(asyncio, "to_thread", run_inline)  # a thread would take no simulated time, but a random one
    return clock


async def yield_to_others(number: int) -> None:
    """Let the event loop run `number` times."""
    for _ in range(number):
        await asyncio.sleep(0)


class TimedClient(ScriptedClient):
    """Generates one token per simulated second, with the weights that the engines have at that moment. The length of a
    response is `bench.length(prompt, index)`."""

    bench: SimulatedBench
    fails: Callable[[str], bool] = staticmethod(lambda prompt: False)
    refuses: Callable[[str], bool] = staticmethod(lambda prompt: False)

    async def generate_each(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], **options: Any
    ) -> list[Generation]:
        bench, start = self.bench, self.bench.clock.now
        [prompt] = bench.tokenizer.decode([prompts[0]], skip_special_tokens=False)
        bench.issues.append(prompt)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            lengths = [bench.length(prompt, index) for index in range(len(prompts))]
            await asyncio.sleep(max(lengths))
            await yield_to_others(bench.chance.randrange(8))
        finally:
            self.in_flight -= 1
        if self.fails(prompt):
            raise ConnectionError("no engine answered")
        if self.refuses(prompt):
            raise ValueError("the input is too long")
        return [self._answer(start, length) for length in lengths]

    def _answer(self, start: float, length: int) -> Generation:
        versions = [self.bench.version_at(start + token + 0.5) for token in range(length)]
        spans = [(f"run/{version}", len(list(tokens))) for version, tokens in groupby(versions)]
        tokens = [6 + version % 10 for version in versions[:-1]] + [END_TOKEN]
        return Generation(tokens, [-0.5] * length, "stop", spans, TokenCounts(prompt=3, cached=1))


class ScriptedGrader:
    """Grades every sample 1, `delay(group id)` simulated seconds after its generation."""

    delay: Callable[[str], float] = staticmethod(lambda group_id: 0.0)

    def submit_group(self, samples: list[Sample]) -> list[Future[Outcome]]:
        futures: list[Future[Outcome]] = [Future() for _ in samples]
        seconds = self.delay(samples[0].group_id) if samples else 0.0
        for future in futures:
            if seconds:
                asyncio.get_running_loop().call_later(seconds, future.set_result, Outcome(reward=1.0))
            else:
                future.set_result(Outcome(reward=1.0))
        return futures


class SimulatedStream(RolloutStream):
    """Pauses the clock when a round is taken."""

    bench: SimulatedBench

    async def _take(self, rollout_id: int) -> Taken:
        self.bench.clock.resume()
        return await super()._take(rollout_id)

    def _end_round(self, *args: Any) -> Taken:
        self.bench.clock.pause()
        return super()._end_round(*args)


class SimulatedBench(Bench):
    """A run with `--async-mode streaming`: rounds are trained one after the other, each in `train_seconds`, and then
    its weights are in the engines."""

    def __init__(
        self,
        directory: Path,
        tokenizer: PromptTokenizer,
        clock: Clock,
        *,
        max_staleness: int = 2,
        num_rounds: int = 1000,
        train_seconds: float = 8.0,
        num_rows: int = 200,
        **options: Any,
    ) -> None:
        options = {"rollout_timeout": 1e6, "rollout_journal_interval": 1.0} | options
        super().__init__(directory, tokenizer, num_rows, **options)
        self.directory, self.clock = directory, clock
        self.max_staleness, self.num_rounds, self.train_seconds = max_staleness, num_rounds, train_seconds
        self.grader, self.stop = ScriptedGrader(), StopRequest()
        self.chance = random.Random(0)  # order of what happens at the same simulated time
        self.length: Callable[[str, int], int] = short_lengths
        self.issues: list[str] = []  # prompts of all requests
        self.versions = [0]  # policy versions of the engines, and since when they have had each
        self.since = [0.0]
        self.stream: SimulatedStream | None = None
        self.num_kills = 0

    # ---- the trainer -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy version that the engines have now."""
        return self.version_at(self.clock.now)

    def version_at(self, time: float) -> int:
        return self.versions[bisect_right(self.since, time) - 1]

    def train(self, rollout_id: int) -> None:
        """Publish the policy of a round when it is trained: after the rounds before it, and `train_seconds`."""
        start = max(self.clock.now, self.since[-1])
        self.versions.append(rollout_id + 1)
        self.since.append(start + self.train_seconds)

    def publish(self, version: int) -> None:
        """Publish a policy now."""
        self.versions.append(version)
        self.since.append(self.clock.now)

    # ---- the stream --------------------------------------------------------------------------------------------------

    def round(self, r: int, *, is_trained: bool = True, **changes: Any) -> Commit:  # type: ignore[override]
        """Take round `r` from the stream, and start its training. `changes`: attributes of the client, if this opens
        the stream."""
        if self.stream is None:
            self.stream = self.open(r, **changes)
            self.stream.start()
        try:
            commit = self.stream.run_round(r)
        except BaseException:
            self.close()
            raise
        if is_trained:
            self.train(r)
        return commit

    def open(self, first: int, **changes: Any) -> SimulatedStream:
        """Return a stream that begins with round `first`, not started."""

        def connect(urls: list[str], timeout: float) -> ScriptedClient:
            return self.connect(urls, timeout, client=TimedClient, bench=self, **changes)

        @contextmanager
        def engines() -> Iterator[list[str]]:
            yield ["http://engine"]

        stream = SimulatedStream(
            RolloutContext(
                self.store,
                self.config,
                self.source(),
                self.tokenizer,
                grader=self.grader,  # type: ignore[arg-type]
                stop=self.stop,
                connect=connect,
            ),
            engines,
            KEYS.rollout_prefix,
            RolloutRound("run", first, self.version, max_staleness=self.max_staleness, updates_in_flight=True),
            read_resume_point(self.store, KEYS, first),
            num_rounds=self.num_rounds,
            engine_version=lambda: self.version,
        )
        stream.bench = self
        return stream

    def close(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def kill(self) -> None:
        """Continue with a copy of the store: what the stream still writes is lost. The policy of the last trained round
        is in the engines."""
        self.num_kills += 1
        copy = self.directory / f"store-{self.num_kills}"
        shutil.copytree(self.store.root, copy)
        self.close()
        self.store = Store(str(copy))
        num_committed = len(self.store.committed_indices(f"{KEYS.prefix}/rollouts"))
        version = min(self.version, num_committed)
        self.versions, self.since = [version], [0.0]
        for rollout_id in range(version, num_committed):
            self.train(rollout_id)

    @property
    def client(self) -> ScriptedClient:
        """The client of the last stream."""
        return self.clients[-1]


def short_lengths(prompt: str, index: int) -> int:
    """Return lengths of 1 to 8 tokens, at random but always the same for a sample."""
    return random.Random(f"{prompt} {index}").randint(1, 8)


def lengths_of(**seconds: int) -> Callable[[str, int], int]:
    """Return a function of response lengths: `p3=20` makes those to the prompt 3 20 tokens long; others have 2."""
    return lambda prompt, index: seconds.get(f"p{number_of(prompt)}", 2)


def number_of(prompt: str) -> int:
    """Return the number of a prompt's row."""
    return int(prompt.partition("+")[0].rpartition(">")[2])
