"""The journal of an unfinished round: the next attempt adopts finished groups once, and none of another policy or
config."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Bench, ScriptedClient

from penstock.engines.generation import Generation
from penstock.stages.rollout.journal import Journal
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import RunKeys
from penstock.storage.preemption import Preempted, StopRequest

PREFIX = RunKeys("run").rollout_prefix(0)
JOURNAL = f"{PREFIX}.journal"


class Killed(BaseException):
    """The end of a process, as far as a test can have it: no handler of ours runs."""


class Breaking(ScriptedClient):
    """Answers `num_answers` prompts, then waits for `wait` seconds or `until` something is true, then raises
    `failure`."""

    num_answers = 5
    failure: BaseException = Killed()
    wait = 0.3
    until: Callable[[], bool] | None = None

    async def generate_each(self, *arguments: Any, **named: Any) -> list[Generation]:
        if len(self.requests) >= self.num_answers:
            while self.until and not self.until():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await asyncio.sleep(0 if self.until else self.wait)
            raise self.failure
        return await super().generate_each(*arguments, **named)


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PromptTokenizer) -> Bench:
    return Bench(tmp_path, tokenizer, num_rows=12, rollout_batch_size=8, rollout_journal_interval=0.05)


def break_round(bench: Bench, num_journalled: int = 5, **changes: Any) -> None:
    """Kill an attempt at round 0 as soon as the journal has `num_journalled` groups."""

    def is_written() -> bool:
        return sum(entry.num_samples() for entry in bench.journal(0)) >= num_journalled * 2

    with pytest.raises(Killed):
        bench.round(0, client=Breaking, until=is_written, **changes)


def prompts_of(client: ScriptedClient) -> set[tuple[int, ...]]:
    return {tuple(ids) for ids, _, _ in client.requests}


def ids_of(bench: Bench) -> list[str]:
    commit = bench.store.committed(PREFIX)
    assert commit is not None
    return [sample.sample_id for sample in bench.trained(commit)]


WHOLE = [f"{g:09d}-{j:02d}" for g in range(8) for j in range(2)]


@pytest.mark.parametrize(
    ("interval", "failure"),
    [(0.05, Killed()), (60.0, RuntimeError("the engines are gone"))],
    ids=["killed after an interval", "failed before one"],
)
def test_finished_groups_are_not_generated_again(bench: Bench, interval: float, failure: BaseException) -> None:
    bench.config = bench.config.model_copy(update={"rollout_journal_interval": interval})
    with pytest.raises(type(failure)):
        bench.round(0, client=Breaking, failure=failure)
    first = prompts_of(bench.clients[-1])
    assert bench.store.committed(PREFIX) is None
    assert bench.store.committed_indices(f"{RunKeys('run').prefix}/rollouts") == []
    commit = bench.round(0)
    second = prompts_of(bench.clients[-1])
    assert (len(first), len(second)) == (5, 3) and not first & second
    assert ids_of(bench) == WHOLE
    assert commit.summary["rollout/num_adopted_groups"] == len(commit.state["adopted_groups"]) == 5
    assert all(sample.reward is not None for sample in bench.trained(commit))
    assert not list(bench.store.walk(JOURNAL)), "a committed round needs no journal"


def test_journals_of_several_failed_attempts_add_up(bench: Bench) -> None:
    for expected in (2, 4, 6):
        break_round(bench, expected, num_answers=2)
        adopted = sum(len(bench.trained(entry)) for entry in bench.journal(0))
        assert adopted == expected * 2
    bench.round(0)
    assert len(bench.clients[-1].requests) == 2 and ids_of(bench) == WHOLE


@pytest.mark.parametrize(
    "change",
    [
        {"rollout_temperature": 0.5},
        {"rollout_seed": 43},
        {"rollout_journal_interval": 0.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_groups_of_other_config_are_not_adopted(bench: Bench, change: dict[str, Any]) -> None:
    break_round(bench)
    bench.config = bench.config.model_copy(update=change)
    commit = bench.round(0)
    # In another order of the rows a journalled group is another prompt; it is generated again unless it is the same
    # one.
    assert commit.summary["rollout/num_adopted_groups"] == 0 or change.get("rollout_seed")
    samples = bench.trained(commit)
    assert len({sample.sample_id for sample in samples}) == len(samples) == 8 * bench.config.n_samples_per_prompt
    rows = [sample.metadata["source"]["row"] for sample in samples[:: bench.config.n_samples_per_prompt]]
    expected, _ = bench.source().take(bench.source().restore(None), 8)
    assert rows == [prompt.row for prompt in expected]


def test_groups_of_other_policy_are_not_adopted(bench: Bench) -> None:
    """An evaluation's prefix says the version, a rollout's too; the journal checks nevertheless."""
    break_round(bench)
    commit = bench.round(0, policy_version=1, served_version="run/1")
    assert commit.summary["rollout/num_adopted_groups"] == 0
    assert {sample.policy_versions for sample in bench.trained(commit)} == {(1, 1)}


def test_groups_of_damaged_journal_are_generated_again(bench: Bench) -> None:
    break_round(bench)
    for entry in bench.journal(0):
        path = Path(bench.store.path(entry.files[0].path))
        path.write_bytes(path.read_bytes()[:-100])
    bench.round(0)
    assert len(bench.clients[-1].requests) == 8 and ids_of(bench) == WHOLE


def test_two_concurrent_attempts_use_each_group_once(bench: Bench) -> None:
    """A driver that was taken for dead writes entries of the same round as its successor."""

    threads = [threading.Thread(target=break_round, args=(bench, 10)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journalled = [sample.sample_id for entry in bench.journal(0) for sample in bench.trained(entry)]
    assert len(journalled) == 20 and len(set(journalled)) == 10
    commit = bench.round(0)
    assert ids_of(bench) == WHOLE and len(commit.state["adopted_groups"]) == 5


def test_stop_request_without_grace_period_journals_and_raises_preempted(bench: Bench) -> None:
    bench.config = bench.config.model_copy(update={"rollout_journal_interval": 60.0})
    stop = StopRequest()
    threading.Timer(0.2, stop.request, args=(0.0,)).start()
    with pytest.raises(Preempted, match="10 of 16 samples"):
        bench.round(0, client=Breaking, wait=3600.0, stop=stop)  # longer than a test may take
    bench.round(0)
    assert len(bench.clients[-1].requests) == 3 and ids_of(bench) == WHOLE


def test_stop_request_with_long_grace_period_finishes_round(bench: Bench) -> None:
    stop = StopRequest()
    stop.request(grace_seconds=60.0)
    assert bench.round(0, stop=stop, pause_seconds=0.4).summary["rollout/num_samples"] == 16


def test_stop_request_while_grading_keeps_generated_groups(plugin_bench: Any) -> None:
    code = "import time\ndef reward_func(args, sample):\n    time.sleep(20)\n    return 1.0\n"
    bench, stop = plugin_bench(code, "custom_rm_path", rollout_batch_size=8, rm_type=None), StopRequest()
    threading.Timer(0.5, stop.request, args=(0.0,)).start()
    with pytest.raises(Preempted, match="0 of 16 samples"):
        bench.round(0, stop=stop)
    bench.config = bench.config.model_copy(update={"custom_rm_path": None, "rm_type": "exact_number"})
    bench.round(0)
    assert not bench.clients[-1].requests and ids_of(bench) == WHOLE


def test_flush_after_commit_writes_nothing(bench: Bench) -> None:
    """A flush in its thread may end after the commit."""
    break_round(bench)
    [entry, *_] = bench.journal(0)
    samples = bench.trained(entry)
    journal = Journal(bench.store, PREFIX, RolloutRound("run", 0, policy_version=0), bench.config)
    journal.load_finished_groups()
    journal.add_finished_group(samples)
    journal.delete_entries()
    journal.flush()
    journal.add_finished_group(samples)
    journal.flush()
    assert not Path(bench.store.path(JOURNAL)).exists()
