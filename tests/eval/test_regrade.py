"""Grading stored samples of evaluations again with `penstock regrade`."""

import re
from collections.abc import Collection
from pathlib import Path

import pytest
from evaluated_run import config_of, evaluate, write_sums

from penstock.flows import cli
from penstock.flows.commands import regrade
from penstock.flows.inspect.report import compare_evaluations
from penstock.flows.inspect.run_views import evaluation_rows
from penstock.flows.reporting.prefect_page import describe_progress
from penstock.flows.runtime.runs import read_existing_record
from penstock.flows.terminal.lines import seconds_by_stage, summary_rows
from penstock.storage.commit import Commit, RunKeys, evaluation_rewards
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.report.data import ReportInput, collect_overview
from penstock.storage.samples.sample import Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.sql_views import execute, open_connection
from penstock.storage.store import Store, read_commits
from penstock.storage.tracking.tracker import RunCommits
from tests.forked_worker import forked_workers  # noqa: F401 fixture

RESPONSES = [["0", "no 0"], ["2, or 3", "?..."], ["\\boxed{4}", "4..."], ["", "?"]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "store"))
    config = config_of(store, write_sums(tmp_path / "sums.jsonl"), "r")
    for version in (0, 20):
        evaluate(store, config, version, RESPONSES)
    return store


def command(store: Store, *words: str) -> int:
    return cli.main(["regrade", "r", "--store", store.root, *words])


def scored_again(store: Store, version: int) -> list[str]:
    names = store.list(f"runs/r/evals/{version:06d}")
    return [name.removesuffix(".commit.json") for name in names if "@" in name and name.endswith(".commit.json")]


def test_regrading_commits_beside_the_old_evaluation(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    before = {found.key: store.read(found.key) for found in store.walk("")}
    problems = audit_run(store, RunKeys("r")).problems
    assert len(problems) == 1 and problems[0].startswith("eval 20 has a policy version that was not trained"), (
        "by construction"
    )
    assert command(store, "--version", "20", "--rm-type", "boxed_exact_number") == 0
    shown = capsys.readouterr().out
    assert {key: store.read(key) for key in before} == before, "nothing that was committed has changed"
    (name,) = scored_again(store, 20)
    assert scored_again(store, 0) == [] and name in shown and "0.500" in shown and "0.125" in shown
    keys = RunKeys("r")
    commit, old = store.committed(keys.eval_prefix(20, name)), store.committed(keys.eval_prefix(20, "sums"))
    assert commit is not None and old is not None
    assert old.summary["eval/sums"] == 0.5 and commit.summary[f"eval/{name}"] == 0.125, "the one in a box"
    assert commit.inputs["samples"] == "runs/r/evals/000020/sums.commit.json"
    assert commit.state["scoring"]["rm_type"] == "boxed_exact_number"
    samples = read_samples(store, commit)
    assert [s.reward for s in samples] == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0, None, 0.0]
    assert [s.sample_id for s in samples][:1] == [f"eval-000020-{name}-000000000-00"]
    assert [s.token_ids for s in samples] == [s.token_ids for s in read_samples(store, old)]
    assert audit_run(store, keys).problems == problems


def regraded_run(store: Store) -> list[Commit]:
    assert command(store, "--rm-type", "boxed_exact_number") == 0
    commits = read_commits(store, RunKeys("r"))
    assert [c.listed_kind for c in commits] == ["eval", "eval", "regrade", "regrade"]
    return commits


def curves_of_trackers(commits: list[Commit]) -> Collection[str]:
    lineage = RunCommits()
    for number, commit in enumerate(commits):
        lineage.add(f"runs/r/evals/{number}", commit)
    return evaluation_rewards(list(lineage.evals.values()))


def test_regraded_evaluation_is_not_listed_as_an_evaluation(store: Store) -> None:
    commits = regraded_run(store)
    listed: dict[str, Collection[str]] = {
        "curve of the Prefect page": evaluation_rewards(commits),
        "line of a start": re.findall(r"eval (\S+)", describe_progress(commits)),
        "summary": [name[5:] for name in summary_rows(commits, [], "store") if name.startswith("eval ")],
        "show": [name[5:] for name in evaluation_rows(commits) if name.startswith("eval ")],
        "curve of the trackers": curves_of_trackers(commits),
    }
    assert {place: list(names) for place, names in listed.items()} == {place: ["sums"] for place in listed}
    assert list(evaluation_rows(commits)) == ["eval sums", f"regrade {scored_again(store, 0)[0]}"]
    assert seconds_by_stage(commits, []) == seconds_by_stage(commits[:2], [])


