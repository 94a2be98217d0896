"""The stream of groups over the boundaries of rounds, in simulated time: which groups a round takes, what happens to
slow and stale ones, and that a restart loses no group and uses none twice."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_records import run_json
from scripted_engine import KEYS
from simulated_stream import Clock, SimulatedBench, clock, lengths_of, number_of, short_lengths

from penstock.flows.rollouts import StreamSource
from penstock.stages.rollout.group import policy_spans
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import BUFFER, Commit
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.preemption import Preempted, StopRequest
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

__all__ = ["clock"]  # a fixture

BATCH = 4  # groups of a round


@pytest.fixture
def make_bench(tmp_path: Path, tokenizer: PromptTokenizer, clock: Clock) -> Iterator[Any]:
    """A function that makes a run with rounds of 4 groups of 2 samples. After the test, its stream is closed and every
    prompt and token of the run is checked."""
    benches: list[SimulatedBench] = []

    def make(option: str = "", code: str = "", **options: Any) -> SimulatedBench:
        if option:
            (tmp_path / "functions.py").write_text(code)
            options[option] = str(tmp_path / "functions.py")
        benches.append(SimulatedBench(tmp_path, tokenizer, clock, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
        check_every_prompt_is_used_once(bench)


@pytest.fixture
def bench(make_bench: Any) -> SimulatedBench:
    """A run whose prompts are issued in the order of their rows."""
    return make_bench(rollout_shuffle=False)


def commits_of(bench: SimulatedBench) -> list[Commit]:
    """Return the commits of all rollouts in the store."""
    rounds = bench.store.committed_indices(f"{KEYS.prefix}/rollouts")
    return [commit for r in rounds if (commit := bench.store.committed(KEYS.rollout_prefix(r))) is not None]


def ids(samples: list[Sample]) -> list[int]:
    """Return the numbers of the samples' groups, each once, in their order. They count the issued prompts."""
    return [int(group_id) for group_id in dict.fromkeys(sample.group_id for sample in samples)]


def check_every_prompt_is_used_once(bench: SimulatedBench) -> None:
    """Check that after every round, each issued prompt was trained or dropped in one round, or is in the buffer, that
    no trained token is stale, and that `penstock verify` agrees."""
    used: Counter[int] = Counter()
    for commit in commits_of(bench):
        samples, waiting = bench.trained(commit), ids(bench.buffered(commit))
        assert commit.num_samples(BUFFER) == len(waiting) * 2, "a group is in the buffer twice"
        dropped = [int(group["group_id"]) for group in commit.state.get("dropped", [])]
        assert len(ids(samples)) == BATCH and len({sample.sample_id for sample in samples}) == len(samples)
        used.update(ids(samples) + dropped)
        assert sorted([*used.elements(), *waiting]) == list(range(commit.state["data_source"]["issued"]))
        check_staleness(bench, commit, samples)
    bench.store.create(KEYS.record, run_json())
    assert [line for line in audit_run(bench.store, KEYS).problems if "rollouts/" in line or "sample ids" in line] == []


def check_staleness(bench: SimulatedBench, commit: Commit, samples: list[Sample]) -> None:
    """Check that no trained token is older than `max_staleness`, or newer than the policy that it trains."""
    for sample in samples:
        num_trained = sum(sample.loss_mask)
        versions = [version for version, count in policy_spans(sample) for _ in range(count)]
        kept = versions[len(versions) - num_trained :]
        assert all(commit.index - bench.max_staleness <= version <= commit.index for version in kept)
        assert not kept or sample.policy_versions == (kept[0], kept[-1])


# ---- which groups a round takes --------------------------------------------------------------------------------------


