"""The end of a command after an interrupt, a closed pipe, or an unexpected error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.flows import cli
from penstock.storage.errors import StoreError

ROOT = Path(__file__).parents[2]
ADVICE = "; add --verbose for the traceback, and please report this bug"
PROGRAM = [sys.executable, "-m", "penstock"]


def start(*words: str, **more: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*PROGRAM, *words], text=True, env=environment, stderr=subprocess.PIPE, **more)  # type: ignore[call-overload]


def test_signal_ends_a_command_in_one_line_with_its_exit_code(tmp_path: Path) -> None:
    ready, plugin = tmp_path / "ready", tmp_path / "slow.py"
    os.mkfifo(ready)
    plugin.write_text(f"import time\nopen({str(ready)!r}).close()\ntime.sleep(600)\n")
    options = f"--run r --hf-checkpoint m --prompt-data d.jsonl --num-rollout 1 --rm-type random --store {tmp_path}"
    with start("train", *options.split(), "--custom-generate-function-path", str(plugin)) as process:
        os.close(os.open(ready, os.O_WRONLY))  # returns when the command imports the plug-in
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "penstock: stopped by SIGTERM; the same command resumes after the last committed stage\n"


def test_closed_pipe_ends_silently() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start("train", "--help", stdout=writer) as process:
        os.close(writer)
        assert process.stderr is not None
        err = process.stderr.read()
    assert (process.returncode, err) == (141, "")


def raising(error: BaseException):
    def command(words: list[str]) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "penstock: interrupted\n"),
        (StoreError("the store\nis full"), 2, "penstock: the store is full\n"),
        (OSError(28, "No space left on device", "/x/y"), 2, "penstock: /x/y: no space left on device\n"),

        (RuntimeError("why"), 1, f"penstock: unexpected RuntimeError: why{ADVICE}\n"),
        (BrokenPipeError(32, "Broken"), 1, f"penstock: unexpected BrokenPipeError: [Errno 32] Broken{ADVICE}\n"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_error_of_a_command_is_one_line(error, code, text, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_stdout_is_closed", lambda: False)
    monkeypatch.setitem(cli.COMMANDS, "runs", raising(error))
    assert cli.main(["runs"]) == code
    assert capsys.readouterr() == ("", text)


def test_signal_whose_exception_a_library_has_replaced_is_reported_as_a_stop(
    capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.stop_signals, "received", [signal.SIGHUP])
    monkeypatch.setitem(cli.COMMANDS, "runs", raising(OSError(5, "x")))
    assert cli.main(["runs"]) == 129
    assert capsys.readouterr().err == "penstock: stopped by SIGHUP\n"


def test_verbose_shows_the_traceback(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "runs", raising(RuntimeError("why")))
    assert cli.main(["runs", "--verbose"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("penstock: unexpected RuntimeError: why\n") and "Traceback" in err
