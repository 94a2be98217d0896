"""Simulate the modes of training as discrete events: wall time, throughput, idle time and staleness.

    python benchmarks/async_simulation.py --table                   # modes against staleness for 8 to 1,024 GPUs
    python benchmarks/async_simulation.py --fit STORE RUN [RUN ...] # the first run is synchronous and is measured; the
                                                                    # others, of any mode, are predicted from it

Simulated are engines that decode all their running requests step by step, groups that end with their slowest sample, a
trainer, and weight updates; prompts cost nothing. A decoding step with k requests takes `step_seconds` + k x
`request_seconds`, whatever their lengths. The modes follow flows/policy_schedule.py and stages/rollout/stream.py
(streaming). Trainer and engines do not slow each other down: on a CPU this needs a core for each.

--table takes the speeds of a 4B model on H200 GPUs from benchmarks/results. It assumes that training speed is
proportional to the number of GPUs, that a weight update takes as long for any number of engines, and that an engine
uses one GPU. The size of a round is the same for every number of GPUs. Wasted tokens are generated, but not trained.

--fit uses the lengths, the seconds and the options of the synchronous run only, and of the others their mode and their
number of rounds.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import simpy

from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from learning import read_commit
from run import read_publish_seconds, round_seconds

Process = Generator[simpy.Event, Any, None]
Group = list[int]  # response length of each sample, in tokens
ROUND_OFF = 1e-6  # tokens; smaller amounts are rounding errors of floating-point sums


@dataclass(frozen=True)
class Workload:
    """What a run generates and trains, and how fast. All times are in seconds."""

    rounds: list[list[Group]]  # the groups of each round
    num_engines: int
    concurrency: int  # samples in flight per engine (--engine-concurrency); further groups wait
    step_seconds: float  # of a decoding step, without the part that grows with the number of requests
    request_seconds: float  # of a decoding step, for each running request
    train_seconds: float  # of a round, apart from the part that grows with its tokens
    train_seconds_per_token: float
    publish_seconds: float  # of a weight update, during which the engines do not decode
    commit_rollout_seconds: float = 0.0  # of a round between its generation and the start of its training
    commit_step_seconds: float = 0.0  # of a round after its training
    grade_seconds: float = 0.0  # maximum for grading a group; the time is uniformly distributed from 0
    warm_up_seconds: Sequence[float] = ()  # additional training time of the first rounds, in which kernels are compiled

    def train_time(self, number: int, groups: Sequence[Group]) -> float:
        """Return the seconds of training round `number` on some groups."""
        warm_up = self.warm_up_seconds[number] if number < len(self.warm_up_seconds) else 0.0
        return warm_up + self.train_seconds + self.train_seconds_per_token * sum(map(sum, groups))


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
    """The results of a simulated run."""

    seconds: float = 0.0
    generated_tokens: float = 0.0
    trained_tokens: float = 0.0
    wasted_tokens: float = 0.0  # generated, but too old to be trained
    engines_idle: float = 0.0  # fraction of the time without a request, mean over the engines
    trainer_idle: float = 0.0  # fraction of the time
    staleness: dict[int, float] = field(default_factory=dict)  # policy versions -> trained tokens
    order: list[int] = field(default_factory=list)  # number of each group, in the order in which they were trained
    repeated: list[int] = field(default_factory=list)  # number of each group that was generated once more
    masked: list[int] = field(default_factory=list)  # number of each group whose tokens were all masked in training
    ends: list[float] = field(default_factory=list)  # when each round was trained

    @property
    def tokens_per_second(self) -> float:
        """Return the trained tokens per second."""
        return self.trained_tokens / self.seconds

    @property
    def mean_staleness(self) -> float:
        """Return the mean staleness of the trained tokens, in policy versions."""
        return sum(age * number for age, number in self.staleness.items()) / max(1.0, self.trained_tokens)


# ---- the actors ------------------------------------------------------------------------------------------------------


class Engine:
    """Decodes requests. All running requests advance by one token in a step."""

    def __init__(self, env: simpy.Environment, workload: Workload) -> None:
        self.env, self.workload = env, workload
        self.load = 0  # samples of unfinished groups, by which a group chooses its engine
        self.busy_seconds = self.generated_tokens = 0.0
        self._progress = 0.0  # tokens of a request that has been running since the start
        self._running: list[tuple[float, int, simpy.Event]] = []  # heap of (progress at its end, tie breaker, end)
        self._ties = itertools.count()
        self._updates = [(0, 0.0)]  # policy version, progress when it was loaded
        self._changed_at = 0.0
        self._is_paused = False
        self._timer = 0

    def submit(self, length: int) -> simpy.Event:
        """Start a request of `length` tokens. Return the event of its end, whose value is the progress at that time."""
        self._advance()
        end = self.env.event()
        heapq.heappush(self._running, (self._progress + length, next(self._ties), end))
        self._set_timer()
        return end

    def pause(self) -> None:
        """Stop decoding until `load_weights` is called."""
        self._advance()
        self._is_paused = True
        self._set_timer()

    def load_weights(self, version: int) -> None:
        """Continue after `pause`, with policy `version`."""
        self._advance()
        self._is_paused = False
        self._updates.append((version, self._progress))
        self._set_timer()

    def tokens_by_version(self, start: float, end: float) -> Iterator[tuple[int, float]]:
        """Yield (policy version, tokens) of a request that ran while the progress went from `start` to `end`."""
        for version, progress in reversed(self._updates):
            tokens = end - max(start, progress)
            if tokens > ROUND_OFF:
                yield version, tokens
                end = progress
            if start >= progress:
                return

    def _advance(self) -> None:
        seconds, self._changed_at = self.env.now - self._changed_at, self.env.now
        if self._running:
            self.busy_seconds += seconds
            if not self._is_paused:
                self._progress += seconds / self._step_time
                self.generated_tokens += seconds / self._step_time * len(self._running)

    @property
    def _step_time(self) -> float:
        return self.workload.step_seconds + self.workload.request_seconds * len(self._running)

    def _set_timer(self) -> None:
        """Set the timer to the time at which the next running request ends."""
        self._timer += 1
        if self._running and not self._is_paused:
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
            end_progress, _, end = heapq.heappop(self._running)
            end.succeed(end_progress)
        self._set_timer()


@dataclass(eq=False)
class Flight:
    """A group from its start to its training."""

    number: int
    group: Group
    version: int = 0  # policy version in the engines at its start
    is_repeated: bool = False  # whether it is generated once more, because all its tokens became too old
    tokens: dict[int, float] = field(default_factory=dict)  # policy version -> tokens that it generated


class Run:
    """One simulated run: engines, trainer and the state that they share."""

    def __init__(self, workload: Workload, mode: Mode) -> None:
        self.workload, self.mode = workload, mode
        self.size = len(workload.rounds[0])  # groups of a round
        self.env = simpy.Environment()
        self.engines = [Engine(self.env, workload) for _ in range(workload.num_engines)]
        num_samples = workload.concurrency * workload.num_engines
        # One slot for each group that may be in flight.
        self.slots = simpy.Resource(self.env, max(1, num_samples // len(workload.rounds[0][0])))
        self.changed = self.env.event()  # triggered, and replaced, by `notify`
        self.batches: simpy.Store = simpy.Store(self.env)
        self.num_trained = self.sent = self.num_taken = 0
        self.is_training = self.is_sending = False
        self.next_rollout: int | None = 0
        self.running: set[Flight] = set()
        self.finished: list[Flight] = []
        self.train_seconds = 0.0
        self.outcome = Outcome()

    def simulate(self) -> Outcome:
        """Run until the last round is trained."""
        if self.mode.max_staleness is None:
            self.env.process(self.generate_rollouts())
        else:
            self.env.process(self.start_groups(self.mode.max_staleness))
            self.env.process(self.take_rounds(self.mode.max_staleness))
        self.env.run(until=self.env.process(self.train()))
        total, outcome = self.env.now, self.outcome
        outcome.seconds, outcome.trainer_idle = total, 1 - self.train_seconds / total
        outcome.generated_tokens = sum(engine.generated_tokens for engine in self.engines)
        outcome.engines_idle = 1 - statistics.fmean(engine.busy_seconds for engine in self.engines) / total
        return outcome

    # ---- the trainer -------------------------------------------------------------------------------------------------

    def train(self) -> Process:
        """Train every round, and, in a stream, send the weights after it."""
        for number in range(len(self.workload.rounds)):
            flights: list[Flight] = yield self.batches.get()
            while self.is_sending or self.version_for(self.next_rollout) not in (None, self.sent):
                yield self.changed
            seconds = self.workload.train_time(number, [flight.group for flight in flights])
            seconds += self.workload.commit_step_seconds + (self.mode.switch_seconds or 0.0)
            self.is_training, self.train_seconds = True, self.train_seconds + seconds
            yield self.env.timeout(seconds)
            self.is_training, self.num_trained = False, number + 1
            self.outcome.ends.append(self.env.now)
            self.count_tokens(number, flights)
            self.notify()
            needs_weights = self.mode.max_staleness is not None and self.num_taken < len(self.workload.rounds)
            if needs_weights and self.num_trained % self.mode.interval == 0:
                yield from self.send_weights()

    def count_tokens(self, number: int, flights: list[Flight]) -> None:
        """Add the tokens of a trained round to the outcome."""
        outcome, limit = self.outcome, self.mode.max_staleness
        for flight in flights:
            outcome.order.append(flight.number)
            ages = {number - version: tokens for version, tokens in flight.tokens.items()}
            trained = {age: tokens for age, tokens in ages.items() if limit is None or age <= limit}
            outcome.wasted_tokens += sum(ages.values()) - sum(trained.values())
            outcome.trained_tokens += sum(trained.values())
            for age, tokens in trained.items():
                outcome.staleness[age] = outcome.staleness.get(age, 0.0) + tokens
            if not trained:
                outcome.masked.append(flight.number)

    def send_weights(self) -> Process:
        """Load the trainer's policy into the engines, which do not decode during the update."""
        self.is_sending, version = True, self.num_trained
        for engine in self.engines:
            engine.pause()
        yield self.env.timeout(self.workload.publish_seconds + (self.mode.switch_seconds or 0.0))
        for engine in self.engines:
            engine.load_weights(version)
        self.sent, self.is_sending = version, False
        self.notify()

    # ---- whole rounds: synchronous, colocated, ahead -----------------------------------------------------------------

    def version_for(self, rollout: int | None) -> int | None:
        """Return the policy version with which a rollout may start now; None if it must wait (as in
        `PolicySchedule`)."""
        newest, sent, mode = self.num_trained, self.sent, self.mode
        if mode.max_staleness is not None or rollout is None or rollout - newest > mode.max_ahead:
            return None
        if newest - newest % mode.interval <= sent:
            return sent
        if not self.is_training:
            return newest
        return sent if rollout - sent < mode.max_ahead + mode.interval else None

    def generate_rollouts(self) -> Process:
        """Generate the rollouts one after the other, each as soon as `version_for` permits it."""
        for number, groups in enumerate(self.workload.rounds):
            self.next_rollout = number
            while (version := self.version_for(number)) is None:
                yield self.changed
            if version != self.sent:
                yield from self.send_weights()
            self.next_rollout = None
            self.notify()
            first = number * self.size
            yield self.env.all_of([self.start(Flight(first + index, group)) for index, group in enumerate(groups)])
            yield self.env.timeout(self.workload.commit_rollout_seconds)
            self.next_rollout = number + 1 if number + 1 < len(self.workload.rounds) else None
            taken, self.finished = self.finished, []
            yield self.batches.put(taken)

    # ---- a stream (`RolloutStream`) ----------------------------------------------------------------------------------

    def start_groups(self, limit: int) -> Process:
        """Start the next group whenever fewer groups are in flight or untrained than can be trained before they are
        more than `limit` policy versions old."""
        groups = [group for round in self.workload.rounds for group in round]
        for number, group in enumerate(groups):
            while len(self.running) + len(self.finished) >= (self.sent + limit + 1 - self.num_taken) * self.size:
                yield self.changed
            self.start(Flight(number, group, self.sent))

    def take_rounds(self, limit: int) -> Process:
        """Pass the groups that finished first to the trainer, one round at a time. `limit`: as in `start_groups`."""
        for number in range(len(self.workload.rounds)):
            self.repeat_stale_groups(number - limit)
            while len(self.finished) < self.size or self.must_await_repeated_groups(number - limit):
                yield self.changed
                self.repeat_stale_groups(number - limit)
            self.finished.sort(key=lambda flight: flight.version if flight.is_repeated else math.inf)
            taken, self.finished = self.finished[: self.size], self.finished[self.size :]
            self.num_taken += 1
            self.notify()
            yield self.env.timeout(self.workload.commit_rollout_seconds)
            yield self.batches.put(taken)

    def repeat_stale_groups(self, oldest: int) -> None:
        """Generate again the finished groups that have no token of policy version `oldest` or newer."""
        for flight in list(self.finished):
            if max(flight.tokens) < oldest and not flight.is_repeated:
                self.finished.remove(flight)
                self.outcome.wasted_tokens += sum(flight.group)
                self.outcome.repeated.append(flight.number)
                self.start(Flight(flight.number, flight.group, self.sent, is_repeated=True))

    def must_await_repeated_groups(self, oldest: int) -> bool:
        """Return whether the next round must wait for repeated groups. If it did not wait, more of them would be left
        than later rounds can train before they get too old. `oldest` is the oldest policy version that the next round
        may train."""
        running = [flight.version for flight in self.running if flight.is_repeated]
        finished = [flight.version for flight in self.finished if flight.is_repeated]
        for version in {*running, *finished}:
            num_running, num_finished = (sum(v <= version for v in versions) for versions in (running, finished))
            num_left = num_running + max(0, num_finished - self.size)
            if num_running and num_left > max(0, version - oldest) * self.size:
                return True
        return False

    # ---- both --------------------------------------------------------------------------------------------------------

    def start(self, flight: Flight) -> simpy.Process:
        """Start a group, or queue it if too many are in flight. Return the event of its end."""
        self.running.add(flight)
        return self.env.process(self.generate(flight))

    def generate(self, flight: Flight) -> Process:
        """Generate one group on the least busy engine, record which policy versions made its tokens, and grade it."""
        with self.slots.request() as slot:
            yield slot
            engine = min(self.engines, key=lambda engine: engine.load)
            engine.load += len(flight.group)
            ends = [engine.submit(length) for length in flight.group]
            ended: simpy.events.ConditionValue = yield self.env.all_of(ends)
            engine.load -= len(flight.group)
        for length, end in zip(flight.group, ends):
            for version, tokens in engine.tokens_by_version(ended[end] - length, ended[end]):
                flight.tokens[version] = flight.tokens.get(version, 0.0) + tokens
        yield self.env.timeout(self.workload.grade_seconds * random.Random(flight.number).random())
        self.running.remove(flight)
        self.finished.append(flight)
        self.notify()

    def notify(self) -> None:
        """Wake all processes of the simulation that wait for a change of the shared state."""
        changed, self.changed = self.changed, self.env.event()
        changed.succeed()


