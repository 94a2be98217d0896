"""Flags of other trainers that are not options of Penstock: refused with a replacement, accepted because they request
what Penstock does anyway, or synonyms of other flags. Each trainer has a folder in `flows/`, with these tables in
`flag_table.py`, and in `recipe.py` the command `penstock import-NAME`, which reads its launch scripts.

A key is a flag, or a flag with a value (`--update-weight-mode full`), which takes precedence over the flag alone. The
texts end the messages "FLAG is not supported: ..." (REFUSED) and "FLAG: ..." (ACCEPTED).
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache

from penstock.flows.options.argv import short_repr
from penstock.storage.errors import OptionError

TRAINERS = ("slime",)
_OF_MEGATRON_LM = {
    "--recompute-activations": "--recompute-granularity selective",
    "--no-bias-gelu-fusion": "--no-bias-activation-fusion",
    "--no-bias-swiglu-fusion": "--no-bias-activation-fusion",
    "--no-check-for-nan-in-loss-and-grad": "--no-check-for-nan-in-grad",
    "--accumulate-allreduce-grads-in-fp32": "--grad-reduce-in-fp32",
    "--grad-reduce-in-bf16": "--no-grad-reduce-in-fp32",
    "--ddp-bucket-size": "--bucket-size ...",
    "--decoder-first-pipeline-num-layers": "--num-layers-in-first-pipeline-stage ...",
    "--decoder-last-pipeline-num-layers": "--num-layers-in-last-pipeline-stage ...",
}
_TABLES = [importlib.import_module(f"penstock.flows.{name}.flag_table") for name in TRAINERS]
REFUSED: dict[str, str] = {flag: text for table in _TABLES for flag, text in table.REFUSED.items()}
ACCEPTED: dict[str, str] = {flag: text for table in _TABLES for flag, text in table.ACCEPTED.items()}
# Flag, or flag with a value -> the flags that replace it; `...` stands for the value that the user gave.
SYNONYMS: dict[str, tuple[tuple[str, ...], ...]] = {
    **{flag: (tuple(words.split()),) for flag, words in _OF_MEGATRON_LM.items()},
    **{flag: flags for table in _TABLES for flag, flags in table.SYNONYMS.items()},
}
# Names of TRL, verl and Hugging Face -> our flags. Our flags are only suggested, because the same value may mean
# something else.
OTHER_NAMES = {
    **dict.fromkeys(("learning-rate", "actor-lr"), "--lr"),
    **dict.fromkeys(("vit-lr", "vision-tower-lr"), "--vision-lr"),
    **dict.fromkeys(("freeze-vit", "freeze-vision-tower"), "--freeze-vision"),
    **dict.fromkeys(("batch-size", "train-batch-size", "num-prompts"), "--rollout-batch-size --global-batch-size"),
    **dict.fromkeys(("per-device-train-batch-size", "mini-batch-size", "ppo-mini-batch-size"), "--global-batch-size"),
    **dict.fromkeys(("epochs", "num-train-epochs", "total-epochs"), "--num-epoch"),
    **dict.fromkeys(("num-iterations", "num-ppo-epochs"), "--ppo-epochs"),
    **dict.fromkeys(("steps", "max-steps", "total-training-steps", "rounds"), "--num-rollout"),
    **dict.fromkeys(("model", "model-path", "model-name-or-path"), "--hf-checkpoint"),
    **dict.fromkeys(("data", "dataset", "dataset-name", "train-data", "train-files"), "--prompt-data"),
    **dict.fromkeys(("eval-dataset", "val-files", "test-data"), "--eval-prompt-data"),
    **dict.fromkeys(("num-generations", "group-size", "num-samples"), "--n-samples-per-prompt"),
    **dict.fromkeys(("max-new-tokens", "max-tokens", "max-completion-length"), "--rollout-max-response-len"),
    **dict.fromkeys(("max-response-length", "response-length"), "--rollout-max-response-len"),
    **dict.fromkeys(("max-prompt-length", "prompt-length"), "--rollout-max-prompt-len"),
    **{name: f"--rollout-{name}" for name in ("temperature", "top-p", "top-k")},
    **dict.fromkeys(("reward", "reward-fn", "reward-funcs", "reward-function"), "--rm-type --custom-rm-path"),
    **dict.fromkeys(("algorithm", "adv-estimator"), "--advantage-estimator"),
    **dict.fromkeys(("beta", "kl-coeff", "kl-loss"), "--kl-loss-coef --kl-coef"),
    **dict.fromkeys(("epsilon", "clip-ratio", "cliprange"), "--eps-clip"),
    **dict.fromkeys(("epsilon-high", "clip-ratio-high"), "--eps-clip-high"),
    **dict.fromkeys(("max-grad-norm", "grad-clip"), "--clip-grad"),
    **dict.fromkeys(("warmup", "warmup-steps", "lr-warmup-steps"), "--lr-warmup-iters"),
    **dict.fromkeys(("save-steps", "save-freq"), "--save-interval"),
    **dict.fromkeys(("eval-steps", "test-freq"), "--eval-interval"),
    **dict.fromkeys(("name", "experiment-name"), "--run"),
    **dict.fromkeys(("output-dir", "default-local-dir"), "--store"),
    **dict.fromkeys(("gpus", "num-gpus", "n-gpus-per-node"), "--actor-num-gpus-per-node --rollout-num-gpus"),
    **dict.fromkeys(("nnodes", "num-nodes"), "--actor-num-nodes"),
    **dict.fromkeys(("gpu-memory-utilization", "vllm-gpu-memory-utilization"), "--sglang-mem-fraction-static"),
    "report-to": "--use-wandb --use-tensorboard",
    "lora-r": "--lora-rank",
    **dict.fromkeys(("lr-scheduler", "lr-scheduler-type"), "--lr-decay-style"),
}

# flags that are refused, accepted or a synonym, perhaps only with certain values
LISTED = {key.partition(" ")[0] for key in (*REFUSED, *ACCEPTED, *SYNONYMS)}

logger = logging.getLogger(__name__)


def synonym_of(name: str, args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the flags, each with its arguments, that replace a synonym; [] if the flag `name` is not a synonym."""
    key = next((key for key in (" ".join([name, *args]), name) if key in SYNONYMS), None)
    if key is None:
        return []
    if key == name and args and "..." not in (word for flag in SYNONYMS[key] for word in flag):
        raise OptionError(f"{name} is a switch and takes no value; found {short_repr(args[0])}")
    flags = [[word for item in flag for word in (args if item == "..." else [item])] for flag in SYNONYMS[key]]
    log_once(key, "means " + " ".join(word for flag in SYNONYMS[key] for word in flag if word != "..."))
    return [(flag, words) for flag, *words in flags]


def apply_listed_flag(name: str, args: Sequence[str]) -> None:
    """Log why an accepted flag of LISTED has no effect, or raise OptionError for a refused one."""
    with_value = " ".join([name, *args])
    key = next((key for key in (with_value, name) if key in ACCEPTED or key in REFUSED), "")
    if key in ACCEPTED:
        log_once(key, ACCEPTED[key])
        return
    values = " or ".join(each.partition(" ")[2] for each in (*ACCEPTED, *SYNONYMS) if each.partition(" ")[0] == name)
    problem = f"{with_value[:120]} is not supported: give {values}, or omit {name}"
    raise OptionError(f"{key} is not supported: {REFUSED[key]}" if key else problem)


@cache
def log_once(key: str, text: str) -> None:
    """Log a warning about a flag, once in this process."""
    logger.warning("%s: %s", key, text)