def test_report_and_fork_separate_regraded_evaluations(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    regraded_run(store)
    record = read_existing_record(store, RunKeys("r"))
    report, _ = collect_overview(store, RunKeys("r"), ReportInput(record, 0, [], compare=compare_evaluations))
    name = scored_again(store, 0)[0]
    for part in (report, report["lineage"]):
        assert [(e["task"], e["version"]) for e in part["evaluations"]] == [("sums", 0), ("sums", 20)]
        assert [(e["task"], e["version"]) for e in part["regrades"]] == [(name, 0), (name, 20)]
    assert [comparison["task"] for comparison in report["comparisons"]] == ["sums"]
    assert cli.main(["fork", "r", "--at", "0", "--name", "f", "--store", store.root]) == 0
    assert "0 checkpoints, 1 eval, 1 regrade" in capsys.readouterr().out


def test_seconds_of_a_regraded_evaluation_are_not_those_of_an_evaluation(store: Store) -> None:
    def seconds() -> tuple[list[tuple], dict]:
        connection, _ = open_connection(store, ["r"])
        rows = execute(connection, "select sum(seconds), count(*) from commits where kind = 'eval'")[1].fetchall()
        report = collect_overview(store, RunKeys("r"), ReportInput(read_existing_record(store, RunKeys("r")), 0, []))[0]
        return rows, {"stages": report["stages"], "gaps": report["gaps"], "parts": report["costs"]["parts"]}

    before = seconds()
    assert command(store, "--rm-type", "boxed_exact_number") == 0
    assert len(scored_again(store, 0)) == 1 and seconds() == before
    connection, _ = open_connection(store, ["r"])
    assert execute(connection, "select count(*) from commits where kind = 'regrade'")[1].fetchall() == [(2,)]
    assert execute(connection, "select count(*) from evaluations")[1].fetchall() == [(4,)]


def test_samples_whose_grader_failed_are_graded_again(store: Store) -> None:
    assert command(store, "--version", "0", "--rm-type", "boxed_exact_number") == 0
    commit = store.committed(RunKeys("r").eval_prefix(0, scored_again(store, 0)[0]))
    assert commit is not None
    *_, cut_off, _, truncated, never_generated, graded_now = read_samples(store, commit)
    assert (cut_off.status, truncated.status) == (Status.TRUNCATED, Status.TRUNCATED), "as long as a response may be"
    assert (cut_off.reward, "error" in cut_off.metadata) == (0.0, False)
    assert (never_generated.status, never_generated.metadata["error"]) == (Status.FAILED, "why")
    assert (graded_now.status, "error" in graded_now.metadata) == (Status.COMPLETED, False)


@pytest.mark.full
def test_repeated_regrading_reuses_the_commit_unless_the_function_changed(store: Store, tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def reward_func(args, sample):\n    return float('or' in sample.response)\n")
    for _ in range(2):
        assert command(store, "--custom-rm-path", str(reward)) == 0
    assert len(scored_again(store, 0)) == len(scored_again(store, 20)) == 1
    first = store.committed(RunKeys("r").eval_prefix(0, scored_again(store, 0)[0]))
    assert first is not None and first.summary[f"eval/{scored_again(store, 0)[0]}"] == 0.125
    reward.write_text("def reward_func(args, sample):\n    return -1.0\n")
    assert command(store, "--custom-rm-path", str(reward)) == 0
    assert len(scored_again(store, 0)) == 2
    assert command(store, "--custom-rm-path", str(reward), "--pass-threshold", "-2") == 0
    assert len(scored_again(store, 0)) == 3, "what passes belongs to how it is scored"


def test_command_line_options_override_the_runs_file(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    file = tmp_path / "evals.toml"
    data = write_sums(tmp_path / "sums.jsonl")
    file.write_text(
        f'[[datasets]]\nname = "own"\npath = "{data}"\nrm_type = "dapo"\nreward_key = "acc"\npass_threshold = 1.0\n'
    )
    config = config_of(store, data, "r", "--eval-config", str(file))
    no_options = dict.fromkeys(("rm_type", "custom_rm_path", "reward_key", "rm_model_path", "rm_url"))
    no_options |= {"rm_evaluated_integers": False, "group_rm": False, "pass_threshold": None}

    def options(*words: str, data_set: str = "own") -> dict[str, object]:
        given = regrade.parse_scoring_options(list(words))
        merged, rollout = regrade.merge_scoring_options(config, given, data_set)
        assert (rollout.rm_type, rollout.custom_rm_path) == (merged["rm_type"], merged["custom_rm_path"])
        return merged

    plain = options()
    assert plain == no_options | {"rm_type": "dapo", "reward_key": "acc", "pass_threshold": 1.0}
    math = options("--rm-type", "math", "--pass-threshold", "0")
    assert math == no_options | {"rm_type": "math", "reward_key": "acc", "pass_threshold": 0.0}
    custom = options("--custom-rm-path", "m.py", "--reward-key", "x", "--group-rm")
    assert custom == no_options | {"custom_rm_path": "m.py", "reward_key": "x", "pass_threshold": 1.0}
    assert options("--rm-type", "math", "--rm-evaluated-integers")["rm_evaluated_integers"] is True
    of_rounds = options("--custom-rm-path", "m.py", "--group-rm", data_set="")
    assert of_rounds == no_options | {"custom_rm_path": "m.py", "group_rm": True}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollout-temperature", "0.5"], "--rollout-temperature has no effect on grading"),
        (["--custom-rm-path", "{path}/half.py", "--log-passrate"], "has the reward 0.5, but pass@k needs rewards of 0"),
        (["--version", "0", "--custom-rm-path", "{path}/broken.py"], "grading of all 7 samples failed, the last with"),
    ],
)
def test_invalid_requests_print_one_sentence_and_commit_nothing(
    store: Store, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, result in (("half", "0.5"), ("broken", "sample.nothing")):
        (tmp_path / f"{name}.py").write_text(f"def reward_func(args, sample):\n    return {result}\n")
    assert command(store, *(word.format(path=tmp_path) for word in words)) == 2
    said = capsys.readouterr().err.strip()
    assert message in said and "\n" not in said
    assert scored_again(store, 0) == scored_again(store, 20) == []
