"""The audit of an undamaged run has no problems; damaged, missing, repeated or misplaced records are reported."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_run import (
    BATCH,
    ROWS,
    SAMPLES,
    commit_files,
    commit_samples,
    config_of,
    edit_record,
    make_run,
    roll_one,
    write_data,
)

from penstock.flows.commands import fork
from penstock.flows.commands.maintenance import verify_main
from penstock.flows.config import PostTrainConfig
from penstock.storage.commit import Commit, RunKeys, commit_key, has_matching_digest, record_digest
from penstock.storage.errors import StoreError
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import expire_checkpoints
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

ROUNDS = 5


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    store = Store(str(root / "store"))
    make_run(store, config_of(store, write_data(root / "data.jsonl")), ROUNDS, save=(2, 4), score=(0, 4))
    return root


@pytest.fixture
def made(template: Path, tmp_path: Path) -> tuple[Store, RunKeys, PostTrainConfig]:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    store = Store(str(tmp_path / "store"))
    return store, RunKeys("r"), config_of(store, tmp_path / "data.jsonl")


def test_an_undamaged_run_has_no_problems(made) -> None:
    store, keys, _ = made
    found = audit_run(store, keys)
    assert found.problems == []
    assert found.num_commits == {"rollout": ROUNDS, "step": ROUNDS, "checkpoint": 2, "eval": 2, "model": 1}
    assert (found.num_samples, found.num_prompts) == (ROUNDS * BATCH * SAMPLES, ROUNDS * BATCH)
    assert found.num_epochs == ROUNDS * BATCH // ROWS
    assert (found.num_orphans, found.num_expired) == (0, 0)


def test_a_run_in_an_object_store_has_no_problems(tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path.name}")
    keys = make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 3, save=(2,))
    assert audit_run(store, keys).problems == []
    store.fs.pipe_file(store.path(store.committed(keys.checkpoint_prefix(2)).files[0].path), b"tampered")
    assert len(audit_run(store, keys).problems) == 1


def test_an_unfinished_round_and_appended_data_are_no_problem(made, tmp_path: Path) -> None:
    store, keys, config = made
    write_data(tmp_path / "data.jsonl", ROWS + 4)
    make_run(store, config, ROUNDS + 3)
    roll_one(store, keys, config, ROUNDS + 3, "")
    assert audit_run(store, keys).problems == []


def test_expired_checkpoints_are_not_reported_as_missing(made) -> None:
    store, keys, _ = made
    inputs = {"checkpoint": commit_key(keys.checkpoint_prefix(2))}
    store.commit(keys.export_prefix(2), Commit(kind="export", run="r", index=2, policy_version=2, inputs=inputs))
    expire_checkpoints(store, keys, num_to_keep=1)
    found = audit_run(store, keys)
    assert (found.problems, found.num_expired) == ([], 1)
    store.delete([f"{keys.checkpoint_prefix(2)}.expired.json"])
    assert "does not exist" in str(audit_run(store, keys).problems), "without a tombstone it is one"


def test_orphans_are_counted_and_not_a_problem(made) -> None:
    store, keys, _ = made
    with pytest.raises(RuntimeError), store.writing(store.new_attempt(keys.rollout_prefix(ROUNDS))) as out:
        (out.path / "part").write_bytes(b"half")
        raise RuntimeError("killed")
    found = audit_run(store, keys)
    assert (found.problems, found.num_orphans, found.orphan_bytes) == ([], 1, 4)


@pytest.mark.parametrize(("prefix", "hashes"), [("models/abc", True), ("runs/r/evals/000004/sums", False)])
def test_one_changed_byte_is_reported(made, prefix: str, hashes: bool) -> None:
    store, keys, _ = made
    path = Path(store.path(store.committed(prefix).files[0].path))
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    problems = audit_run(store, keys, verify_hashes=hashes).problems
    assert problems and path.name in problems[0], problems
    path.unlink()
    assert "is missing" in audit_run(store, keys, verify_hashes=hashes).problems[0]


def sealed_again(summary: dict[str, float]) -> Callable[[dict], object]:
    """Return a change of the metrics that also updates the digest."""

    def change(record: dict) -> None:
        record["summary"].update(summary)
        record["digest"] = record_digest(record)

    return change


@pytest.mark.parametrize(
    ("where", "change", "sentence"),
    [
        ("steps/000003", lambda r: r.update(policy_version=3), "policy version 3; it must be 4"),
        ("steps/000003", lambda r: r["inputs"].update(rollout="runs/r/rollouts/000002.commit.json"), "has the rollout"),
        ("checkpoints/000004", lambda r: r["inputs"].update(step="runs/r/steps/9.commit.json"), "which does not exist"),
        ("rollouts/000002", lambda r: r.update(index=3), "rollouts/000002.commit.json contains rollout 3 of run"),
        ("rollouts/000002", lambda r: r["state"]["data_source"].update(cursor=3), "its samples give"),
        ("rollouts/000002", lambda r: r["state"]["data_source"].update(segments=[]), "lacks data segments"),
        ("steps/000003", lambda r: r["summary"].update({"train/loss": 0.5}), "steps/000003.commit.json was modified"),
        ("steps/000003", lambda r: r.pop("digest"), "steps/000003.commit.json was modified"),
        ("evals/000004/sums", sealed_again({"eval/sums": 4.5}), "has eval/sums 4.5, but its samples give 4"),
        ("rollouts/000002", sealed_again({"rollout/num_samples": 5.0}), "num_samples 5, but its samples give 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_inconsistent_record_is_reported(made, where: str, change: Callable[[dict], object], sentence: str) -> None:
    store, keys, _ = made
    edit_record(store, commit_key(f"{keys.prefix}/{where}"), change)
    assert any(sentence in problem for problem in audit_run(store, keys).problems), audit_run(store, keys).problems


def test_missing_rounds_and_a_missing_run_record_are_reported(made) -> None:
    store, keys, _ = made
    store.delete([commit_key(keys.step_prefix(2)), commit_key(keys.rollout_prefix(1))])
    problems = audit_run(store, keys).problems
    assert any("step 2 is not committed, but step 4 is" in problem for problem in problems)
    assert any("rollout 1 is not committed" in problem for problem in problems)
    store.delete([keys.record])
    assert any("run.json" in problem for problem in audit_run(store, keys).problems)


def change_samples(store: Store, prefix: str, change: Callable[[list], list]) -> None:
    """Commit a rollout again with other samples, as a broken stage would have."""
    commit = store.committed(prefix)
    samples = change(read_samples(store, commit))
    store.delete([commit_key(prefix)])
    commit_samples(store, prefix, samples, **commit.model_dump(exclude={"files", "attempt"}))


def with_tokens(samples: list) -> list:
    """Give the samples tokens to train on, except the second, whose only token with loss mask 1 is its first, and the
    third, which has no reward."""
    masks = [[1, 0, 0] if row == 1 else [0, 1, 1] for row in range(len(samples))]
    return [
        replace(sample, token_ids=[1, 2, 3], loss_mask=mask, rollout_logprobs=[0.0] * 3, reward=reward)
        for sample, mask, reward in zip(samples, masks, [0.25, 0.25, None, *[0.25] * (len(samples) - 3)])
    ]


@pytest.mark.parametrize(
    ("uses", "sentence"),
    [
        ([[2, 1], [0, 2], [2, 3]], None),
        ([[2, 2], [0, 1], [2, 3]], "sample 1 of its rollout was trained 2 times; it must be 0 times"),
        ([[2, 1], [0, 1], [2, 4]], "sample 2 of its rollout was trained 2 times; it must be 0 times"),
        ([[2, 1], [0, 2], [2, 2], [1, 1]], "sample 5 of its rollout was trained 1 times; it must be 2 times"),
        ([[2, 1], [0, 2], [2, 2]], "says how often 5 samples were trained; its rollout has 6"),
        ([[2, 8], [0, -2]], "says how often 6 samples were trained; its rollout has 6"),
        (None, "does not say how often"),
    ],
)
@pytest.mark.parametrize("masking", [(), ("--rollout-data-postprocess-path", "mask.py:mask")], ids=["", "masking"])
def test_a_step_must_say_how_often_each_sample_was_trained(
    tmp_path: Path, masking: tuple[str, ...], uses: list | None, sentence: str | None
) -> None:
    store = Store(str(tmp_path / "store"))
    config = config_of(store, write_data(tmp_path / "data.jsonl"), "r", "--ppo-epochs", "2", *masking)
    keys = make_run(store, config, 1)
    change_samples(store, keys.rollout_prefix(0), with_tokens)

    def audit_with(uses: list | None) -> tuple[list[str], int]:
        def change(record: dict) -> None:
            record["state"] = {} if uses is None else {"sample_uses": uses}
            record["digest"] = record_digest(record)

        edit_record(store, commit_key(keys.step_prefix(0)), change)
        found = audit_run(store, keys)
        return found.problems, found.num_sample_uses

    problems, num_uses = audit_with(uses)
    assert [sentence in problem for problem in problems] == ([] if sentence is None else [True])
    assert num_uses == (8 if sentence is None else 0)
    if masking:  # a user-defined function may mask a whole sample
        assert audit_with([[0, 4], [2, 2]]) == ([], 4)


def served_again(samples: list) -> list:
    """Return samples whose last prompt is replaced by the first one, as after a lost cursor."""
    row = samples[0].metadata
    return [replace(sample, metadata=row) if sample.group_id == samples[-1].group_id else sample for sample in samples]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda samples: samples[SAMPLES:], "prompt 6 is missing"),
        (lambda samples: samples[1:], "groups have 1 to 2 samples"),
        (lambda samples: [*samples, samples[0]], "sample ids are not unique"),
        (
            lambda samples: [replace(s, sample_id=s.sample_id.replace("000000006", "000000001")) for s in samples],
            "sample ids are used more than once",
        ),
        (served_again, "already used in epoch 1"),
        (lambda samples: [replace(samples[0], policy_versions=(1, 2)), *samples[1:]], "policy_versions [1, 2]"),
        (lambda samples: [replace(samples[0], rollout_id=7), *samples[1:]], "has rollout_id 7"),
        (lambda samples: [replace(sample, metadata={}) for sample in samples], "which is not in the run's data"),
        (lambda samples: [replace(samples[0], group_id="x"), *samples[1:]], "which is not a prompt number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lost_repeated_or_twice_served_samples_are_reported(
    made, change: Callable[[list], list], sentence: str
) -> None:
    store, keys, _ = made
    change_samples(store, keys.rollout_prefix(2), change)  # prompts 6 to 8, all of epoch 1
    problems = audit_run(store, keys, verify_hashes=False).problems
    assert any(sentence in problem for problem in problems), problems


def test_an_evaluation_without_all_prompts_is_reported(made) -> None:
    store, keys, _ = made
    change_samples(store, keys.eval_prefix(4, "sums"), lambda samples: samples[:-1])
    cut = {"issued": ROWS - 1, "cursor": ROWS - 1}
    edit_record(store, commit_key(keys.eval_prefix(4, "sums")), lambda r: r["state"]["data_source"].update(cut))
    assert "has samples of 4 of the data set's 5 prompts" in str(audit_run(store, keys).problems)


def test_the_command_prints_the_problems_and_fails(made, capsys: pytest.CaptureFixture[str]) -> None:
    store, keys, _ = made
    assert verify_main([keys.run, "--store", store.root]) == 0
    assert "no problems found" in capsys.readouterr().out
    commit_files(store, "models/other", {"weights": b"other"}, kind="model")
    Path(store.path(store.committed(keys.checkpoint_prefix(4)).files[0].path)).unlink()
    assert verify_main([keys.run, "--no-hashes", "--store", store.root]) == 1
    out, err = capsys.readouterr()
    assert "1 problems" in out and "checkpoints/000004" in err and "is missing" in err


@pytest.mark.parametrize("value", [1, float("nan"), -0.0, 1e300])
def test_a_digest_is_valid_after_a_round_trip(store: Store, value: float) -> None:
    state = {"x": value, "n": [1, (2, value)], "text": "ü\u2028", "deep": {"b": None, "a": True}}
    commit = store.commit("steps/000000", Commit(kind="step", summary={"m": value}, state=state))
    data = store.read(commit_key("steps/000000")) or b""
    assert has_matching_digest(data) and store.committed("steps/000000").digest == commit.digest != ""
    assert not has_matching_digest(data.replace(b'"step"', b'"eval"'))


def test_a_fork_refuses_an_edited_record(made) -> None:
    store, keys, _ = made
    edit_record(store, commit_key(keys.step_prefix(1)), lambda record: record["summary"].update(x=1.0))
    with pytest.raises(StoreError, match=r"steps/000001.commit.json has changed"):
        fork.main([keys.run, "--at", "3", "--name", "f", "--store", store.root])
