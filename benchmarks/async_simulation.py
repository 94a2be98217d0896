"""Simulate the modes of training as discrete events: wall time, throughput, idle time and staleness.

    python benchmarks/async_simulation.py --table                   # modes against staleness for 8 to 1,024 GPUs
    python benchmarks/async_simulation.py --fit STORE RUN [RUN ...] # the first run is synchronous and is measured; the
                                                                    # others, of any mode, are predicted from it

Simulated are engines that decode all their running requests step by step, groups that end with their slowest sample, a
trainer, and weight updates; prompts cost nothing. A decoding step with k requests takes `step_seconds` + k x
`request_seconds`. The modes follow flows/turns.py (ahead) and stages/rollout/stream.py (streaming).

The figures behind --table are those of a 4B model on H200 GPUs (benchmarks/results): decoding steps of fp8_rollout.py's
bf16 engine with 16 and 256 requests, training at 54 % MFU, weight updates over NCCL in proportion to their bytes. It
assumes that training speed is proportional to the number of GPUs.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import simpy

from penstock.storage.refs import RunKeys
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from learning import read_commit
from run import read_publish_seconds, round_seconds

Process = Generator[simpy.Event, Any, None]
Group = list[int]  # response length of each sample, in tokens


@dataclass(frozen=True)
class Workload:
    """What a run generates and trains, and how fast. All times are in seconds."""

    rounds: list[list[Group]]  # the groups of each round
    num_engines: int
    slots: int  # samples that an engine decodes at once; further groups wait
    step_seconds: float  # of a decoding step, without the part that grows with the number of requests
    request_seconds: float  # of a decoding step, for each running request
    train_seconds: float  # of a round, apart from the part that grows with its tokens
    train_seconds_per_token: float
    publish_seconds: float  # of a weight update, during which the engines stand still
    commit_rollout_seconds: float = 0.0  # of a round between its generation and the start of its training
    commit_step_seconds: float = 0.0  # of a round after its training

    def train_time(self, groups: Sequence[Group]) -> float:
        """Return the seconds of training on some groups."""
        return self.train_seconds + self.train_seconds_per_token * sum(map(sum, groups))


@dataclass(frozen=True)
class Mode:
    """How generation and training are interleaved."""

    name: str
    max_ahead: int = 0  # K: rollouts ahead of the trainer
    interval: int = 1  # N: rounds between weight updates
    max_staleness: int | None = None  # S, with streaming
    switch_seconds: float | None = None  # colocated: of moving memory, before each rollout and before each training


SYNCHRONOUS = Mode("synchronous")


@dataclass
class Outcome:
    """What a simulated run took and did."""

    seconds: float
    trained_tokens: int
    engines_idle: float  # fraction of the time without a request, mean over the engines
    trainer_idle: float  # fraction of the time
    staleness: dict[int, int]  # policy versions -> trained tokens
    masked_tokens: int  # generated, but too old to be trained
    order: list[int]  # number of each group, in the order in which they were trained
    ends: list[float]  # when each round was trained

    @property
    def mean_staleness(self) -> float:
        """Return the mean over the trained tokens, in policy versions."""
        return sum(age * number for age, number in self.staleness.items()) / max(1, self.trained_tokens)


# ---- the actors ------------------------------------------------------------------------------------------------------


class Engine:
    """Decodes requests. All running requests advance by one token in a step."""

    def __init__(self, env: simpy.Environment, workload: Workload) -> None:
        self.env, self.workload = env, workload
        self.busy_seconds = 0.0
        self._progress = 0.0  # tokens by which a request would have advanced that runs since the start
        self._running: list[tuple[float, int, simpy.Event]] = []  # heap of (progress at its end, tie, end)
        self._waiting: deque[tuple[int, simpy.Event]] = deque()
        self._ties = itertools.count()
        self._changed_at = 0.0
        self._pauses = 0
        self._timer = 0

    @property
    def load(self) -> int:
        """Return the number of running and waiting requests."""
        return len(self._running) + len(self._waiting)

    @property
    def progress(self) -> float:
        """Return the tokens by which a request would have advanced that runs since the start of the simulation."""
        self._advance()
        return self._progress

    def submit(self, length: int) -> simpy.Event:
        """Start a request of `length` tokens, or queue it. Returns the event of its end, with its progress at the start
        and at the end as value."""
        end = self.env.event()
        self._waiting.append((length, end))
        self._update()
        return end

    def pause(self) -> None:
        """Stand still until `resume` is called as often as `pause`."""
        self._advance()
        self._pauses += 1
        self._update()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._advance()
        self._pauses -= 1
        self._update()

    def _advance(self) -> None:
        seconds, self._changed_at = self.env.now - self._changed_at, self.env.now
        if self._running:
            self.busy_seconds += seconds
            if not self._pauses:
                self._progress += seconds / self._step_time

    @property
    def _step_time(self) -> float:
        return self.workload.step_seconds + self.workload.request_seconds * len(self._running)

    def _update(self) -> None:
        """Start waiting requests, and set the timer to the end of the next request."""
        self._advance()
        while self._waiting and len(self._running) < self.workload.slots:
            length, end = self._waiting.popleft()
            heapq.heappush(self._running, (self._progress + length, next(self._ties), end))
        self._timer += 1
        if self._running and not self._pauses:
            seconds = max(0.0, self._running[0][0] - self._progress) * self._step_time
            timer, timeout = self._timer, self.env.timeout(seconds)
            assert timeout.callbacks is not None
            timeout.callbacks.append(lambda event: self._end_next(timer))

    def _end_next(self, timer: int) -> None:
        if timer != self._timer:
            return  # the number of requests has changed since
        self._advance()
        self._progress = max(self._progress, self._running[0][0])
        while self._running and self._running[0][0] <= self._progress:
            heapq.heappop(self._running)[2].succeed(self._progress)
        self._update()


@dataclass
class Flight:
    """A group that is generated or waits for its training."""

    number: int
    group: Group
    tokens: dict[int, float] = field(default_factory=dict)  # policy version -> tokens that it generated
    is_repeated: bool = False


class Run:
    """One simulated run: engines, trainer and the state that they share."""

    def __init__(self, workload: Workload, mode: Mode) -> None:
        self.workload, self.mode = workload, mode
        self.env = simpy.Environment()
        self.engines = [Engine(self.env, workload) for _ in range(workload.num_engines)]
        self.changed = self.env.event()  # triggered, and replaced, by `notify`
        self.batches: simpy.Store = simpy.Store(self.env)
        self.num_trained = self.sent = 0
        self.is_training = self.is_sending = False
        self.next_rollout: int | None = 0
        self.updates: list[tuple[int, list[float]]] = [(0, [0.0] * workload.num_engines)]  # version, engines' progress
        self.train_seconds = 0.0
        self.outcome = Outcome(0.0, 0, 0.0, 0.0, {}, 0, [], [])
        self.in_flight = 0
        self.finished: list[Flight] = []

    def simulate(self) -> Outcome:
        """Run until the last round is trained."""
        self.env.process(self.generate_in_stream() if self.mode.max_staleness is not None else self.generate_rollouts())
        self.env.run(until=self.env.process(self.train()))
        total, outcome = self.env.now, self.outcome
        outcome.seconds = total
        outcome.engines_idle = 1 - statistics.fmean(engine.busy_seconds for engine in self.engines) / total
        outcome.trainer_idle = 1 - self.train_seconds / total
        return outcome

    # ---- the trainer ---------------------------------------------------------------------------------------------

    def train(self) -> Process:
        """Train every round, and, in a stream, send the weights after it."""
        for number in range(len(self.workload.rounds)):
            flights: list[Flight] = yield self.batches.get()
            while self.is_sending or self.version_for(self.next_rollout) not in (None, self.sent):
                yield self.changed
            seconds = self.workload.train_time([flight.group for flight in flights])
            seconds += self.workload.commit_step_seconds + (self.mode.switch_seconds or 0.0)
            self.is_training, self.train_seconds = True, self.train_seconds + seconds
            yield self.env.timeout(seconds)
            self.is_training, self.num_trained = False, number + 1
            self.outcome.ends.append(self.env.now)
            self.count_tokens(number, flights)
            self.notify()
            if self.mode.max_staleness is not None and self.num_trained % self.mode.interval == 0:
                yield from self.send_weights()

    def count_tokens(self, number: int, flights: list[Flight]) -> None:
        """Add the tokens of a trained round to the outcome."""
        for flight in flights:
            self.outcome.order.append(flight.number)
            for version, tokens in flight.tokens.items():
                age, num_tokens = number - version, round(tokens)
                if self.mode.max_staleness is not None and age > self.mode.max_staleness:
                    self.outcome.masked_tokens += num_tokens
                elif num_tokens:
                    self.outcome.staleness[age] = self.outcome.staleness.get(age, 0) + num_tokens
                    self.outcome.trained_tokens += num_tokens

    def send_weights(self) -> Process:
        """Load the trainer's policy into the engines, which stand still meanwhile."""
        self.is_sending, version = True, self.num_trained
        for engine in self.engines:
            engine.pause()
        yield self.env.timeout(self.workload.publish_seconds + (self.mode.switch_seconds or 0.0))
        for engine in self.engines:
            engine.resume()
        self.sent, self.is_sending = version, False
        self.updates.append((version, [engine.progress for engine in self.engines]))
        self.notify()

    # ---- rounds of their own: synchronous, colocated, ahead ------------------------------------------------------

    def version_for(self, rollout: int | None) -> int | None:
        """Return the policy version with which a rollout may start now; None if it must wait (`Turns`)."""
        newest, sent, mode = self.num_trained, self.sent, self.mode
        if mode.max_staleness is not None or rollout is None or rollout - newest > mode.max_ahead:
            return None
        if newest - newest % mode.interval <= sent:
            return sent
        if not self.is_training:
            return newest
        return sent if rollout - sent < mode.max_ahead + mode.interval else None

    def generate_rollouts(self) -> Process:
        """Generate one rollout after the other."""
        for number, groups in enumerate(self.workload.rounds):
            self.next_rollout = number
            while (version := self.version_for(number)) is None:
                yield self.changed
            if version != self.sent:
                yield from self.send_weights()
            self.next_rollout = None
            self.notify()
            first = number * len(groups)
            flights = [Flight(first + index, group) for index, group in enumerate(groups)]
            yield self.env.all_of([self.env.process(self.generate(flight)) for flight in flights])
            yield self.env.timeout(self.workload.commit_rollout_seconds)
            self.next_rollout = number + 1 if number + 1 < len(self.workload.rounds) else None
            yield self.batches.put(flights)
            self.finished.clear()

    # ---- a stream ------------------------------------------------------------------------------------------------

    def generate_in_stream(self) -> Process:
        """Keep groups in flight, and hand over the oldest finished ones as rounds (`RolloutStream`)."""
        limit, rounds = self.mode.max_staleness or 0, self.workload.rounds
        size = len(rounds[0])
        waiting = deque(enumerate(group for groups in rounds for group in groups))
        for number in range(len(rounds)):
            while True:
                room = (self.sent + limit + 1 - number) * size - self.in_flight - len(self.finished)
                for _ in range(min(room, len(waiting))):
                    self.env.process(self.generate(Flight(*waiting.popleft())))
                self.repeat_stale_groups(number - limit)
                if len(self.finished) >= size:
                    break
                yield self.changed
            self.finished.sort(key=lambda flight: not flight.is_repeated)
            taken, self.finished = self.finished[:size], self.finished[size:]
            yield self.env.timeout(self.workload.commit_rollout_seconds)
            yield self.batches.put(taken)

    def repeat_stale_groups(self, oldest: int) -> None:
        """Generate those finished groups once more that have no token of policy version `oldest` or newer."""
        for flight in list(self.finished):
            if max(flight.tokens) < oldest and not flight.is_repeated:
                self.finished.remove(flight)
                self.outcome.masked_tokens += sum(flight.group)
                self.env.process(self.generate(Flight(flight.number, flight.group, is_repeated=True)))

    # ---- both ----------------------------------------------------------------------------------------------------

    def generate(self, flight: Flight) -> Process:
        """Generate one group on the least busy engine, and record which policy versions made its tokens."""
        self.in_flight += 1
        index = min(range(len(self.engines)), key=lambda index: self.engines[index].load)
        engine = self.engines[index]
        ends = [engine.submit(length) for length in flight.group]
        for length, end in zip(flight.group, ends):
            end_progress = yield end
            self.add_tokens(flight, index, end_progress - length, end_progress)
        self.in_flight -= 1
        self.finished.append(flight)
        self.notify()

    def add_tokens(self, flight: Flight, engine: int, start: float, end: float) -> None:
        """Add the tokens of one sample, generated while the engine's progress went from `start` to `end`."""
        for version, progress in reversed(self.updates):
            if end > progress[engine]:
                tokens = end - max(start, progress[engine])
                flight.tokens[version] = flight.tokens.get(version, 0.0) + tokens
                end -= tokens
            if start >= progress[engine]:
                return

    def notify(self) -> None:
        """Wake everything that waits for a change."""
        changed, self.changed = self.changed, self.env.event()
        changed.succeed()


