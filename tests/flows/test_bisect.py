"""`penstock bisect`: what it refuses and states beforehand, without engines; and a whole search with engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import config_of, make_run, write_data
from penstock_command import penstock

from penstock.flows import bisect
from penstock.flows.commands import fork
from penstock.flows.commands.demo_model import make_tiny_data
from penstock.flows.config import PostTrainConfig
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.store import Store

ROUNDS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("bisect") / "data.jsonl")


@pytest.fixture(scope="module")
def store(data: Path) -> Store:
    """A store with the run `r` of eight rounds, checkpoints of versions 2 and 6, and evaluations of 0, 4 and 8, whose
    value is the version."""
    store = Store(str(data.parent / "store"))
    config = config_of(store, data, "r", "--eval-prompt-data", "sums", str(data), "--rm-type", "random")
    make_run(store, config, ROUNDS, save=(2, 6), score=(0, 4, 8))
    return store


@pytest.fixture(autouse=True)
def without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of options that read the model."""
    monkeypatch.setattr(bisect, "plan_of", lambda flow, config: config)


def dry(store: Store, words: str, run: str = "r") -> int:
    return bisect.main([run, "--metric", "eval/sums", *words.split(), "--dry-run", "--store", store.root])


def test_dry_run_states_the_cost_and_writes_nothing(store: Store, printed: Callable[..., str]) -> None:
    before = {found.key for found in store.walk("")}
    words = ("bisect", "r", "--metric", "eval/sums", "--below", "5", "--store", store.root)
    out = printed(*words, "--dry-run")
    assert "eval/sums below 5, versions 0 to 8, 3 of them with a stored evaluation" in out
    assert "at most 0 evaluations and 0 replayed rounds" in out, "the stored values rise"
    error = printed(*words, code=2)
    assert "from version 0 to 8, the metric does not fall" in error and "(it is 8 at version 8): give another" in error
    assert {found.key for found in store.walk("")} == before


