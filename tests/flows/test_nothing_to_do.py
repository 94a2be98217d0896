"""A command whose result exists starts no process: no server, no Ray, no engine."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.flows import convert, replay
from penstock.flows.commands.start import resume_main
from penstock.flows.config import PostTrainConfig
from penstock.flows.inspect import export
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import prefect_api, runner
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import completion_of, create_run_record
from penstock.flows.tasks import convert_unless_unchanged
from penstock.stages.convert.targets import is_conversion_of
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.commit import CheckpointRef, Commit, FileRecord, RunKeys, commit_key, encode_commit
from penstock.storage.history.run_record import Start, record_completion, record_end, record_start
from penstock.storage.store import Store

KEYS = RunKeys("r")


class Started(Exception):
    """Something was started that would take seconds."""


def start_something(*args: object, **kwargs: object) -> None:
    raise Started


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "preflight", start_something)
    monkeypatch.setattr(prefect_api, "ensure_prefect_api", start_something)
    monkeypatch.setattr("penstock.engines.cluster.Cluster.start", start_something)


# ---- flows -----------------------------------------------------------------------------------------------------------


def words(root: str, *more: str) -> list[str]:
    return ["--run", "r", "--store", root, "--hf-checkpoint", "/model", "--num-rollout", "3", *more]


def complete(root: str, flow: str, *more: str) -> Store:
    """Make the store of a run whose last start has completed it."""
    store, config = Store(root), parse_config(words(root, *more))
    number = record_start(store, KEYS, Start())
    record_end(store, KEYS, number, "FINISHED")
    record_completion(store, KEYS, number, completion_of(store, resolve(flow, config, store)))
    return store


@pytest.mark.parametrize(
    ("flow", "more"),
    [
        ("train", []),
        ("sft", ["--loss-type", "sft_loss"]),
        ("evaluate", ["--eval-prompt-data", "sums", "/sums.jsonl"]),
    ],
)
def test_completed_run_starts_nothing(
    root: str, flow: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    complete(root, flow, *more)
    assert runner.run_flow(flow, parse_config(words(root, *more))) == 0
    assert "nothing is left to do" in capsys.readouterr().out


@pytest.mark.parametrize(("rounds", "is_complete"), [("3", True), ("4", False)])
def test_dry_run_of_a_completed_run_says_that_nothing_starts(
    root: str, rounds: str, is_complete: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = complete(root, "train")
    create_run_record(store, resolve("train", parse_config(words(root)), store))
    for name in ("missing_files", "plan_rows", "config_warnings", "options_without_partner", "check_options"):
        monkeypatch.setattr(f"penstock.flows.inspect.dry_run.{name}", lambda *_: [])
    assert resume_main(["r", "--store", root, "--num-rollout", rounds, "--dry-run"]) == 0
    assert ("r is complete: " in capsys.readouterr().out) == is_complete


@pytest.mark.parametrize(
    ("completed", "more", "is_started"),
    [
        ("", "--trainer-threads 1", False),
        ("", "--store store", False),  # a relative path of the same store
        ("--keep-checkpoints 1", "", False),  # as `penstock resume`
        ("--debug-rollout-only", "", True),
        ("", "--debug-rollout-only", True),
        ("", "--num-rollout 4", True),
        ("", "--use-tensorboard", True),
        ("", "--lr 1e-3", True),
        ("", "--no-report", True),
        ("", "--keep-checkpoints 1", True),
        ("", "--dump-details /details", True),
    ],
)
def test_options_that_add_nothing_to_a_completed_run_start_nothing(
    root: str, completed: str, more: str, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(root, "train", *completed.split())
    monkeypatch.chdir(Path(root).parent)
    with pytest.raises(Started) if is_started else nullcontext():
        assert runner.run_flow("train", parse_config(words(root, *more.split()))) == 0


def test_later_start_that_was_killed_is_continued(root: str) -> None:
    record_start(complete(root, "train"), KEYS, Start())
    with pytest.raises(Started):
        runner.run_flow("train", parse_config(words(root)))


def test_deleted_copy_of_a_checkpoint_is_written_again(root: str, tmp_path: Path) -> None:
    option = ["--save-hf", str(tmp_path / "hf-{rollout_id}")]
    store = complete(root, "train", *option)
    store.commit(KEYS.checkpoint_prefix(3), Commit(kind="checkpoint", run="r", index=3, policy_version=3))
    with pytest.raises(Started):
        runner.run_flow("train", parse_config(words(root, *option)))


# ---- conversions and exports -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversion(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a converted model, which is also checkpoint 3 of a run. Read only."""
    store = Store(str(tmp_path_factory.mktemp("converted") / "store"))
    config = parse_config([*words(store.root), "--hf-checkpoint", str(tiny_model)])
    create_run_record(store, resolve("train", config, store))
    model = Commit.model_validate_json(store.read(convert_hf(store, tiny_model).key) or b"")
    checkpoint = model.model_copy(update={"kind": "checkpoint", "run": "r", "index": 3, "policy_version": 3})
    store.create(commit_key(KEYS.checkpoint_prefix(3)), encode_commit(checkpoint))
    return store


