"""A driver for test_supervised_engines.py: `python engine_driver.py hold|resume ADDRESS MODEL DIRECTORY`, on a standing
Ray.

`hold` starts two engines and waits to be killed. `resume` adopts them; then a second and a third pool adopt the engines
in turn. Both commands write their observations to DIRECTORY/<command>.json.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from penstock.engines.cluster import Cluster
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import restart_dead_engines


def main(what: str, address: str, model: str, directory: str) -> None:
    cluster = Cluster.start(address, namespace="penstock-run")
    pool = EnginePool(cluster, ServerSpec(model_path=model, log_dir=directory), num_engines=2)
    adopted = [replica.adopted for replica in pool.replicas]
    seen: dict[str, Any] = {"urls": pool.urls, "pids": pids_of(pool), "adopted": adopted}
    if what == "resume":
        seen |= second_pool(cluster, pool)
    report = Path(directory) / f"{what}.json"
    report.with_suffix(".part").write_text(json.dumps(seen))
    report.with_suffix(".part").rename(report)
    if what == "hold":
        signal.pause()
    cluster.stop()


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