def simulate(workload: Workload, mode: Mode) -> Outcome:
    """Simulate a run of all rounds of a workload, from the start of the first rollout to the end of the last step."""
    return Run(workload, mode).simulate()


# ---- the table: which mode at which size -----------------------------------------------------------------------------

GPUS = (8, 16, 64, 256, 1024)
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8)  # of the GPUs for the trainer; the best one is taken
TABLE_MODES = (
    SYNCHRONOUS,
    Mode("colocated", switch_seconds=1.0),
    Mode("ahead K=1", max_ahead=1),
    Mode("ahead K=2", max_ahead=2),
    Mode("streaming S=1", max_staleness=1),
    Mode("streaming S=2", max_staleness=2),
    Mode("streaming S=4", max_staleness=4),
)
PROMPTS, SAMPLES, ROUNDS = 256, 16, 8
MEDIAN_LENGTH, SIGMA, MAX_LENGTH = 2000, 1.0, 16384  # log-normal response lengths, cut off at the maximum
PARAMETERS = 4.02e9
TRAINED_TOKENS_PER_SECOND = 0.54 * 989e12 / (6 * PARAMETERS)  # of one GPU, at 54 % MFU of the data sheet's peak
STEP_SECONDS = (0.0041, 0.01228)  # of a decoding step with 16 and with 256 requests
PUBLISH_SECONDS = 0.059 * 8.04 / 1.19  # 0.059 s for 1.19 GB over NCCL