def test_groups_that_finished_first_are_taken_first_also_after_a_wait_and_a_kill(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p0=9, p1=7, p2=3, p3=8, p4=4, p5=2, p6=6, p7=5, p8=11, p9=10, p10=13, p11=12)
    first = bench.round(0)
    assert ids(bench.trained(first)) == [2, 4, 5, 7], "in the order of the data, as in other modes"
    assert ids(bench.buffered(first)) == [0, 1, 3, 6, 8, 9, 10, 11]
    bench.clock.run_for(20)
    assert bench.stream is not None
    order = [flight.prompts[0].group_id for flight in bench.stream.groups.finished]
    assert [int(group_id) for group_id in order][:8] == [6, 1, 3, 0, 9, 8, 11, 10]
    assert ids(bench.trained(bench.round(1))) == [0, 1, 3, 6]
    bench.kill()  # the order is in the buffer
    assert ids(bench.trained(bench.round(2, is_trained=False))) == [8, 9, 10, 11]


def test_sample_records_the_round_that_started_and_the_round_that_trains_it(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p0=30)
    for r in range(6):
        [slow] = [
            sample for sample in bench.trained(bench.round(r)) if sample.sample_id.startswith("000000000-00")
        ] or [None]
        if slow is not None:
            break
    assert slow is not None and r > 1
    assert slow.rollout_id == r and slow.metadata["start_rollout_id"] == 0
    assert slow.policy_versions[0] == max(0, r - 2), "older tokens are masked"
    assert sum(count for _, count in policy_spans(slow)) == sum(slow.loss_mask)


@pytest.mark.parametrize(
    ("train_seconds", "max_staleness"),
    [
        *[(1.0, 4), (100.0, 1)],
        *(pytest.param(*case, marks=pytest.mark.full) for case in [(1.0, 1), (8.0, 2), (100.0, 4)]),
    ],
)
def test_number_of_groups_in_flight_is_bounded(bench: SimulatedBench, max_staleness: int, train_seconds: float) -> None:
    """No more than (V + S + 1 - R) * B groups: all could be trained before they get too old."""
    bench.max_staleness, bench.train_seconds = max_staleness, train_seconds
    most = 0
    for r in range(8):
        bench.round(r)
        for _ in range(8):
            assert bench.stream is not None
            num_groups = len(bench.stream.groups.running) + len(bench.stream.groups.finished)
            assert num_groups <= (bench.version + max_staleness + 1 - bench.stream.round.rollout_id) * BATCH
            most = max(most, num_groups)
            bench.clock.run_for(0.7)
    assert most >= max_staleness * BATCH, "the bound is used"


def test_number_of_groups_in_flight_is_bounded_while_hooks_run(bench: SimulatedBench) -> None:
    """A round that is being taken counts until its end: no group is started that only the round after could train."""
    bench.clock.thread_seconds, bench.train_seconds = 1.0, 20.0

    def length(prompt: str, index: int) -> int:
        assert bench.stream is not None
        num_issued = bench.stream.intake.source.dataset.state.issued
        assert num_issued <= (bench.version + bench.max_staleness + 1) * BATCH
        return short_lengths(prompt, index)

    bench.length = length
    for r in range(8):
        bench.round(r)


def test_groups_of_later_runs_are_not_started(bench: SimulatedBench) -> None:
    bench.num_rounds = 5
    commits = [bench.round(r) for r in range(5)]
    assert commits[-1].state["data_source"]["issued"] == 5 * BATCH and not commits[-1].num_samples(BUFFER)


# ---- stale tokens ----------------------------------------------------------------------------------------------------


def test_tokens_that_are_too_old_are_masked_and_counted(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p0=60, p5=75)
    num_masked = []
    for r in range(14):
        commit = bench.round(r)
        stale = 0
        for sample in bench.trained(commit):
            spans, num_trained = policy_spans(sample), sum(sample.loss_mask)
            assert num_trained == sum(count for version, count in spans if version >= r - bench.max_staleness)
            assert num_trained == sum(count for _, count in spans)
            stale += len(sample.token_ids) - len(bench.tokenizer.encode([sample.prompt])[0]) - num_trained
            assert all((p == 0.0) == (m == 0) for p, m in zip(sample.rollout_logprobs, sample.loss_mask))
        assert commit.summary["rollout/masked_stale_tokens"] == stale
        assert commit.summary["rollout/wasted_tokens"] == stale
        assert commit.summary["rollout/staleness/max"] <= bench.max_staleness
        num_masked.append(stale)
    assert sum(map(bool, num_masked)) == 2, "the two slow groups"


