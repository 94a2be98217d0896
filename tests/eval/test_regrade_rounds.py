"""Grading the samples of training rounds again with `penstock regrade`."""

import gc
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from evaluated_run import LIMIT, commit_round, config_of, evaluate, open_with_model, sample_of, train_rounds, write_sums

from penstock.flows import cli
from penstock.flows.commands import regrade as regrade_command
from penstock.flows.inspect.report import compare_evaluations
from penstock.flows.runtime.runs import read_existing_record
from penstock.stages.eval import regrading
from penstock.stages.eval.regrading import DETECTORS, detector_metrics
from penstock.stages.rewards.outcome import penalize_overlong
from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.batching import Batch
from penstock.stages.train.microbatches import compute_loss_weights
from penstock.stages.train.step import stored_experience
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import find_orphans
from penstock.storage.report.data import ReportInput, collect_overview
from penstock.storage.samples import shards
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples, read_table
from penstock.storage.sql_views import execute, open_connection
from penstock.storage.store import Store, read_commits
from penstock.storage.tracking.tracker import RunCommits
from tests.forked_worker import forked_workers  # noqa: F401 fixture

KEYS = RunKeys("r")
ROWS, SAMPLES = 12, 4  # prompts of a round, responses to a prompt


def responses_of(seed: int) -> list[list[str]]:
    """Random responses to the prompts of a round: right, wrong, truncated, failed generations and failed gradings."""
    draw = random.Random(seed)
    choices = ("{right}", "no", "so {right}", "{right}...", "", "?{right}", "{wrong}")
    return [
        [draw.choice(choices).format(right=2 * row, wrong=2 * row + 1) for _ in range(SAMPLES)] for row in range(ROWS)
    ]


def train(store: Store, tmp_path: Path, rounds: int, *words: str, flow: str = "train") -> RunKeys:
    data = write_sums(tmp_path / "sums.jsonl", ROWS)
    config = config_of(store, data, "r", "--prompt-data", str(data), "--num-rollout", "9", *words)
    return train_rounds(store, config, [responses_of(r) for r in range(rounds)], flow)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def samples_of(store: Store, r: int) -> list[Sample]:
    rollout = store.committed(KEYS.rollout_prefix(r))
    assert rollout is not None
    return read_samples(store, rollout)


def regrade(store: Store, *words: str) -> int:
    return cli.main(["regrade", "r", "--store", store.root, *words])


def regraded(store: Store, r: int) -> Commit:
    """The only regrade of a round."""
    (name,) = store.committed_names(f"{KEYS.prefix}/regrades/{r:06d}")
    commit = store.committed(KEYS.regrade_prefix(r, name))
    assert commit is not None
    return commit


def metrics_of(commit: Commit) -> dict[str, float]:
    return {name.partition("/")[2]: value for name, value in commit.summary.items()}


def rows_of(store: Store, commit: Commit) -> list[dict]:
    (file,) = commit.files
    return pq.read_table(store.path(file.path)).to_pylist()


# A grader with a planted fault: it takes every wrong response with a 1 for right, and right ones above 9 for wrong.
FAULTY = """
import re
def grade(response, label):
    right = re.search(r"\\d+", response) and re.search(r"\\d+", response)[0] == label
    return float(bool(int(label) < 10 if right else "1" in response))
def reward_func(args, sample):
    return grade(sample.response, sample.label)
"""


def grade_by_hand(sample: Sample) -> float | None:
    namespace: dict = {}
    exec(FAULTY, namespace)
    return namespace["grade"](sample.response, sample.label) if any(sample.loss_mask) else sample.reward


