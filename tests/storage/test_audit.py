"""A whole run has nothing wrong with it; whatever is damaged, lost, doubled or out of order is found and named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_run import BATCH, ROWS, SAMPLES, commit_files, commit_samples, config_of, make_run, roll_one, write_data

from flows import fork, verify
from flows.config import PostTrainConfig
from storage.audit import audit
from storage.errors import StoreError
from storage.refs import Commit, RunKeys, commit_key, is_unchanged, record_digest
from storage.retention import expire_checkpoints
from storage.shards import read_samples
from storage.store import Store

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


def rewrite(store: Store, prefix: str, change: Callable[[dict], object]) -> None:
    """Tamper with a commit record."""
    path = Path(store.path(commit_key(prefix)))
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_a_whole_run_has_no_problems(made) -> None:
    store, keys, _ = made
    found = audit(store, keys)
    assert found.problems == []
    assert found.num_commits == {"rollout": ROUNDS, "step": ROUNDS, "checkpoint": 2, "eval": 2, "model": 1}
    assert (found.num_samples, found.num_prompts) == (ROUNDS * BATCH * SAMPLES, ROUNDS * BATCH)
    assert found.num_epochs == ROUNDS * BATCH // ROWS
    assert (found.num_orphans, found.num_expired) == (0, 0)


def test_a_run_in_an_object_store(tmp_path: Path) -> None:
    store = Store(f"memory://{tmp_path.name}")
    keys = make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 3, save=(2,))
    assert audit(store, keys).problems == []
    store.fs.pipe_file(store.path(store.committed(keys.checkpoint(2)).files[0].path), b"tampered")
    assert len(audit(store, keys).problems) == 1


def test_a_run_between_rollout_and_step_and_data_that_grew_is_whole(made, tmp_path: Path) -> None:
    store, keys, config = made
    write_data(tmp_path / "data.jsonl", ROWS + 4)
    make_run(store, config, ROUNDS + 3)
    roll_one(store, keys, config, ROUNDS + 3)
    assert audit(store, keys).problems == []


def test_expired_checkpoints_are_no_loss(made) -> None:
    store, keys, _ = made
    export = Commit(kind="export", run="r", index=2, policy_version=2, inputs={"checkpoint": commit_key(keys.checkpoint(2))})
    store.commit(keys.export(2), export)
    expire_checkpoints(store, keys, keep=1)
    found = audit(store, keys)
    assert (found.problems, found.num_expired) == ([], 1)
    store.delete([f"{keys.checkpoint(2)}.expired.json"])
    assert [problem for problem in audit(store, keys).problems if "is not there" in problem], "without a tombstone it is one"


def test_orphans_are_counted_and_harmless(made) -> None:
    store, keys, _ = made
    with pytest.raises(RuntimeError), store.writing(store.new_attempt(keys.rollout(ROUNDS))) as out:
        (out.path / "part").write_bytes(b"half")
        raise RuntimeError("killed")
    found = audit(store, keys)
    assert (found.problems, found.num_orphans, found.orphan_bytes) == ([], 1, 4)


def first_file(store: Store, prefix: str) -> Path:
    return Path(store.path(store.committed(prefix).files[0].path))


@pytest.mark.parametrize(
    ("prefix", "hashes"),
    [
        ("models/abc", True),
        ("runs/r/checkpoints/000002", True),
        ("runs/r/rollouts/000001", False),
        ("runs/r/evals/000004/sums", False),
    ],
)
def test_one_changed_byte_is_found(made, prefix: str, hashes: bool) -> None:
    store, keys, _ = made
    path = first_file(store, prefix)
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    problems = audit(store, keys, hashes=hashes).problems
    assert problems and path.name in problems[0], problems


@pytest.mark.parametrize("hashes", [True, False])
def test_a_lost_file_is_found(made, hashes: bool) -> None:
    store, keys, _ = made
    first_file(store, keys.checkpoint(4)).unlink()
    assert "is missing" in audit(store, keys, hashes=hashes).problems[0]


def sealed_again(summary: dict[str, float]) -> Callable[[dict], object]:
    """Other metrics, by somebody who also computes the digest anew."""

    def change(record: dict) -> None:
        record["summary"].update(summary)
        record["digest"] = record_digest(record)

    return change


TAMPERED: list[tuple[str, Callable[[dict], object], str]] = [
    ("steps/000003", lambda r: r.update(policy_version=3), "policy version 3; it must be 4"),
    ("steps/000003", lambda r: r["inputs"].update(rollout="runs/r/rollouts/000002.commit.json"), "made from rollout"),
    ("checkpoints/000004", lambda r: r["inputs"].update(step="runs/r/steps/000009.commit.json"), "is not there"),
    ("rollouts/000002", lambda r: r.update(index=3), "says that it is rollout 3"),
    ("rollouts/000002", lambda r: r.update(kind="nonsense"), "is not a valid record (kind"),
    ("rollouts/000002", lambda r: r["state"]["data_source"].update(cursor=3), "its samples lead to"),
    ("rollouts/000002", lambda r: r["state"]["data_source"].update(issued=10), "number 9 is missing"),
    ("rollouts/000002", lambda r: r["state"]["data_source"].update(segments=[]), "has forgotten data"),
    ("steps/000003", lambda r: r["summary"].update({"train/loss": 0.5}), "its digest differs"),
    ("steps/000003", lambda r: r.update(seconds={"x": 1.0}), "its digest differs"),
    ("steps/000003", lambda r: r.pop("digest"), "its digest differs"),
    ("evals/000004/sums", lambda r: r["summary"].update({"eval/sums": 4.5}), "says eval/sums 4.5, but its samples give 4"),
    ("rollouts/000002", sealed_again({"rollout/raw_reward": 0.5}), "says rollout/raw_reward 0.5, but its samples give 0.25"),
    ("rollouts/000002", sealed_again({"rollout/num_samples": 5.0}), "says rollout/num_samples 5, but its samples give 6"),
    ("evals/000004/sums", lambda r: r.update(index=5, policy_version=5), "says that it is eval 5"),
]


@pytest.mark.parametrize(("where", "change", "sentence"), TAMPERED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_record_that_does_not_fit_is_found(made, where: str, change: Callable[[dict], object], sentence: str) -> None:
    store, keys, _ = made
    rewrite(store, f"{keys.prefix}/{where}", change)
    assert any(sentence in problem for problem in audit(store, keys).problems), audit(store, keys).problems


def test_a_gap_is_found(made) -> None:
    store, keys, _ = made
    store.delete([commit_key(keys.step(2)), commit_key(keys.rollout(1))])
    problems = audit(store, keys).problems
    assert any("step 2 is not committed, but step 4 is" in problem for problem in problems)
    assert any("rollout 1 is not committed" in problem for problem in problems)


def change_samples(store: Store, prefix: str, change: Callable[[list], list]) -> None:
    """Commit a rollout again with other samples, as a broken stage would have."""
    commit = store.committed(prefix)
    samples = change(read_samples(store, commit))
    store.delete([commit_key(prefix)])
    commit_samples(store, prefix, samples, **commit.model_dump(exclude={"files", "attempt"}))


def renamed(samples: list) -> list:
    return [replace(sample, sample_id=sample.sample_id.replace("000000006", "000000001")) for sample in samples]


def served_again(samples: list) -> list:
    """The first prompt's row in place of the last one's, as if the cursor had been lost."""
    row = samples[0].metadata
    return [replace(sample, metadata=row) if sample.group_id == samples[-1].group_id else sample for sample in samples]


BROKEN: list[tuple[Callable[[list], list], str]] = [
    (lambda samples: samples[SAMPLES:], "number 6 is missing"),
    (lambda samples: samples[1:], "groups have 1 to 2 samples"),
    (lambda samples: [*samples, samples[0]], "sample ids are not unique"),
    (renamed, "sample ids stand in more than one round"),
    (served_again, "served before in epoch 1"),
    (lambda samples: [replace(samples[0], policy_versions=(1, 2)), *samples[1:]], "policy versions [1, 2]"),
    (lambda samples: [replace(samples[0], rollout_id=7), *samples[1:]], "says rollout 7"),
    (lambda samples: [replace(sample, metadata={}) for sample in samples], "which the run has not seen"),
    (lambda samples: [replace(samples[0], group_id="x"), *samples[1:]], "which is no issue number"),
]


@pytest.mark.parametrize(("change", "sentence"), BROKEN, ids=[sentence for _, sentence in BROKEN])
def test_samples_lost_doubled_or_served_twice_are_found(made, change: Callable[[list], list], sentence: str) -> None:
    store, keys, _ = made
    change_samples(store, keys.rollout(2), change)  # prompts 6 to 8, all of epoch 1
    problems = audit(store, keys, hashes=False).problems
    assert any(sentence in problem for problem in problems), problems


def test_an_evaluation_that_skipped_a_prompt_is_found(made) -> None:
    store, keys, _ = made
    change_samples(store, keys.eval(4, "sums"), lambda samples: samples[:-1])
    rewrite(store, keys.eval(4, "sums"), lambda record: record["state"]["data_source"].update(issued=ROWS - 1, cursor=ROWS - 1))
    assert any("has scored 4 of the data set's prompts" in problem for problem in audit(store, keys).problems)


def test_the_command_says_what_is_wrong(made, capsys: pytest.CaptureFixture[str]) -> None:
    store, keys, _ = made
    assert verify.main([keys.run, "--store", store.root]) == 0
    assert "the run is whole" in capsys.readouterr().out
    commit_files(store, "models/other", {"weights": b"other"}, kind="model")
    first_file(store, keys.checkpoint(4)).unlink()
    assert verify.main([keys.run, "--no-hashes", "--store", store.root]) == 1
    out, err = capsys.readouterr()
    assert "1 problems" in out and "checkpoints/000004" in err and "is missing" in err
    with pytest.raises(ValueError, match="has no run 'x'"):
        verify.main(["x", "--store", store.root])


def test_records_of_before_the_digest_still_load_and_verify_counts_them(made, capsys: pytest.CaptureFixture[str]) -> None:
    store, keys, _ = made

    def older(record: dict) -> None:
        del record["digest"], record["record_version"]

    rewrite(store, keys.step(3), older)
    commit = store.committed(keys.step(3))
    assert commit is not None and (commit.record_version, commit.digest) == (1, "")
    found = audit(store, keys)
    assert (found.problems, found.num_without_digest) == ([], 1)
    assert verify.main([keys.run, "--store", store.root]) == 0
    assert "1 records carry no digest" in capsys.readouterr().out
    rewrite(store, keys.step(3), lambda record: record.update(record_version=3))
    with pytest.raises(StoreError):
        store.committed(keys.step(3))


@pytest.mark.parametrize("value", [1, 1.5, float("nan"), float("inf"), -0.0, 1e300])
def test_a_digest_survives_being_written_and_read(tmp_path: Path, value: float) -> None:
    store = Store(str(tmp_path))
    state = {"x": value, "n": [1, (2, value)], "text": "ü\u2028", "deep": {"b": None, "a": True}}
    commit = store.commit("steps/000000", Commit(kind="step", summary={"m": value}, state=state))
    data = store.read(commit_key("steps/000000")) or b""
    assert is_unchanged(data) and store.committed("steps/000000").digest == commit.digest != ""
    assert not is_unchanged(data.replace(b'"step"', b'"eval"'))


def test_a_fork_does_not_copy_an_edited_record(made) -> None:
    store, keys, _ = made
    rewrite(store, keys.step(1), lambda record: record["summary"].update(x=1.0))
    with pytest.raises(StoreError, match=r"steps/000001.commit.json has changed"):
        fork.main([keys.run, "--at", "3", "--name", "f", "--store", store.root])


@pytest.mark.parametrize("content", [b"{", b"[]", None])
def test_a_damaged_or_lost_run_record_is_a_problem_and_no_crash(made, content: bytes | None) -> None:
    store, keys, _ = made
    store.delete([keys.record])
    if content is not None:
        store.create(keys.record, content)
    assert [problem for problem in audit(store, keys).problems if "run.json" in problem]
    Path(store.path(f"{keys.prefix}/base.json")).write_bytes(b"{}")
    assert [problem for problem in audit(store, keys).problems if "base.json" in problem]
