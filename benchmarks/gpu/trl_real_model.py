"""Train a real model on the tasks of real_model.py with TRL's GRPOTrainer, and report the same figures.

    python benchmarks/gpu/trl_real_model.py DIRECTORY --model model --data data [--seed 0] [--rounds 100]

The settings are those of examples/smollm2/run.toml. TRL generates with transformers, and computes with fp32 weights
under bf16 autocast. Held-out rows are graded by the reward of the example. Different from Penstock: the order of the
prompts, the random numbers, and padded micro-batches of --micro-batch samples.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from real_model import TASKS, WARM_UP_ROUNDS, block_means, make_run_parser, median_speed
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from penstock.flows.config import read_toml
from penstock.stages.eval.scores import bootstrap_intervals

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, "examples/smollm2")

from report import parse_options, write_report
from reward import reward_func

CURVES = {  # names of real_model.py -> those of TRL's log
    "rollout/raw_reward": "rewards/score/mean",
    "rollout/rewards/correct": "rewards/correct/mean",
    "rollout/response_len/mean": "completions/mean_length",
    "train/grad_norm": "grad_norm",
}
EVAL_BATCH = 128


def main() -> int:
    parser = make_run_parser(__doc__, "trl")
    parser.add_argument("--lr", type=float, help="default: that of the recipe")
    parser.add_argument("--prompts", type=int, help="prompts of a round; default: those of the recipe")
    parser.add_argument("--samples", type=int, help="samples of a prompt; default: those of the recipe")
    parser.add_argument("--held-out", type=int, help="held-out rows of each task (default: all)")
    parser.add_argument("--micro-batch", type=int, default=128)
    options = parse_options(parser)
    start = time.time()
    config = make_config(options)
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    # With the default, sdpa, the gradients of left-padded micro-batches were NaN on an H100 (transformers 5.12.1).
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, attn_implementation="eager")
    recorder = Recorder(options, tokenizer)
    trainer = TimedTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=[score, correct],
        train_dataset=Dataset.from_list(read_rows(options.data / "train.jsonl")),
        callbacks=[recorder],
    )
    trainer.train()
    figures = {
        "wall seconds": round(time.time() - start, 1),
        "seconds from the start": {name: round(at - start, 2) for name, at in recorder.start_times().items()},
        "rounds": describe_rounds(trainer, recorder, config.generation_batch_size),
        "held out": recorder.held_out,
        "settings of the model": {"model": str(options.model), "data": str(options.data)},
    }
    options.model = options.data = None  # do not report paths of this machine
    write_report(options, figures)
    return 0


def make_config(options: Any) -> GRPOConfig:
    """Return TRL's settings for the recipe of the example. A round is one optimizer step."""
    recipe = read_toml(Path("examples/smollm2/run.toml"))
    rollout, train = recipe["rollout"], recipe["train"]
    options.lr = options.lr or train["lr"]
    prompts = options.prompts or rollout["rollout_batch_size"]
    samples = options.samples or rollout["n_samples_per_prompt"]
    micro_batch = min(options.micro_batch, prompts * samples)
    return GRPOConfig(
        output_dir=str(options.directory / f"{options.name}-seed{options.seed}"),
        max_steps=options.rounds,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=prompts * samples // micro_batch,
        num_generations=samples,
        max_completion_length=rollout["rollout_max_response_len"],
        temperature=rollout["rollout_temperature"],
        learning_rate=options.lr,
        lr_scheduler_type=train["lr_decay_style"],
        adam_beta2=train["adam_beta2"],
        weight_decay=train["weight_decay"],
        max_grad_norm=1.0,
        epsilon=train["eps_clip"],
        epsilon_high=train["eps_clip_high"],
        beta=0.0,
        loss_type="grpo",  # the mean over samples of the mean over their tokens
        reward_weights=[1.0, 0.0],
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=options.seed,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return prompts (messages) and labels of a file of examples/smollm2/data.py."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": row["prompt"], "label": row["label"]} for row in rows]


def grade(text: str, label: str) -> dict[str, float]:
    """Return the rewards of the example."""
    return reward_func(None, SimpleNamespace(response=text, label=label))


