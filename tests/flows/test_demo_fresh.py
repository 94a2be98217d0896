"""`penstock demo --fresh` removes what a demo made, and nothing else."""

import os
from pathlib import Path

import pytest

from penstock.flows.cli import main
from penstock.flows.commands import demo
from penstock.flows.commands.demo import MARKER, MARKER_TEXT, remove_demo
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.store import Store


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """What a demo leaves."""
    directory = tmp_path / "demo"
    (directory / "inputs" / "model").mkdir(parents=True)
    (directory / MARKER).write_bytes(MARKER_TEXT)
    (directory / "store" / "runs" / "demo-sft-seed0").mkdir(parents=True)
    (directory / "inputs" / "model" / "weights").write_text("x")
    return directory


def test_fresh_keeps_other_files_in_the_directory(made: Path, tmp_path: Path) -> None:
    (made / "notes.txt").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (made / "inputs" / "link").symlink_to(outside)
    (made / "store").rename(tmp_path / "moved")
    (made / "store").symlink_to(outside)
    remove_demo(made)
    assert [path.name for path in made.iterdir()] == ["notes.txt"]
    assert (outside / "precious").exists() and (tmp_path / "moved").exists()
    (made / MARKER).write_bytes(MARKER_TEXT)
    (made / "notes.txt").unlink()
    remove_demo(made)
    assert not made.exists(), "nothing else was in it"
    remove_demo(made)


def refused(directory: Path) -> None:
    before = sorted(directory.rglob("*")) if directory.is_dir() else []
    with pytest.raises((OptionError, RunError), match=str(directory)):
        remove_demo(directory)
    assert (sorted(directory.rglob("*")) if directory.is_dir() else []) == before


@pytest.mark.parametrize("content", [None, b"something else"])
def test_fresh_refuses_a_directory_without_the_marker(tmp_path: Path, content: bytes | None) -> None:
    directory = tmp_path / "thesis"
    (directory / "store").mkdir(parents=True)
    (directory / "store" / "chapter").write_text("x")
    if content is not None:
        (directory / MARKER).write_bytes(content)
    refused(directory)


def test_fresh_refuses_links_home_and_the_current_directory(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(made)
    refused(link)
    (made / MARKER).rename(made / "aside")
    (made / MARKER).symlink_to(made / "aside")
    refused(made)
    (made / MARKER).unlink()
    (made / MARKER).write_bytes(MARKER_TEXT)
    for place in (made, made / "inputs"):
        with monkeypatch.context() as patch:
            patch.setenv("HOME", str(place))
            refused(made)
            patch.undo()
            patch.chdir(place)
            refused(made)
    with pytest.raises(OptionError):
        remove_demo(Path("/"))
    (tmp_path / "file").write_bytes(MARKER_TEXT)
    refused(tmp_path / "file")


def test_fresh_refuses_a_running_demo(made: Path) -> None:
    lease = Lease(Store(str(made / "store")), new_driver_lease_key(RunKeys("demo-sft-seed0"))).take()
    with pytest.raises(RunError, match=f"process {os.getpid()}"):
        remove_demo(made)
    lease.release()
    remove_demo(made)
    assert not made.exists()


def test_refused_demo_prints_one_line_and_does_not_mark_a_directory_with_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("x")
    assert main(["demo", "--fresh", "--directory", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and str(tmp_path) in err and (tmp_path / "mine").exists()
    monkeypatch.setattr(demo, "make_model_and_data", lambda *arguments: (_ for _ in ()).throw(OptionError("stop here")))
    assert main(["demo", "--directory", str(tmp_path)]) == 2
    assert not (tmp_path / MARKER).exists()
    assert main(["demo", "--directory", str(tmp_path / "new")]) == 2
    assert (tmp_path / "new" / MARKER).read_bytes() == MARKER_TEXT
    assert main(["demo", "--directory", str(tmp_path / "mine")]) == 2


def test_model_only_writes_the_model_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    assert main(["demo", "--model-only", str(model)]) == 0
    assert (model / "model.safetensors").exists() and [path.name for path in tmp_path.iterdir()] == ["model"]
    assert str(model) in capsys.readouterr().out
    assert main(["demo", "--model-only", str(model)]) == 2
