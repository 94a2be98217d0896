"""What can be said about training, beside the algorithm: batches, optimizer, numerics, parallelism, placement.

Names are slime's and Megatron's; the loop's length and data belong to other stages.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from stages.train.algorithm_config import AlgorithmConfig
from storage.config import option
from storage.errors import OptionError

OPTIMIZER_FIELDS = {
    *("lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
}


class TrainConfig(AlgorithmConfig):
    """Algorithm (inherited), batches, optimizer, parallelism and placement of the trainer."""

    # ---- batches --------------------------------------------------------------------------------------------------------

    global_batch_size: int | None = option(None, ge=1)
    """Samples per optimizer step; rollout batch x samples per prompt / steps if not given."""

    num_steps_per_rollout: int | None = option(None, ge=1)
    """Optimizer steps per rollout; follows from --global-batch-size if not given, 1 if neither is."""

    use_dynamic_batch_size: bool | None = option(None, change="placement")
    """Fill micro-batches up to --max-tokens-per-gpu, whatever --micro-batch-size says; so it is unless that is given."""

    max_tokens_per_gpu: int = option(8192, change="placement", ge=1)
    """Tokens packed into one micro-batch, per GPU of a context-parallel group; a longer sample stands alone."""

    micro_batch_size: int | None = option(None, change="placement", ge=1)
    """Samples packed into one micro-batch, in place of a number of tokens."""

    balance_data: bool = option(False, change="placement")
    """Deal the micro-batches of a step out so that data-parallel ranks have equal work, by an estimate of their operations."""

    log_probs_chunk_size: int = option(4096, change="placement", ge=1)
    """Tokens whose logits are held at a time."""

    # ---- optimizer ------------------------------------------------------------------------------------------------------

    lr: float = option(1e-6, gt=0)
    """Learning rate (the highest, if it changes)."""

    min_lr: float = option(0.0, ge=0)
    """Where a decaying learning rate ends."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = option("constant")
    """How the learning rate goes on after the warm-up."""

    lr_warmup_iters: int = option(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""

    lr_decay_iters: int | None = option(None, ge=1)
    """Optimizer steps until --min-lr is reached, warm-up included; needed unless the style is constant."""

    weight_decay: float = option(0.01, ge=0)
    """Decoupled weight decay of the matrices (norms and biases have none)."""

    adam_beta1: float = option(0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""

    adam_beta2: float = option(0.999, ge=0, lt=1)
    """Decay of Adam's second moment; 0.98 is usual in RL."""

    adam_eps: float = option(1e-8, gt=0)
    """Adam's epsilon."""

    clip_grad: float = option(1.0, ge=0)
    """Largest global norm of the gradient; 0 does not clip."""

    # ---- numerics -------------------------------------------------------------------------------------------------------

    seed: int = option(1234)
    """Seed of everything random in the trainer."""

    params_dtype: Literal["fp32", "bf16"] | None = option(None)
    """Number format of weights and activations (the optimizer's are fp32); bf16 on a GPU and fp32 on a CPU if not given."""

    deterministic_mode: bool = option(False, change="placement")
    """Only kernels that give the same bits every time; on a CPU they always do."""

    # ---- parallelism and placement --------------------------------------------------------------------------------------

    actor_num_nodes: int = option(1, change="placement", ge=1)
    """Machines that train."""

    actor_num_gpus_per_node: int = option(1, change="placement", ge=1)
    """Trainer ranks on each of them: GPUs, or processes where there is no GPU."""

    tensor_model_parallel_size: int = option(1, change="placement", ge=1)
    """Ranks that share every matrix."""

    pipeline_model_parallel_size: int = option(1, change="placement", ge=1)
    """Ranks that share the layers, one after the other."""

    context_parallel_size: int = option(1, change="placement", ge=1)
    """Ranks that share every sequence."""

    expert_model_parallel_size: int = option(1, change="placement", ge=1)
    """Ranks that share the experts."""

    expert_tensor_parallel_size: int | None = option(None, change="placement", ge=1)
    """Ranks that share every expert's matrices; as --tensor-model-parallel-size if not given."""

    virtual_pipeline_model_parallel_size: int | None = option(None, change="placement", ge=1)
    """Pipeline pieces per rank (interleaved schedule)."""

    sequence_parallel: bool = option(False, change="placement")
    """Share norms and residuals between tensor-parallel ranks by position."""

    megatron: dict[str, Any] = option(default_factory=dict)
    """Any further field of Megatron-core's configurations, by its own name."""

    trainer_threads: int | None = option(None, change="placement", ge=1)
    """CPU threads per trainer rank; the machine's cores shared out if not given. Another number gives other fp32 sums."""

    train_timeout: float = option(3600.0, change="placement", gt=0)
    """Seconds after which a training call that has not come back is given up and the trainer started anew."""

    @property
    def num_ranks(self) -> int:
        """Trainer ranks on all nodes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Model replicas."""
        return self.num_ranks // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """The fields of the optimizer section."""
        return self.model_dump(include=OPTIMIZER_FIELDS)

    @property
    def critic_optimizer_options(self) -> dict[str, Any]:
        """The same for the critic."""
        own = {"lr": self.critic_lr, "lr_warmup_iters": self.critic_lr_warmup_iters}
        return self.optimizer_options | {name: value for name, value in own.items() if value is not None}

    @property
    def fills_by_tokens(self) -> bool:
        """Whether a micro-batch holds as many samples as fit, or a fixed number of them."""
        return self.micro_batch_size is None if self.use_dynamic_batch_size is None else self.use_dynamic_batch_size

    def check_batch(self, global_batch_size: int) -> None:
        """Check that every data-parallel replica gets a sample per optimizer step. Raises OptionError."""
        if global_batch_size < self.data_parallel_size:
            raise OptionError(
                f"--global-batch-size {global_batch_size} is smaller than the {self.data_parallel_size} data-parallel replicas, each of "
                "which needs a sample per step: make the batch larger, or use fewer ranks"
            )

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        if self.num_ranks % model:
            raise OptionError(
                f"{self.num_ranks} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided by tensor x pipeline x "
                f"context = {model}: change one of them"
            )
        expert_tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        experts = expert_tensor * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        if self.num_ranks % experts:
            raise OptionError(
                f"{self.num_ranks} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided by expert tensor x "
                f"--expert-model-parallel-size x pipeline = {experts}: change one of them"
            )
        if self.global_batch_size is not None:
            self.check_batch(self.global_batch_size)
        if self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1:
            raise OptionError(
                f"--virtual-pipeline-model-parallel-size {self.virtual_pipeline_model_parallel_size} needs --pipeline-model-parallel-size "
                "above 1: add it, or leave this out"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> TrainConfig:
        if self.lr_decay_style != "constant" and self.lr_decay_iters is None:
            raise OptionError(
                f"--lr-decay-style {self.lr_decay_style} needs --lr-decay-iters, the number of optimizer steps until --min-lr"
            )
        rates = {"--lr": self.lr, "--critic-lr": self.critic_lr}
        for name, rate in rates.items():
            if rate is not None and self.min_lr > rate:
                raise OptionError(f"--min-lr {self.min_lr:g} is above {name} {rate:g}: make it smaller")
        warmups = {"--lr-warmup-iters": self.lr_warmup_iters, "--critic-lr-warmup-iters": self.critic_lr_warmup_iters}
        for name, warmup in warmups.items():
            if self.lr_decay_style != "constant" and (warmup or 0) >= (self.lr_decay_iters or 0):
                raise OptionError(
                    f"--lr-decay-iters {self.lr_decay_iters} is not above {name} {warmup}, which it includes: make it larger"
                )
        return self
