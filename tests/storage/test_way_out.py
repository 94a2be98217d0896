"""`gc`, `runs`, `verify` and `rm` on a store that is read-only, full or missing."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from made_run import config_of, make_run, write_data

from penstock.flows.cli import main
from penstock.storage import disk
from penstock.storage.commit import RunKeys
from penstock.storage.maintenance.deletion import expire_checkpoints
from penstock.storage.store import Store

KEYS = RunKeys("r")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with an expired checkpoint and one orphan of each kind for which `gc` writes a file."""
    root = tmp_path_factory.mktemp("made")
    store = Store(str(root / "store"))
    make_run(store, config_of(store, write_data(root / "data.jsonl")), 2, save=(1, 2))
    expire_checkpoints(store, KEYS, num_to_keep=1)
    store.create(f"{KEYS.rollout_prefix(5)}/attempt-dead/part", b"x" * 5000)
    store.create(f"{KEYS.prefix}/published/weights-1/w", b"x" * 500)
    return root


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return Store(str(tmp_path / "store"), probe=False)


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Return the output of a command; an error is one sentence on stderr."""
    assert main(list(words)) == code, capsys.readouterr()
    out = capsys.readouterr()
    if code == 2:
        assert out.err.startswith("penstock: ") and out.err.count("\n") == 1 and len(out.err) < 400, out
    return out.out + out.err


def test_gc_and_rm_free_space_on_a_full_disk(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk empty files can be created, but no byte can be written."""

    def full(create: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(target: Path, data: bytes, **kwargs: Any) -> Any:
            if data:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            return create(target, data, **kwargs)

        return refuse

    for name in ("create", "replace"):
        monkeypatch.setattr(disk, name, full(getattr(disk, name)))
    where = ["--store", store.root]
    assert "2 files, 5.5 kB removed" in said(capsys, 0, "gc", "--delete", "--older-than", "0", *where)
    assert "no problems found" in said(capsys, 0, "verify", "r", *where)
    assert "removed" in said(capsys, 0, "rm", "r", "--yes", "r", *where)
    assert store.list("runs") == []


@pytest.mark.parametrize(
    ("command", "kind", "code"),
    [
        (["runs"], "missing", 0),
        (["gc", "--delete"], "missing", 0),
        (["verify", "r"], "missing", 2),
        (["gc"], "empty", 0),
        (["gc", "r"], "empty", 2),
        (["resume", "r"], "empty", 2),
        (["runs"], "file", 2),
        (["rm", "r"], "below a file", 2),
    ],
)
def test_commands_without_a_store(
    command: list[str], kind: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    if "file" in kind:
        place.write_text("x")
    said(capsys, code, *command, "--store", str(place / "x" if "below" in kind else place))
    assert place.exists() == (kind != "missing"), "a typo leaves no directory behind"
    assert not place.is_dir() or not list(place.iterdir())


@pytest.mark.parametrize(
    "words",
    ["runs", "show r", "verify r", "gc", "lineage r/2", "samples r", "report r", "rm r", "resume r", "replay r"],
)
def test_missing_bucket_is_named(words: str, s3_options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--store", "s3://missing-bucket/x", "--store-options", json.dumps(s3_options)]
    assert main([*words.split(), *where]) == 2
    error = capsys.readouterr().err
    assert "missing-bucket" in error and "the bucket does not exist" in error and error.count("\n") == 1


def test_empty_prefix_of_a_bucket_has_no_runs(
    s3_store: Callable[..., Store], s3_options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "--store", "s3://bucket/never", "--store-options", json.dumps(s3_options)]) == 0
    assert "no runs in s3://bucket/never" in capsys.readouterr().out


def test_commands_on_a_store_without_permissions(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        root = shutil.copytree(template / "store", Path(directory) / "store")
        for path in [root, *root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        where = ["--store", str(root)]
        for words in (["runs"], ["gc"], ["verify", "r"]):  # another user may not be able to read what they import
            main([*words, *where])
        capsys.readouterr()
        with without_rights_of_root():
            assert "train" in said(capsys, 0, "runs", *where)
            assert "no problems found" in said(capsys, 0, "verify", "r", *where)
            listed = said(capsys, 0, "gc", "--older-than", "0", *where)
            assert "attempt-dead" in listed and "published" in listed and "nothing was removed" in listed
            for words in (["gc", "--delete", "--older-than", "0"], ["rm", "r", "--yes", "r"]):
                refusal = said(capsys, 2, *words, *where)
                assert os.strerror(errno.EACCES) in refusal and str(root) in refusal
        (root / "runs").chmod(0o000)
        with without_rights_of_root():
            for words in (["runs"], ["verify", "r"]):
                assert os.strerror(errno.EACCES) in said(capsys, 2, *words, *where)
        for path in [root, *root.rglob("*")]:  # so that it can be deleted
            path.chmod(0o755)


@contextmanager
def without_rights_of_root() -> Iterator[None]:
    """Become a user to whom permissions apply."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
