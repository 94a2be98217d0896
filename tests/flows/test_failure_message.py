"""The message of a failed flow names a file with the traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.run_config import RunConfig
from penstock.flows.runtime.runner import save_traceback
from penstock.storage.secrets import register_secret


def failure(text: str = "why") -> Exception:
    """Return an error with a cause, as a stage raises it."""
    try:
        try:
            raise KeyError("cause")
        except KeyError as cause:
            raise ValueError(text) from cause
    except ValueError as error:
        return error


def file_in(sentence: str) -> Path:
    path, _, rest = sentence.partition(" ")
    assert rest == "has the traceback."
    return Path(path)


@pytest.mark.parametrize("store", ["file://{tmp}/store", "{tmp}/a/b/store"])
def test_traceback_of_a_failure_is_in_the_logs_of_the_run(store: str, tmp_path: Path) -> None:
    path = file_in(save_traceback(RunConfig(run="r", store=store.format(tmp=tmp_path)), failure()))
    assert path.parent.parts[-3:] == ("runs", "r", "logs") and path.is_relative_to(tmp_path)
    text = path.read_text()
    assert "in failure" in text and "KeyError: 'cause'" in text and text.endswith("ValueError: why\n")


@pytest.mark.parametrize("own", [False, True])
def test_traceback_is_outside_the_directory_that_is_removed_at_exit_if_the_store_is_not_local(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "own" if own else tmp_path
    monkeypatch.setattr("tempfile.tempdir", str(directory))
    monkeypatch.setattr("penstock.engines.scratch._own", (directory, None) if own else None)
    assert file_in(save_traceback(RunConfig(run="r", store="memory://store"), failure())).parent == tmp_path


def test_traceback_is_returned_if_it_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "logs").write_text("a file")
    text = save_traceback(RunConfig(run="r", store=str(tmp_path)), failure())
    assert "in failure" in text and text.endswith("ValueError: why\n")


def test_traceback_has_no_secrets(tmp_path: Path) -> None:
    secret = register_secret("0123456789abcdef0123")
    path = file_in(save_traceback(RunConfig(run="r", store=str(tmp_path)), failure(f"token {secret} is refused")))
    assert secret not in path.read_text() and "is refused" in path.read_text()