def test_every_flip_of_a_planted_fault_is_found(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "SAMPLES_PER_SHARD", 7)  # groups of 4 samples continue in the next shard
    train(store, tmp_path, 3)
    (tmp_path / "faulty.py").write_text(FAULTY)
    assert regrade(store, "--custom-rm-path", str(tmp_path / "faulty.py")) == 0
    printed = capsys.readouterr().out
    total: Counter[str] = Counter()
    for r in range(3):
        rollout, commit = store.committed(KEYS.rollout_prefix(r)), regraded(store, r)
        assert rollout is not None and len(rollout.shards()) > 1
        samples = read_samples(store, rollout)
        pairs = {sample.sample_id: (sample.reward, grade_by_hand(sample)) for sample in samples}
        rows = rows_of(store, commit)
        assert {row["sample_id"]: (row["old_reward"], row["reward"]) for row in rows} == pairs
        assert [row["sample_id"] for row in rows] == [sample.sample_id for sample in samples]
        right = [(old or 0) > 0 for old, _ in pairs.values()], [(new or 0) > 0 for _, new in pairs.values()]
        expected = {
            "changed": sum(old != new for old, new in pairs.values()),
            "right_to_wrong": sum(was and not now for was, now in zip(*right)),
            "wrong_to_right": sum(now and not was for was, now in zip(*right)),
            "failed": sum(new is None for _, new in pairs.values()),
            "num_samples": len(samples),
        }
        assert min(expected.values()) > 0
        found = metrics_of(commit)
        assert {name: found[name] for name in expected} == expected
        assert found["reward"] == np.mean([new for _, new in pairs.values() if new is not None])
        for kind, (was, now) in {"right_to_wrong": (True, False), "wrong_to_right": (False, True)}.items():
            examples = commit.state["examples"][kind]
            assert len(examples) == min(3, expected[kind])
            for example in examples:
                old, new = pairs[example["sample"]]
                assert ((old or 0) > 0, (new or 0) > 0, example["reward"]) == (was, now, new)
        total.update(expected)
    share = f"{total['changed']} of {total['num_samples']} rewards changed"
    assert f"{share} ({total['changed'] / total['num_samples']:.2%})" in printed
    assert f"{total['right_to_wrong']} right -> wrong, {total['wrong_to_right']} wrong -> right" in printed


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages --calculate-per-token-loss",
        "--advantage-estimator maxrl --calculate-per-prompt-loss",
        "--disable-grpo-std-normalization --loss-denominator 100",
    ],
)
def test_advantages_and_gradient_equal_those_of_the_trainer(words: str, store: Store, tmp_path: Path) -> None:
    """The trainer's own batch, estimator and loss weights, token by token; two samples of a prompt are a trajectory."""
    train(store, tmp_path, 1, *words.split())
    (tmp_path / "faulty.py").write_text(FAULTY)
    samples = samples_of(store, 0)
    for i, sample in enumerate(samples):
        sample.trajectory_id = f"{sample.group_id}-{i // 2}"
    commit_round(store, KEYS, 1, samples, {})
    assert regrade(store, "--rounds", "1", "--custom-rm-path", str(tmp_path / "faulty.py")) == 0
    rollout, commit = store.committed(KEYS.rollout_prefix(1)), regraded(store, 1)
    assert rollout is not None
    data = tmp_path / "sums.jsonl"
    config = config_of(store, data, "r", "--prompt-data", str(data), "--num-rollout", "9", *words.split()).train
    table, rows, gradients = read_table(store, rollout), rows_of(store, commit), []
    reward = table.column_names.index("reward")
    for column, of_advantage in (("old_reward", "old_advantage"), ("reward", "advantage")):
        rewards = pa.array([row[column] for row in rows], table.schema.field(reward).type)
        batch = Batch.from_table(table.set_column(reward, "reward", rewards), needs_rewards=True)
        advantages = estimate_advantages(stored_experience(batch), config).advantages.numpy()
        of_samples = dict(zip(batch.sample_index.tolist(), advantages))  # the last token of each sample
        assert [row[of_advantage] for row in rows] == pytest.approx([of_samples.get(i, 0.0) for i in range(len(rows))])
        loss_weights = compute_loss_weights(batch, config)
        weights = loss_weights.weights * (1.0 if loss_weights.pg_scale is None else loss_weights.pg_scale)
        gradients.append(np.zeros(len(batch.token_ids)))
        gradients[-1][batch.trained_positions] = weights.numpy() * advantages
    (old, new), found = gradients, metrics_of(commit)
    assert found["gradient_cosine"] == pytest.approx(old @ new / np.sqrt((old @ old) * (new @ new)), rel=1e-12)
    assert found["gradient_ratio"] == pytest.approx(np.sqrt((new @ new) / (old @ old)), rel=1e-12)
    pairs = [(row["old_advantage"], row["advantage"]) for row in rows]
    assert found["changed_advantages"] == sum(a != b for a, b in pairs) > 0
    assert found["changed_signs"] == sum(a * b < 0 for a, b in pairs) > 0


