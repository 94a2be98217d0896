"""Train with verl (FSDP, and vLLM on the same GPUs) by GRPO, and report the figures of peers.py.

    python benchmarks/peers/verl_grpo.py DIRECTORY --model model --data data [--rounds 40] [-- HYDRA OVERRIDES]

Needs verl 0.9.1 with its extras `vllm` and flash-attn. The overrides after `--` are further settings of verl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from peers import GpuMemory, Round, Settings, held_out_tasks, make_peer_parser, read_rows, read_settings, report

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import parse_options

DIFFERENCES = [
    "order of the prompts and random numbers",
    "fp32 weights under FSDP with bf16 computation; Penstock: bf16 weights with an fp32 copy in the optimizer",
    "old log-probs are computed by a forward pass, as by default; with one update a round Penstock needs none",
    "ratios above 3 with negative advantage are clipped as well (clip_ratio_c)",
    "the engine's weights and cache are freed during the update (free_cache_engine), as by default",
    "held-out answers come from vLLM; not deterministic",
]
POLL_SECONDS = 0.01


def main() -> int:
    parser = make_peer_parser(__doc__, "verl")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="longest prompt")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    options = parse_options(parser)
    options.directory.mkdir(parents=True, exist_ok=True)
    settings, start = read_settings(options), time.time()
    configuration = overrides(options, settings)
    log = options.directory / f"{options.name}-seed{options.seed}.jsonl"
    log.unlink(missing_ok=True)
    with GpuMemory() as memory:
        lines = run_verl(configuration, log, options.directory / f"{options.name}-seed{options.seed}.log")
    held_out = {task: describe_held_out(lines, task) for task in held_out_tasks(options)}
    report(
        options,
        describe_rounds(lines),
        memory,
        held_out=held_out,
        start={"update committed": next(at for at, line in lines if "actor/grad_norm" in line["data"]) - start},
        configuration=configuration,
        differences=DIFFERENCES,
    )
    return 0


def overrides(options: Namespace, settings: Settings) -> list[str]:
    """Return verl's settings, and write its rows."""
    files = {name: write_rows(options, name) for name in ("train", *(f"heldout-{t}" for t in held_out_tasks(options)))}
    train, evaluation = files["train"], [path for name, path in files.items() if name != "train"] or [files["train"]]
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={train}",
        f"data.val_files=[{','.join(map(str, evaluation))}]",
        f"data.train_batch_size={settings.prompts}",
        f"data.max_prompt_length={options.prompt_tokens}",
        f"data.max_response_length={settings.response_tokens}",
        f"data.seed={options.seed}",
        f"actor_rollout_ref.model.path={options.model.resolve()}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={options.gradient_checkpointing}",
        f"{actor}.ppo_mini_batch_size={settings.prompts}",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu={settings.micro_batch_tokens}",
        f"{actor}.loss_agg_mode=seq-mean-token-mean",
        f"{actor}.clip_ratio_low={settings.eps_clip}",
        f"{actor}.clip_ratio_high={settings.eps_clip_high}",
        f"{actor}.optim.lr={settings.lr}",
        f"{actor}.optim.betas=[0.9,{settings.adam_beta2}]",
        f"{actor}.optim.weight_decay={settings.weight_decay}",
        f"{rollout}.name=vllm",
        f"{rollout}.n={settings.samples}",
        f"{rollout}.temperature={settings.temperature}",
        f"{rollout}.ignore_eos={settings.fixed_length}",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization={options.engine_memory}",
        f"{rollout}.max_num_seqs={settings.prompts * settings.samples}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('verl_reward.py').resolve()}",
        f"+reward.custom_reward_function.reward_kwargs.path={options.reward.resolve()}",
        f"trainer.n_gpus_per_node={options.gpus}",
        f"trainer.val_before_train={not options.no_held_out}",
        f"trainer.test_freq={-1 if options.no_held_out else options.rounds // 2}",
        f"trainer.total_training_steps={options.rounds}",
        "trainer.total_epochs=1000000",
        "trainer.logger=[console,file]",
        "trainer.resume_mode=disable",
        *options.train_options,
    ]


def write_rows(options: Namespace, name: str) -> Path:
    """Write the rows of a file in verl's form, and return its path."""
    path = (options.directory / f"verl-{name}.jsonl").resolve()
    source = name.removeprefix("heldout-")
    rows = [
        {
            "data_source": source,
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["label"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(read_rows(options.data / f"{name}.jsonl"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Lines = list[tuple[float, dict[str, Any]]]  # time, {"step", "data"}


def run_verl(configuration: list[str], metrics: Path, output: Path) -> Lines:
    """Run verl to its end, and return the lines of its file logger with the time at which each was written."""
    here = str(Path(__file__).parent.resolve())
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    env = os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONPATH": path}
    lines: Lines = []
    with output.open("w") as log:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *configuration]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        running, read = True, 0
        while running:
            running = process.poll() is None  # read once more after the end
            time.sleep(POLL_SECONDS)
            text = metrics.read_bytes() if metrics.exists() else b""
            complete = text[: text.rfind(b"\n") + 1]
            lines += [(time.time(), json.loads(line)) for line in complete[read:].splitlines()]
            read = len(complete)
    if process.returncode:
        raise SystemExit(f"verl failed with exit code {process.returncode}: see {output}")
    return lines


def describe_rounds(lines: Lines) -> list[Round]:
    """Return the rounds. The first one has no end of a round before it: its total is the time of its step."""
    rounds: list[Round] = []
    before: float | None = None
    for at, line in lines:
        data = line["data"]
        if "timing_s/step" not in data:
            continue
        seconds = {
            "generation": data["timing_s/gen"],
            "training": data["timing_s/old_log_prob"] + data["timing_s/update_actor"],
            "weight update": data["timing_s/update_weights"],
        }
        total = data["timing_s/step"] if before is None else at - before - data.get("timing_s/testing", 0.0)
        rounds.append(Round(seconds, total, data["critic/score/mean"], data["response_length/mean"]))
        before = at
    return rounds


def describe_held_out(lines: Lines, task: str) -> dict[int, dict[str, float]]:
    """Return number of trained rounds -> accuracy and mean reward of a task."""
    results = {}
    for _, line in lines:
        means = {  # name of a value -> mean
            key.split("/")[2]: value
            for key, value in line["data"].items()
            if key.startswith((f"val-core/{task}/", f"val-aux/{task}/")) and key.endswith("/mean@1")
        }
        if means:
            figures = {"accuracy": means["correct"], "reward": means["score"]}
            results[line["step"]] = {name: round(value, 4) for name, value in figures.items()}
    return results


if __name__ == "__main__":
    sys.exit(main())
