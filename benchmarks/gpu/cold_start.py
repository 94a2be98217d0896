"""Measure the seconds from `penstock train` to the first committed weight update, and compare them with the start of a
bare SGLang server with the same model and flags until it is healthy.

    python benchmarks/gpu/cold_start.py DIRECTORY [--model 0.6b] [-- OPTIONS]
    python benchmarks/gpu/cold_start.py DIRECTORY --model tiny -- --rollout-max-response-len 16    # rehearsal on a CPU

OPTIONS are further options of `penstock train`. Both are started twice: first with empty compile caches, then with
those of the first start. The floor (lowest possible time) is that of the bare server. On a machine without CUDA the
bare server is started with the launcher of Penstock's engines, because SGLang's own does not start there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import torch

from penstock.engines.backends import engine_backend
from penstock.engines.network import reserve_free_port
from penstock.engines.scratch import COMPILE_CACHES
from penstock.engines.sglang.backend import SGLangServer
from penstock.flows.config import PostTrainConfig
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment
from penstock.flows.runtime.engine_options import engine_options
from penstock.flows.runtime.runs import open_store
from penstock.storage.commit import CheckpointRef, Commit, RunKeys

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import MODELS, train_arguments
from report import make_parser, parse_options, write_report

RUN = "start"
GOAL = 30.0  # seconds after the bare server
TIMEOUT = 900.0


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for model, prompts, stores, caches and logs")
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    options = parse_options(parser)
    environment.set_default_variables()
    arguments = [*train_arguments(options.directory, options.model, RUN), "--num-rollout", "1"]
    figures: dict[str, object] = {"goal": f"at most {GOAL} s after the bare server (floor)"}
    for name in ("bare", "run"):
        shutil.rmtree(options.directory / f"caches-{name}", ignore_errors=True)
    for start in ("first start", "second start"):
        store = options.directory / start.replace(" ", "-")
        shutil.rmtree(store, ignore_errors=True)
        words = [*arguments, "--store", str(store), *options.train_options]
        config = parse_config(words)
        bare = measure_server(config, options.directory)
        seconds = measure_run(words, config, options.directory)
        excess = round(seconds["update committed"] - bare, 2)
        figures[start] = {"bare server (floor)": bare, "penstock train": seconds, "update after the floor": excess}
    write_report(options, figures)
    return 0


def cache_variables(directory: Path, name: str) -> dict[str, str]:
    """Return environment variables with which the processes keep their compiled kernels in `directory`."""
    caches = directory / f"caches-{name}"
    variables = {variable: str(caches / folder) for variable, folder in COMPILE_CACHES.items()}
    return {"XDG_CACHE_HOME": str(caches), "FLASHINFER_WORKSPACE_BASE": str(caches), **variables}


def measure_server(config: PostTrainConfig, directory: Path) -> float:
    """Return the seconds until a server with the engine flags of `config` is healthy; then kill it."""
    has_gpus = torch.cuda.is_available()
    options = engine_options(config)
    spec = options.spec.model_copy(update={"args": engine_backend().server_args(options, has_gpus=has_gpus)})
    spec = spec.model_copy(update={"tensor_parallel": options.gpus_per_engine if has_gpus else 1})
    port = reserve_free_port()
    command = SGLangServer(spec).command(port)
    if has_gpus:
        command[1:2] = ["-m", "sglang.launch_server"]
    env = {**os.environ, **cache_variables(directory, "bare"), "OMP_NUM_THREADS": str(spec.threads)}
    env |= {"PENSTOCK_SERVER_PARENT": str(os.getpid()), "PENSTOCK_SERVER_KEY": "benchmark"}  # for the launcher
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.pythonpath, env.get("PYTHONPATH")]))
    start = time.time()
    with (directory / "bare.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        while not is_healthy(port):
            if server.poll() is not None or time.time() - start > TIMEOUT:
                raise RuntimeError(f"the bare server is not healthy: see {directory / 'bare.log'}")
            time.sleep(0.1)
        return round(time.time() - start, 2)
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def is_healthy(port: int) -> bool:
    """Return whether the server at `port` answers /health."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False


def measure_run(arguments: list[str], config: PostTrainConfig, directory: Path) -> dict[str, float]:
    """Run `penstock train` for one round, and return the seconds from its start to each of its stages."""
    env = {**os.environ, **cache_variables(directory, "run")}
    start = time.time()
    with (directory / "run.log").open("wb") as log:
        command = [sys.executable, "-m", "penstock", "train", *arguments]
        subprocess.run(command, env=env, stdout=log, stderr=log, timeout=TIMEOUT, check=True)
    ended, store, keys = time.time(), open_store(config.run), RunKeys(RUN)
    base = store.read(CheckpointRef.model_validate_json(store.read(f"{keys.prefix}/base.json") or b"").key)
    rollout, step = store.committed(keys.rollout_prefix(0)), store.committed(keys.step_prefix(0))
    assert base and rollout and step
    times = {
        "model converted": Commit.model_validate_json(base).created_at,
        "rollout started": rollout.created_at - sum(rollout.seconds.values()),
        "rollout committed": rollout.created_at,
        "update committed": step.created_at,
        "process ended": ended,
    }
    return {name: round(at - start, 2) for name, at in times.items()}


if __name__ == "__main__":
    sys.exit(main())
