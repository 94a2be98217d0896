"""GPU placement on a real Ray cluster of two nodes of this machine, with GPUs that exist only in Ray's accounting."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engines.network import reserve_free_port

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


class Nodes:
    """A head with two GPUs, and a second node with two GPUs at 127.0.0.2."""

    def __init__(self, root: Path, temp_dir: str) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": str(ROOT)}
        # a slow raylet is not a dead one; a dead one refuses the connection at once
        slow = {"RAY_health_check_timeout_ms": "60000"}
        self.environment = {**os.environ, **token, **slow, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
        self.root = root
        self.processes: list[subprocess.Popen[Any]] = []
        port = reserve_free_port()
        self.address = f"127.0.0.1:{port}"
        self.start("--head", "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={temp_dir}",
                   "--include-dashboard=false")  # fmt: skip
        self.second = self.start_second()

    def start(self, *words: str) -> psutil.Process:
        log = self.root / f"node-{len(self.processes)}"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", *words]
        command += ["--num-cpus=2", "--num-gpus=2", "--object-store-memory=80000000"]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=self.environment)
        self.processes.append(process)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return psutil.Process(process.pid)

    def start_second(self) -> psutil.Process:
        return self.start(f"--address={self.address}", "--node-ip-address=127.0.0.2")

    def kill_second(self) -> None:
        for process in self.second.children(recursive=True):
            if process.name() == "raylet":
                process.kill()

    def driver(self, *sizes: int) -> Callable[[], Any]:
        """Start placement_driver.py; return a function that lets it place its processes once."""
        command = [sys.executable, str(Path(__file__).with_name("placement_driver.py")), self.address]
        with (self.root / f"driver-{len(self.processes)}").open("w") as errors:
            process = subprocess.Popen(
                [*command, *map(str, sizes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=self.environment,
            )  # fmt: skip
        self.processes.append(process)

        def place() -> Any:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("place\n")
            process.stdin.flush()
            for line in process.stdout:  # Ray prints there, too
                if line.startswith("placed "):
                    return json.loads(line.removeprefix("placed "))
            raise AssertionError(Path(errors.name).read_text()[-3000:])

        return place

    def stop(self) -> None:
        for process in self.processes:
            try:
                children = psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                children = []
            for child in children:
                if child.is_running():
                    child.kill()
            process.kill()
            process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        nodes = Nodes(tmp_path, short)
        yield nodes
        nodes.stop()


@pytest.mark.full
def test_engines_do_not_span_nodes_and_follow_a_restarted_node(nodes: Nodes) -> None:
    place = nodes.driver(1, 2, 2)  # one rank, an engine of two GPUs: one GPU is left over
    rank, engine, spans_nodes = placed = place()
    assert spans_nodes and rank[0] != engine[0] and engine[1:] == ["0", "1"] and len(rank) == 2
    again = nodes.driver(1, 2, 2)
    assert again() == placed, "the next driver uses the same GPUs"

    nodes.kill_second()
    assert again() == "node-lost"
    nodes.second = nodes.start_second()
    deadline = time.monotonic() + 300
    while (found := again()) == "node-lost":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert found == placed