@pytest.mark.parametrize(
    ("words", "cost"),
    [
        # no value is below the bound, and both ends are known
        ("--below -8", "0 evaluations and 0 replayed rounds"),
        # both ends, then the middle: 5 (3 rounds from 2), 7 (1 from 6), 6 (0), then 5 again (3) if 6 is low
        ("--below 5 --from 5 --to 7", "3 evaluations and 7 replayed rounds"),
        # 1 (1 from 0), 3 (1 from 2), 2 (0), then 1 again (1) if 2 is low
        ("--below 5 --from 1 --to 3", "3 evaluations and 3 replayed rounds"),
    ],
)
def test_cost_counts_evaluations_and_rounds_from_the_nearest_checkpoint(
    store: Store, capsys: pytest.CaptureFixture[str], words: str, cost: str
) -> None:
    assert dry(store, words) == 0
    assert f"at most {cost}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--below is missing"),
        ("--below low", "--below takes a number; found 'low'"),
        ("--below 1 --to 9", r"from version 0 to 9: give --from and --to with 0 <= from < to <= 8"),
        ("--below 1 --lr 1", "--lr cannot change in a search"),
    ],
)
def test_bad_requests_are_refused_before_anything_starts(store: Store, words: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        dry(store, words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "--metric is missing"),
        ("--metric eval/other", r"'eval/other' does not belong .*the run has eval/sums"),
        ("--metric eval/sums-pass@9", r"not a metric of the evaluation of version 0.*eval/sums"),
    ],
)
def test_metric_that_the_run_does_not_have_is_refused(store: Store, words: str, sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        bisect.main(["r", *words.split(), "--below", "1", "--dry-run", "--store", store.root])


def test_run_without_evaluations_needs_a_range(store: Store, data: Path) -> None:
    make_run(store, config_of(store, data, "bare", "--eval-prompt-data", "sums", str(data)), 2)
    with pytest.raises(RunError, match=r"'bare' has no evaluation on sums of versions 0 to 2: give --from and --to"):
        dry(store, "--below 1", run="bare")
    assert dry(store, "--below 1 --from 0 --to 2", run="bare") == 0


def test_longest_name_of_a_data_set_decides() -> None:
    config = PostTrainConfig.model_validate({"eval": {"eval_prompt_data": [("a", "x"), ("a-b", "y")]}})
    names = {"eval/a": "a", "eval/a-pass@1": "a", "eval/a-b": "a-b", "eval/a-b/rewards/x": "a-b"}
    assert {metric: bisect.find_data_set(config, metric) for metric in names} == names


def test_fork_with_other_options_is_searched_from_its_fork_point(store: Store) -> None:
    for name, words in (("same", ()), ("other", ("--lr", "1e-3"))):
        assert fork.main(["r", "--at", "6", "--name", name, *words, "--store", store.root]) == 0
    assert dry(store, "--below 1", run="same") == 0
    with pytest.raises(RunError, match="'other' has no evaluation on sums of versions 6 to 6"):
        dry(store, "--below 1", run="other")
    with pytest.raises(OptionError, match=r"before 6 were trained by its parent with other options.*6 <= from"):
        dry(store, "--below 1 --from 0 --to 6", run="other")


# ---- with real engines -----------------------------------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.full
def test_a_search_restores_evaluates_and_ranks_and_leaves_the_run_whole(
    prefect_api: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    """The metric is one that has fallen, and the bound lies between its values at the two ends. The reward has a part
    and its negative, so one of both has."""
    store, data = Store(str(tmp_path / "store")), make_tiny_data(tmp_path / "data")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def reward_func(args, sample):\n"
        "    value = sum(map(ord, sample.response)) % 97 / 97\n"
        "    return {'score': value, 'plus': value, 'minus': -value}\n"
    )

    def run(*words: str) -> str:
        result = penstock(*words, "--store", store.root, env=prefect_api)
        return result.stdout + result.stderr

    options = f"""--hf-checkpoint {tiny_model} --prompt-data {data["train"]} --input-key prompt --label-key label
        --custom-rm-path {reward} --reward-key score --apply-chat-template
        --rollout-batch-size 4 --n-samples-per-prompt 4
        --rollout-max-response-len 8 --num-rollout 4 --save-interval 2 --lr 1e-3 --trainer-threads 1
        --check-logits false --eval-prompt-data sums {data["train"]} --eval-interval 4"""
    run("train", "--run", "base", *options.split())
    keys = RunKeys("base")

    def values() -> dict[int, float]:
        commits = {version: store.committed(keys.eval_prefix(version, "sums")) for version in range(5)}
        return {version: commit.summary["eval/sums"] for version, commit in commits.items() if commit is not None}

    assert values().keys() == {0, 4}
    first, last = (store.committed(keys.eval_prefix(version, "sums")) for version in (0, 4))
    assert first is not None and last is not None
    name = next(name for name, value in first.summary.items() if "/rewards/" in name and last.summary[name] < value)
    words = ("bisect", "base", "--metric", name, "--below", str((first.summary[name] + last.summary[name]) / 2))
    steps = {r: store.committed(keys.step_prefix(r)) for r in range(4)}
    out = run(*words)
    assert "at most 2 evaluations" in out and "fell below" in out and "influence" in out
    assert len(values()) == 4
    assert {r: store.committed(keys.step_prefix(r)) for r in range(4)} == steps, "no round is trained again"
    before = int(out.partition("Round ")[2].split()[0])
    assert before == 0 or store.committed(keys.checkpoint_prefix(before)) is not None
    again = run(*words)
    assert "at most 0 evaluations" in again and f"Round {before} trained it" in again
    table = [line for line in out.splitlines() if "%" in line]
    assert table and table == [line for line in again.splitlines() if "%" in line], "the ranking is deterministic"
    assert audit_run(store, keys).problems == []
