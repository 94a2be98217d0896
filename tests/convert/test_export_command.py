"""`penstock export` and --save-hf: a run's policies for other programs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from converted import check_same_tensors, commit_of

from penstock.flows import convert
from penstock.flows.config import PostTrainConfig
from penstock.flows.convert import translate_flags, with_hf_checkpoint
from penstock.flows.inspect import export
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import save_hf_rules
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record
from penstock.stages.convert.targets import (
    RECORD,
    DirectoryTarget,
    Origin,
    is_published,
    megatron_directory,
    open_parent_store,
    origin_of_copy,
)
from penstock.stages.convert.to_hf import export_hf, export_to
from penstock.stages.convert.to_torch_dist import convert_hf, export_megatron, import_megatron_checkpoint
from penstock.stages.convert.work import copy_export
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.errors import OptionError, RunError, StoreError, check_rules
from penstock.storage.store import Store


def conversion_argv(words: list[str]) -> list[str]:
    """Return the arguments that `penstock export` gives to `penstock convert`."""
    given: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "main", lambda argv: given.extend(argv) or 0)
        assert export.main(words) == 0
    return given


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The store of a run; tests write into directories of their own."""
    return Store(str(tmp_path_factory.mktemp("run") / "store"))


@pytest.fixture(scope="module")
def checkpoint(store: Store, tiny_model: Path) -> Commit:
    """The checkpoint of a run after 20 rounds."""
    commit = commit_of(store, convert_hf(store, tiny_model))
    return commit.model_copy(update={"kind": "checkpoint", "run": "r", "index": 20, "policy_version": 20})


