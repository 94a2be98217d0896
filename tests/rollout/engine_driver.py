"""A driver for test_supervised_engines.py: `python engine_driver.py hold|go_on ADDRESS MODEL DIRECTORY`, on a standing Ray.

`hold` starts two engines and waits to be killed. `go_on` takes them over, makes two rounds, the second one through SGLang's router, in each
of which one of them is killed, and lets a second pool take over in turn. Both write what they saw to DIRECTORY/<what>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from scripted_engine import write_jsonl

from engines.cluster import Cluster
from engines.sglang.args import check_router_args
from engines.sglang.client import EngineClient
from engines.sglang.pool import EnginePool
from engines.sglang.router import Router
from engines.sglang.server import ServerSpec
from engines.weights.publisher import make_publisher
from stages.rollout.beginning import beginning_of
from stages.rollout.config import RolloutConfig
from stages.rollout.prompts.source import PromptSource
from stages.rollout.rollout import rollout_stage
from stages.rollout.round import Round
from stages.rollout.tokenizer import PromptTokenizer
from storage.refs import RunKeys
from storage.store import Store

NUM_PROMPTS, NUM_SAMPLES, WAVE = 40, 4, 60
KEYS = RunKeys("run")


def main(what: str, address: str, model: str, directory: str) -> None:
    cluster = Cluster.start(address, namespace="penstock-run")
    pool = EnginePool(cluster, ServerSpec(model_path=model, log_dir=directory), num_engines=2)
    start = time.monotonic()
    seen: dict[str, Any] = {"urls": pool.urls, "pids": pool.pids(), "adopted": pool.adopted, "seconds": time.monotonic() - start}
    if what == "go_on":
        seen |= rounds_with_a_kill(pool, Path(model), Path(directory)) | second_pool(cluster, pool)
    report = Path(directory) / f"{what}.json"
    report.with_suffix(".part").write_text(json.dumps(seen))
    report.with_suffix(".part").rename(report)
    if what == "hold":
        signal.pause()
    cluster.stop()


def rounds_with_a_kill(pool: EnginePool, model: Path, directory: Path) -> dict[str, Any]:
    """Two rounds by two policies, over-sampled; when a quarter of one is there, its first engine is killed."""
    rows = [{"input": f"{i}+8=", "label": str(i + 8)} for i in range(WAVE)]
    config = RolloutConfig(
        prompt_data=write_jsonl(directory / "rows.jsonl", rows),
        label_key="label",
        apply_chat_template=True,
        rollout_batch_size=NUM_PROMPTS,
        over_sampling_batch_size=WAVE,
        partial_rollout=True,
        n_samples_per_prompt=NUM_SAMPLES,
        rollout_max_response_len=128,
        sglang_server_concurrency=64,
        rm_type="exact_number",
    )
    store, source = Store(str(directory / "store")), PromptSource.open(config)

    def round(r: int, connect: Any = EngineClient) -> dict[str, Any]:
        published: list[list[str]] = []
        killed: list[int] = []

        def publish(urls: list[str]) -> None:
            published.append(urls)
            make_publisher(urls).publish(iter(load_file(model / "model.safetensors").items()), f"run/{r}")

        def kill_one(done: int, total: int) -> None:
            if not killed and done >= total // 4:
                killed.append(pool.pids()[0])
                os.kill(killed[0], signal.SIGKILL)

        with pool.serving(f"run/{r}", publish) as live:
            before = live()
            commit = rollout_stage(
                store,
                KEYS.rollout(r),
                Round("run", rollout_id=r, policy_version=r),
                engines=live,
                source=source,
                tokenizer=PromptTokenizer(model, apply_chat_template=True),
                config=config,
                beginning=beginning_of(store, KEYS, r),
                on_progress=kill_one,
                connect=connect,
            )
            start = time.monotonic()
            while len(live()) < 2 and time.monotonic() - start < 120:
                time.sleep(0.1)
            return {
                "before": before,
                "after": live(),
                "killed": killed,
                "published": published,
                "versions": pool.weight_versions(),
                "seconds": commit.seconds["generate"],
                "seconds_until_back": time.monotonic() - start,
            }

    direct = round(0)
    with Router(check_router_args({}), str(directory)) as router:
        pool.listener = router.lead_to
        routed = round(1, partial(EngineClient, router=router.address))
    return {"direct": direct, "routed": routed, "log": pool.log_tails(5)}


def second_pool(cluster: Cluster, first: EnginePool) -> dict[str, Any]:
    """Another driver takes the engines over; then the first one cannot end them. A third one needs only one of them."""
    pids = first.pids()
    second = EnginePool(cluster, first.spec, num_engines=2)
    adopted = (second.urls and second.adopted, second.pids() == pids)
    try:
        first.ensure_alive()
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    first.stop()
    survived = [psutil.pid_exists(pid) for pid in pids]
    third = EnginePool(cluster, first.spec, num_engines=1)
    kept = third.pids() == pids[:1] and ended(pids[1]) and psutil.pid_exists(pids[0])
    third.stop()
    return {"second_adopted": adopted, "refusal": refusal, "survived": survived, "one_kept": kept, "gone": ended(pids[0])}


def ended(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + 15
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
