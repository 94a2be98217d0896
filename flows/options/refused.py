"""Flags of slime and Megatron-LM that are not options of Penstock: refused with what to use instead, accepted because
they ask for what Penstock does anyway, or synonyms of other flags.

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
    "--delta-compression": "weight updates send all weights, not differences; omit it",
    "--delta-dtype": "weight updates send all weights, not differences; omit it",
    "--delta-full-interval": "weight updates send all weights, not differences; omit it",
    "--update-weight-local-checkpoint-dir": "engines load weights from --update-weight-disk-dir directly; omit it",
    "--update-weight-disk-keep-files": "files of a weight update are removed after it; use --save-hf to keep weights",
    "--custom-update-weight-post-write-path": "there is no hook between writing and loading weights; use a shared "
    "file system for --update-weight-disk-dir, or --update-weight-transport nccl",
    # ---- trainer ----
    "--train-backend": "Megatron-core trains; give megatron, or omit it",
    "--fsdp-cpu-offload": "Megatron-core trains, not FSDP; use --optimizer-cpu-offload or --offload-train",
    "--fsdp-state-dict-cpu-offload": "Megatron-core trains, not FSDP; omit it",
    "--fsdp-cpu-backend": "Megatron-core trains, not FSDP; omit it",
    "--gradient-checkpointing": "Megatron-core trains, not FSDP; use --recompute-granularity",
    "--attn-implementation": "Megatron-core trains, not FSDP; use --attention-backend",
    "--use-lora": "give --lora-rank, which turns adapters on",
    "--lora-target-preset": "name the layers with --lora-target-modules",
    "--lora-weight-decay": "adapters are trained with --weight-decay; omit it",
    "--lora-learning-rate": "adapters are trained with --lr; omit it",
    "--lora-save-merged-hf": "use --save-hf, which writes merged weights",
    "--save-lora": "use `penstock export RUN --format peft`",
    "--lora-type": "there is one type of adapter, that of PEFT; omit it",
    "--lora-adapter-path": "start from an adapter with --lora-load",
    "--target-modules": "name the layers of the adapters with --lora-target-modules",
    "--exclude-modules": "name the layers that get adapters with --lora-target-modules",
    "--train-env-vars": "the trainer has the environment of this process; export the variables before the start",
    "--true-on-policy-mode": "use --deterministic-mode with --sglang-enable-deterministic-inference",
    "--qkv-format": "sequences are packed; give thd, or omit it",
    "--int4-params-rollout": "int4 rollouts are not supported; use an fp8 --hf-checkpoint (docs/engines.md)",
    "--force-fp8-ue8m0-scale": "scales of fp8 weights are those that --hf-checkpoint has; omit it",
    "--freeze-indexer": "no supported family has an indexer; use --freeze-params-name-list",
    "--qwen-gdn-backend": "models with linear attention are not supported; omit it",
    "--megatron-deepgemm-forward-layers": "training is in bf16; omit it",
    "--megatron-deepgemm-forward-modules": "training is in bf16; omit it",
    "--megatron-deepgemm-moe-forward-layers": "training is in bf16; omit it",
    "--megatron-deepgemm-moe-forward-modules": "training is in bf16; omit it",
    "--custom-megatron-init-path": "there is no hook in the trainer's start; add a family with --model-family-path",
    "--custom-megatron-before-log-prob-hook-path": "use --custom-advantage-function-path, which gets the log-probs",
    "--custom-megatron-before-train-step-hook-path": "use --custom-loss-function-path",
    "--balance-by-flops": "use --balance-data, which balances estimated FLOPs over data-parallel ranks",
    "--pg-loss-type": "use --policy-loss, or --custom-loss-function-path; give ppo, or omit it",
    "--use-score-centering": "use --custom-loss-function-path, or --use-tis for off-policy samples",
    "--score-centering-top-k": "use --custom-loss-function-path; omit it",
    "--routing-replay-prefetch-microbatches": "routed experts are read with their samples; omit it",
    "--critic-num-nodes": "the critic shares the policy's ranks; omit it",
    "--critic-num-gpus-per-node": "the critic shares the policy's ranks; omit it",
    "--critic-train-only": "use --num-critic-only-steps with the number of rounds",
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
    "--opd-teacher-ckpt-step": "give the checkpoint itself: --opd-teacher-load DIR/iter_0000012",
    # ---- rollouts ----
    "--buffer-sort-by-staleness": "groups are taken first in, first out; use --buffer-filter-path",
    "--flush-cache-interval": "use --async-mode streaming with --pause-generation-mode in_place, which keeps the KV "
    "cache over weight updates, and --update-weights-interval",
    "--rollout-data-dir": "samples are in the store (--store); omit it",
    "--rollout-storage-profile": "samples are in the store (--store); omit it",
    "--rollout-storage-declaration": "samples are in the store (--store); omit it",
    "--rollout-queue-run-id": "samples are in the store under the run's name (--run); omit it",
    "--rollout-queue-online-gc": "samples are kept; use `penstock gc` and `penstock rm`",
    "--rollout-queue-lease-seconds": "samples are in the store (--store); omit it",
    "--rollout-queue-segment-mib": "samples are in the store (--store); omit it",
    "--rollout-io-concurrency": "samples are in the store (--store); omit it",
    "--rollout-session-id": "engines belong to the run (--run); omit it",
    "--rollout-num-gpus-per-node": "use --num-gpus-per-node",
    "--topk-level-opd": "use --use-opd, which takes the log-prob of the sampled token",
    "--opd-top-k": "use --use-opd, which takes the log-prob of the sampled token; omit it",
    "--opd-teacher-loads": "one teacher is supported; use --opd-teacher-load",
    "--rollout-buffer-url": "there is no buffer server; use --custom-generate-function-path or --rollout-function-path",
    "--fetch-trajectory-retry-times": "there is no buffer server; use --custom-generate-function-path",
    "--min-batch-collection-ratio": "a round has exactly --rollout-batch-size groups; omit it",
    "--rollout-task-type": "there is no buffer server; use --rm-type or --custom-rm-path",
    "--disable-rollout-global-dataset": "prompts come from --prompt-data; use --data-source-path for another source",
    "--slime-router-middleware-paths": "the router is SGLang's; use --custom-generate-function-path",
    "--eval-max-prompt-len": "evaluations score every prompt; remove long prompts from the data set",
    "--eval-min-new-tokens": "evaluations sample like rollouts; use --rollout-sampling min_new_tokens=N for both",
    "--http-proxy": "set the environment variables http_proxy and no_proxy",
    "--log-reward-category": "let the reward return a dictionary; penstock query groups samples by its keys; omit it",
    "--log-correct-samples": "penstock query selects samples by reward; omit it",
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

SAME_ROLLOUT = "rollouts are generated in this way without it"
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
    "--rollout-function-path slime.rollout.sglang_rollout.generate_rollout": SAME_ROLLOUT,
    "--train-backend megatron": "Megatron-core always trains",
    "--qkv-format thd": "sequences are always packed",
    "--pg-loss-type ppo": "the policy loss is that of --advantage-estimator or --policy-loss",
    "--rollout-global-dataset": "prompts always come from one data source",
    "--model-name": "the model family is read from config.json",
    "--megatron-to-hf-mode": "weights are converted by the model family of config.json (docs/models.md)",
    "--use-hf-config-for-megatron": "the model's shape is always read from config.json",
    "--log-probs-max-tokens-per-gpu": "log-probs are computed in the micro-batches of --max-tokens-per-gpu",
    "--data-pad-size-multiplier": "sequences are packed without padding",
    "--rollout-health-check-first-wait": "health checks begin when an engine is ready (--sglang-start-timeout)",
    "--rollout-cleanup-timeout": "processes of a run have --grace-period seconds to end",
    "--log-multi-turn": "turns of a sample are always recorded",
    "--train-memory-margin-bytes": "`penstock doctor --plan` estimates the GPU memory before the start",
    "--disable-weights-backuper": "reference and teacher are in host memory, and the policy only with --offload-train",
    "--wandb-exp-name": "a W&B run has the name of the run (--run)",
    "--async-strategy": "checkpoints are always written by the trainer's ranks",
}
# Flag, perhaps with a value -> the flags that it stands for; `...` is the value that was given.
SYNONYMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "--offload": (("--offload-train",), ("--offload-rollout",)),
    "--use-slime-router": (("--use-router",),),
    "--wandb-entity": (("--wandb-team", "..."),),
    "--wandb-save-dir": (("--wandb-dir", "..."),),
    "--sglang-router-policy": (("--router-policy", "..."),),
    "--sglang-router-request-timeout-secs": (("--router-request-timeout-secs", "..."),),
    "--rollout-function-path slime.rollout.sft_rollout.generate_rollout": (("--loss-type", "sft_loss"),),
    "--rollout-function-path fully_async_rollout.generate_rollout_fully_async": (("--async-mode", "streaming"),),
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async": (
        ("--async-mode", "streaming"),
    ),
    "--advantage-estimator on_policy_distillation": (("--use-opd",), ("--opd-type", "sglang")),
}

logger = logging.getLogger(__name__)


def is_listed(name: str) -> bool:
    """Return whether a flag is refused, accepted or a synonym, perhaps only with some value."""
    return any(key.partition(" ")[0] == name for key in (*REFUSED, *ACCEPTED, *SYNONYMS))


def is_listed_with_value(name: str, args: Sequence[str]) -> bool:
    """Return whether a flag is listed with exactly these arguments."""
    return bool(args) and " ".join([name, *args]) in {**REFUSED, **ACCEPTED, **SYNONYMS}


def synonym_of(name: str, args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the flags, each with its arguments, for which a flag stands; [] if it is not a synonym.

    Raises:
        OptionError: the flag is a switch, but has a value.
    """
    key = next((key for key in (" ".join([name, *args]), name) if key in SYNONYMS), None)
    if key is None:
        return []
    if key == name and args and "..." not in (word for flag in SYNONYMS[key] for word in flag):
        raise OptionError(f"{name} is a switch and takes no value; found {args[0][:80]!r}")
    flags = [[word for item in flag for word in (args if item == "..." else [item])] for flag in SYNONYMS[key]]
    log_once(key, "means " + " ".join(word for flag in SYNONYMS[key] for word in flag if word != "..."))
    return [(flag, words) for flag, *words in flags]


def check_listed_flag(name: str, args: Sequence[str]) -> None:
    """Log why an accepted flag has no effect of its own. `name` is a flag for which `is_listed` is true.

    Raises:
        OptionError: the flag is refused, alone or with these arguments.
    """
    with_value = " ".join([name, *args])
    for key in (with_value, name):
        if key in ACCEPTED:
            log_once(key, ACCEPTED[key])
            return
        if key in REFUSED:
            raise OptionError(f"{key} is not supported: {REFUSED[key]}")
    values = " or ".join(key.partition(" ")[2] for key in ACCEPTED if key.partition(" ")[0] == name)
    raise OptionError(f"{with_value[:120]} is not supported: give {values}, or omit {name}")


@cache
def log_once(key: str, text: str) -> None:
    """Log a sentence about a flag, at its first occurrence in this process."""
    logger.warning("%s: %s", key, text)
