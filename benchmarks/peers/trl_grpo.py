"""Train with TRL's GRPOTrainer, which generates with transformers or with vLLM on the same GPU, and report the figures
of peers.py.

    python benchmarks/peers/trl_grpo.py DIRECTORY --model model --data data --engine vllm [--rounds 40]

Needs TRL 1.16, and vLLM for `--engine vllm`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peers import GpuMemory, Round, Settings, held_out_tasks, load_reward, make_peer_parser, read_rows, read_settings
from peers import report as report_peer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import parse_options

DIFFERENCES = [
    "order of the prompts and random numbers",
    "fp32 weights under bf16 autocast; Penstock: bf16 weights with an fp32 copy in the optimizer",
    "padded micro-batches of --micro-batch samples; Penstock: packed ones of --micro-batch-tokens tokens",
    "held-out answers come from transformers' generate; not deterministic",
]
VLLM_DIFFERENCES = [
    "old log-probs are computed by a forward pass to correct for the difference to those of vLLM, as by default",
    "without --engine-sleep vLLM keeps its weights and cache during the update, as by default",
]
EVAL_BATCH = 128
Grade = Callable[[str, str], dict[str, float]]


def main() -> int:
    parser = make_peer_parser(__doc__, "trl")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--micro-batch", type=int, default=64, help="samples of a micro-batch")
    parser.add_argument(
        "--attention", default="flash_attention_2", help="of the trainer, and of transformers' generate"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="longest prompt")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--engine-sleep", action="store_true", help="free vLLM's weights and cache during the update")
    options = parse_options(parser)
    settings, start = read_settings(options), time.time()
    config = make_config(options, settings)
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=options.attention
    )
    if settings.fixed_length:
        model.generation_config.eos_token_id = None
    recorder = Recorder(options, tokenizer, load_reward(options.reward))
    with GpuMemory() as memory:
        trainer = TimedTrainer(
            model=model,
            args=config,
            processing_class=tokenizer,
            reward_funcs=[recorder.score],
            train_dataset=Dataset.from_list(read_rows(options.data / "train.jsonl")),
            callbacks=[recorder],
        )
        trainer.train()
    report_peer(
        options,
        describe_rounds(trainer, recorder),
        memory,
        held_out=recorder.held_out,
        start={"rollout started": recorder.began - start, "update committed": recorder.ended[0] - start},
        configuration=[f"{name}={value}" for name, value in given_settings(options, settings).items()],
        differences=DIFFERENCES + (VLLM_DIFFERENCES if options.engine == "vllm" else []),
    )
    return 0


def given_settings(options: Any, settings: Settings) -> dict[str, Any]:
    """Return TRL's settings as a user writes them. A round is one optimizer step."""
    samples = settings.prompts * settings.samples
    micro_batch = min(options.micro_batch, samples)
    engine: dict[str, Any] = {}
    if options.engine == "vllm":
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.engine_memory,
            "vllm_max_model_length": options.prompt_tokens + settings.response_tokens,
            "vllm_enable_sleep_mode": options.engine_sleep,
        }
    if settings.fixed_length:
        ignore_end = {"ignore_eos": True} if options.engine == "vllm" else {"min_new_tokens": settings.response_tokens}
        engine["generation_kwargs"] = ignore_end
    return {
        "max_steps": options.rounds,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": samples // micro_batch,
        "num_generations": settings.samples,
        "max_completion_length": settings.response_tokens,
        "temperature": settings.temperature,
        "learning_rate": settings.lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": settings.adam_beta2,
        "weight_decay": settings.weight_decay,
        "epsilon": settings.eps_clip,
        "epsilon_high": settings.eps_clip_high,
        "loss_type": "grpo",  # the mean over samples of the mean over their tokens
        "bf16": torch.cuda.is_available(),
        "gradient_checkpointing": options.gradient_checkpointing,
        "seed": options.seed,
        **engine,
    }


def make_config(options: Any, settings: Settings) -> GRPOConfig:
    """Return TRL's settings, with those of the measurement."""
    return GRPOConfig(
        output_dir=str(options.directory / f"{options.name}-seed{options.seed}"),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **given_settings(options, settings),
    )


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that records the seconds of the parts of each round."""

    def __init__(self, **arguments: Any) -> None:
        self.seconds: list[dict[str, float]] = []
        super().__init__(**arguments)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self._timed("weight update", self.vllm_generation.sync_weights)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = function(*args, **kwargs)
            self.seconds[-1][part] = self.seconds[-1].get(part, 0.0) + now() - start
            return result

        return timed

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.seconds.append({})
        return self._timed("generate and score", super()._generate_and_score_completions)(inputs)

    def _generate(self, prompts: list[Any]) -> Any:
        return self._timed("generate", super()._generate)(prompts)

    @torch.no_grad()
    def _old_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        return self._timed("old log-probs", super()._get_per_token_logps_and_entropies)(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Time the calls of `_generate_and_score_completions`, which are those without gradients."""
        if torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self._old_logprobs(*args, **kwargs)


def now() -> float:
    """Return the time at which all work of the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time()


class Recorder(TrainerCallback):
    """Grades responses, records the end of each round, and evaluates before the first, after the middle and after the
    last one."""

    def __init__(self, options: Any, tokenizer: Any, grade: Grade) -> None:
        self.tokenizer, self.grade = tokenizer, grade
        self.versions = {0, options.rounds // 2, options.rounds}
        self.rows = {task: read_rows(options.data / f"heldout-{task}.jsonl") for task in held_out_tasks(options)}
        self.held_out: dict[str, dict[int, dict[str, float]]] = {task: {} for task in self.rows}
        self.ended: list[float] = []
        self.totals: list[float] = []

    def score(self, completions: list[Any], label: list[str], **_: Any) -> list[float]:
        return [self.grade(turns[-1]["content"], text)["score"] for turns, text in zip(completions, label, strict=True)]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.evaluate(model, 0)
        self.began = self.round_began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.ended.append(now())
        self.totals.append(self.ended[-1] - self.round_began)
        if state.global_step in self.versions:
            self.evaluate(model, state.global_step)
        self.round_began = now()

    def evaluate(self, model: Any, version: int) -> None:
        """Generate greedily from the held-out prompts, and record accuracy and mean reward."""
        was_training = model.training
        model.eval()
        for task, rows in self.rows.items():
            texts = [text for at in range(0, len(rows), EVAL_BATCH) for text in self.answer(model, rows, at)]
            grades = [self.grade(text, row["label"]) for text, row in zip(texts, rows, strict=True)]
            self.held_out[task][version] = {
                "accuracy": round(statistics.fmean(each["correct"] for each in grades), 4),
                "reward": round(statistics.fmean(each["score"] for each in grades), 4),
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


def describe_rounds(trainer: TimedTrainer, recorder: Recorder) -> list[Round]:
    """Return the rounds. What is neither generation nor scoring of a round is training, and so are old log-probs."""
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    rounds = []
    for entry, parts, total in zip(logs, trainer.seconds, recorder.totals, strict=True):
        update, old_logprobs = parts.get("weight update", 0.0), parts.get("old log-probs", 0.0)
        seconds = {
            "generation": parts["generate"] - update,
            "training": total - parts["generate and score"] + old_logprobs,
            "weight update": update,
        }
        rounds.append(Round(seconds, total, float(entry["reward"]), float(entry["completions/mean_length"])))
    return rounds


if __name__ == "__main__":
    sys.exit(main())