def score(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    return [grade(turns[-1]["content"], text)["score"] for turns, text in zip(completions, label, strict=True)]


def correct(completions: list[Any], label: list[str], **_: Any) -> list[float]:
    """Return whether each answer is right. Its weight in the reward is 0: it is only logged."""
    return [grade(turns[-1]["content"], text)["correct"] for turns, text in zip(completions, label, strict=True)]


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that records the seconds of each generation."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.generation_seconds: list[float] = []

    def _generate(self, prompts: list[Any]) -> Any:
        start = time.time()
        output = super()._generate(prompts)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.generation_seconds.append(time.time() - start)
        return output


class Recorder(TrainerCallback):
    """Records the time of each round, and evaluates before the first, after the middle and after the last one."""

    def __init__(self, options: Any, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.versions = {0, options.rounds // 2, options.rounds}
        self.rows = {task: read_rows(options.data / f"heldout-{task}.jsonl")[: options.held_out] for task in TASKS}
        self.held_out: dict[str, dict[int, Any]] = {task: {} for task in TASKS}
        self.began: list[float] = []
        self.ended: list[float] = []
        self.evaluated = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.training_began = time.time()
        self.evaluate(model, 0)
        self.evaluated = time.time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began.append(time.time())

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ended.append(time.time())
        if state.global_step in self.versions:
            self.evaluate(model, state.global_step)

    def evaluate(self, model: Any, version: int) -> None:
        """Generate greedily from the held-out prompts, and record accuracy, interval and mean reward."""
        was_training = model.training
        model.eval()
        for task, rows in self.rows.items():
            texts = [text for at in range(0, len(rows), EVAL_BATCH) for text in self.answer(model, rows, at)]
            grades = [grade(text, row["label"]) for text, row in zip(texts, rows, strict=True)]
            passed = np.array([[grades_of_row["correct"]] for grades_of_row in grades])
            low, high = (float(bound[0]) for bound in bootstrap_intervals(passed))
            self.held_out[task][version] = {
                "accuracy": round(float(passed.mean()), 4),
                "interval": [round(low, 4), round(high, 4)],
                "reward": round(statistics.fmean(grades_of_row["score"] for grades_of_row in grades), 4),
            }
            print(task, version, self.held_out[task][version], flush=True)
        model.train(was_training)

    @torch.no_grad()
    def answer(self, model: Any, rows: list[dict[str, Any]], at: int) -> list[str]:
        """Return the greedy answers to a batch of rows."""
        inputs = self.tokenizer.apply_chat_template(
            [row["prompt"] for row in rows[at : at + EVAL_BATCH]],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            tokens = model.generate(**inputs, do_sample=False, max_new_tokens=64)
        return self.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def start_times(self) -> dict[str, float]:
        return {
            "first evaluation started": self.training_began,
            "first evaluations committed": self.evaluated,
            "rollout started": self.began[0],
            "update committed": self.ended[0],
        }


def describe_rounds(trainer: TimedTrainer, recorder: Recorder, samples: int) -> dict[str, Any]:
    """Return seconds, speeds and curves of the rounds, under the names of real_model.py."""
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    curves = {name: [float(entry[key]) for entry in logs] for name, key in CURVES.items()}
    seconds = [ended - began for began, ended in zip(recorder.began, recorder.ended, strict=True)]
    generation = trainer.generation_seconds
    measured = range(WARM_UP_ROUNDS, len(seconds))
    lengths = curves["rollout/response_len/mean"]
    medians = {
        "generation": statistics.median(generation[r] for r in measured),
        "training": statistics.median(seconds[r] - generation[r] for r in measured),
        "round": statistics.median(seconds[r] for r in measured),
    }
    return {
        "median seconds by part": {name: round(value, 4) for name, value in medians.items()},
        "slowest and fastest round": [round(f(seconds[r] for r in measured), 3) for f in (max, min)],
        "wall seconds from the first to the last update": round(recorder.ended[-1] - recorder.ended[0], 1),
        "generated tokens/s, median": median_speed([lengths[r] * samples / generation[r] for r in measured]),
        "means of 10 rounds": block_means(curves),
        "rounds with a NaN": sum(any(value != value for value in entry.values()) for entry in logs),
    }


if __name__ == "__main__":
    sys.exit(main())
