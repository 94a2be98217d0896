"""A driver for test_supervised_engines.py: `python engine_driver.py hold|resume ADDRESS MODEL DIRECTORY`, on a standing
Ray.

`hold` starts two engines and waits to be killed. `resume` adopts them and runs two rounds, the second one through
SGLang's router; in each round one engine is killed. Then a second pool adopts the engines in turn. Both commands write
their observations to DIRECTORY/<command>.json.
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

from penstock.engines.cluster import Cluster
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import restart_dead_engines
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.passthrough import check_router_args
from penstock.engines.sglang.router import SGLangRouter
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

NUM_PROMPTS, NUM_SAMPLES, WAVE = 40, 4, 60
KEYS = RunKeys("run")


def main(what: str, address: str, model: str, directory: str) -> None:
    cluster = Cluster.start(address, namespace="penstock-run")
    pool = EnginePool(cluster, ServerSpec(model_path=model, log_dir=directory), num_engines=2)
    start = time.monotonic()
    seen: dict[str, Any] = {
        "urls": pool.urls,
        "pids": pids_of(pool),
        "adopted": [replica.adopted for replica in pool.replicas],
        "seconds": time.monotonic() - start,
    }
    if what == "resume":
        seen |= rounds_with_a_kill(pool, Path(model), Path(directory)) | second_pool(cluster, pool)
    report = Path(directory) / f"{what}.json"
    report.with_suffix(".part").write_text(json.dumps(seen))
    report.with_suffix(".part").rename(report)
    if what == "hold":
        signal.pause()
    cluster.stop()


def rounds_with_a_kill(pool: EnginePool, model: Path, directory: Path) -> dict[str, Any]:
    """Run two over-sampled rounds by two policies; kill the first engine after a quarter of each."""
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
        engine_concurrency=64,
        rm_type="exact_number",
    )
    store, source = Store(str(directory / "store")), PromptSource.open(config)

    def round(r: int, connect: Any = SGLangClient) -> dict[str, Any]:
        published: list[list[str]] = []
        killed: list[int] = []

        def publish(urls: list[str]) -> None:
            published.append(urls)
            SGLangClient(urls).update_weights(iter(load_file(model / "model.safetensors").items()), f"run/{r}")

        def kill_one(done: int, total: int) -> None:
            if not killed and done >= total // 4:
                killed.append(pool.replicas[0].place().pid)
                os.kill(killed[0], signal.SIGKILL)

        with pool.serving(f"run/{r}", publish) as live:
            before = live()
            commit = rollout_stage(
                RolloutContext(
                    store,
                    config,
                    source,
                    PromptTokenizer(model, apply_chat_template=True),
                    live,
                    on_progress=kill_one,
                    connect=connect,
                ),
                KEYS.rollout_prefix(r),
                RolloutRound("run", rollout_id=r, policy_version=r),
                read_resume_point(store, KEYS, r),
            )
            start = time.monotonic()
            while len(live()) < 2 and time.monotonic() - start < 120:
                time.sleep(0.1)
            return {
                "before": before,
                "after": live(),
                "killed": killed,
                "published": published,
                "versions": [replica.weight_version() for replica in pool.replicas],
                "seconds": commit.seconds["generate"],
                "seconds_until_back": time.monotonic() - start,
            }

    direct = round(0)
    with SGLangRouter(check_router_args({}), str(directory)) as router:
        pool.listener = router.set_backends
        routed = round(1, partial(SGLangClient, router=router.address))
    return {"direct": direct, "routed": routed}


def pids_of(pool: EnginePool) -> list[int]:
    return [replica.place().pid for replica in pool.replicas]


def second_pool(cluster: Cluster, first: EnginePool) -> dict[str, Any]:
    """Let a second pool adopt the engines, so the first one cannot stop them; a third pool needs only one of them."""
    pids = pids_of(first)
    second = EnginePool(cluster, first.spec, num_engines=2)
    adopted = (
        second.urls and [replica.adopted for replica in second.replicas],
        pids_of(second) == pids,
    )
    try:
        restart_dead_engines(first.replicas)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    first.stop()
    survived = [psutil.pid_exists(pid) for pid in pids]
    third = EnginePool(cluster, first.spec, num_engines=1)
    kept = pids_of(third) == pids[:1] and ended(pids[1]) and psutil.pid_exists(pids[0])
    third.stop()
    return {
        "second_adopted": adopted,
        "refusal": refusal,
        "survived": survived,
        "one_kept": kept,
        "gone": ended(pids[0]),
    }


def ended(pid: int) -> bool:
    """Return whether a process ends within 15 s."""
    deadline = time.monotonic() + 15
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not psutil.pid_exists(pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
