"""`gc`, `runs`, `verify` and `rm` on a store that is read-only, full or missing."""

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import config_of, make_run, save_one, write_data

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


@pytest.fixture
def read_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every change of the store's directory fail with EROFS, as on a read-only mount."""

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(store.root):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, *args, **kwargs)

        return refuse

    for name in ("unlink", "rmdir", "mkdir", "utime", "link", "rename", "replace", "chmod"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    real = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return (guarded(real) if set(mode) & set("wax+") else real)(file, mode, *args, **kwargs)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(builtins, "open", opened)


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Return the output of a command; an error is one sentence on stderr."""
    assert main(list(words)) == code, capsys.readouterr()
    out = capsys.readouterr()
    if code == 2:
        assert out.err.startswith("penstock: ") and out.err.count("\n") == 1 and len(out.err) < 400, out
    return out.out + out.err


@pytest.mark.usefixtures("read_only")
def test_commands_on_a_read_only_store(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--store", store.root]
    assert "train" in said(capsys, 0, "runs", *where)
    assert "no problems found" in said(capsys, 0, "verify", "r", *where)
    listed = said(capsys, 0, "gc", "--older-than", "0", *where)
    assert "attempt-dead" in listed and "published" in listed and "nothing was removed" in listed
    for words in (["gc", "--delete", "--older-than", "0"], ["rm", "r", "--yes", "r"]):
        refusal = said(capsys, 2, *words, *where)
        assert os.strerror(errno.EROFS) in refusal and store.root in refusal


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
    "command", [["runs"], ["gc"], ["gc", "--delete"], ["verify", "r"], ["gc", "r"], ["rm", "r"], ["resume", "r"]]
)
@pytest.mark.parametrize("kind", ["missing", "empty", "file", "below a file"])
def test_commands_without_a_store(
    command: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    if kind == "empty":
        place.mkdir()
    if "file" in kind:
        place.write_text("x")
    code = 0 if command[-1] != "r" and "file" not in kind else 2
    said(capsys, code, *command, "--store", str(place / "x" if "below" in kind else place))
    assert place.exists() == (kind != "missing"), "a typo leaves no directory behind"
    assert not place.is_dir() or not list(place.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_commands_on_a_store_without_permissions(template: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same with real file permissions."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        Path(directory).chmod(0o755)
        root = shutil.copytree(template / "store", Path(directory) / "store")
        store = Store(str(root), probe=False)
        save_one(store, KEYS, 9)
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        where = ["--store", store.root]
        for words in (
            ["runs"],
            ["gc"],
            ["verify", "r"],
        ):  # their imports may be in a directory that the other user cannot read
            main([*words, *where])
        capsys.readouterr()
        os.seteuid(65534)
        try:
            assert "train" in said(capsys, 0, "runs", *where)
            assert "attempt-dead" in said(capsys, 0, "gc", "--older-than", "0", *where)
            for words in (["gc", "--delete", "--older-than", "0"], ["rm", "r", "--yes", "r"]):
                assert os.strerror(errno.EACCES) in said(capsys, 2, *words, *where)
            os.seteuid(0)
            (root / "runs").chmod(0o700)
            os.seteuid(65534)
            for words in (["runs"], ["verify", "r"]):
                assert os.strerror(errno.EACCES) in said(capsys, 2, *words, *where)
        finally:
            os.seteuid(0)