def long_tailed_rounds(rounds: int, seed: int = 0) -> list[list[Group]]:
    """Return response lengths of long reasoning: log-normal, with many at the maximum length."""
    rng = random.Random(seed)

    def length() -> int:
        return min(MAX_LENGTH, max(1, round(MEDIAN_LENGTH * rng.lognormvariate(0, SIGMA))))

    return [[[length() for _ in range(SAMPLES)] for _ in range(PROMPTS)] for _ in range(rounds)]


def workload_on(gpus: int, trainer_gpus: int, mode: Mode) -> Workload:
    """Return the workload of the table on a number of GPUs, of which the trainer has `trainer_gpus`."""
    engines = gpus if mode.switch_seconds is not None else gpus - trainer_gpus
    per_request = (STEP_SECONDS[1] - STEP_SECONDS[0]) / (256 - 16)
    return Workload(
        rounds=long_tailed_rounds(ROUNDS),
        num_engines=engines,
        slots=256,
        step_seconds=STEP_SECONDS[0] - 16 * per_request,
        request_seconds=per_request,
        train_seconds=0.0,
        train_seconds_per_token=1 / (trainer_gpus * TRAINED_TOKENS_PER_SECOND),
        publish_seconds=PUBLISH_SECONDS,
        commit_rollout_seconds=0.1,
        commit_step_seconds=0.3,
    )


