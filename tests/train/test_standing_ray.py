"""Trainers that survive their driver, on a real standing Ray: the next driver takes them over, and the earlier one is
refused."""

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

import pytest
from penstock_command import HANG
from random_rollouts import commit_rollouts

from penstock.engines.cluster import Cluster
from penstock.engines.network import reserve_free_port
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

pytestmark = pytest.mark.integration


class Driver:
    """A process with a trainer; see standing_driver.py."""

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        program = str(Path(__file__).with_name("standing_driver.py"))
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, program, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self.log = log

    def tell(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answered = self.process.stdout.readline()
        assert answered, self.log.read_text()[-3000:]
        return json.loads(answered)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": root}
    return {**os.environ, **token, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def address(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """Yield the address of a Ray cluster that ends with the test."""
    port = reserve_free_port()
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short,
        (tmp_path / "head").open("w") as log,
    ):
        words = [
            *("--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={short}"),
            *("--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000"),
        ]
        ray = str(Path(sys.executable).with_name("ray"))
        head = subprocess.Popen([ray, "start", *words], stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            deadline = time.monotonic() + HANG
            while "Ray runtime started" not in (tmp_path / "head").read_text():
                assert head.poll() is None and time.monotonic() < deadline, (tmp_path / "head").read_text()
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(HANG)


@pytest.fixture
def store(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> Store:
    store = Store(str(tmp_path / "store"))
    commit_rollouts(store, RunKeys("run"), 2)
    base = cluster.run(convert_hf, store, str(tiny_model))
    store.create("base.json", base.model_dump_json().encode())
    return store


@pytest.fixture
def start(store: Store, address: str, environment: dict[str, str], tiny_model: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(lr: float = 1e-3) -> Driver:
        log = Path(store.root).parent / f"driver-{len(drivers)}"
        drivers.append(Driver([address, store.uri, str(tiny_model), str(lr)], environment, log))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


@pytest.mark.full
def test_new_driver_takes_over_the_ranks_and_the_earlier_one_is_refused(
    start: Callable[..., Driver], store: Store
) -> None:
    first, second = start(), start()
    held = first.tell("round 0")
    assert held["version"] == 1 and held["clean"] and len(held["pids"]) == 2

    # taken over as they are: no process is started, nothing is loaded
    taken = second.tell("ensure 1")
    assert taken == {**held, "told": []}

    # the first driver still runs, and every call of it is refused, kill included
    for command in ("train 1", "ensure 0", "state"):
        refused = first.tell(command)
        assert refused["error"] == "FencedError", refused
    assert first.tell("kill") == {"left": [True, True, False]}
    assert second.tell("state") == taken

    # ranks that applied an uncommitted step are taken over, but restored
    assert second.tell("train 1")["version"] == 2
    second.end()
    third = start()
    undone = third.tell("ensure 1")
    assert undone["pids"] == held["pids"] and undone["told"] == [
        "loading the starting weights",
        "replaying training of rollout 0 (1 of 1)",
    ]
    assert undone["digest"] == held["digest"]

    # a driver with another build kills these ranks and starts its own; none is left at the end of a run
    third.end()
    fourth = start(lr=1e-4)
    assert not set(fourth.tell("ensure 0")["pids"]) & set(held["pids"])
    assert fourth.tell("kill") == {"left": [False, False, False]}


def test_driver_with_another_token_is_refused_at_once(address: str, environment: dict[str, str]) -> None:
    program = (
        "import sys; from penstock.engines.cluster import Cluster, EngineError\n"
        f"try: Cluster.start({address!r}).stop()\n"
        "except EngineError as error: sys.exit(str(error))"
    )
    for change, accepted in (({}, True), ({"RAY_AUTH_TOKEN": "b" * 64}, False), ({"RAY_AUTH_MODE": "disabled"}, False)):
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env={**environment, **change}, timeout=HANG
        )
        assert result.returncode == (0 if accepted else 1), result.stderr
        assert accepted or "does not accept the token of this process (RAY_AUTH_MODE=" in result.stderr, result.stderr
