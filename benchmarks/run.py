"""`make bench`: measure the overhead of the pipeline, as ratios of times from the same run.

1. Breakdown of a round of the tiny recipe: generation, grading, training, and overhead.
2. Throughput of the rollout stage, with its commit, compared with the same requests sent directly to the SGLang server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp

from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model
from penstock.flows.config import RECIPES, PostTrainConfig, read_toml, validate_config
from penstock.flows.runtime import environment
from penstock.flows.runtime.runs import open_store
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

WARM_UP_ROUNDS = 5
WORK = {  # phase in a commit -> label in the breakdown; the other phases are overhead
    "generate": "generation",
    "reward": "grading",
    "update": "training",
    "ref_logprobs": "training",
    "old_logprobs": "training",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=30, help="rounds of the tiny recipe; 0 skips the breakdown of a round"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=64,
        help="prompts of the rollout comparison, with 8 samples of 256 tokens each; 0 skips the comparison",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        help="repetitions of the rollout comparison; each measures requests, stage, stage, requests",
    )
    options = parser.parse_args()
    environment.set_default_variables()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        root = Path(scratch)
        make_tiny_model(root / "model", max_length=1024)
        make_tiny_data(root / "data")
        if options.rounds:
            print_round_breakdown(root, options.rounds)
        if options.prompts:
            compare_rollout_with_engine(root, options.prompts, options.repeats)


def tiny_config(root: Path, **sections: dict) -> PostTrainConfig:
    """Return the demo's GRPO recipe without evaluation and checkpoints. `sections` overrides options of a section."""
    values = read_toml(RECIPES / "demo-grpo.toml")
    values["convert"] = {"hf_checkpoint": str(root / "model")}
    values["rollout"]["prompt_data"] = [str(root / "data" / "train.jsonl")]
    del values["eval"], values["run"]["save_interval"]
    for section, entries in sections.items():
        values[section] |= entries
    return validate_config(values)


# ---- 1. a round ------------------------------------------------------------------------------------------------------


def print_round_breakdown(root: Path, rounds: int) -> None:
    """Run the tiny recipe with the real flow, and print the median seconds of each phase of a round."""
    from penstock.flows.runtime.runner import run_flow

    config = tiny_config(root, run={"run": "bench", "store": str(root / "store"), "num_rollout": rounds})
    assert run_flow("train", config) == 0
    store, keys = open_store(config.run), RunKeys("bench")
    published = read_publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    medians = median_seconds([round_seconds(store, keys, r, published) for r in range(WARM_UP_ROUNDS, rounds)])
    print(f"\nSeconds of a round by phase (tiny recipe, 256 samples, median of {rounds - WARM_UP_ROUNDS} rounds)")
    print_seconds(medians)


def round_seconds(store: Store, keys: RunKeys, r: int, published: dict[int, float]) -> dict[str, float]:
    """Return the seconds of each part of round `r` (at least 1), from the commit of the training before it to the
    commit of its own training: part -> seconds, and "round", their sum, and "overhead", all but generation, grading and
    training.

    Args:
        published: round -> seconds of the weight update after it.
    """
    before, step = store.committed(keys.step_prefix(r - 1)), store.committed(keys.step_prefix(r))
    rollout = store.committed(keys.rollout_prefix(r))
    assert before and step and rollout
    wall = step.created_at - before.created_at
    parts = {"publish": published.get(r - 1, 0.0), "waiting for the checkpoint": 0.0}
    for name, seconds in [*rollout.seconds.items(), *step.seconds.items()]:
        label = WORK.get(name, name)
        parts[label] = parts.get(label, 0.0) + seconds
    if saved := store.committed(keys.checkpoint_prefix(r)):  # the checkpoint is saved during the rollout
        save = saved.seconds["save"]
        hidden = min(saved.created_at, rollout.created_at) - max(saved.created_at - save, rollout.started_at)
        parts["waiting for the checkpoint"] = save - max(0.0, hidden)
    parts["Prefect, commits, other"] = wall - sum(parts.values())
    work = sum(parts.get(label, 0.0) for label in ("generation", "grading", "training"))
    return {**parts, "round": wall, "overhead": wall - work}