def test_sample_without_trainable_tokens_beside_a_fresh_one_keeps_the_run_consistent(bench: SimulatedBench) -> None:
    """One sample of a group ends at once, by a policy that is too old when the other one ends."""
    bench.length = lambda prompt, index: (60 if index else 3) if number_of(prompt) == 0 else 2
    commits = [bench.round(r) for r in range(10)]
    pairs = [[s for s in bench.trained(commit) if s.group_id == "000000000"] for commit in commits]
    [(short, long)] = [pair for pair in pairs if pair]
    assert not any(short.loss_mask) and any(long.loss_mask), "the group is used, as some of its tokens are fresh"
    assert short.status is Status.COMPLETED and short.reward == 1.0


def test_group_with_only_stale_tokens_is_generated_once_more_then_awaited(bench: SimulatedBench) -> None:
    """The reward of a group takes so long that all its tokens get too old; the second time, rounds wait for it."""
    bench.grader.delay = lambda group_id: 40.0 if group_id == "000000000" else 0.0
    used = {}
    for r in range(12):
        commit = bench.round(r)
        used[r] = [sample for sample in bench.trained(commit) if sample.group_id == "000000000"]
        if commit.summary["rollout/wasted_tokens"]:
            wasted_in = r
            assert commit.summary["rollout/wasted_tokens"] == sum(bench.length(bench.issues[0], i) for i in (0, 1))
    [(r, samples)] = [(r, samples) for r, samples in used.items() if samples]
    assert bench.issues.count(bench.issues[0]) == 2
    assert wasted_in <= r and all(all(sample.loss_mask[sample.prompt_length :]) for sample in samples)
    assert all(sample.policy_versions[0] >= r - bench.max_staleness for sample in samples), "fresh at last"


@pytest.mark.parametrize("seed", [12, *(pytest.param(seed, marks=pytest.mark.full) for seed in (35, 40))])
def test_groups_whose_rewards_are_late_are_all_used_with_fresh_tokens(bench: SimulatedBench, seed: int) -> None:
    """More groups than a round can take become too old at the same time, and are generated once more."""
    chance = random.Random(seed)
    bench.max_staleness, bench.train_seconds = chance.choice([1, 2, 3, 4]), chance.choice([3.0, 8.0, 15.0])
    late = {f"{number:09d}" for number in chance.sample(range(24), chance.choice([4, 8, 12]))}
    longest = chance.choice([20, 40, 80])
    bench.grader.delay = lambda group_id: chance.choice([longest, longest, longest / 2]) if group_id in late else 0.0
    for r in range(14):
        bench.round(r)
    for commit in commits_of(bench):
        fresh = [sample for sample in bench.trained(commit) if any(sample.loss_mask)]
        assert len(ids(fresh)) == BATCH, "every group has trainable tokens"