def test_the_same_grader_changes_nothing_but_failed_gradings(store: Store, tmp_path: Path) -> None:
    train(store, tmp_path, 2)
    assert regrade(store) == 0
    for r in range(2):
        rows, found = rows_of(store, regraded(store, r)), metrics_of(regraded(store, r))
        assert found["changed"] == sum(row["old_reward"] != row["reward"] for row in rows)
        assert found["changed"] == sum(row["old_reward"] is None and row["reward"] is not None for row in rows)
        assert [row["error"] for row in rows if row["reward"] is None] == ["why"] * int(found["failed"])


def test_overlong_penalty_of_a_sample_remains(store: Store, tmp_path: Path) -> None:
    train(store, tmp_path, 1, "--overlong-buffer-len", "4", "--overlong-penalty-factor", "0.5")
    samples = samples_of(store, 0)
    for sample in samples:
        penalize_overlong(sample, LIMIT, 4, 0.5)
    commit_round(store, KEYS, 1, samples, {})
    assert regrade(store, "--rounds", "1") == 0
    rows = rows_of(store, regraded(store, 1))
    assert all(row["old_reward"] in (None, row["reward"]) for row in rows)
    assert {row["reward"] for row in rows if row["old_reward"] is not None} == {0.0, 0.5, 1.0}