def simulate(workload: Workload, mode: Mode) -> Outcome:
    """Simulate a run of all rounds of a workload, from the start of the first rollout to the end of the last step."""
    return Run(workload, mode).simulate()


# ---- the table: which mode at which size -----------------------------------------------------------------------------

# Of a 4B model in bf16 on H200 GPUs, from benchmarks/results:
STEP_SECONDS = (0.0041, 0.01228)  # of a decoding step with 16 and with 256 requests (one-h200.json, fp8_rollout_4b)
TRAINED_TOKENS_PER_SECOND = 32_768 / 1.597  # of one GPU, with planning and log-probs (step-h200.json, 4b)
PUBLISH_SECONDS = 0.105  # over NCCL, with one rank and one engine (two-h200.json, publish)
SWITCH_SECONDS = 0.9  # of moving memory in one direction (two-h200.json, turns-4b, round 3)
COMMIT_SECONDS = (0.1, 0.3)  # of a rollout and of a step: assumed

GPUS = (8, 16, 64, 256, 1024)
SHARES = (
    1 / 8,
    1 / 4,
    3 / 8,
    1 / 2,
    5 / 8,
    3 / 4,
)  # fractions of the GPUs for the trainer; the table shows the fastest
TABLE_MODES = (
    SYNCHRONOUS,
    Mode("colocated", switch_seconds=SWITCH_SECONDS),
    Mode("ahead K=1", max_ahead=1),
    Mode("ahead K=2", max_ahead=2),
    Mode("streaming S=1", max_staleness=1),
    Mode("streaming S=2", max_staleness=2),
    Mode("streaming S=4", max_staleness=4),
)
PROMPTS, SAMPLES, ROUNDS = 256, 16, 16
MEDIAN_LENGTH, SIGMA, MAX_LENGTH = 2000, 1.0, 16384  # log-normal response lengths, cut off at the maximum


