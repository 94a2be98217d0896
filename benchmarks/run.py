"""`make bench`: what the pipeline costs beside the work itself, always as a ratio or a share measured in the same run.

1. Where a round's time goes with the tiny recipe: generation, grading and training, and everything else.
2. The rollout stage with its commit against the same requests sent straight to the same SGLang server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp

from penstock.flows.commands.demo import RECIPES
from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model
from penstock.flows.config import read_toml, validated
from penstock.flows.runtime import environment
from penstock.flows.runtime.runs import open_store
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store

WARM_UP_ROUNDS = 5
WORK = {
    "generate": "generation",
    "reward": "grading",
    "update": "training",
    "ref_logprobs": "training",
    "old_logprobs": "training",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of the tiny recipe; 0 leaves this part out")
    parser.add_argument(
        "--prompts",
        type=int,
        default=64,
        help="of the rollout comparison, 8 samples of 256 tokens each; 0 leaves this part out",
    )
    parser.add_argument("--repeats", type=int, default=1, help="of the rollout comparison: bare, stage, stage, bare")
    options = parser.parse_args()
    environment.prepare()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        root = Path(scratch)
        make_tiny_model(root / "model", max_length=1024)
        make_tiny_data(root / "data")
        if options.rounds:
            round_breakdown(root, options.rounds)
        if options.prompts:
            rollout_against_engine(root, options.prompts, options.repeats)


def recipe(root: Path, **sections: dict) -> object:
    values = read_toml(RECIPES / "demo-grpo.toml")
    values["convert"] = {"hf_checkpoint": str(root / "model")}
    values["rollout"]["prompt_data"] = [str(root / "data" / "train.jsonl")]
    del values["eval"], values["run"]["save_interval"]
    for section, entries in sections.items():
        values[section] |= entries
    return validated(values)


# ---- 1. a round ------------------------------------------------------------------------------------------------------


def round_breakdown(root: Path, rounds: int) -> None:
    """Run the tiny recipe through the real flow and take its commits apart."""
    from penstock.flows.runtime.runner import start

    config = recipe(root, run={"run": "bench", "store": str(root / "store"), "num_rollout": rounds})
    assert start("post_train", config) == 0
    store, keys = open_store(config.run), RunKeys("bench")
    published = publish_seconds(Path(store.path(f"{keys.prefix}/tracking/outbox.jsonl")))
    shares: dict[str, list[float]] = {}
    for r in range(WARM_UP_ROUNDS, rounds):
        before, step, rollout = (
            store.committed(keys.step(r - 1)),
            store.committed(keys.step(r)),
            store.committed(keys.rollout(r)),
        )
        assert before and step and rollout
        wall = step.created_at - before.created_at
        parts = {"publish": published.get(r - 1, 0.0)}
        for name, seconds in [*rollout.seconds.items(), *step.seconds.items()]:
            label = WORK.get(name, name)
            parts[label] = parts.get(label, 0.0) + seconds
        parts["Prefect, commits, the rest"] = wall - sum(parts.values())
        work = sum(parts[label] for label in ("generation", "grading", "training"))
        for label, seconds in {**parts, "round": wall, "outside the work": wall - work}.items():
            shares.setdefault(label, []).append(seconds)
    print(
        f"\nWhere a round's time goes (tiny recipe, 256 samples, median of {rounds - WARM_UP_ROUNDS} rounds, seconds)"
    )
    medians = {label: statistics.median(values) for label, values in shares.items()}
    for label in [
        *(name for name in medians if name not in ("round", "outside the work")),
        "round",
        "outside the work",
    ]:
        print(f"  {label:<28}{medians[label]:8.3f}  {medians[label] / medians['round']:6.1%}")


def publish_seconds(outbox: Path) -> dict[int, float]:
    """Round -> seconds of the weight publish after it."""
    lines = [json.loads(line) for line in outbox.read_text().splitlines()]
    key = "perf/update_weights_time"
    return {
        line["step"]: line["metrics"][key] for line in lines if line.get("type") == "metrics" and key in line["metrics"]
    }


# ---- 2. the rollout stage --------------------------------------------------------------------------------------------


def rollout_against_engine(root: Path, prompts: int, repeats: int) -> None:
    """Tokens per second of the whole stage and of the bare requests, in turns on one server."""
    from penstock.engines.cluster import Cluster
    from penstock.engines.serving.pool import EnginePool
    from penstock.engines.serving.server import ServerSpec
    from penstock.stages.rollout.group import make_grader
    from penstock.stages.rollout.prompts.data_source import RolloutRound, new_groups
    from penstock.stages.rollout.prompts.source import PromptSource
    from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
    from penstock.stages.rollout.text.tokenizer import PromptTokenizer

    long = {"rollout_batch_size": prompts, "rollout_max_response_len": 256, "rollout_sampling": {"ignore_eos": True}}
    config = recipe(root, rollout=long, train={"global_batch_size": None}).rollout
    source, tokenizer = PromptSource.open(config), PromptTokenizer(root / "model", apply_chat_template=True)
    at = RolloutRound("bench", 0, 0)
    store = Store(str(root / "store"))
    cluster = Cluster.start()
    try:
        args = {"max_total_tokens": 160_000}
        pool = EnginePool(cluster, ServerSpec(model_path=str(root / "model"), weight_version="bench/0", args=args))
        bodies = [
            {
                "input_ids": [sample.token_ids for sample in group],
                "sampling_params": config.sampling_params(),
                "return_logprob": True,
            }
            for group in new_groups(
                source.take(source.restore(None), prompts)[0], tokenizer, at, config.n_samples_per_prompt
            )
        ]
        asyncio.run(bare(pool.urls[0], bodies[: max(1, prompts // 8)]))  # warm up
        stage_seconds: list[float] = []
        with make_grader(config) as grader:
            context = RolloutContext(store, config, source, tokenizer, pool.urls, grader)

            def stage() -> int:
                commit = rollout_stage(context, f"bench/{len(stage_seconds)}", at)
                stage_seconds.append(sum(commit.seconds.values()))
                return round(commit.summary["rollout/response_len/mean"] * commit.summary["rollout/num_samples"])

            work = {"bare": lambda: asyncio.run(bare(pool.urls[0], bodies)), "stage": stage}
            speeds: dict[str, list[float]] = {name: [] for name in work}
            for name in [*work, *reversed(work)] * repeats:  # in turns, so that a slow minute hits both
                asyncio.run(flush(pool.urls[0]))  # a full cache makes whoever comes second evict
                start = time.perf_counter()
                tokens = work[name]()
                speeds[name].append(tokens / (time.perf_counter() - start))
        ratio = statistics.median(speeds["stage"]) / statistics.median(speeds["bare"])
        print(
            f"\nThe rollout stage against the bare engine ({prompts} x 8 samples of 256 tokens, "
            f"{statistics.median(stage_seconds):.1f} s a stage)"
        )
        for name, values in speeds.items():
            print(
                f"  {name:<8}{statistics.median(values):10,.0f} tokens/s   "
                f"(each: {', '.join(f'{value:,.0f}' for value in values)})"
            )
        print(f"  ratio   {ratio:10.3f}")
        pool.stop()
    finally:
        cluster.stop()


async def flush(url: str) -> None:
    """Empty the server's prefix cache."""
    from penstock.engines.sglang import control

    await asyncio.to_thread(control.call_server, url, "/flush_cache", {})


async def bare(url: str, bodies: list[dict]) -> int:
    """All requests at once, as raw as they come. Returns the number of generated tokens."""
    from penstock.engines.serving import keys

    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=600), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def one(body: dict) -> int:
            async with session.post(f"{url}/generate", json=body, headers=keys.auth_headers(url)) as response:
                return sum(answer["meta_info"]["completion_tokens"] for answer in await response.json())

        return sum(await asyncio.gather(*map(one, bodies)))


if __name__ == "__main__":
    main()