def test_progress_is_printed_within_a_round(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(store, tmp_path, 2)
    monkeypatch.setattr(regrade_command, "_REPORT_SECONDS", 0.0)
    assert regrade(store) == 0
    lines = capsys.readouterr().err.splitlines()
    size = ROWS * SAMPLES
    expected = ((1, 0), (size, 0), (size + 1, 1), (2 * size, 1))
    texts = [f"graded {k} samples, finished {done} of 2 rounds and evaluations" for k, done in expected]
    assert [line for line in lines if line in texts] == texts and len(lines) == 2 * size


@pytest.mark.parametrize(
    ("words", "reward", "reason"),
    [
        ("--advantage-estimator ppo", "0.5", "with --advantage-estimator ppo they do not"),
        (
            "--custom-reward-post-process-path {path}/own.py",
            "0.5",
            "with --custom-reward-post-process-path they do not",
        ),
        ("--advantage-estimator maxrl", "-1.0", "a sample has the reward -1"),
    ],
)
def test_advantages_that_need_more_than_these_rewards_are_not_compared(
    words: str, reward: str, reason: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = f"def post_process(args, samples): ...\n\ndef reward_func(args, sample):\n    return {reward}\n"
    (tmp_path / "own.py").write_text(code)
    train(store, tmp_path, 1, *words.format(path=tmp_path).replace("own.py", "own.py:post_process").split())
    assert regrade(store, "--custom-rm-path", f"{tmp_path}/own.py:reward_func") == 0
    assert f"advantages are not compared: {reason}" in capsys.readouterr().out
    assert {row["advantage"] for row in rows_of(store, regraded(store, 0))} == {None}
    assert "gradient_cosine" not in metrics_of(regraded(store, 0)) and metrics_of(regraded(store, 0))["changed"] > 0


@pytest.mark.parametrize(("limit", "code"), [("0.9", 0), ("0", 1)])
def test_exit_code_tells_whether_too_many_rewards_changed(
    limit: str, code: int, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(store, tmp_path, 2)
    for _ in range(2):  # the second time from the commits
        assert regrade(store, "--rm-type", "boxed_exact_number", "--fail-above", limit) == code
        assert ("more than --fail-above" in capsys.readouterr().err) == bool(code)


def test_selection_of_rounds_and_evaluations(store: Store, tmp_path: Path) -> None:
    train(store, tmp_path, 3)
    config = config_of(store, tmp_path / "sums.jsonl", "r", "--prompt-data", str(tmp_path / "sums.jsonl"))
    evaluate(store, config, 3, [["0"]] * ROWS, flow="train")

    def selected(**own: str) -> list[tuple[str, int]]:
        record = read_existing_record(store, KEYS)
        return regrade_command.select_sources(store, KEYS, record, {f"--{name}": value for name, value in own.items()})

    assert selected(rounds="1") == [("", 1)] and selected(rounds="1-2") == [("", 1), ("", 2)]
    assert selected(dataset="sums") == [("sums", 3)]
    assert selected(rounds="0", version="3") == [("", 0), ("sums", 3)]
    assert selected() == [("", 0), ("", 1), ("", 2), ("sums", 3)]


# ---- kills -----------------------------------------------------------------------------------------------------------

COUNTING = """
def reward_func(args, sample):
    with open({path!r}, "a") as file:
        print(sample.sample_id, file=file)
    return float(len(sample.response))
"""


class Killed(BaseException):
    """The end of the process."""


def test_killed_regrade_continues_after_its_last_commit(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(store, tmp_path, 4)
    graded, reward = tmp_path / "graded", tmp_path / "counting.py"
    reward.write_text(COUNTING.format(path=str(graded)))

    def kill_at_second_commit(point: str) -> None:
        if point == "commit-before-seal" and store.committed_names(f"{KEYS.prefix}/regrades/000000"):
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("penstock.storage.leases.failpoint", kill_at_second_commit)
        regrade(store, "--custom-rm-path", str(reward))
    committed = {r: store.committed_names(f"{KEYS.prefix}/regrades/{r:06d}") for r in range(4)}
    assert [len(names) for names in committed.values()] == [1, 0, 0, 0]
    first = regraded(store, 0)
    before = Counter(graded.read_text().split())
    assert regrade(store, "--custom-rm-path", str(reward)) == 0
    again = Counter(graded.read_text().split()) - before
    of_rounds = [
        {row["sample_id"] for row in rows_of(store, regraded(store, r)) if row["reward"] is not None} for r in range(4)
    ]
    assert set(again) == set.union(*of_rounds[1:]) and max(again.values()) == 1
    assert regraded(store, 0) == first
    assert audit_run(store, KEYS).problems == []
    (orphan,) = find_orphans(store, "r", older_than=0.0)
    assert orphan.kind == "unfinished attempt" and "/regrades/000001/" in orphan.key


# ---- memory ----------------------------------------------------------------------------------------------------------


def long_rounds(store: Store, tmp_path: Path, sizes: list[int]) -> None:
    """Commit rounds of the given numbers of samples, in groups of 4, with responses of 2,000 characters."""
    data = write_sums(tmp_path / "sums.jsonl")
    keys = open_with_model(store, config_of(store, data, "r", "--prompt-data", str(data)), "train")
    for r, size in enumerate(sizes):
        groups = [f"{100_000 * r + i // 4:09d}" for i in range(size)]
        samples = [sample_of(group, i % 4, r, "4", 2000 * "x", (0, 0, 0)) for i, group in enumerate(groups)]
        for sample in samples:
            sample.reward = 0.0
        commit_round(store, keys, r, samples, {})


def test_memory_is_constant_in_the_number_of_samples(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large round only some samples are in memory at a time; of each sample of the round some bytes are kept, and
    of a finished round only its commit."""
    monkeypatch.setattr(regrading, "_IN_FLIGHT", 64)
    monkeypatch.setattr(regrading, "_BATCH", 32)
    sizes = [150] * 4 + [600]
    long_rounds(store, tmp_path, sizes)
    assert regrade(store, "--rm-type", "zero") == 0  # imports
    num_alive, num_bytes = [], []
    add, write = regrading.GradedSamples._add, regrading.write_regraded

    def counting_add(graded: regrading.GradedSamples, *arguments: object) -> None:
        if len(graded.ids) % 150 == 75:
            gc.collect()
            num_alive.append(sum(type(each) is Sample for each in gc.get_objects()))
        add(graded, *arguments)

    def measuring_write(*arguments: object, **columns: object) -> None:
        gc.collect()
        num_bytes.append(tracemalloc.get_traced_memory()[0])  # not the peak: a read record reserves 1 GiB for a moment
        write(*arguments, **columns)

    monkeypatch.setattr(regrading.GradedSamples, "_add", counting_add)
    monkeypatch.setattr(regrading, "write_regraded", measuring_write)
    tracemalloc.start()
    assert regrade(store, "--rm-type", "exact_number") == 0
    tracemalloc.stop()
    assert len(num_bytes) == len(sizes) and len(num_alive) == 4 + 4
    assert max(num_alive) <= regrading._IN_FLIGHT + regrading._BATCH + 8
    assert (num_bytes[3] - num_bytes[1]) / 2 < 20_000, "bytes of each finished round"
    assert (num_bytes[4] - num_bytes[3]) / 450 < 500, "bytes of each sample of the round in progress"


# ---- detectors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("detector", "response", "label", "value"),
    [
        ("length", "any", "4", 7.0),
        ("repetition", "a b c d e f g h", "", 0.0),
        ("repetition", "a b c d a b c d", "", 1 / 5),
        ("repetition", "no no no no no no", "", 2 / 3),
        ("label_echo", "It is 42.<|im_end|>", "42", 0.0),
        ("label_echo", "42 42 42", "42", 2 / 3),
        ("label_echo", "<think>42 42 42</think> so 42, or 42", "42", 1 / 4),
        ("label_echo", "New York or New York", "New York", 2 / 5),
        ("label_echo", "a banana", "a", 0.0),
        ("format_only", "so \\boxed{ }", "4", 1.0),
        ("format_only", "so \\boxed{4}", "4", 0.0),
        ("format_only", "The answer:\n<|im_end|>", "4", 1.0),
        ("format_only", "The answer: 4", "4", 0.0),
        ("format_only", "#### ", "4", 1.0),
    ],
)
def test_value_of_a_detector(detector: str, response: str, label: str, value: float) -> None:
    sample = Sample("0-0", "0", "0-0", 0, response=response, label=label)
    assert DETECTORS[detector](sample, 7) == pytest.approx(value)


def test_correlation_of_a_detector_is_computed_within_prompts() -> None:
    values, groups = np.array([1.0, 2.0, 3.0, 11.0, 12.0, 13.0, 9.0]), np.array([0, 0, 0, 1, 1, 1, 2])
    old = np.array([0.0, 1.0, 2.0, -5.0, -4.0, -3.0, 8.0])  # falls from group to group, rises in each
    new = np.array([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, np.nan])  # does not vary in any
    found = detector_metrics("x", values, (old, new), groups)
    assert found == {"x/mean": values.mean(), "x/old_correlation": pytest.approx(1.0)}


def test_detectors_are_reported_for_the_first_and_the_last_round(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From round to round, more of the rewarded responses repeat the label."""
    data = write_sums(tmp_path / "sums.jsonl", 4)
    config = config_of(store, data, "r", "--prompt-data", str(data))
    rounds = [[[f"{2 * i}", "no"] for i in range(4)], [[f"{2 * i} {2 * i} {2 * i}", "no"] for i in range(4)]]
    train_rounds(store, config, rounds)
    assert regrade(store) == 0 and "label_echo" not in capsys.readouterr().out
    assert regrade(store, "--detectors", "--rm-type", "zero") == 0
    printed = capsys.readouterr().out
    assert "rounds 0 -> 1" in printed
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("label_echo"))
    assert line[1:] == ["0.000", "->", "0.333", "-", "->", "1.000", "-", "->", "-"]
    names = [store.committed_names(f"{KEYS.prefix}/regrades/{r:06d}") for r in range(2)]
    assert names[0] == names[1] and len(names[0]) == 2 and sum(name.endswith("-detectors") for name in names[0]) == 1


# ---- the rest of the house -------------------------------------------------------------------------------------------


@pytest.fixture
def commits(store: Store, tmp_path: Path) -> list[Commit]:
    """The regrades of a run with two rounds."""
    train(store, tmp_path, 2)
    assert audit_run(store, KEYS).problems == []
    assert regrade(store, "--rm-type", "boxed_exact_number") == 0
    return [regraded(store, r) for r in range(2)]


def test_verify_accepts_regraded_rounds_and_finds_damage(store: Store, commits: list[Commit]) -> None:
    assert audit_run(store, KEYS).problems == []
    path = Path(store.path(commits[0].files[0].path))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (problem,) = audit_run(store, KEYS).problems
    assert "regrades/000000" in problem and "has hash" in problem
    commits[1].inputs["samples"] = commit_key(KEYS.rollout_prefix(0))
    prefix = KEYS.regrade_prefix(1, "0123abcd")
    store.commit(prefix, commits[1])
    assert any(
        problem.startswith(f"{prefix}.commit.json has the samples") and "it must be" in problem
        for problem in audit_run(store, KEYS).problems
    )
    store.delete([commit_key(KEYS.rollout_prefix(1)), commit_key(KEYS.step_prefix(1))])
    assert any("has as input the samples" in problem for problem in audit_run(store, KEYS).problems)


def test_lineage_leads_from_a_regrade_to_its_round(
    store: Store, commits: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--store", store.root]
    (name,) = store.committed_names(f"{KEYS.prefix}/regrades/000001")
    for reference in (f"r/regrade/1/{name}", "r/regrade/1"):
        assert cli.main(["lineage", reference, *where]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("r/regrade/1 (boxed_exact_number)")
        assert "r/rollout/1" in printed.partition("made from")[2].partition("used for")[0]
    assert cli.main(["lineage", "r/rollout/1", *where]) == 0
    assert "r/regrade/1 (boxed_exact_number)" in capsys.readouterr().out.partition("used for")[2]
    assert cli.main(["lineage", "r/rollout/1", "--dot", *where]) == 0
    assert capsys.readouterr().out.count("regrade") > 0


def test_fork_shares_the_regrades_of_its_rounds(
    store: Store, commits: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fork", "r", "--at", "1", "--name", "f", "--lr", "1e-5", "--store", store.root]) == 0
    assert "1 rollout, 1 step" in (printed := capsys.readouterr().out) and "1 regrade" in printed
    (shared,) = (commit for commit in read_commits(store, RunKeys("f")) if commit.kind == "regrade")
    assert shared.inputs == {"samples": "runs/f/rollouts/000000.commit.json"}
    assert shared.files == commits[0].files
    assert audit_run(store, RunKeys("f")).problems == []
    assert find_orphans(store, older_than=0.0) == []
    assert cli.main(["rm", "r", "--yes", "r", "--store", store.root]) == 2, "the fork needs its files"
    assert cli.main(["rm", "f", "--yes", "f", "--store", store.root]) == 0
    assert cli.main(["rm", "r", "--yes", "r", "--store", store.root]) == 0
    assert list(store.walk("runs")) == []


def test_rounds_of_a_forks_parent_are_compared_with_the_parents_estimator(store: Store, tmp_path: Path) -> None:
    train(store, tmp_path, 2)
    where = ["--store", store.root]
    assert cli.main(["fork", "r", "--at", "2", "--name", "f", "--advantage-estimator", "ppo", *where]) == 0
    assert cli.main(["regrade", "f", "--rm-type", "zero", *where]) == 0
    of_fork = [commit for commit in read_commits(store, RunKeys("f")) if commit.kind == "regrade"]
    assert ["changed_advantages" in metrics_of(commit) for commit in of_fork] == [True, True]


def test_views_show_report_and_trackers_know_regraded_rounds(
    store: Store, commits: list[Commit], capsys: pytest.CaptureFixture[str]
) -> None:
    connection, problems = open_connection(store, ["r"])
    assert problems == {}
    sql = (
        "select rollout_id, count(*), sum((old_reward is distinct from reward)::int), sum((advantage <> 0)::int) from "
    )
    rows = execute(connection, f"{sql} regraded_samples group by all order by all")[1].fetchall()
    assert rows == [(r, ROWS * SAMPLES, metrics_of(commits[r])["changed"], 0) for r in range(2)]
    kinds = execute(connection, "select kind, count(*) from commits group by kind order by kind")[1].fetchall()
    assert kinds == [("regrade", 2), ("rollout", 2), ("step", 2)]
    capsys.readouterr()
    assert cli.main(["show", "r", "--store", store.root]) == 0
    total = sum(metrics_of(commit)["changed"] for commit in commits)
    assert f"{total:,.0f} rewards changed in 2 rounds" in capsys.readouterr().out
    record = read_existing_record(store, KEYS)
    report, _ = collect_overview(store, KEYS, ReportInput(record, 2, [], compare=compare_evaluations))
    for part in (report, report["lineage"]):
        assert [(e["version"], len(e["task"])) for e in part["regrades"]] == [(0, 8), (1, 8)]
    assert {stage["kind"] for stage in report["stages"]} == {"rollout", "step"} and report["evaluations"] == []
    assert report["regrades"][0]["metrics"] == commits[0].summary
    index = RunCommits()
    for commit in commits:
        index.add(key := f"{(commit.attempt or '').rpartition('/')[0]}.commit.json", commit)
        assert index.child_run_name(key, commit) == ""


@pytest.mark.parametrize(
    ("flow", "words", "message"),
    [
        ("train", "--rounds 5-7", "has no graded samples that match --rounds, --version and --dataset (it has: rounds"),
        ("train", "--custom-rm-path {path}/broken.py", "samples failed, the last with 'ZeroDivisionError"),
        ("sft", "", "has no graded samples"),
    ],
)
def test_bad_requests_are_one_error_and_commit_nothing(
    flow: str, words: str, message: str, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("def reward_func(args, sample):\n    return 1 / 0\n")
    train(store, tmp_path, 1, flow=flow)
    assert regrade(store, *words.format(path=tmp_path).split()) == 2
    printed = capsys.readouterr().err.strip()
    assert message in printed and "\n" not in printed
    assert not store.list(f"{KEYS.prefix}/regrades")