def best_split(gpus: int, mode: Mode) -> tuple[Outcome, int]:
    """Return the outcome with the best number of trainer GPUs, and this number."""
    if mode.switch_seconds is not None:
        return simulate(workload_on(gpus, gpus, mode), mode), gpus
    tries = [max(1, round(share * gpus)) for share in SHARES]
    outcomes = [(simulate(workload_on(gpus, trainers, mode), mode), trainers) for trainers in dict.fromkeys(tries)]
    return min(outcomes, key=lambda outcome: outcome[0].seconds)


def print_table() -> None:
    """Print throughput, idle time and staleness of every mode for every number of GPUs as Markdown."""
    print("| GPUs | mode | tokens/s per GPU | x synchronous | staleness mean / max | engines idle | trainer idle |")
    print("|---|---|---|---|---|---|---|")
    for gpus in GPUS:
        baseline = 0.0
        for mode in TABLE_MODES:
            outcome, trainers = best_split(gpus, mode)
            speed = outcome.trained_tokens / outcome.seconds / gpus
            baseline = baseline or speed
            split = "all GPUs" if mode.switch_seconds is not None else f"{trainers} train"
            cells = [f"{gpus:,}", f"{mode.name} ({split})", f"{speed:,.0f}", f"{speed / baseline:.2f}"]
            cells.append(f"{outcome.mean_staleness:.1f} / {max(outcome.staleness)}")
            cells += [f"{outcome.engines_idle:.0%}", f"{outcome.trainer_idle:.0%}"]
            print("| " + " | ".join(cells) + " |", flush=True)


