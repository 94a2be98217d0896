"""--load, --save and --ref-load mean what they mean in slime: which model a run starts from, and which run resumes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.flows.commands.fork import plan_fork
from penstock.flows.config import Plan, PostTrainConfig
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import preflight
from penstock.flows.runtime.resolve import loaded_checkpoint, resolve
from penstock.flows.runtime.runs import create_run_record, open_store
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError


def config(*words: str) -> PostTrainConfig:
    return parse_config(["--hf-checkpoint", "hf", *words])


def plan(*words: str, flow: str = "train") -> Plan:
    given = config("--run", "new", *words) if "--save" not in words and "--run" not in words else config(*words)
    return resolve(flow, given, open_store(given.run, probe=False))


def starting_weights(*words: str) -> str:
    return plan(*words).start_weights


def hf_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def megatron_directory(path: Path) -> Path:
    (path / "iter_0000005").mkdir(parents=True)
    (path / "iter_0000005" / ".metadata").touch()
    (path / "latest_checkpointed_iteration.txt").write_text("5")
    return path


def run_with_checkpoints(path: Path, *versions: int) -> Path:
    """A run STORE/NAME with checkpoints, as `--save` names it."""
    run = config("--save", str(path)).run
    store, keys = open_store(run), RunKeys(run.run)
    create_run_record(store, resolve("train", config("--save", str(path)), store))
    for version in versions:
        attempt = f"{keys.prefix}/files/{version}"
        commit = Commit(kind="checkpoint", run=run.run, index=version, policy_version=version, attempt=attempt)
        store.commit(keys.checkpoint_prefix(version), commit)
    return path


# ---- --save ----------------------------------------------------------------------------------------------------------


def test_save_names_store_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for save, store in (
        ("/models/glm_slime/", "/models"),
        ("out/glm_slime", str(tmp_path / "out")),
        ("s3://bucket/models/glm_slime", "s3://bucket/models"),
    ):
        run = config("--save", save).run
        assert (run.store, run.run, run.save) == (store, "glm_slime", None)
    assert config("--save", "out/r", "--store", "out", "--run", "r").run.run == "r"


def test_save_that_contradicts_store_or_run_is_refused() -> None:
    for words in (["--run", "other"], ["--store", "elsewhere"]):
        with pytest.raises(OptionError, match=f"--save out/r means .* but {words[0]} .*{words[1]}"):
            config("--save", "out/r", *words)


# ---- --load and --ref-load -------------------------------------------------------------------------------------------


def test_start_weights_are_load_else_ref_load_else_hf_checkpoint(tmp_path: Path) -> None:
    hf, reference = hf_directory(tmp_path / "actor"), str(tmp_path / "reference")
    megatron = megatron_directory(tmp_path / "megatron")
    assert starting_weights() == os.path.abspath("hf")
    assert starting_weights("--ref-load", reference) == reference
    for directory in (hf, megatron, megatron / "iter_0000005"):
        both = plan("--ref-load", reference, "--load", str(directory))
        assert both.start_weights == str(directory) and both.train.ref_load == reference


def test_load_without_checkpoint_falls_back_to_ref_load_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for directory in ("empty", "missing"):
        given = plan("--ref-load", "/reference", "--load", str(tmp_path / directory), "--save", str(tmp_path / "r"))
        assert given.start_weights == "/reference"
        assert [*given.notes] == [f"--load {tmp_path / directory} has no checkpoint: the run starts from /reference"]


def test_load_equal_to_save_resumes_the_run(tmp_path: Path) -> None:
    path = run_with_checkpoints(tmp_path / "r", 2)
    same = plan("--ref-load", "/reference", "--load", f"{path}/", "--save", str(path))
    assert same.start_weights == "/reference" and not same.notes
    assert starting_weights("--load", str(path), "--store", str(tmp_path), "--run", "r") == os.path.abspath("hf")
    remote = "s3://bucket/models/r"
    assert loaded_checkpoint(config("--load", remote, "--save", remote)) is None


def test_load_equal_to_save_starts_from_the_megatron_checkpoint_in_it(tmp_path: Path) -> None:
    directory = str(megatron_directory(tmp_path / "slime_run"))
    assert starting_weights("--load", directory, "--save", directory) == directory


def test_load_of_another_run_starts_from_its_checkpoint(tmp_path: Path) -> None:
    path = run_with_checkpoints(tmp_path / "old", 2, 4)
    files = str(tmp_path / RunKeys("old").prefix / "files")
    assert starting_weights("--load", str(path), "--save", str(tmp_path / "new")) == f"{files}/4"
    assert starting_weights("--load", str(path / "2")) == f"{files}/2"
    for wrong in (path / "3", run_with_checkpoints(tmp_path / "untrained")):
        with pytest.raises(OptionError, match="has no such checkpoint"):
            loaded_checkpoint(config("--load", str(wrong)))


def test_load_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path, message in ((tmp_path, "is not a checkpoint"), ("s3://bucket/model", "not a local directory")):
        with pytest.raises(OptionError, match=message):
            loaded_checkpoint(config("--load", str(path)))


def test_start_weights_that_the_flow_does_not_use_are_refused(tmp_path: Path) -> None:
    load = ["--load", str(hf_directory(tmp_path / "actor"))]
    with pytest.raises(OptionError, match="--load has no effect in the flow `evaluate`"):
        plan(*load, flow="evaluate")
    for words in (load, ["--ref-load", "reference"]):
        with pytest.raises(OptionError, match=f"{words[0]} has no effect with --debug-rollout-only"):
            preflight(plan(*words, "--debug-rollout-only"))


def test_reference_that_nothing_uses_is_told(tmp_path: Path) -> None:
    words = ["--load", str(hf_directory(tmp_path / "actor")), "--ref-load", "reference"]
    assert ["--ref-load has no effect" in line for line in plan(*words).notes] == [True]
    assert not plan(*words, "--use-kl-loss").notes


def test_fork_of_a_run_that_loads_itself_keeps_its_start_weights(tmp_path: Path) -> None:
    path = run_with_checkpoints(tmp_path / "r", 2)
    parent = plan("--load", str(path), "--save", str(path), "--num-rollout", "4")
    fork = plan_fork(open_store(parent.run), "train", parent, [], "new", 2)
    assert fork.run.run == "new" and fork.start_weights == os.path.abspath("hf")