def long_tailed_rounds(rounds: int, seed: int = 0) -> list[list[Group]]:
    """Return response lengths of long reasoning: log-normal, with many at the maximum length."""
    rng = random.Random(seed)

    def length() -> int:
        return min(MAX_LENGTH, max(1, round(MEDIAN_LENGTH * rng.lognormvariate(0, SIGMA))))

    return [[[length() for _ in range(SAMPLES)] for _ in range(PROMPTS)] for _ in range(rounds)]


def workload_on(gpus: int, trainer_gpus: int, mode: Mode) -> Workload:
    """Return the workload of the table for a number of GPUs, of which the trainer has `trainer_gpus`."""
    engines = gpus if mode.switch_seconds is not None else gpus - trainer_gpus
    per_request = (STEP_SECONDS[1] - STEP_SECONDS[0]) / (256 - 16)
    return Workload(
        rounds=long_tailed_rounds(ROUNDS),
        num_engines=engines,
        concurrency=256,
        step_seconds=STEP_SECONDS[0] - 16 * per_request,
        request_seconds=per_request,
        train_seconds=0.0,
        train_seconds_per_token=1 / (trainer_gpus * TRAINED_TOKENS_PER_SECOND),
        publish_seconds=PUBLISH_SECONDS,
        commit_rollout_seconds=COMMIT_SECONDS[0],
        commit_step_seconds=COMMIT_SECONDS[1],
    )


