"""The soak: the demo's GRPO run, killed at random again and again, learns what the run without kills learns. A program;
a test runs it short.

    python tests/durability/soak.py --directory soak                three demos without kills, then 60 rounds with them

In every round, with probability 0.1, a random target is killed at a random moment, and in the middle the Prefect server
is away for a minute. The run recovers by itself or is restarted. At the end its reward may differ from the
undisturbed run's by no more than seeds differ from each other, and a clean replay must give its weights, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from harness import Pipeline, World

from penstock.flows.config import RECIPES, read_toml
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

SOAK_TARGETS = ("driver", "engine", "trainer", "ray", "tree")
SEEDS = (0, 1, 2)
LAST = 10  # rounds whose mean reward is compared


def soak(pipeline: Pipeline, num_rounds: int, probability: float, seed: int, outage: float) -> dict[str, int]:
    """Run `num_rounds` rounds with random kills; half-way the Prefect server is down for `outage` seconds. Return how
    often each target was killed."""
    rng, killed = random.Random(seed), dict.fromkeys(SOAK_TARGETS, 0)
    for rollout_id in range(num_rounds):
        pipeline.run_until(partial(committed, pipeline, rollout_id))
        if rollout_id == num_rounds // 2:
            without_prefect(pipeline, outage)
        if rng.random() < probability and pipeline.returncode() is None:
            time.sleep(rng.uniform(0, 1))
            target = rng.choice(SOAK_TARGETS)
            killed[target] += pipeline.returncode() is None and pipeline.strike(target) > 0
    pipeline.run_until(lambda: False)
    return killed


def without_prefect(pipeline: Pipeline, seconds: float) -> None:
    """Stop the Prefect server and start it again."""
    pipeline.world.stop("prefect")
    back = time.monotonic() + seconds
    ended = not pipeline.run_until(lambda: time.monotonic() > back)
    assert not ended, f"the run ended without reporting it to Prefect:\n{pipeline.tail()}"
    pipeline.world.start_prefect()


def committed(pipeline: Pipeline, rollout_id: int) -> bool:
    """Return whether a round was trained."""
    return pipeline.store.committed(pipeline.keys.step_prefix(rollout_id)) is not None


def last_reward(store: Store, keys: RunKeys) -> float:
    """Return the mean reward of the last rounds."""
    rounds = store.committed_indices(f"{keys.prefix}/rollouts")[-LAST:]
    commits = [store.committed(keys.rollout_prefix(rollout_id)) for rollout_id in rounds]
    return statistics.mean(commit.summary["rollout/raw_reward"] for commit in commits if commit)


def demo_flags(demo: Path, seed: int, num_rounds: int) -> list[str]:
    """Return the flags of the demo's second half, on the export of the first half in `demo`."""
    sft = RunKeys(f"demo-sft-seed{seed}")
    store = Store(str(demo / "store"))
    commit = store.committed(sft.export_prefix(store.committed_indices(f"{sft.prefix}/exports")[-1]))
    assert commit is not None and commit.attempt is not None
    data = demo / "inputs" / f"data-seed{seed}"
    words = f"""--config demo-grpo --num-rollout {num_rounds}
        --hf-checkpoint {store.path(commit.attempt)} --prompt-data {data / "train.jsonl"}
        --rollout-seed {seed} --seed {seed} --eval-prompt-data heldout {data / "heldout.jsonl"}"""
    return words.split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="finished demos in it are not run again")
    parser.add_argument("--probability", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=7, help="of the kills")
    parser.add_argument("--outage", type=float, default=60.0, help="seconds without a Prefect server")
    options = parser.parse_args()
    num_rounds = read_toml(RECIPES / "demo-grpo.toml")["run"]["num_rollout"]
    demo, rewards = options.directory / "demo", []
    for seed in SEEDS:
        words = ["demo", "--seed", str(seed), "--directory", str(demo)]
        subprocess.run([sys.executable, "-m", "penstock", *words], check=True, stdout=subprocess.DEVNULL)
        rewards.append(last_reward(Store(str(demo / "store")), RunKeys(f"demo-grpo-seed{seed}")))
        print(f"seed {seed} without kills: reward {rewards[-1]:.3f}", flush=True)
    root = options.directory / f"soak-{int(time.time())}"
    root.mkdir()
    with World(root) as world:
        world.start_prefect()
        pipeline = Pipeline(world, "soak", str(root / "store"), demo_flags(demo, SEEDS[0], num_rounds))
        killed = soak(pipeline, num_rounds, options.probability, options.seed, options.outage)
        reward = last_reward(pipeline.store, pipeline.keys)
        print(f"killed {killed}, started {pipeline.num_starts} times: reward {reward:.3f}", flush=True)
        print(f"flow runs: {', '.join(world.flow_states())}", flush=True)
        print(f"checked: {pipeline.check()}; replayed {pipeline.replay()} rounds bit for bit", flush=True)
    spread = max(rewards) - min(rewards)
    good = abs(reward - rewards[0]) <= spread  # the difference to the undisturbed run is within that between seeds
    verdict = "within" if good else "NOT within"
    print(f"without kills {min(rewards):.3f} to {max(rewards):.3f}: {verdict} the spread of the seeds")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
