"""Flags of slime and Megatron-LM that are not options of Penstock: refused with what to use instead, or accepted
because they ask for what Penstock does anyway.

A key is a flag, or a flag with a value (`--update-weight-mode full`), which takes precedence over the flag alone. The
sentences continue "FLAG is not supported: ..." and "FLAG: ...".
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from penstock.storage.errors import OptionError

REFUSED: dict[str, str] = {
    # ---- weight updates ----
    "--update-weight-mode": "weight updates send all weights; give full, or omit it",
    "--update-weight-delta-encoding": "weight updates send all weights, not differences; omit it",
    "--update-weight-delta-checksum": "weight updates send all weights, not differences; omit it",
    "--update-weight-local-checkpoint-dir": "engines load weights from --update-weight-disk-dir directly; omit it",
    "--update-weight-disk-keep-files": "files of a weight update are removed after it; use --save-hf to keep weights",
    "--custom-update-weight-post-write-path": "there is no hook between writing and loading weights; use a shared "
    "file system for --update-weight-disk-dir, or --update-weight-transport nccl",
    # ---- trainer ----
    "--release-train": "the trainer's processes run until the end; use --offload-train to free their GPU memory while "
    "the engines generate",
    "--use-stateless-adam": "the optimizer keeps its moments; use --reset-optimizer-states to forget them after every "
    "round, or --optimizer-cpu-offload to save GPU memory",
    "--megatron-config-path": "policy and critic have the same Megatron options; give them as flags, and --critic-lr "
    "and --critic-lr-warmup-iters for the critic",
    "--keep-old-actor": "old log-probs are those of the policy before the update; use --use-rollout-logprobs for those "
    "of the policy that generated the samples, or --use-tis, which corrects the difference",
    "--allgather-cp": "context parallelism exchanges heads all-to-all; omit it",
    "--custom-model-provider-path": "models are built from config.json; add a family with --model-family-path "
    "(docs/models.md)",
    "--use-rollout-entropy": "the entropy of each token is an argument of --custom-loss-function-path; omit it",
    "--enable-mtp-training": "multi-token prediction layers are not trained; use --mtp keep to keep them in exports, "
    "and omit it",
    "--mtp-loss-scaling-factor": "multi-token prediction layers are not trained; omit it",
    "--critic-load": "the critic starts from the policy's weights, and resumes with the run; omit it",
    "--critic-save": "the critic is saved in the run's checkpoints; omit it",
    "--no-save-optim": "a run resumes from its checkpoints with the optimizer; use --save-interval to save less often, "
    "and --keep-checkpoints N to remove old ones",
    "--start-rollout-id": "a run resumes after its last committed round; use `penstock fork RUN --at N` to start from "
    "an earlier one",
    "--ckpt-step": "give the checkpoint itself: --load DIR/iter_0000012 or STORE/RUN/12",
    "--ref-ckpt-step": "give the checkpoint itself: --ref-load DIR/iter_0000012",
    # ---- rollouts ----
    "--rollout-data-transport": "samples reach the trainer through the store; omit it",
    "--use-distributed-post": "one process sends the requests of a rollout; use --use-router for many engines, and "
    "omit it",
    "--multimodal-keys": "only text models are supported; omit it",
    "--loss-mask-type": "SFT trains on every assistant turn with its end token, as the model's chat template renders "
    "it; omit it, and set step_loss_mask 0 in messages that are not trained",
    "--load-forge-rollout-data": "a run trains only on rollouts in its store; use `penstock sft` for demonstrations in "
    "a file",
    "--prefill-num-servers": "every engine does both prefill and decode; use --rollout-num-gpus-per-engine, and omit "
    "it",
}

SFT_MASK = "SFT always trains on every assistant turn with its end token, as the chat template renders it"
ACCEPTED: dict[str, str] = {
    "--update-weight-mode full": "weight updates always send all weights",
    "--rollout-data-transport object-store": "samples always reach the trainer through the store",
    "--loss-mask-type qwen": f"{SFT_MASK} (of any model family)",
    "--loss-mask-type qwen3": f"{SFT_MASK} (of any model family)",
    "--loss-mask-type qwen3_5": f"{SFT_MASK} (of any model family)",
    "--no-load-optim": "start weights are always loaded without optimizer state; a resumed run restores its own",
    "--no-load-rng": "start weights are always loaded without RNG states; a resumed run restores its own",
    "--finetune": "start weights are always loaded as round 0; a resumed run continues after its last round",
    "--ckpt-format torch_dist": "checkpoints always have this format",
}

logger = logging.getLogger(__name__)


def is_listed(name: str) -> bool:
    """Return whether a flag is refused or accepted, perhaps only with some value."""
    return any(key.partition(" ")[0] == name for key in (*REFUSED, *ACCEPTED))


def check_listed_flag(name: str, args: Sequence[str]) -> None:
    """Log why an accepted flag has no effect of its own. `name` is a flag for which `is_listed` is true.

    Raises:
        OptionError: the flag is refused, alone or with these arguments.
    """
    with_value = " ".join([name, *args])
    for key in (with_value, name):
        if key in REFUSED:
            raise OptionError(f"{key} is not supported: {REFUSED[key]}")
        if key in ACCEPTED:
            log_once(key)
            return
    values = " or ".join(key.partition(" ")[2] for key in ACCEPTED if key.partition(" ")[0] == name)
    raise OptionError(f"{with_value[:120]} is not supported: give {values}, or omit {name}")


@cache
def log_once(key: str) -> None:
    """Log the sentence of an accepted flag, at its first occurrence in this process."""
    logger.warning("%s: %s", key, ACCEPTED[key])
