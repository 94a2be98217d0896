"""SIGTERM, SIGHUP and SIGINT: a request to stop, then an exception, then the end of the process, whatever it does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.flows.runtime.signals import StopSignals, describe_cleanup
from penstock.storage.preemption import Preempted, StopRequest

ROOT = Path(__file__).parents[2]

PREFACE = """
import atexit, ctypes, os, re, signal, subprocess, sys, threading, time
from penstock.flows.runtime import signals
from penstock.storage.preemption import Preempted, StopRequest

signals.CLEANUP, signals.TICK = 0.5, 0.05
stops = signals.stop_signals
stops.install()
stops.start_watchdog()
stops.set_grace_period(0.5)
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)


def hang():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass


class Library:
    def __del__(self):
        time.sleep(600)


mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
HANGS = {  # program -> the signal that it gets
    "swallows every exception": ("hang()", signal.SIGTERM),
    "loses exceptions in a finalizer": ("while True:\n    Library()", signal.SIGINT),
    "exits, and an exit hook hangs": ("atexit.register(time.sleep, 600)\nstops.exits = True", signal.SIGHUP),
    "exits, and a thread never ends": (
        "threading.Thread(target=time.sleep, args=(600,)).start()\nstops.exits = True",
        signal.SIGTERM,
    ),
    "swallows in a session": ("with stops.session(StopRequest(), 0.5):\n    hang()", signal.SIGHUP),
    "cleanup of a session hangs": (
        "with stops.session(StopRequest(), 0.5):\n    stops.begin_cleanup()\n    time.sleep(600)",
        signal.SIGINT,
    ),
    "lost an exception before the session": (
        "try:\n    signal.raise_signal(signal.SIGTERM)\nexcept BaseException:\n    pass\nstop = StopRequest()\n"
        "with stops.session(stop, 0.5):\n    assert stop.requested\n    hang()",
        signal.SIGTERM,
    ),
}
NATIVE_HANGS = {  # Python's handlers cannot run: the watchdog kills the process
    "native code holds the interpreter's lock": ("ctypes.PyDLL(None).pthread_mutex_lock(mutex)", signal.SIGHUP),
    "a thread holds the interpreter's lock": (
        'threading.Thread(target=re.match, args=("(a+)+$", "a" * 60 + "b")).start()\ntime.sleep(600)',
        signal.SIGINT,
    ),
    "native code in a session": (
        "with stops.session(StopRequest(), 0.5):\n    ctypes.CDLL(None).pthread_mutex_lock(mutex)",
        signal.SIGTERM,
    ),
    "native code in an exit hook": (
        "atexit.register(ctypes.CDLL(None).pthread_mutex_lock, mutex)\nstops.exits = True",
        signal.SIGHUP,
    ),
}


@pytest.fixture(scope="module")
def signalled() -> Iterator[dict[str, tuple[subprocess.Popen[str], psutil.Process]]]:
    """All programs of HANGS and NATIVE_HANGS with their child processes. They got their signals together, so that their
    grace periods pass at the same time."""
    programs = HANGS | NATIVE_HANGS
    processes = {name: start(body) for name, (body, _) in programs.items()}
    family = {}
    try:
        for name, process in processes.items():
            family[name] = process, first_child(process)
        time.sleep(0.2)  # the programs are then in their bodies
        for name, process in processes.items():
            process.send_signal(programs[name][1])
        yield family
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
        for _, child in family.values():
            if child.is_running():
                child.kill()


@pytest.mark.parametrize("name", [*HANGS, *NATIVE_HANGS])
def test_process_and_its_children_end_after_the_grace_period(
    name: str, signalled: dict[str, tuple[subprocess.Popen[str], psutil.Process]]
) -> None:
    process, child = signalled[name]
    expected = -signal.SIGKILL if name in NATIVE_HANGS else 128 + HANGS[name][1]
    assert process.wait(60) == expected
    assert ends(child)


