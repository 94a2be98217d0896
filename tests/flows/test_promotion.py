"""The registry: a policy becomes champion only if it is better; refusals have the numbers; rollback; start from it."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_records import run_json

from penstock.flows import tasks
from penstock.flows.cli import main
from penstock.flows.commands.fork import plan_fork
from penstock.flows.config import Plan
from penstock.flows.options.flags import parse_config
from penstock.flows.promotion import promote_policy
from penstock.flows.runtime.preflight import evaluation_rules
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run, read_flow_and_config
from penstock.stages.eval.scores import Gate
from penstock.storage.champions import Decision, champion, read_decisions, record_decision
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import DataError, OptionError, PromotionRefused, RunError, check_rules
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.store import Store
from tests.storage.made_run import commit_files, commit_samples

KEYS = RunKeys("r")
NUM_PROMPTS = 40


def evaluate(store: Store, version: int, rewards: list[float], data_set: str = "sums", rows: str = "d1") -> None:
    samples = [
        Sample(
            sample_id=f"eval-{data_set}-{prompt:09d}-00",
            group_id=f"eval-{data_set}-{prompt:09d}",
            trajectory_id="t",
            rollout_id=version,
            reward=reward,
            status=Status.COMPLETED,
        )
        for prompt, reward in enumerate(rewards)
    ]
    fields = {"kind": "eval", "run": "r", "index": version, "policy_version": version}
    fields["summary"] = {f"eval/{data_set}": sum(rewards) / len(rewards)}
    fields["state"] = {"data_source": {"segments": [{"rows": len(rewards), "digest": rows}]}}
    commit_samples(store, KEYS.eval_prefix(version, data_set), samples, **fields)


def save(store: Store, version: int, export: bool = True) -> None:
    fields = {"run": "r", "index": version, "policy_version": version}
    commit_files(store, KEYS.checkpoint_prefix(version), {"w": b"w"}, kind="checkpoint", **fields)
    if export:
        commit_files(store, KEYS.export_prefix(version), {"model": b"m"}, kind="export", **fields)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Versions 1 to 4 with checkpoint and evaluation: 2 is clearly better than 1, 3 about equal to 2, 4 better on
    `sums` and worse on `code`. Read only."""
    store = Store(str(tmp_path_factory.mktemp("evaluated") / "store"))
    store.create(KEYS.record, run_json())
    half = [float(prompt % 2) for prompt in range(NUM_PROMPTS)]
    better = [1.0 if prompt % 8 else 0.0 for prompt in range(NUM_PROMPTS)]
    equal = [1.0 - better[prompt] if prompt % 16 in (0, 1) else better[prompt] for prompt in range(NUM_PROMPTS)]
    for version, rewards in ((1, half), (2, better), (3, equal), (4, [1.0] * NUM_PROMPTS)):
        save(store, version)
        evaluate(store, version, rewards)
        evaluate(store, version, [0.2 if version == 4 else 0.8] * NUM_PROMPTS, "code")
    return store


@pytest.fixture
def store(evaluated: Store, tmp_path: Path) -> Store:
    """A copy of `evaluated`."""
    return Store(str(shutil.copytree(evaluated.root, tmp_path / "store")))


def promote(store: Store, version: int, **gate) -> Decision:
    return promote_policy(store, "math", f"r/{version}", Gate("sums", **gate))


def test_better_policy_is_promoted_and_equal_one_refused_with_the_numbers(store: Store) -> None:
    assert promote(store, 1).action == "promoted"
    decision = promote(store, 2)
    assert decision.action == "promoted" and decision.conditions[0].low > 0
    refused = promote(store, 3)
    assert refused.action == "refused" and champion(store, "math").version == 2
    [condition] = refused.conditions
    assert condition.low <= 0 <= condition.high and not condition.holds
    assert "0.8750 against 0.8750" in str(condition) and "40 prompts" in str(condition)
    assert [d.action for d in read_decisions(store, "math")] == ["promoted", "promoted", "refused"]


def test_regression_on_a_guard_refuses(store: Store) -> None:
    promote(store, 2)
    refused = promote(store, 4, guards={"code": 0.1})
    assert [condition.holds for condition in refused.conditions] == [True, False] and refused.action == "refused"
    assert promote(store, 4, guards={"code": 0.7}).action == "promoted"


