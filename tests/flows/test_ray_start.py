"""The local Ray of a run starts in a thread while Prefect is loaded, and the driver imports no torch."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.engines import cluster
from penstock.engines.cluster import ClusterStart
from penstock.engines.local_ray import ClusterLost
from penstock.engines.placement import PlacementOptions
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import processes
from penstock.flows.runtime.processes import ray_starting
from penstock.storage.errors import LayoutError

HANG = 30.0


class FakeCluster:
    too_few = False

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.thread = threading.current_thread()
        self.reserved: list[int] = []

    def place_processes(self, num_processes: int) -> None:
        self.reserved.append(num_processes)
        if self.too_few:
            raise LayoutError("the cluster has 1 GPUs, but the run needs 2")

    def stop(self) -> None:
        self.ended.set()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replace the start of Ray. Yields the arguments of each start."""
    starts: list[dict[str, Any]] = []

    def start(**options: Any) -> FakeCluster:
        starts.append(options)
        return FakeCluster()

    monkeypatch.setattr(cluster.Cluster, "start", start)
    monkeypatch.setattr(cluster, "import_ray_with_settings", lambda **options: None)
    yield starts
    assert processes._early_ray.get() is None


def config_of(*words: str) -> Any:
    return parse_config(["--run", "r", "--store", "/s", "--hf-checkpoint", "/m", "--num-rollout", "1", *words])


def test_the_thread_of_the_start_lives_until_ray_is_stopped(started: list[dict[str, Any]]) -> None:
    """The kernel kills Ray's daemons with the thread that started them."""
    options = PlacementOptions(trainer_gpus=3)
    start = ClusterStart("penstock-r", options).start()
    taken: Any = start.take()
    assert started == [{"namespace": "penstock-r", "options": options}]
    assert start.take() is None, "it is taken once"
    time.sleep(0.05)
    assert taken.thread.is_alive() and taken.thread is not threading.current_thread() and taken.thread.daemon
    taken.stop()
    taken.thread.join(HANG)
    assert not taken.thread.is_alive()


@pytest.mark.parametrize("too_few", [False, True])
def test_the_gpus_of_the_run_are_reserved_in_advance(
    too_few: bool, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are too few, the stage that needs them says so."""
    monkeypatch.setattr(FakeCluster, "too_few", too_few)
    taken: Any = ClusterStart("penstock-r", PlacementOptions()).start().take()
    assert taken.reserved == [1]
    taken.stop()


@pytest.mark.parametrize("error", [ClusterLost("Ray did not start"), OSError(28, "full")], ids=str)
def test_a_start_that_fails_is_logged_and_left_to_the_stage(
    error: Exception, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**options: Any) -> None:
        raise error

    monkeypatch.setattr(cluster.Cluster, "start", fail)
    with caplog.at_level(logging.WARNING):
        assert ClusterStart("penstock-r", PlacementOptions()).start().take() is None
    assert str(error) in caplog.text and "starting it again" in caplog.text


@pytest.mark.parametrize("error", [None, RuntimeError("refused"), KeyboardInterrupt()], ids=str)
def test_a_ray_that_no_run_has_taken_is_stopped(
    error: BaseException | None, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCluster()
    monkeypatch.setattr(cluster.Cluster, "start", lambda **options: fake)
    try:
        with ray_starting(config_of()):
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert raised is error
    assert fake.ended.is_set()


def test_a_ray_that_a_run_has_taken_is_left_to_it(started: list[dict[str, Any]]) -> None:
    with ray_starting(config_of("--actor-num-gpus-per-node", "2")):
        start = processes._early_ray.get()
        assert start is not None
        taken: Any = start.take()
    assert not taken.ended.is_set()
    [options] = started
    assert options["namespace"] == "penstock-r" and options["options"].trainer_gpus == 2
    taken.stop()


def test_an_external_ray_is_not_started(started: list[dict[str, Any]]) -> None:
    with ray_starting(config_of("--ray-address", "127.0.0.1:6379")):
        assert processes._early_ray.get() is None
    assert started == []


# ---- imports of the driver -------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from types import SimpleNamespace
from penstock.flows.runtime.conversion import import_model
from penstock.flows.options.flags import parse_config
from penstock.stages.rollout.text.tokenizer import PromptTokenizer

ids, calls = [], []
for model in sys.argv[1:]:
    inner = PromptTokenizer(model, apply_chat_template=True).inner
    ids.append(inner.apply_chat_template([{"role": "user", "content": "1+1="}])["input_ids"])
run = lambda function, *args, **options: calls.append(f"{function.__module__}.{function.__name__}")
convert = parse_config(["--run", "r", "--store", "/s", "--hf-checkpoint", model, "--num-rollout", "1"]).convert
import_model(SimpleNamespace(run=run), None, convert, model)
imported = "torch" in sys.modules
from transformers.utils import is_torch_available
print(json.dumps([ids, calls, imported, is_torch_available(), inner("1", return_tensors="pt")["input_ids"].ndim]))
"""


def test_the_driver_tokenizes_and_converts_without_torch(tiny_model: Path, tmp_path: Path) -> None:
    """A plugin in the driver that imports torch afterwards gets the whole of transformers."""
    models = [str(tmp_path / name) for name in ("TokenizersBackend", "PreTrainedTokenizerFast")]
    for model in models:
        path = shutil.copytree(tiny_model, Path(model)) / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": Path(model).name}))
    result = subprocess.run([sys.executable, "-c", PROGRAM, *models], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    ids, calls, imported, available, ndim = json.loads(result.stdout.splitlines()[-1])
    assert all(ids) and calls == ["penstock.flows.runtime.conversion.convert"] and not imported
    assert available and ndim == 2


# ---- the end of a driver whose Ray has just started ------------------------------------------------------------------


@pytest.mark.integration
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGKILL, "loading Prefect", marks=pytest.mark.full),
        (signal.SIGTERM, "opening the run"),
        pytest.param(signal.SIGINT, "starting Prefect's server", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_no_process_outlives_a_driver_that_ends_during_the_start(
    number: signal.Signals, moment: str, tiny_model: Path, tmp_path: Path
) -> None:
    prompts, log = tmp_path / "prompts.jsonl", tmp_path / "log"
    prompts.write_text('{"input": "1+1=", "label": "2"}\n' * 8)
    words = f"""
        --run r --store {tmp_path / "store"} --hf-checkpoint {tiny_model} --num-rollout 1 --prompt-data {prompts}
        --rm-type random --rollout-batch-size 2 --rollout-max-response-len 8
    """
    with log.open("wb") as out:
        driver = psutil.Popen([sys.executable, "-m", "penstock", "train", *words.split()], stdout=out, stderr=out)
    try:
        wait_for(lambda: moment in log.read_text() or driver.poll() is not None)
        assert driver.poll() is None, log.read_text()
        wait_for(lambda: "raylet" in {child.name() for child in driver.children()})
        family = driver.children(recursive=True)
        driver.send_signal(number)
        driver.wait(2 * HANG)
    finally:
        if driver.poll() is None:
            driver.kill()
    # Ray's agents whose raylet died before they were connected exit after a minute.
    _, alive = psutil.wait_procs(family, timeout=4 * HANG)
    assert not alive, log.read_text()
    assert driver.returncode == (-number if number == signal.SIGKILL else 128 + number), log.read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
