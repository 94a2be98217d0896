"""Hang detector: the stacks of all processes, once for each hang, and nothing is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from penstock.engines.scratch import own_temp_directory
from penstock.flows.reporting import hang_detector
from penstock.flows.reporting.hang_detector import HangDetector, own_stacks, stacks_of_process, stacks_of_run

REGISTERED = """import sys
from penstock.engines.scratch import print_stacks_on_signal
def wait_for_input():
    print("ready", flush=True)
    sys.stdin.read()
print_stacks_on_signal()
wait_for_input()"""
PLAIN = "import sys\nprint('ready', flush=True)\nsys.stdin.read()"


@contextmanager
def stuck_process(program: str) -> Iterator[psutil.Process]:
    own_temp_directory()  # the process gets it as TMPDIR
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as popen:  # type: ignore[call-overload]
        try:
            assert popen.stdout.readline() == b"ready\n"
            yield psutil.Process(popen.pid)
        finally:
            popen.send_signal(signal.SIGCONT)
            popen.communicate(timeout=60)
    assert popen.returncode == 0


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for processes that earlier tests left to other libraries, such as W&B's, which never answer."""
    monkeypatch.setattr(hang_detector, "stacks_of_process", partial(stacks_of_process, seconds=0.0))


def test_registered_process_prints_its_stacks_and_continues() -> None:
    with stuck_process(REGISTERED) as process:
        assert "in wait_for_input" in stacks_of_process(process, seconds=60)
        assert "in wait_for_input" in stacks_of_process(process, seconds=60)


def test_process_without_a_handler_gets_no_signal() -> None:
    with stuck_process(PLAIN) as process:
        assert "cannot print its stacks" in stacks_of_process(process)


def test_stopped_process_is_reported_as_stopped(impatient: None) -> None:
    with stuck_process(PLAIN) as process:
        process.suspend()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        text = stacks_of_run()
    assert f"(pid {process.pid})\nstopped (T)" in text


def test_own_stacks_name_threads_and_functions() -> None:
    text = own_stacks()
    assert "thread MainThread:" in text and "test_own_stacks_name_threads_and_functions" in text


def test_each_hang_is_reported_once_with_a_file(impatient: None, tmp_path: Path) -> None:
    messages: list[str] = []
    reported = threading.Event()

    def warn(text: str) -> None:
        messages.append(text)
        reported.set()

    with HangDetector(0.05, warn, tmp_path / "logs") as detector:
        assert reported.wait(60)
        reported.clear()
        assert not reported.wait(0.3)  # the same hang
        detector.on_progress()
        assert reported.wait(60)
    files = sorted((tmp_path / "logs").iterdir())
    assert len(messages) == 2 and "== driver" in messages[0]
    assert "test_each_hang_is_reported_once_with_a_file" in files[0].read_text()


@pytest.mark.parametrize("timeout", [0.0, 3600.0])
def test_no_hang_is_reported_before_the_timeout(timeout: float, tmp_path: Path) -> None:
    messages: list[str] = []
    with HangDetector(timeout, messages.append, tmp_path) as detector:
        detector.on_progress()
    assert messages == [] and list(tmp_path.iterdir()) == []