def test_first_champion_needs_the_minimum_reward_and_the_next_the_margin(store: Store) -> None:
    assert promote(store, 1, min_reward=0.6).action == "refused" and champion(store, "math") is None
    first = promote(store, 1, min_reward=0.4)
    assert promote(store, 1) == first and len(read_decisions(store, "math")) == 2, "it is the champion already"
    assert promote(store, 2, margin=0.3).action == "refused", "the lower bound of the difference counts"
    assert promote(store, 2, margin=0.1).action == "promoted"


def test_rollback_goes_back_one_champion_at_a_time(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    for version in (1, 2, 4):
        assert promote(store, version).action == "promoted"
    for version in (2, 1):
        assert main(["promote", "--to", "math", "--rollback", "--store", store.root]) == 0
        assert champion(store, "math").version == version
    assert main(["promote", "--to", "math", "--rollback", "--store", store.root]) == 2
    assert "has no earlier champion" in capsys.readouterr().err
    assert promote(store, 2).action == "promoted" and champion(store, "math").version == 2


def test_concurrent_promotions_cannot_both_replace_the_same_champion(store: Store) -> None:
    decision = promote(store, 1)
    record_decision(store, "math", 1, decision)
    with pytest.raises(RunError, match="another process changed the champion"):
        record_decision(store, "math", 1, decision)


def test_different_rows_or_missing_evaluation_are_refused_before_a_decision(store: Store) -> None:
    promote(store, 1)
    save(store, 5)
    evaluate(store, 5, [1.0] * NUM_PROMPTS, rows="other")
    with pytest.raises(DataError, match="repeat one evaluation"):
        promote(store, 5)
    with pytest.raises(DataError, match="candidate was evaluated on sums, not on code"):
        promote(store, 5, guards={"code": 0.1})
    evaluate(store, 6, [1.0] * NUM_PROMPTS)
    with pytest.raises(RunError, match=r"r/6 has no checkpoint \(run 'r' has: 1, 2, 3, 4, 5\)"):
        promote(store, 6)
    assert len(read_decisions(store, "math")) == 1


def test_command_prints_numbers_and_exits_with_1_if_refused(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--to", "math", "--data-set", "sums", "--store", store.root]
    assert main(["promote", "r/2", *where]) == 0
    assert main(["promote", "r/3", *where, "--guard", "code=0.1"]) == 1
    assert "difference" in (text := capsys.readouterr().out) and "r/3 refused; champion: r/2" in text
    assert main(["promote", "r/3", *where, "--force"]) == 0
    assert main(["promote", "--to", "math", "--store", store.root]) == 0
    assert "promoted (forced)" in capsys.readouterr().out
    assert main(["promote", "r/3", *where, "--guard", "code"]) == 2
    assert main(["promote", "r/3", "--to", "a/b", "--data-set", "sums", "--store", store.root]) == 2


@pytest.mark.parametrize("refused", ["warn", "fail"])
def test_refused_promotion_at_the_end_of_a_run_says_the_numbers(refused: str, store: Store) -> None:
    promote(store, 2)
    flags = ["--promote-to", "math", "--promote-refused", refused, "--eval-prompt-data", "sums", "p"]
    said: dict[str, list[str]] = {"note": [], "warn": [], "message": []}
    session = SimpleNamespace(
        config=parse_config(["--hf-checkpoint", "m", "--run", "r", *flags]),
        run=SimpleNamespace(store=store, keys=KEYS),
        display=SimpleNamespace(note=said["note"].append, warn=said["warn"].append),
        set_stage_message=said["message"].append,
    )
    with pytest.raises(PromotionRefused, match=r"0\.8750 against 0\.8750") if refused == "fail" else nullcontext():
        tasks.promote.body(session, 3)
    assert said["warn"] == said["message"] and "r/3 refused" in said["warn"][0] and said["note"] == []
    assert champion(store, "math").version == 2
    tasks.promote.body(session, 2)  # the champion already
    assert said["note"] == said["message"][1:] and "r/2 promoted (sums: mean 0.8750, no champion yet" in said["note"][0]


CHAMPION = ["--hf-checkpoint", "champion:math", "--num-rollout", "3"]


def plan(store: Store, run: str, *words: str) -> Plan:
    given = parse_config([*CHAMPION, "--run", run, "--store", store.root, *words])
    return resolve("train", given, store)


def export(store: Store, version: int) -> str:
    commit = store.committed(KEYS.export_prefix(version))
    assert commit is not None and commit.attempt is not None
    return store.path(commit.attempt)


def test_run_keeps_the_champion_that_it_started_from_and_the_next_run_gets_the_new_one(store: Store) -> None:
    with pytest.raises(RunError, match="model 'math' has no champion"):
        plan(store, "nightly")
    promote(store, 1)
    first = plan(store, "nightly")
    promote(store, 2)
    assert first.convert.hf_checkpoint == export(store, 1)
    assert plan(store, "nightly").convert.hf_checkpoint == export(store, 2), "a start killed before its record is new"
    open_run(store, first)
    for words in ([], ["--num-rollout", "5"], ["--trainer-threads", "1"]):
        again = plan(store, "nightly", *words)
        open_run(store, again)
        assert again.convert.hf_checkpoint == export(store, 1), words
    flow, recorded = read_flow_and_config(first.run, "nightly")
    assert resolve(flow, recorded, store).convert.hf_checkpoint == export(store, 1), "penstock resume"
    assert plan(store, "weekly").convert.hf_checkpoint == export(store, 2)
    other = parse_config(["--hf-checkpoint", export(store, 2), "--run", "nightly", "--store", store.root])
    assert resolve("train", other, store).convert.hf_checkpoint == export(store, 2), "given explicitly"


def test_run_keeps_the_checkpoint_that_its_load_has_named(store: Store) -> None:
    old = RunKeys("old")
    open_run(store, resolve("train", parse_config(["--hf-checkpoint", "m", "--save", f"{store.root}/old"]), store))

    def save_old(version: int) -> str:
        attempt = f"{old.prefix}/files/{version}"
        commit = Commit(kind="checkpoint", run="old", index=version, policy_version=version, attempt=attempt)
        store.commit(old.checkpoint_prefix(version), commit)
        return store.path(attempt)

    paths = [save_old(1)]
    words = ["--hf-checkpoint", "m", "--load", f"{store.root}/old", "--store", store.root, "--num-rollout", "3"]
    for run in ("a", "b"):
        open_run(store, resolve("train", parse_config([*words, "--run", run]), store))
        paths.append(save_old(len(paths) + 1))
    plans = [resolve("train", parse_config([*words, "--run", run]), store) for run in ("a", "b", "c")]
    assert [plan.start_weights for plan in plans] == paths


def test_fork_keeps_the_champion_of_its_parent_unless_it_is_given(store: Store) -> None:
    promote(store, 1)
    parent = plan(store, "next")
    promote(store, 2)
    given = ["--hf-checkpoint", "champion:math"]
    for words, version in (([], 1), (given, 2)):
        assert plan_fork(store, "train", parent, words, "branch", 0).convert.hf_checkpoint == export(store, version)
    with pytest.raises(RunError, match="model 'other' has no champion"):
        plan_fork(store, "train", parent, ["--hf-checkpoint", "champion:other"], "branch", 0)
    store.delete([commit_key(KEYS.export_prefix(2))])
    with pytest.raises(RunError, match="has no export in a local store"):
        plan(store, "third")


@pytest.mark.parametrize(
    "command",
    [
        "train --dry-run --prompt-data {data} --num-rollout 1 --rm-type random --rollout-max-response-len 16",
        "train --dry-run --prompt-data {absent} --num-rollout 1 --rm-type random --rollout-max-response-len 16",
        "doctor --plan",
    ],
)
def test_champion_is_resolved_by_every_command_that_plans(
    command: str, store: Store, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text('{"input": "1+1="}\n')
    paths = {name: tmp_path / f"{name}.jsonl" for name in ("data", "absent")}
    argv = f"{command.format(**paths)} --store {store.root} --run next --hf-checkpoint champion:math".split()
    assert main(argv) == 2 and "model 'math' has no champion" in capsys.readouterr().err
    promote(store, 1)
    exported = store.path(store.committed(KEYS.export_prefix(1)).attempt)
    shutil.copytree(tiny_model, exported, dirs_exist_ok=True)
    assert main(argv) in (0, 1), capsys.readouterr().err
    out = capsys.readouterr().out
    assert "parameters" in out and "champion:math does not exist" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--promote-to", "math"], "needs evaluations on at least one data set"),
        (["--promote-to", "math", "--eval-prompt-data", "a", "p", "--promote-data-set", "b"], "needs evaluations on b"),
        (["--promote-data-set", "a"], "need --promote-to MODEL"),
    ],
)
def test_options_of_the_promotion_are_checked_before_the_start(flags: list[str], message: str) -> None:
    config = parse_config(["--hf-checkpoint", "m", "--run", "r", *flags])
    with pytest.raises(OptionError, match=message):
        check_rules(evaluation_rules(config))
