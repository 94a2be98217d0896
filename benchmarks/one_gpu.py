"""Run the whole loop on one GPU: the shape of Qwen3-0.6B with random bf16 weights, trainer and engine on the same GPU,
weights sent over CUDA IPC.

    python benchmarks/one_gpu.py DIRECTORY [further `penstock train` options]

Prints the seconds and metrics of every round from the run's commits, among them tokens per second and the difference
between the trainer's and the engine's log-probs.
"""

import sys
from pathlib import Path

from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment
from penstock.flows.runtime.runner import run_flow
from penstock.flows.runtime.runs import open_store
from penstock.storage.refs import RunKeys

sys.path.insert(0, str(Path(__file__).parent))

from gpu_models import make_model, write_prompts

RECIPE = Path(__file__).parent.parent / "configs/recipes/qwen3-0.6b-1gpu.toml"


def main(directory: Path, train_options: list[str]) -> int:
    environment.set_default_variables()
    directory.mkdir(parents=True, exist_ok=True)
    model, prompts = make_model("0.6b", directory), write_prompts(directory / "prompts.jsonl")
    config = parse_config(
        [
            *(
                "--config",
                str(RECIPE),
                "--run",
                "one-gpu",
                "--store",
                str(directory / "store"),
                "--hf-checkpoint",
                str(model),
            ),
            *("--prompt-data", str(prompts), "--rollout-sampling", "ignore_eos=true", *train_options),
        ]
    )
    code = run_flow("post_train", config)
    print_rounds(config)
    return code


def print_rounds(config) -> None:
    """Print the phase seconds and metrics in the rollout and step commits of every round."""
    store, keys = open_store(config.run), RunKeys(config.run.run)
    for r in store.committed_indices(f"{keys.prefix}/steps"):
        rollout, step = store.committed(keys.rollout_prefix(r)), store.committed(keys.step_prefix(r))
        print(f"\nround {r}")
        for commit in (rollout, step):
            print("  seconds ", {name: round(value, 3) for name, value in commit.seconds.items()})
            print("  metrics ", {name: round(value, 6) for name, value in commit.summary.items()})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
