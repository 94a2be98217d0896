"""The observers that watch a run from a thread: the hang detector kills nothing and reports each hang once, system
metrics never fail a run, and Prometheus gets the newest values, on loopback, until the run ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from urllib.error import URLError

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engines.scratch import own_temp_directory
from penstock.flows.commands.doctor import listening_ports
from penstock.flows.options.addresses import check_addresses
from penstock.flows.options.flags import parse_config
from penstock.flows.reporting import monitors
from penstock.flows.reporting.monitors import (
    HangDetector,
    PrometheusEndpoint,
    SystemMetrics,
    sample_system,
    stacks_of_process,
    stacks_of_run,
)
from penstock.storage.commit import Commit
from penstock.storage.errors import OptionError

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
    monkeypatch.setattr(monitors, "stacks_of_process", partial(stacks_of_process, seconds=0.0))


def test_registered_process_prints_its_stacks_and_continues() -> None:
    with stuck_process(REGISTERED) as process:
        for _ in range(2):
            assert "in wait_for_input" in stacks_of_process(process, seconds=60)


def test_process_without_a_handler_gets_no_signal_and_a_stopped_one_is_reported_below_the_driver(
    impatient: None,
) -> None:
    with stuck_process(PLAIN) as process:
        assert "cannot print its stacks" in stacks_of_process(process)
        process.suspend()
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        text = stacks_of_run()
    assert f"(pid {process.pid})\nstopped (T)" in text
    assert "thread MainThread:" in text and "a_stopped_one_is_reported_below_the_driver" in text


def test_each_hang_is_reported_once_with_a_file(impatient: None, tmp_path: Path) -> None:
    messages: list[str] = []
    reported = threading.Event()

    def warn(text: str) -> None:
        messages.append(text)
        reported.set()

    with HangDetector(0.05, warn, tmp_path / "logs") as detector:
        assert reported.wait(60)
        reported.clear()
        assert not reported.wait(0.15)  # the same hang
        detector.on_progress()
        assert reported.wait(60)
    files = sorted((tmp_path / "logs").iterdir())
    assert len(messages) == 2 and "== driver" in messages[0]
    assert "test_each_hang_is_reported_once_with_a_file" in files[0].read_text()


def test_no_hang_is_reported_before_the_timeout(tmp_path: Path) -> None:
    messages: list[str] = []
    with HangDetector(3600.0, messages.append, tmp_path) as detector:
        detector.on_progress()
    assert messages == [] and list(tmp_path.iterdir()) == []


def test_records_are_means_of_intervals_and_the_end_logs_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "SAMPLE_SECONDS", 0.01)
    logged, sampled, twelve = [], [], threading.Event()

    def sample() -> dict[str, float]:
        sampled.append(float(len(sampled)))
        if len(sampled) == 13:
            twelve.set()
        return {"system/x": sampled[-1]} | ({"system/gpu": 5.0} if len(sampled) == 2 else {})

    assert 0 < sample_system()["system/system_memory_usage_percentage"] <= 100, "of this machine"
    with SystemMetrics(logged.append, print, sample) as sampler:
        assert twelve.wait(60)
    sampler.thread.join()
    means = [record["system/x"] for record in logged]
    rest = sampled[1 + 5 * (len(means) - 1) :]  # the first sample is before the first interval
    assert means[:2] == [3.0, 8.0] and means[-1] == pytest.approx(sum(rest) / len(rest)) and len(rest) <= 5
    assert [record.get("system/gpu") for record in logged[:2]] == [5.0, None], "the mean of the samples that have it"


def test_failing_sampler_is_one_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "SAMPLE_SECONDS", 0.001)
    notes, logged = [], []

    def sample() -> dict[str, float]:
        raise OSError("no driver")

    with SystemMetrics(logged.append, notes.append, sample) as sampler:
        sampler.thread.join()
    assert logged == [] and len(notes) == 1 and "OSError: no driver" in notes[0]


def scrape(port: int) -> dict[str, tuple[dict[str, str], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
        return {sample.name: (sample.labels, sample.value) for family in families for sample in family.samples}


def test_newest_value_of_each_metric_is_served_on_loopback_until_the_end_of_the_run() -> None:
    step = Commit(kind="step", index=4, policy_version=5, summary={"train/loss": 0.5, "perf/actor_train_mfu": 0.4})
    with PrometheusEndpoint('a"b', 0) as endpoint:
        endpoint.update({"rollout/response_len/mean": 1.0, "rollout/zero_std/count_1.0": 2.0, "x": float("nan")})
        endpoint.update({"rollout/response_len/mean": 3.0})
        endpoint.on_commit("runs/r/steps/000004", step, is_new=True)
        endpoint.on_stage("train", 4)
        served = scrape(endpoint.port)
        ports = {port.address: port for port in listening_ports([psutil.Process()])}
    run = {"run": 'a"b'}
    assert served == {
        "penstock_rollout_response_len_mean": (run, 3.0),
        "penstock_rollout_zero_std_count_1_0": (run, 2.0),
        "penstock_train_loss": (run, 0.5),
        "penstock_perf_actor_train_mfu": (run, 0.4),
        "penstock_round": (run, 4.0),
        "penstock_policy_version": (run, 5.0),
        "penstock_stage": ({**run, "stage": "train"}, 1.0),
    }
    assert ports[f"127.0.0.1:{endpoint.port}"].loopback and f"0.0.0.0:{endpoint.port}" not in ports
    with pytest.raises(URLError):
        scrape(endpoint.port)


def test_taken_port_is_refused_with_the_flag_and_none_is_the_default() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"--prometheus-port {port} cannot be used"):
            check_addresses(parse_config(["--prometheus-port", str(port)]))
    for words in ([], ["--prometheus-port", "0"]):
        check_addresses(parse_config(words))
    assert parse_config([]).run.prometheus_port is None