def best_split(gpus: int, mode: Mode) -> tuple[Outcome, int]:
    """Return the outcome with the best number of trainer GPUs, and this number."""
    if mode.switch_seconds is not None:
        return simulate(workload_on(gpus, gpus, mode), mode), gpus
    tries = [max(1, round(share * gpus)) for share in SHARES]
    outcomes = [(simulate(workload_on(gpus, trainers, mode), mode), trainers) for trainers in dict.fromkeys(tries)]
    return max(outcomes, key=lambda outcome: outcome[0].tokens_per_second)


def print_table() -> None:
    """Print throughput, idle time and staleness of every mode for every number of GPUs as Markdown."""
    columns = ["GPUs", "mode", "tokens/s per GPU", "x synchronous", "staleness mean / max"]
    columns += ["engines idle", "trainer idle", "wasted tokens"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for gpus in GPUS:
        baseline = 0.0
        for mode in TABLE_MODES:
            outcome, trainers = best_split(gpus, mode)
            speed = outcome.tokens_per_second / gpus
            baseline = baseline or speed
            split = "all GPUs" if mode.switch_seconds is not None else f"{trainers} train"
            cells = [f"{gpus:,}", f"{mode.name} ({split})", f"{speed:,.0f}", f"{speed / baseline:.2f}"]
            cells.append(f"{outcome.mean_staleness:.1f} / {max(outcome.staleness)}")
            cells += [f"{outcome.engines_idle:.0%}", f"{outcome.trainer_idle:.0%}"]
            cells.append(f"{outcome.wasted_tokens / outcome.generated_tokens:.1%}")
            print("| " + " | ".join(cells) + " |", flush=True)


# ---- the fit: predict real runs --------------------------------------------------------------------------------------

NUM_WARM_UP = 2  # rounds in which kernels are compiled
MIN_SPREAD = 0.05  # fraction of the mean by which x values must differ, so that a line is fitted


def measure(store: Store, keys: RunKeys) -> Workload:
    """Return the workload of a finished synchronous run: its lengths, and mean times after the first two rounds, in
    which kernels are compiled."""
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    numbers = store.committed_indices(f"{keys.prefix}/steps")
    rounds = [groups_of(store, keys, number) for number in numbers]
    config = config_of(store, keys)["rollout"]
    size = {"num_engines": config["num_engines"], "concurrency": config["engine_concurrency"]}
    parts = [round_seconds(store, keys, number, published) for number in numbers[NUM_WARM_UP:]]

    def mean(*names: str) -> float:
        return statistics.fmean(sum(part.get(name, 0.0) for name in names) for part in parts)

    tokens = [float(sum(map(sum, groups))) for groups in rounds[NUM_WARM_UP:]]
    steps = decoding_steps(rounds, **size)[NUM_WARM_UP:]
    running = [number / step / config["num_engines"] for number, step in zip(tokens, steps)]  # mean of an engine
    decoding = fit_line(running, [part["generation"] / step for part, step in zip(parts, steps)])
    training = fit_line(tokens, [part["training"] for part in parts])
    of_rollout = mean("prepare", "grading", "write") + mean("Prefect, commits, other") / 2
    train_seconds = [sum(read_commit(store, keys.step_prefix(number)).seconds.values()) for number in numbers]
    usual = statistics.fmean(train_seconds[NUM_WARM_UP:])
    return Workload(
        rounds,
        **size,
        step_seconds=decoding[0] if decoding else 0.0,
        request_seconds=decoding[1]
        if decoding
        else mean("generation") / statistics.fmean(tokens) * size["num_engines"],
        train_seconds=training[0] if training else mean("training"),
        train_seconds_per_token=training[1] if training else 0.0,
        publish_seconds=mean("publish"),
        commit_rollout_seconds=of_rollout,
        commit_step_seconds=mean("round") - mean("generation", "training", "publish") - of_rollout,
        warm_up_seconds=[max(0.0, seconds - usual) for seconds in train_seconds[:NUM_WARM_UP]],
    )


def decoding_steps(rounds: list[list[Group]], num_engines: int, concurrency: int) -> list[float]:
    """Return the number of decoding steps of each round of a synchronous run: the simulated duration of the round if a
    step takes one second and all else no time."""
    ends = simulate(Workload(rounds, num_engines, concurrency, 1.0, 0.0, 0.0, 0.0, 0.0), SYNCHRONOUS).ends
    return [end - start for start, end in zip([0.0, *ends], ends)]


def fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """Return (intercept, slope) of the least-squares line, or None if `x` varies too little to determine both, or if
    one of them is negative."""
    if len(x) < 3 or max(x) - min(x) < MIN_SPREAD * statistics.fmean(x):
        return None
    slope, intercept = statistics.linear_regression(x, y)
    return (intercept, slope) if intercept >= 0 and slope >= 0 else None


def groups_of(store: Store, keys: RunKeys, rollout_id: int) -> list[Group]:
    """Return the response lengths of a committed rollout by group."""
    groups: dict[str, Group] = {}
    for sample in read_samples(store, read_commit(store, keys.rollout_prefix(rollout_id))):
        groups.setdefault(sample.group_id, []).append(max(1, sample.response_length))
    return list(groups.values())


def config_of(store: Store, keys: RunKeys) -> dict[str, Any]:
    """Return the recorded config of a run."""
    record = store.read(keys.record)
    assert record is not None, f"the store has no run {keys.run}"
    return dict(json.loads(record)["config"])


def mode_of(store: Store, keys: RunKeys) -> Mode:
    """Return the mode of a run whose trainer and engines do not share GPUs, from its recorded config."""
    run = config_of(store, keys)["run"]
    staleness = run["max_staleness"] if run["async_mode"] == "streaming" else None
    return Mode(keys.run, run["async_buffer_size"], run["update_weights_interval"], staleness)


def print_fit(uri: str, runs: Sequence[str]) -> None:
    """Print the measured and the predicted seconds of some runs: from the start of the first rollout, and from the end
    of the second round, to the commit of the last step. The prediction uses no times of the predicted run."""
    store = Store(uri)
    assert replace(mode_of(store, RunKeys(runs[0])), name="") == Mode(""), f"{runs[0]} is not a synchronous run"
    workload = measure(store, RunKeys(runs[0]))
    print("| run | measured s | predicted s | error | without two rounds: measured s | predicted s | error |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        keys = RunKeys(run)
        numbers = store.committed_indices(f"{keys.prefix}/steps")
        start = read_commit(store, keys.rollout_prefix(numbers[0])).started_at
        measured = [read_commit(store, keys.step_prefix(number)).created_at - start for number in numbers]
        rounds = list(itertools.islice(itertools.cycle(workload.rounds), len(numbers)))
        predicted = simulate(replace(workload, rounds=rounds), mode_of(store, keys)).ends
        cells = [run]
        for skipped in (0.0, 1.0):
            seconds = [ends[-1] - skipped * ends[NUM_WARM_UP - 1] for ends in (measured, predicted)]
            cells += [f"{seconds[0]:.1f}", f"{seconds[1]:.1f}", f"{seconds[1] / seconds[0] - 1:+.1%}"]
        print(f"| {' | '.join(cells)} |")


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
