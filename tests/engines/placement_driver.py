"""A driver that places processes on GPUs of a Ray cluster, which exist only in Ray's accounting; a separate program, as
a process can be in one Ray only.

usage: placement_driver.py ADDRESS TRAINER_GPUS ENGINE_GPUS GPUS_PER_ENGINE

Each line on standard input places the trainer and the engines, starts an actor on every placement, and is answered by
`placed` and JSON: for each actor its node's address and its GPU ids, and whether the run spans nodes; or the name of an
error.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from penstock.engines.cluster import Cluster
from penstock.engines.network import node_address
from penstock.engines.placement import NodeLost, PlacementOptions


class Actor:
    def address(self) -> str:
        return node_address()


def main() -> None:
    address, trainer, engines, size = sys.argv[1], *map(int, sys.argv[2:])
    options = PlacementOptions(trainer_gpus=trainer, engine_gpus=engines, gpus_per_engine=size)
    cluster = Cluster.start(address, namespace="penstock-placement", options=options)
    import ray

    for _ in sys.stdin:
        answer: Any
        try:
            slots = [
                *cluster.place_processes(trainer),
                *cluster.place_processes(engines // size, size, trainer),
            ]
            actor: Any = ray.remote(Actor)
            actors = [actor.options(**slot.options).remote() for slot in slots]
            addresses = ray.get([each.address.remote() for each in actors], timeout=120)
            places = [[where, *slot.gpu_ids] for where, slot in zip(addresses, slots, strict=True)]
            answer = [*places, cluster.spans_nodes]
        except (NodeLost, ray.exceptions.ActorDiedError):  # ActorDied: Ray saw the death after assigning the GPUs
            answer = NodeLost.code
        print("placed", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