def median_seconds(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median over the rounds of each entry of `round_seconds`."""
    return {label: statistics.median(seconds[label] for seconds in rounds) for label in rounds[0]}


def print_seconds(medians: dict[str, float]) -> None:
    """Print a table: part, seconds, share of the round."""
    for label, seconds in medians.items():
        print(f"  {label:<28}{seconds:8.3f}  {seconds / medians['round']:6.1%}")


def read_publish_seconds(outbox: Path) -> dict[int, float]:
    """Return round -> seconds of the weight publish after the round, from the tracker's outbox file."""
    lines = [json.loads(line) for line in outbox.read_text().splitlines()]
    key = "perf/update_weights_time"
    return {
        line["step"]: line["metrics"][key] for line in lines if line.get("type") == "metrics" and key in line["metrics"]
    }


# ---- 2. the rollout stage --------------------------------------------------------------------------------------------


def compare_rollout_with_engine(root: Path, prompts: int, repeats: int) -> None:
    """Print the tokens per second of the rollout stage and of the same requests without the stage."""
    long = {"rollout_batch_size": prompts, "rollout_max_response_len": 256, "rollout_sampling": {"ignore_eos": True}}
    long["engine_options"] = {"max_total_tokens": 160_000}
    config = tiny_config(root, rollout=long, train={"global_batch_size": None})
    speeds, stage_seconds = measure_rollout_stage(config, Store(str(root / "store")), repeats)
    ratio = statistics.median(speeds["stage"]) / statistics.median(speeds["requests"])
    print(
        f"\nRollout stage compared with direct requests ({prompts} x 8 samples of 256 tokens, "
        f"{statistics.median(stage_seconds):.1f} s per stage)"
    )
    for name, values in speeds.items():
        each = ", ".join(f"{value:,.0f}" for value in values)
        print(f"  {name:<9}{statistics.median(values):10,.0f} tokens/s   (each: {each})")
    print(f"  ratio    {ratio:10.3f}")


def measure_rollout_stage(
    config: PostTrainConfig, store: Store, repeats: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Start the engines of `config`, and generate its first round repeatedly: "stage" is the whole rollout stage with
    its commit, "requests" sends the requests of a stage, recorded before, to the first engine without the stage. The
    prefix cache is flushed before each measurement.

    Returns:
        {"requests": [...], "stage": [...]}, the tokens/s of each measurement in the order requests, stage, stage,
        requests, `repeats` times; and the seconds of each stage.
    """
    from penstock.engines.cluster import Cluster
    from penstock.engines.serving.pool import start_pool
    from penstock.flows.runtime.engine_options import engine_options
    from penstock.stages.rollout.group import make_grader
    from penstock.stages.rollout.prompts.data_source import RolloutRound
    from penstock.stages.rollout.prompts.source import PromptSource
    from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
    from penstock.stages.rollout.text.tokenizer import PromptTokenizer

    rollout, at = config.rollout, RolloutRound("bench", 0, 0)
    source = PromptSource.open(rollout)
    tokenizer = PromptTokenizer(config.convert.hf_checkpoint, apply_chat_template=rollout.apply_chat_template)
    cluster = Cluster.start()
    try:
        options = engine_options(config).replace_spec_fields(weight_version="bench/0")
        pool = start_pool(cluster, options)
        url = pool.urls[0]
        stage_seconds: list[float] = []
        numbers = itertools.count()
        with make_grader(rollout) as grader:
            context = RolloutContext(store, rollout, source, tokenizer, [url], grader)

            def stage() -> int:
                commit = rollout_stage(context, f"bench/{next(numbers)}", at)
                stage_seconds.append(sum(commit.seconds.values()))
                return round(commit.summary["rollout/response_len/mean"] * commit.summary["rollout/num_samples"])

            with recorded_requests() as bodies:
                stage()  # warm up
            stage_seconds.clear()
            work = {"requests": lambda: asyncio.run(send_requests(url, bodies)), "stage": stage}
            speeds: dict[str, list[float]] = {name: [] for name in work}
            for name in [*work, *reversed(work)] * repeats:  # alternate, so that a slow minute affects both
                asyncio.run(flush_prefix_cache(url))  # evictions would slow the second measurement
                start = time.perf_counter()
                tokens = work[name]()
                speeds[name].append(tokens / (time.perf_counter() - start))
        pool.stop()
        return speeds, stage_seconds
    finally:
        cluster.stop()


@contextmanager
def recorded_requests() -> Iterator[list[dict]]:
    """Return the list to which the bodies of all /generate requests are added that SGLang gets in this context."""
    from penstock.engines.sglang.client import SGLangClient

    bodies: list[dict] = []
    post = SGLangClient._post

    async def record(client: SGLangClient, url: str, path: str, body: dict, *more: Any) -> Any:
        if path == "/generate":
            bodies.append({name: value for name, value in body.items() if name != "rid"})
        return await post(client, url, path, body, *more)

    with patch.object(SGLangClient, "_post", record):
        yield bodies


async def flush_prefix_cache(url: str) -> None:
    """Empty the server's prefix cache."""
    from penstock.engines.sglang import control

    await asyncio.to_thread(control.call_server, url, "/flush_cache", {})


async def send_requests(url: str, bodies: list[dict]) -> int:
    """Send all /generate requests to the server at once, and return the number of generated tokens."""
    from penstock.engines.serving import endpoints

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=3600), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def send(body: dict) -> int:
            async with session.post(f"{url}/generate", json=body, headers=endpoints.auth_headers(url)) as response:
                return sum(answer["meta_info"]["completion_tokens"] for answer in await response.json())

        return sum(await asyncio.gather(*map(send, bodies)))


if __name__ == "__main__":
    main()