@pytest.fixture
def converted(conversion: Store, root: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A copy of `conversion`."""
    monkeypatch.setattr(convert, "preflight", lambda *args: None)
    return Store(str(shutil.copytree(conversion.root, root)))


@pytest.mark.parametrize("form", [["--format", "hf"], ["--format", "megatron"]], ids=" ".join)
def test_export_starts_ray_but_no_server_and_nothing_the_second_time(
    converted: Store, root: str, form: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["r/3", "--output", str(tmp_path / "out"), "--store", root, *form]
    with pytest.raises(Started):
        export.main(command)

    class Here:
        def run(self, function: Callable[..., object], *args: object, timeout: float) -> object:
            return function(*args)

        def stop(self) -> None:
            monkeypatch.setattr("penstock.engines.cluster.Cluster.start", start_something)

    monkeypatch.setattr("penstock.engines.cluster.Cluster.start", lambda address: Here())
    assert [export.main(command), export.main(command)] == [0, 0]


@pytest.mark.parametrize("save", [None, "out"])
def test_conversion_that_exists_starts_nothing(
    converted: Store, root: str, save: str | None, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [] if save is None else ["--save", str(tmp_path / save)]
    if target:
        convert_hf(converted, tiny_model, options=ConversionOptions(save=target[1]))
    assert convert.main(["--hf-checkpoint", str(tiny_model), "--store", root, *target]) == 0
    assert "was already converted" in capsys.readouterr().out


def test_changed_model_is_converted_as_a_flow(converted: Store, root: str, other_tiny_model: Path) -> None:
    with pytest.raises(Started):
        convert.main(["--hf-checkpoint", str(other_tiny_model), "--store", root])


def test_model_whose_files_were_written_again_is_not_recognized(
    converted: Store, tiny_model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    model = convert_hf(converted, copy)
    assert not is_conversion_of(converted, model.model_copy(update={"key": commit_key("models/other")}), str(copy))
    assert not is_conversion_of(Store(str(tmp_path / "empty")), model, str(copy))
    assert is_conversion_of(converted, model, str(copy))
    os.utime(copy / "config.json", (1, 1))
    assert not is_conversion_of(converted, model, str(copy))


class NewRun:
    """The session of the run `new`, which has recorded no model."""

    def __init__(self, store: Store) -> None:
        self.run = SimpleNamespace(store=store, keys=RunKeys("new"))
        self.config, self.processes, self.lines = PostTrainConfig(), self, []
        self.display = SimpleNamespace(note=self.lines.append, note_wait=self.lines.append)

    @property
    def cluster(self) -> None:
        start_something()


def test_new_run_uses_the_conversion_of_another_run_without_ray(
    converted: Store, tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    session, model = NewRun(converted), convert_hf(converted, tiny_model)
    saved = str(tmp_path / "saved")
    convert_hf(converted, tiny_model, options=ConversionOptions(save=saved))
    for path in (str(tiny_model), saved):
        assert convert_unless_unchanged(session, "base", path) == model  # type: ignore[arg-type]
        assert session.lines.pop() == f"the store has {path} converted" and not session.lines
    with pytest.raises(Started):
        convert_unless_unchanged(session, "base", str(other_tiny_model))  # type: ignore[arg-type]
    assert session.lines == [f"converting {other_tiny_model}"]


# ---- replay ----------------------------------------------------------------------------------------------------------


def test_replay_needs_no_prefect_server(
    converted: Store, root: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    model: CheckpointRef = convert_hf(converted, tiny_model)
    converted.create(KEYS.origin_key("base"), json.dumps(model.model_dump()).encode())
    files = [FileRecord(path="x", bytes=1, xxh3="0")]
    step = Commit(kind="step", run="r", index=0, policy_version=1, files=files)
    converted.create(commit_key(KEYS.step_prefix(0)), encode_commit(step))
    assert replay.main(["r", "--store", root]) == 1
    assert "replay failed: Started" in capsys.readouterr().err