def test_megatron_export_has_the_iteration_and_equal_weights(
    store: Store, checkpoint: Commit, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_megatron(store, checkpoint, Origin(tiny_model), str(out), "te", iteration=20)
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert megatron_directory(out) == out / "iter_0000020"
    assert torch.load(out / "iter_0000020" / "common.pt", weights_only=False)["iteration"] == 20
    other = Store(str(tmp_path / "other"))
    model = import_megatron_checkpoint(other, str(out), Origin(tiny_model))
    back = export_hf(other, commit_of(other, model), Origin(tiny_model), "exports/back")
    check_same_tensors(other.path(back.attempt or ""), tiny_model)


def test_conversion_of_an_export_records_the_files_of_the_run(
    store: Store, checkpoint: Commit, tiny_model: Path, tmp_path: Path
) -> None:
    attempt = store.new_attempt(RunKeys("r").checkpoint_prefix(20))
    shutil.copytree(store.path(checkpoint.attempt or ""), store.path(attempt))
    saved = Commit.model_validate_json(checkpoint.model_dump_json().replace(checkpoint.attempt or "", attempt))
    export_to(store, saved, Origin(tiny_model), str(tmp_path / "out"))
    for directory, inputs in ((tmp_path / "out", {"export": attempt}), (tiny_model, {})):
        other = Store(str(tmp_path / f"other-{directory.name}"))
        commit = commit_of(other, convert_hf(other, directory))
        assert commit.inputs == {"hf_checkpoint": str(directory.resolve()), **inputs}


def test_export_is_a_conversion_of_the_run() -> None:
    assert conversion_argv(["r/20", "--output", "out", "--store", "s"]) == [
        *("--load", "r/20", "--save", "out", "--store", "s")
    ]
    megatron = conversion_argv(["r", "--format", "megatron", "--output=out"])
    assert megatron == [*("--load", "r", "--save", "out", "--megatron-iteration", "--megatron-names", "te")]
    local = conversion_argv(["r", "--format", "megatron", "--output", "out", "--megatron-names", "local"])
    assert local.count("--megatron-names") == 1 and local[-1] == "--megatron-iteration"


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["r"], OptionError, "needs a run and a directory"),
        (["--output", "out"], OptionError, "needs a run and a directory"),
        (
            ["r", "--output", "out", "--format", "gguf"],
            OptionError,
            "--format takes hf, megatron or peft; found 'gguf'",
        ),
        (["r/last", "--output", "out"], OptionError, "'last' is not a policy version"),
        (["../r", "--output", "out"], RunError, "not a valid run name"),
    ],
)
def test_export_of_something_else_is_refused(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        conversion_argv(words)


def test_iteration_of_a_model_that_no_run_trained_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--hf-checkpoint", str(tiny_model), "--save", str(tmp_path / "out"), "--megatron-names", "te"]
    with pytest.raises(OptionError, match="--megatron-iteration needs --load RUN"):
        with_hf_checkpoint(parse_config([*translate_flags(words), "--megatron-iteration"]))


# ---- the run's own export --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(store: Store, checkpoint: Commit, tiny_model: Path) -> Commit:
    """The export with which a run ended after 20 rounds."""
    config = parse_config(["--hf-checkpoint", str(tiny_model), "--store", store.root, "--run", "r"])
    create_run_record(store, resolve("sft", config, store))
    store.commit(RunKeys("r").checkpoint_prefix(20), checkpoint.model_copy(update={"inputs": {}}))
    inputs = {"checkpoint": commit_key(RunKeys("r").checkpoint_prefix(20))}
    return export_hf(store, checkpoint, Origin(tiny_model), RunKeys("r").export_prefix(20), inputs=inputs)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of the exports that start a conversion in Ray, which fails here."""
    started: list[str] = []

    def export_checkpoint(config: PostTrainConfig, report: object) -> CheckpointRef:
        started.append(str(config.convert.convert_save))
        raise StoreError("a conversion was started")

    monkeypatch.setattr(convert, "export_checkpoint", export_checkpoint)
    return started


def test_export_of_a_finished_run_is_copied(
    store: Store,
    finished: Commit,
    tiny_model: Path,
    tmp_path: Path,
    conversions: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    words = ["r", "--output", str(out), "--store", store.root]
    assert export.main(words) == 0 and conversions == []
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"copying the export of r, policy version 20: {len(finished.files)} files, ")
    assert last.startswith("r is converted") and f"{out} (AutoModelForCausalLM.from_pretrained loads it)" in last
    check_same_tensors(out, tiny_model)
    assert {path.name for path in out.iterdir()} - {RECORD} == {Path(file.path).name for file in finished.files}
    assert origin_of_copy(out) == {"export": finished.attempt} and not list(tmp_path.glob(".out*"))
    assert export.main(words) == 0  # the existing result
    assert "was already converted" in capsys.readouterr().out
    checkpoint = store.committed(RunKeys("r").checkpoint_prefix(20))
    assert checkpoint is not None and export_to(store, checkpoint, Origin(tiny_model), str(out)).uri == str(out)


@pytest.mark.parametrize(
    "words",
    [["--export-dtype", "float16"], ["--vocab-size", "64"], ["--format", "megatron"]],
    ids=lambda words: words[-1],
)
@pytest.mark.usefixtures("finished")
def test_export_with_other_options_is_converted(
    words: list[str], store: Store, tmp_path: Path, conversions: list[str]
) -> None:
    with pytest.raises(StoreError, match="a conversion was started"):
        export.main(["r", "--output", str(tmp_path / "out"), "--store", store.root, *words])
    assert conversions == [str(tmp_path / "out")] and not (tmp_path / "out").exists()


def test_export_of_a_run_whose_model_files_have_changed_is_converted(
    store: Store, finished: Commit, tiny_model: Path, tmp_path: Path, conversions: list[str]
) -> None:
    changed = shutil.copytree(tiny_model, tmp_path / "changed")
    (changed / "generation_config.json").write_text("{}")
    words = ["r", "--output", str(tmp_path / "out"), "--store", store.root, "--origin-hf-dir", str(changed)]
    with pytest.raises(StoreError, match="a conversion was started"):
        export.main(words)
    assert conversions


def test_directory_with_something_else_is_refused_before_a_copy(
    store: Store, finished: Commit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    with pytest.raises(OptionError, match="exists and is not the result"):
        export.main(["r", "--output", str(tmp_path / "out"), "--store", store.root])
    assert "copying" not in capsys.readouterr().out and [*(tmp_path / "out").iterdir()] == [tmp_path / "out" / "notes"]


def test_damaged_export_is_not_copied(store: Store, finished: Commit, tmp_path: Path) -> None:
    file = Path(store.path(finished.files[0].path))
    content = file.read_bytes()
    file.write_bytes(b"x" * len(content))
    with pytest.raises(StoreError, match=r"has hash .*, but was committed"):
        export.main(["r", "--output", str(tmp_path / "out"), "--store", store.root])
    assert not (tmp_path / "out").exists()
    file.write_bytes(content)


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_killed_copy_resumes(
    place: str, store: Store, finished: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tmp_path / "copies/out") if place == "disk" else f"memory://bucket/{tmp_path.name}/out"
    with monkeypatch.context() as patch:
        patch.setattr(DirectoryTarget, "publish", lambda *_: 1 / 0)  # the files are written, but not published
        with pytest.raises(ZeroDivisionError):
            copy_export(store, finished, target)
    assert not is_published(target)
    copy_export(store, finished, target)
    parent, name = open_parent_store(target)
    assert is_published(target) and parent.list("") == [name]


# ---- --save-hf -------------------------------------------------------------------------------------------------------


def test_copy_of_an_export_is_complete_or_absent(
    store: Store, finished: Commit, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "hf_19"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            copy_export(store, finished, str(target))
    assert not target.exists() and not is_published(str(target))
    for _ in range(2):
        copy_export(store, finished, str(target))
    assert is_published(str(target)) and not list(tmp_path.glob(".hf_19*"))
    check_same_tensors(target, tiny_model)
    with pytest.raises(OptionError, match="exists and is not the result"):
        copy_export(store, finished.model_copy(update={"attempt": "other"}), str(target))


def test_save_hf_needs_a_path_for_each_checkpoint(tmp_path: Path) -> None:
    words = ["--hf-checkpoint", "m", "--run", "r", "--num-rollout", "3"]
    config = parse_config([*words, "--save-hf", f"{tmp_path}/hf_{{rollout_id}}"])
    assert config.run.hf_path(20) == f"{tmp_path}/hf_19"
    check_rules(save_hf_rules(config.run))
    (tmp_path / "hf_2").mkdir()
    check_rules(save_hf_rules(config.run))
    (tmp_path / "hf_2" / "config.json").touch()
    with pytest.raises(OptionError, match="hf_2 exists and is not from run 'r'"):
        check_rules(save_hf_rules(config.run))
    for path in ("hf", "hf_{rollout_id}_{step}"):
        with pytest.raises(
            OptionError, match=r"--save-hf hf.* gives several checkpoints one path, or has other braces"
        ):
            parse_config([*words, "--save-hf", path])
