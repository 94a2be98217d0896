"""A driver for test_supervised_engines.py: `python engine_driver.py hold|go_on ADDRESS MODEL DIRECTORY`, on a standing Ray.

`hold` starts two engines and waits to be killed. `go_on` takes them over, makes a round while one of them is killed, and lets a second
pool take over in turn. Both write what they saw to DIRECTORY/<what>.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file
from scripted_engine import write_jsonl

from engines.cluster import Cluster
from engines.sglang.pool import EnginePool
from engines.sglang.server import ServerSpec
from engines.weights.publisher import make_publisher
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import PromptSource
from stages.rollout.generate import Round
from stages.rollout.rollout import rollout_stage
from stages.rollout.tokenizer import PromptTokenizer
from storage.store import Store

NUM_PROMPTS, NUM_SAMPLES = 40, 4


def main(what: str, address: str, model: str, directory: str) -> None:
    cluster = Cluster.start(address, namespace="penstock-run")
    pool = EnginePool(cluster, ServerSpec(model_path=model, log_dir=directory), num_engines=2)
    start = time.monotonic()
    seen: dict[str, Any] = {"urls": pool.urls, "pids": pool.pids(), "adopted": pool.adopted, "seconds": time.monotonic() - start}
    if what == "go_on":
        seen |= round_with_a_kill(pool, Path(model), Path(directory)) | second_pool(cluster, pool)
    report = Path(directory) / f"{what}.json"
    report.with_suffix(".part").write_text(json.dumps(seen))
    report.with_suffix(".part").rename(report)
    if what == "hold":
        signal.pause()
    cluster.stop()


def round_with_a_kill(pool: EnginePool, model: Path, directory: Path) -> dict[str, Any]:
    """One round; when a quarter of it is there, the first engine is killed."""
    rows = [{"input": f"{i}+8=", "label": str(i + 8)} for i in range(NUM_PROMPTS)]
    config = RolloutConfig(
        prompt_data=write_jsonl(directory / "rows.jsonl", rows),
        label_key="label",
        apply_chat_template=True,
        rollout_batch_size=NUM_PROMPTS,
        n_samples_per_prompt=NUM_SAMPLES,
        rollout_max_response_len=128,
        rollout_sampling={"ignore_eos": True},
        sglang_server_concurrency=16,
        rm_type="exact_number",
    )
    published: list[list[str]] = []
    killed: list[int] = []

    def publish(urls: list[str]) -> None:
        published.append(urls)
        make_publisher(urls).publish(iter(load_file(model / "model.safetensors").items()), "run/0")

    def kill_one(done: int, total: int) -> None:
        if not killed and done >= total // 4:
            killed.append(pool.pids()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pool.serving("run/0", publish) as live:
        before = live()
        commit = rollout_stage(
            Store(str(directory / "store")),
            "rollouts/000000",
            Round("run", rollout_id=0, policy_version=0),
            engines=live,
            source=PromptSource.open(config),
            tokenizer=PromptTokenizer(model, apply_chat_template=True),
            config=config,
            on_progress=kill_one,
        )
        start = time.monotonic()
        while len(live()) < 2 and time.monotonic() - start < 120:
            time.sleep(0.1)
        after = live()
    return {
        "before": before,
        "after": after,
        "killed": killed,
        "published": published,
        "versions": pool.weight_versions(),
        "log": pool.log_tails(5),
        "round_seconds": commit.seconds,
        "seconds_until_back": time.monotonic() - start,
    }


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
