"""Measure how long a weight update in flight stalls generation: the longest gap between two tokens of a streamed
request during an update, minus the usual gap.

    python benchmarks/gpu/in_flight.py DIRECTORY [--model 4b] [--requests 64] [--pause in_place] [-- OPTIONS]
    python benchmarks/gpu/in_flight.py DIRECTORY --model tiny --requests 8 --prompt-tokens 32    # rehearsal on a CPU

OPTIONS are further options of `penstock train`. With two GPUs, trainer and engine are apart and weights are sent over
NCCL; on one GPU they share it, and weights are sent over CUDA IPC. `publish` is the time from the call to the last
acknowledgement; `stall` is the part of it in which generation stands still. Prints JSON.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import torch

from penstock.engines.serving import endpoints
from penstock.flows.runtime import environment
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import QWEN3, make_model
from publish import trainer_and_engines
from report import make_parser, parse_options, write_report

UPDATES = 8
SECONDS = 1.0  # of generation before and after each update
GOAL = 0.2  # seconds of stall


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for model and store")
    parser.add_argument("--model", choices=QWEN3, default="0.6b")
    parser.add_argument("--requests", type=int, default=64, help="requests that are generated during the updates")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--pause", choices=["in_place", "retract"], default="in_place")
    options = parse_options(parser)
    environment.set_default_variables()
    model = make_model(options.model, options.directory)
    words = ["--sglang-context-length", "32768", "--pause-generation-mode", options.pause, *options.train_options]
    words += ["--async-mode", "streaming", "--max-staleness", "1"]
    if torch.cuda.device_count() > 1:
        words += ["--rollout-num-gpus", "1", "--update-weight-transport", "nccl"]
    with trainer_and_engines(Store(str(options.directory / "store")), model, words) as (pool, publish):
        publish()  # the first one connects trainer and engine
        measured = asyncio.run(measure(pool.urls[0], publish, options))
    figures = {name: statistics.median(values) for name, values in measured.items()}
    write_report(options, {"goal": f"stall below {GOAL} s", "median seconds": figures, "all seconds": measured})
    return 0


async def measure(url: str, publish: Callable[[], float], options: Any) -> dict[str, list[float]]:
    """Return the seconds of each update (`publish`), of the generation that it stalls, and between two tokens without
    updates (`step`)."""
    arrivals: list[float] = []
    first = asyncio.Event()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3600)) as session:

        async def send(index: int) -> None:
            """Send a request; note when each token of the first one arrives."""
            async with session.post(
                f"{url}/generate", json=body(index, options), headers=endpoints.auth_headers(url)
            ) as reply:
                async for line in reply.content:
                    if line.startswith(b"data:") and index == 0:
                        arrivals.append(time.perf_counter())
                        first.set()

        requests = [asyncio.create_task(send(index)) for index in range(options.requests)]
        await first.wait()
        result: dict[str, list[float]] = {"publish": [], "stall": [], "step": []}
        for _ in range(UPDATES):
            await asyncio.sleep(SECONDS)
            start = time.perf_counter()
            result["publish"].append(await asyncio.to_thread(publish))
            await asyncio.sleep(SECONDS)
            gaps = [(later, later - earlier) for earlier, later in pairwise(arrivals)]
            usual = statistics.median(gap for later, gap in gaps if start - SECONDS < later < start)
            result["stall"].append(round(max(gap for later, gap in gaps if later > start) - usual, 4))
            result["step"].append(round(usual, 4))
        assert not requests[0].done(), "the streamed request ended before the last update"
        for request in requests:
            request.cancel()
    return result


def body(index: int, options: Any) -> dict[str, Any]:
    """Return a /generate request that does not end before the measurement does; the first one is streamed."""
    prompt = [10 + (index * 7 + position) % 40 for position in range(options.prompt_tokens)]
    sampling = {"max_new_tokens": 30000, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": index == 0}


if __name__ == "__main__":
    sys.exit(main())
