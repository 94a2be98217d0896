"""Compare the time of recovery after a crash (load a checkpoint, replay training of the committed rounds after it) with
the time of generating and training these rounds again.

    python benchmarks/recovery.py      12 rounds of the tiny recipe, recovery from versions 8, 4 and 0
    python benchmarks/recovery.py --store S --run R --versions 0   recovery of an existing run

For each version, a new trainer loads its checkpoint and replays all later rounds of the run.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model
from penstock.flows.config import PostTrainConfig, RunConfig
from penstock.flows.runtime import environment
from penstock.flows.runtime.runs import open_store, read_flow_and_config
from penstock.storage.commit import CheckpointRef, RunKeys

sys.path.insert(0, str(Path(__file__).parent))

from run import tiny_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="store of --run")
    parser.add_argument("--run", help="existing run to recover; default: run the tiny recipe first")
    parser.add_argument(
        "--versions",
        type=int,
        nargs="+",
        default=[8, 4, 0],
        help="policy versions whose checkpoints are loaded; 0: the starting weights",
    )
    options = parser.parse_args()
    environment.set_default_variables()
    if options.run:
        measure_recovery(read_flow_and_config(RunConfig(store=options.store), options.run)[1], options.versions)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        root = Path(scratch)
        make_tiny_model(root / "model", max_length=1024)
        make_tiny_data(root / "data")
        # Responses of 128 tokens, so that generation takes measurable time.
        rollout = {"rm_type": "random", "rollout_max_response_len": 128, "rollout_sampling": {"ignore_eos": True}}
        run = {"run": "bench", "store": str(root / "store"), "num_rollout": 12, "save_interval": 4}
        config = tiny_config(root, run=run, rollout=rollout)
        from penstock.flows.runtime.runner import run_flow

        assert run_flow("train", config) == 0
        measure_recovery(config, options.versions)


def measure_recovery(config: PostTrainConfig, versions: list[int]) -> None:
    """Recover the run's last policy from each of the `versions`. Print the seconds, and their ratio to the seconds that
    generating and training the rounds again would take."""
    from penstock.engines.cluster import Cluster
    from penstock.engines.families import read_shape
    from penstock.stages.train.restore import PolicyRestorer
    from penstock.stages.train.spec import TrainerSpec
    from penstock.stages.train.trainer_group import TrainerGroup

    store, keys = open_store(config.run), RunKeys(config.run.run)
    rounds = len(store.committed_indices(f"{keys.prefix}/steps"))
    base = CheckpointRef.model_validate_json(store.read(f"{keys.prefix}/base.json") or b"")
    spec = TrainerSpec(
        run=keys.run,
        shape=read_shape(config.convert.hf_checkpoint),
        config=config.train,
        temperature=config.rollout.rollout_temperature,
        store=store.uri,
    )
    cluster = Cluster.start()
    print(f"\nRecovery of policy version {rounds} in a new trainer, in seconds")
    print(
        f"  {'from':<18}{'start':>8}{'load':>8}{'replay':>8}{'per round':>11}"
        f"{'generate and train again':>26}{'ratio':>8}"
    )
    for version in versions:
        group = TrainerGroup(cluster, spec)
        times = [time.perf_counter()]
        group.ensure_started()
        times.append(time.perf_counter())
        policy = PolicyRestorer(store, keys, group, base)
        policy.load_checkpoint(version)
        times.append(time.perf_counter())
        for rollout_id in range(version, rounds):
            verdict = policy.replay_round(rollout_id).verdict
            assert verdict != "DIFFERS"
        times.append(time.perf_counter())
        group.kill()
        started, loaded, replayed = (after - before for before, after in itertools.pairwise(times))
        commits = [
            commit
            for r in range(version, rounds)
            for prefix in (keys.rollout_prefix(r), keys.step_prefix(r))
            if (commit := store.committed(prefix))
        ]
        again = sum(sum(commit.seconds.values()) for commit in commits)
        name = f"checkpoint {version}" if version else "starting weights"
        print(
            f"  {name:<18}{started:8.1f}{loaded:8.1f}{replayed:8.1f}{replayed / (rounds - version):11.2f}{again:26.1f}"
            f"{(loaded + replayed) / again:8.2f}"
        )
    train, rollout = (
        statistics.median(sum(c.seconds.values()) for r in range(rounds) if (c := store.committed(prefix_of(r))))
        for prefix_of in (keys.step_prefix, keys.rollout_prefix)
    )
    print(f"  medians per round: rollout {rollout:.2f} s, training {train:.2f} s")
    cluster.stop()


if __name__ == "__main__":
    main()