@pytest.mark.parametrize(
    ("body", "code"),
    [("hang()", 128 + signal.SIGINT), ("ctypes.PyDLL(None).pthread_mutex_lock(mutex)", -signal.SIGKILL)],
    ids=["Python", "native code"],
)
def test_second_interrupt_kills_at_once(body: str, code: int) -> None:
    with start(f"stops.set_grace_period(600)\n{body}") as process:
        child = first_child(process)
        time.sleep(0.2)
        while process.poll() is None:  # signals that arrive together count once
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.returncode == code and ends(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_command_without_a_session_is_interrupted_at_once(number: int) -> None:
    body = "stops.set_grace_period(600)\ntry:\n    print('ready', flush=True)\n    time.sleep(600)\n"
    body += "except BaseException as error:\n    print(type(error).__name__, flush=True)\n    child.kill()"
    with start(body) as process:
        first_child(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == ("KeyboardInterrupt\n" if number == signal.SIGINT else "Preempted\n")
        assert process.wait() == 0


def test_hangup_that_nohup_ignores_stays_ignored() -> None:
    with start("time.sleep(600)", before="import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n") as process:
        child = first_child(process)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1  # an uncaught exception; the command line reports it
        child.kill()


@pytest.mark.full
def test_watchdog_ends_with_its_process() -> None:
    with start("time.sleep(600)") as process:
        child = first_child(process)
        watchdogs = [other for other in psutil.Process(process.pid).children() if other.pid != child.pid]
        process.kill()
        child.kill()
        assert len(watchdogs) >= 1 and all(map(ends, watchdogs))


@pytest.mark.full
def test_exit_code_is_that_of_the_program_if_it_ends_slowly() -> None:
    body = """
child.kill()
signals.TICK = 0.001
try:
    signal.raise_signal(signal.SIGTERM)
except BaseException:
    sys.exit(143)
"""
    with start(body) as process:
        assert process.wait() == 143


def start(body: str, before: str = "") -> subprocess.Popen[str]:
    """Start a program that prints the id of a child process and then runs `body`."""
    program = [sys.executable, "-c", before + PREFACE + body]
    return subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def first_child(process: subprocess.Popen[str]) -> psutil.Process:
    """Wait for the program's first line, and return its child process."""
    assert process.stdout is not None
    return psutil.Process(int(process.stdout.readline()))


def ends(process: psutil.Process) -> bool:
    """Return whether a process has ended or ends, a zombie included."""
    deadline = time.monotonic() + 60
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    return time.monotonic() < deadline


# ---- in this process -------------------------------------------------------------------------------------------------


def test_signal_requests_a_stop_and_raises_when_the_time_of_the_stage_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.runtime.signals.CLEANUP", 1000.0)
    stop, before = StopRequest(), signal.getsignal(signal.SIGHUP)
    with StopSignals().session(stop, 1000.2):
        stop.raise_if_requested()
        signal.raise_signal(signal.SIGHUP)
        assert stop.wait(60) and stop.seconds_left <= 0.2
        with pytest.raises(Preempted, match="asked to stop"):
            stop.raise_if_requested()
        for _ in range(2):  # again, if the first is lost
            with pytest.raises(Preempted, match="stopped by"):
                time.sleep(600)  # ended by the signal, or by the test's timeout
    assert signal.getsignal(signal.SIGHUP) is before


def test_interrupt_raises_at_once_and_again_if_it_is_lost() -> None:
    stop = StopRequest()
    with StopSignals().session(stop, 1000.0):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(600)
    assert stop.requested


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cleanup_of_a_session_is_not_interrupted(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.runtime.signals.TICK", 0.01)
    stop, stops = StopRequest(), StopSignals()
    with stops.session(stop, 0.0):
        stops.begin_cleanup()
        signal.raise_signal(number)
        time.sleep(0.05)
    assert stop.requested and stops.exit_code == 128 + number


def test_process_of_another_program_outlives_a_session_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("penstock.flows.runtime.signals.kill_command", killed.append)
    monkeypatch.setattr("penstock.flows.runtime.signals.CLEANUP", 0.0)
    stop, stops = StopRequest(), StopSignals()
    stops.received = [signal.SIGTERM]
    stops._kill_after(0.0)
    assert killed == [], "no session runs"
    with stops.session(stop, 0.0):
        stops.begin_cleanup()
        stops._kill_after(0.0)
    assert killed == [128 + signal.SIGTERM]


def test_work_that_ends_within_the_grace_period_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.runtime.signals.TICK", 0.01)
    stop = StopRequest()
    with StopSignals().session(stop, 1000.0):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.05)
    time.sleep(0.05)
    assert stop.requested


def test_second_request_can_only_shorten_the_time() -> None:
    stop = StopRequest()
    stop.raise_if_requested()
    assert not stop.wait(0) and stop.seconds_left == float("inf")
    stop.request(1000.0)
    assert stop.seconds_left > 900
    stop.request(0.0)
    stop.request(1000.0)
    assert stop.seconds_left <= 0


@pytest.mark.parametrize(
    ("kind", "is_requested", "writes_report", "text"),
    [
        (None, False, True, "stopping trainer and engines, writing the report"),
        (Preempted, False, False, "stopped on request: stopping trainer and engines"),
        (RuntimeError, True, True, "stopped on request: stopping trainer and engines, writing the report"),
        (RuntimeError, False, False, "failed: stopping trainer and engines"),
        (KeyboardInterrupt, True, True, "interrupted: stopping trainer and engines, writing the report (Ctrl-C again"),
    ],
)
def test_a_failure_is_named_only_if_no_stop_was_requested(
    kind: type[BaseException] | None, is_requested: bool, writes_report: bool, text: str
) -> None:
    assert describe_cleanup(kind, is_requested=is_requested, writes_report=writes_report).startswith(text)