# ---- the fit: predict real runs --------------------------------------------------------------------------------------


def measure(store: Store, keys: RunKeys) -> Workload:
    """Return the workload of a finished synchronous run with one engine: its lengths, and median times."""
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    numbers = store.committed_indices(f"{keys.prefix}/steps")
    rounds = [groups_of(store, keys, number) for number in numbers]
    parts = [round_seconds(store, keys, number, published) for number in numbers[2:]]  # in the first, kernels compile

    def median(*names: str) -> float:
        return statistics.median(sum(part.get(name, 0.0) for name in names) for part in parts)

    tokens = statistics.median(sum(map(sum, groups)) for groups in rounds[2:])
    of_rollout = median("prepare", "grading", "write") + median("Prefect, commits, other") / 2
    return Workload(
        rounds,
        num_engines=1,
        slots=1 << 30,
        step_seconds=0.0,  # on a CPU the time of a step is proportional to the requests
        request_seconds=median("generation") / tokens,
        train_seconds=median("training"),
        train_seconds_per_token=0.0,
        publish_seconds=median("publish"),
        commit_rollout_seconds=of_rollout,
        commit_step_seconds=median("round") - median("generation", "training", "publish") - of_rollout,
    )


def groups_of(store: Store, keys: RunKeys, rollout_id: int) -> list[Group]:
    """Return the response lengths of a committed rollout by group."""
    groups: dict[str, Group] = {}
    for sample in read_samples(store, read_commit(store, keys.rollout_prefix(rollout_id))):
        groups.setdefault(sample.group_id, []).append(max(1, sample.response_length))
    return list(groups.values())


def mode_of(store: Store, keys: RunKeys) -> Mode:
    """Return the mode of a run, from its recorded config."""
    record = store.read_json(keys.record)
    assert record is not None
    run = record["config"]["run"]
    staleness = run.get("max_staleness", 2) if run.get("async_mode") == "streaming" else None
    return Mode(keys.run, run.get("async_buffer_size", 0), run.get("update_weights_interval", 1), staleness)


def print_fit(uri: str, runs: Sequence[str]) -> None:
    """Print the measured and the predicted seconds of some runs, from the end of their second round."""
    store = Store(uri)
    workload = measure(store, RunKeys(runs[0]))
    print("| run | measured s | predicted s | error |\n|---|---|---|---|")
    for run in runs:
        keys = RunKeys(run)
        steps = [
            read_commit(store, keys.step_prefix(number)) for number in store.committed_indices(f"{keys.prefix}/steps")
        ]
        own = replace(workload, rounds=[groups_of(store, keys, number) for number in range(len(steps))])
        ends = simulate(own, mode_of(store, keys)).ends
        measured, predicted = steps[-1].created_at - steps[1].created_at, ends[-1] - ends[1]
        print(f"| {run} | {measured:.1f} | {predicted:.1f} | {predicted / measured - 1:+.1%} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the modes for 8 to 1,024 GPUs")
    parser.add_argument("--fit", nargs="+", metavar=("STORE", "RUN"), help="predict runs of a store from its first RUN")
    options = parser.parse_args()
    if options.table:
        print_table()
    if options.fit:
        print_fit(options.fit[0], options.fit[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
