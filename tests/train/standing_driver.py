"""A driver of a trainer on a standing Ray, controlled line by line; a separate program, as a process can be in one Ray
only.

usage: standing_driver.py ADDRESS STORE HF_MODEL LEARNING_RATE

Lines on standard input are `ensure VERSION`, `round ROLLOUT` (train and commit), `train ROLLOUT` (train only), `state`
and `kill`; each is answered by one line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from penstock.engines.cluster import Cluster
from penstock.engines.families import read_shape
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.spec import TrainerSpec
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef, RunKeys
from penstock.storage.store import Store

KEYS = RunKeys("run")


def answer(group: TrainerGroup, store: Store, base: CheckpointRef, command: str, *words: str) -> dict[str, Any]:
    told: list[str] = []
    try:
        if command == "ensure":
            PolicyRestorer(store, KEYS, group, base, on_progress=told.append).restore(int(words[0]))
        elif command == "round":
            PolicyRestorer(store, KEYS, group, base).train_round(int(words[0]))
        elif command == "train":
            rollout = store.committed(KEYS.rollout_prefix(int(words[0])))
            assert rollout is not None
            group.train(rollout, int(words[0]))
        elif command == "kill":
            group.kill()
            return {"left": [group.cluster.find_actor(f"trainer-{rank}") is not None for rank in range(3)]}
        state = group.policy_state()
    except Exception as error:
        return {"error": type(error).__name__, "told": str(error)}
    if state is None:
        return {"state": None}
    ranks = group._call("adopt", group._owner)
    pids = [rank.pid for rank in ranks]
    return {"version": state.version, "clean": state.clean, "pids": pids, "told": told, "digest": group.digest()}


def main() -> None:
    address, uri, model, lr = sys.argv[1:]
    store = Store(uri)
    base = store.read_record(CheckpointRef, "base.json")
    config = TrainConfig(lr=float(lr), num_steps_per_rollout=2, actor_num_gpus_per_node=2, trainer_threads=1)
    cluster = Cluster.start(address, namespace=f"penstock-{KEYS.run}")
    spec = TrainerSpec(run=KEYS.run, shape=read_shape(model), config=config, store=uri)
    group = TrainerGroup(cluster, spec)
    for line in sys.stdin:
        print(json.dumps(answer(group, store, base, *line.split())), flush=True)


if __name__ == "__main__":
    main()