@pytest.mark.full
def test_slow_prompts_are_trained_as_often_as_fast_ones(
    tmp_path: Path, tokenizer: PromptTokenizer, clock: Clock
) -> None:
    """Log-normal lengths, 2 % of the prompts twenty times the median: 1,000 prompts, one epoch and a half."""
    num_prompts, size, median = 1000, 20, 20
    options = {"rollout_batch_size": size, "n_samples_per_prompt": 1, "rollout_journal_interval": 0.0}
    bench = SimulatedBench(tmp_path, tokenizer, clock, num_rows=num_prompts, train_seconds=30.0, **options)
    chance = random.Random(0)
    lengths = [max(1, round(chance.lognormvariate(math.log(median), 0.5))) for _ in range(num_prompts)]
    slow = set(chance.sample(range(num_prompts), num_prompts // 50))
    bench.length = lambda prompt, index: 20 * median if number_of(prompt) in slow else lengths[number_of(prompt)]
    num_rounds = 3 * num_prompts // size // 2
    num_trained: Counter[int] = Counter()
    for r in range(num_rounds):
        commit = bench.round(r)
        assert commit.summary["rollout/num_running_groups"] > 0, "generation does not pause between rounds"
        num_trained.update(sample.metadata["i"] for sample in bench.trained(commit) if any(sample.loss_mask))
    assert num_trained.total() == num_rounds * size, "every sample has trained tokens"
    by_length = sorted(set(range(num_prompts)) - slow, key=lambda number: lengths[number])
    classes = [*(set(by_length[start : start + 140]) for start in range(0, 980, 140)), slow]
    assert chi_square(classes, num_trained) < 18.5, "1 %, 7 degrees of freedom"
    assert chi_square([{number} for number in range(num_prompts)], num_trained) < 1107, "1 %, 999 degrees of freedom"


def chi_square(classes: list[set[int]], num_trained: Counter[int]) -> float:
    """Return the chi-square statistic of how often the prompts of the classes were trained, if all were equal."""
    mean = num_trained.total() / sum(map(len, classes))
    counts = [(sum(num_trained[number] for number in members), mean * len(members)) for members in classes]
    return sum((observed - expected) ** 2 / expected for observed, expected in counts)


# ---- restarts --------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ended."""


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3, 4))])
def test_kills_at_any_time_lose_no_group_and_use_none_twice(
    bench: SimulatedBench, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    bench.train_seconds = chance.choice([2.0, 8.0, 20.0])
    slow = set(chance.sample(range(60), 6))
    bench.length = lambda prompt, index: 40 if number_of(prompt) in slow else 1 + number_of(prompt) * (index + 3) % 9
    r = 0
    while r < 12:
        kill = chance.choice(["none", "none", "before the commit", "after the commit", "while groups are generated"])
        if kill == "before the commit":
            kill_before_commit(bench, r, monkeypatch)
            continue
        if kill == "while groups are generated" and bench.stream is not None:
            bench.clock.run_for(chance.uniform(0, 12))
            bench.kill()
        bench.round(r)
        r += 1
        if kill == "after the commit":
            bench.kill()
    assert bench.num_kills > 2


def kill_before_commit(bench: SimulatedBench, r: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the run when round `r` is taken from the stream, but not committed."""

    def killed(*args: object, **fields: object) -> Commit:
        raise Killed

    with monkeypatch.context() as context, pytest.raises(Killed):
        context.setattr("penstock.stages.rollout.stream.commit_samples", killed)
        close, bench.close = bench.close, lambda: None  # type: ignore[method-assign]
        try:
            bench.round(r)
        finally:
            bench.close = close  # type: ignore[method-assign]
    bench.kill()


def test_finished_groups_that_no_round_took_are_not_generated_again(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p4=3, p5=3, p6=3, p7=3, p8=30, p9=30, p10=30, p11=30)
    bench.round(0)
    bench.clock.run_for(4)
    bench.close()
    before = len(bench.issues)
    assert len(set(bench.issues)) == before == 3 * BATCH
    assert ids(bench.trained(bench.round(1))) == [4, 5, 6, 7]
    bench.close()
    assert {number_of(prompt) for prompt in bench.issues[before:]} == {8, 9, 10, 11}


def test_unfinished_groups_begin_again_without_their_tokens(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p0=30)
    pending = [sample for sample in bench.buffered(bench.round(0)) if sample.group_id == "000000000"]
    bench.close()
    assert len(pending) == 2
    for sample in pending:
        assert sample.status is Status.PENDING and sample.reward is None and not sample.response
        assert not any(sample.loss_mask) and "policy_spans" not in sample.metadata


# ---- two drivers -----------------------------------------------------------------------------------------------------


def stream_of_second_driver(
    directory: Path, tokenizer: PromptTokenizer, clock: Clock, store: Store
) -> tuple[SimulatedBench, StreamSource]:
    """Return another driver of the run in `store`, whose engines finish other groups first, with its stream already
    opened at round 0."""
    other = SimulatedBench(directory, tokenizer, clock, rollout_shuffle=False)
    other.length = lambda prompt, index: short_lengths(prompt[::-1], index)
    other.store = store
    streams, notes = [other.open(0)], list[str]()
    session = SimpleNamespace(
        display=SimpleNamespace(progress=lambda *_: nullcontext(lambda done, total: None), note=notes.append),
        run=SimpleNamespace(keys=KEYS, read_commit=store.committed),
    )
    run = StreamSource(session)  # type: ignore[arg-type]
    run.open = lambda r: streams.pop() if streams else other.open(r)  # type: ignore[method-assign]
    return other, run


@pytest.mark.parametrize("rounds_of_first", [{0, 2, 3}, {1, 4}])
def test_stream_continues_from_rounds_that_another_driver_has_committed(
    bench: SimulatedBench, tokenizer: PromptTokenizer, clock: Clock, tmp_path: Path, rounds_of_first: set[int]
) -> None:
    """An old driver that was suspended and presumed dead wakes up. Regression test: the driver that lost a round used
    some groups twice and lost others, because it continued with its own state."""
    (tmp_path / "second").mkdir()
    other, second = stream_of_second_driver(tmp_path / "second", tokenizer, clock, bench.store)
    for r in range(6):
        if r in rounds_of_first:
            bench.round(r)
            bench.close()
        if r not in rounds_of_first or r in (0, 3):  # the second driver loses rounds 0 and 3; others it does not take
            commit = second.generate(r)
            assert commit == bench.store.committed(KEYS.rollout_prefix(r))
        other.train(r)
        if r not in rounds_of_first:
            bench.train(r)
    second.close()


# ---- failures and stops ----------------------------------------------------------------------------------------------


def test_failing_engine_fails_the_round_and_the_next_stream_continues(bench: SimulatedBench) -> None:
    bench.round(0)
    bench.kill()
    with pytest.raises(ConnectionError, match="no engine answered"):
        bench.round(1, fails=lambda prompt: number_of(prompt) == 9)
    assert bench.stream is None
    for r in range(1, 5):
        bench.round(r)


def test_engine_failure_between_two_rounds_fails_the_next_one(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p5=20)
    bench.round(0, fails=lambda prompt: number_of(prompt) == 5)
    assert bench.stream is not None
    bench.clock.resume()
    bench.stream._thread.join(60)
    assert not bench.stream._thread.is_alive()
    with pytest.raises(ConnectionError, match="no engine answered"):
        bench.round(1)
    bench.round(1)


class SlowExit:
    """Engines that need some time to end after a failure."""

    def __init__(self) -> None:
        self.failed, self.may_end = threading.Event(), threading.Event()

    def __enter__(self) -> list[str]:
        return ["http://engine"]

    def __exit__(self, *details: object) -> None:
        self.failed.set()
        assert self.may_end.wait(60)


@pytest.mark.parametrize("takes_round", [True, False], ids=["round raises", "close waits"])
def test_stream_that_is_ending_is_awaited_and_its_failure_raised(bench: SimulatedBench, takes_round: bool) -> None:
    """The engines end seconds later than the event loop if weights are being sent to them."""
    engines = SlowExit()
    stream = bench.open(0, fails=lambda prompt: number_of(prompt) == 5)
    stream.engines = lambda: engines
    stream.start()
    bench.clock.resume()
    assert engines.failed.wait(60)
    threading.Timer(0.05, engines.may_end.set).start()
    if takes_round:
        with pytest.raises(ConnectionError, match="no engine answered"):
            stream.run_round(0)
    stream.close()
    assert not stream._thread.is_alive()


def test_failure_is_raised_also_while_the_event_loop_is_closed(bench: SimulatedBench) -> None:
    """The loop waits for its worker threads, for example for one that writes to the store, and runs no new task."""
    bench.config = bench.config.model_copy(update={"rollout_timeout": 1e15})
    bench.length = lambda prompt, index: 2 if number_of(prompt) == 5 else 30
    may_end, is_closing = asyncio.Event(), threading.Event()
    stream = bench.open(0, fails=lambda prompt: number_of(prompt) == 5)
    stream.start()
    loop = stream._loop
    assert loop is not None

    async def slow_shutdown() -> None:
        is_closing.set()
        await may_end.wait()

    loop.shutdown_default_executor = slow_shutdown  # type: ignore[method-assign]
    bench.clock.resume()
    assert is_closing.wait(60)
    threading.Timer(0.05, loop.call_soon_threadsafe, [may_end.set]).start()
    with pytest.raises(ConnectionError, match="no engine answered"):
        stream.run_round(0)


def test_engines_that_do_not_start_fail_the_round(bench: SimulatedBench) -> None:
    class Broken(SlowExit):
        def __enter__(self) -> list[str]:
            raise RuntimeError("no engine started")

    stream = bench.open(0)
    stream.engines = Broken
    with pytest.raises(RuntimeError, match="no engine started"):
        stream.start()
    stream.close()
    bench.round(0)


def test_prompt_that_the_engine_refuses_is_used_as_failed(bench: SimulatedBench) -> None:
    bench.length = lengths_of(p2=50)
    for r in range(10):
        bench.round(r, refuses=lambda prompt: number_of(prompt) == 2)
    failed = [s for commit in commits_of(bench) for s in bench.trained(commit) if s.status is Status.FAILED]
    assert {sample.group_id for sample in failed} == {"000000002"} and len(failed) == 2
    assert all("refused by the engine" in sample.metadata["error"] for sample in failed)


def test_round_that_takes_too_long_raises_timeout(bench: SimulatedBench) -> None:
    bench.config = bench.config.model_copy(update={"rollout_timeout": 5.0})
    bench.length = lengths_of(p0=30, p1=30, p2=30, p3=30, p4=30, p5=30, p6=30, p7=30, p8=30, p9=30)
    with pytest.raises(TimeoutError, match=r"only 2 of 4 groups .*--rollout-timeout 5 s"):
        bench.round(0)


def test_rollout_timeout_does_not_count_the_wait_for_the_trainer(bench: SimulatedBench) -> None:
    bench.config = bench.config.model_copy(update={"rollout_timeout": 50.0})
    bench.max_staleness, bench.train_seconds = 1, 400.0
    for r in range(3):
        bench.round(r)


def test_restart_remembers_which_groups_were_generated_again(bench: SimulatedBench) -> None:
    """Regression test: after a restart, a group whose reward came late could be generated a third time."""
    bench.max_staleness = 4
    bench.grader.delay = lambda group_id: 60.0 if group_id == "000000000" else 0.0
    r = 0
    while bench.issues.count(bench.issues[0] if bench.issues else "") < 2:
        bench.round(r)
        r += 1
    marked = {
        s.group_id for c in commits_of(bench)[-1:] for s in bench.buffered(c) if s.metadata.get("generated_again")
    }
    assert marked == {"000000000"}
    bench.kill()
    first = bench.issues[0]
    bench.issues.clear()
    for later in range(r, r + 9):
        bench.round(later)
    assert bench.issues.count(first) <= 1, "it was running when the process was killed"


def test_stop_request_raises_preempted_and_finished_groups_are_in_the_journal(bench: SimulatedBench) -> None:
    bench.config = bench.config.model_copy(update={"rollout_journal_interval": 1000.0})
    bench.length = lengths_of(p0=4, p1=5, p2=6, p3=30)
    bench.num_rounds = 1
    stopped = bench.stream = bench.open(0)
    bench.stream.start()
    bench.clock.run_for(20)
    assert not bench.journal(0), "nothing is written yet"
    bench.stop.request(grace_seconds=0.0)
    with pytest.raises(Preempted):
        bench.round(0)
    assert not stopped._thread.is_alive()
    finished = {sample.group_id for entry in bench.journal(0) for sample in read_samples(bench.store, entry)}
    assert {int(group_id) for group_id in finished} == {0, 1, 2}
    before = len(bench.issues)
    bench.stop = StopRequest()
    commit = bench.round(0)
    assert [int(group_id) for group_id in commit.state["adopted_groups"]] == [0, 1, 2]
    assert [number_of(prompt) for prompt in bench.issues[before:]] == [3]


# ---- dynamic sampling ------------------------------------------------------------------------------------------------


def test_dropped_groups_are_replaced_and_recorded(make_bench: Any) -> None:
    code = "def check(args, samples):\n    return int(samples[0].group_id) % 3 != 1\n"
    bench = make_bench("dynamic_sampling_filter_path", code)
    for r in range(8):
        bench.round(r)
        if r % 3 == 2:
            bench.kill()
    commits = commits_of(bench)
    dropped = [group for commit in commits for group in commit.state.get("dropped", [])]
    assert len(dropped) > 8 and {group["reason"] for group in dropped} == {"check"}
    assert all(int(group["group_id"]) % 3 == 1 for group in dropped)
    assert not any(number % 3 == 1 for commit in commits for number in ids(bench.trained(commit)))
    assert sum(commit.summary.get("rollout/dynamic_filter/drop_check", 0) for commit in commits) == len(dropped)
    assert sum(commit.summary["rollout/wasted_tokens"] for commit in commits) > 0


def test_filter_that_drops_everything_fails_the_round(make_bench: Any) -> None:
    bench = make_bench("dynamic_sampling_filter_path", "def check(args, samples):\n    return False\n", max_waves=3)
    with pytest.raises(RuntimeError, match=r"dropped \d+ groups .*--max-waves"):
        bench.round(0)


def test_more_groups_than_a_round_needs_are_in_flight_with_over_sampling(make_bench: Any) -> None:
    """The slowest groups of a round are not awaited; later rounds take them, also after a kill."""
    size = 9
    bench = make_bench(over_sampling_batch_size=size, num_rounds=8)
    for r in range(8):
        bench.round(r)
        assert bench.stream is not None
        num_groups = len(bench.stream.groups.running) + len(bench.stream.groups.finished)
        bound = (bench.version + bench.max_staleness + 1 - r) * BATCH + size - BATCH
        assert num_groups <= bound
        if r % 3 == 2:
            bench.kill()
    issued = commits_of(bench)[-1].state["data_source"]["issued"]
    assert issued == 8 * BATCH + size - BATCH, "the surplus of the last round stays in the buffer"


def test_buffer_filter_selects_the_groups_that_a_restarted_stream_begins_with(make_bench: Any) -> None:
    code = "def last_first(args, rollout_id, buffer, num_samples):\n    return buffer[::-1][:num_samples]\n"
    bench = make_bench("buffer_filter_path", code, rollout_shuffle=False)
    bench.round(0)
    before = len(bench.issues)
    waiting = ids(bench.buffered(commits_of(bench)[0]))
    bench.kill()
    for r in range(1, 5):
        bench.round(r)
    again = [number_of(prompt) for prompt in bench.issues[before:]]
    assert again and set(waiting) & set(again) and again[0] == max(set(waiting) & set(again))
