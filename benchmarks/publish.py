"""Measure the seconds of a weight update on two GPUs, from the call to the last acknowledgement, and compare them with
raw copies of the same bytes.

    python benchmarks/publish.py DIRECTORY [--model 4b] [-- OPTIONS]

OPTIONS are further options of `penstock train`. Two cases: two trainer ranks and two engines on the same GPUs (CUDA
IPC; raw: one copy on each GPU), and one trainer rank and one engine on separate GPUs (NCCL; raw: one broadcast). Prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.engines.backends import engine_backend
from penstock.engines.cluster import Cluster
from penstock.engines.families import read_shape
from penstock.engines.serving.endpoints import BASE
from penstock.engines.serving.pool import EnginePool, start_pool
from penstock.flows.options.adapters import adapter_of_version, with_adapters
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment
from penstock.flows.runtime.engine_options import engine_options
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.spec import TrainerSpec
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef, RunKeys
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent))

from gpu_models import MODELS, make_model, write_prompts
from report import parse_options

CASES = {"tensor": ["--actor-num-gpus-per-node", "2"], "nccl": ["--rollout-num-gpus", "1"]}
UPDATES = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parse_options(parser)
    environment.set_default_variables()
    options.directory.mkdir(parents=True, exist_ok=True)
    model = make_model(options.model, options.directory)
    num_bytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    report: dict[str, Any] = {"model": options.model, "bytes": num_bytes, "raw": raw_copies(num_bytes)}
    store = Store(str(options.directory / "store"))
    for kind in options.cases:
        words = [*CASES[kind], "--update-weight-transport", kind, *options.train_options]
        seconds = updates(store, model, words)
        report[kind] = {"first": seconds[0], "median": statistics.median(seconds[1:]), "all": seconds}
        print(json.dumps(report), flush=True)
    return 0


def updates(store: Store, model: Path, words: list[str]) -> list[float]:
    """Return the seconds of successive weight updates."""
    with trainer_and_engines(store, model, words) as (_, publish):
        return [publish() for _ in range(UPDATES)]


@contextmanager
def trainer_and_engines(
    store: Store, model: Path, words: list[str]
) -> Iterator[tuple[EnginePool, Callable[[], float]]]:
    """Start trainer and engines with further options of `penstock train`. Yield the engines, and a function that sends
    them the trainer's weights and returns the seconds that this took."""
    inputs = ["--hf-checkpoint", str(model), "--prompt-data", str(write_prompts(model.parent / "prompts.jsonl"))]
    config = parse_config(["--run", "publish", "--store", store.uri, "--params-dtype", "bf16", *inputs, *words])
    cluster, options = Cluster.start(), with_adapters(engine_options(config), config, None)
    options = options.replace_spec_fields(weight_version=BASE)
    base: CheckpointRef = cluster.run(convert_hf, store, str(model), verify=False)
    pool = start_pool(cluster, options)
    shape = read_shape(model)
    group = TrainerGroup(cluster, TrainerSpec(run="publish", shape=shape, config=config.train, store=store.uri))
    try:
        PolicyRestorer(store, RunKeys("publish"), group, base).restore(0)

        def publish() -> float:
            transport = options.weight_transport(pool.places(pool.urls), group.places(), "")
            if options.adapters is not None:
                adapter = adapter_of_version("publish/0", "@benchmark-0", config.train, shape, str(model))
                transport = replace(transport, adapter=adapter)
            start = time.perf_counter()
            group.publish(pool.urls, "publish/0", transport)
            if transport.adapter is not None:
                engine_backend().connect(pool.urls).use_adapter(transport.adapter.name)
            return round(time.perf_counter() - start, 4)

        yield pool, publish
    finally:
        pool.stop()
        group.kill()
        cluster.stop()


def raw_copies(num_bytes: int) -> dict[str, float]:
    """Return the seconds of copying bytes on both GPUs at once, and of broadcasting them from one GPU to the other."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as directory:
        seconds = manager.dict()
        mp.spawn(_raw_copies, (num_bytes, f"file://{directory}/rendezvous", seconds), nprocs=2)
        return dict(seconds)


def _raw_copies(rank: int, num_bytes: int, rendezvous: str, seconds: dict[str, float]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rendezvous, rank=rank, world_size=2)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def median(copy: Callable[[], Any]) -> float:
        times = []
        for _ in range(UPDATES):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return round(statistics.median(times), 4)

    result = {"copy": median(lambda: target.copy_(source)), "broadcast": median(lambda: dist.broadcast(source, 0))}
    if rank == 0:
        seconds.update(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
