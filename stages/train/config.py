"""Options of the trainer except those of the algorithm: batches, optimizer, numerics, parallelism, placement.

The number of rounds is an option of the run, and the data are options of the rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from penstock.engines.megatron.megatron_options import MegatronOptions
from penstock.engines.parallel_layout import ParallelLayout
from penstock.stages.train.algorithm_config import AlgorithmConfig
from penstock.storage.config import option
from penstock.storage.errors import check_rules

OPTIMIZER_FIELDS = {
    *("lr", "vision_lr", "min_lr", "lr_decay_style", "lr_warmup_iters", "lr_decay_iters"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
}


class TrainConfig(AlgorithmConfig):
    """All options of the trainer; the options of the algorithm are inherited from `AlgorithmConfig`."""

    # ---- batches -----------------------------------------------------------------------------------------------------

    global_batch_size: int | None = option(None, ge=1)
    """Samples per optimizer step; default: --rollout-batch-size x --n-samples-per-prompt / --num-steps-per-rollout."""

    num_steps_per_rollout: int | None = option(None, ge=1)
    """Optimizer steps per rollout; default: derived from --global-batch-size if that is given, else 1."""

    ppo_epochs: int = option(1, ge=1)
    """Number of times that the optimizer steps of a rollout are run over its samples; from the second time on, in
    another order of the batches."""

    use_dynamic_batch_size: bool | None = option(None, mutability="placement")
    """Fill micro-batches up to --max-tokens-per-gpu; default: on, unless --micro-batch-size is given."""

    max_tokens_per_gpu: int = option(8192, mutability="placement", ge=1)
    """Maximum number of tokens of a micro-batch per context-parallel rank; a longer sample gets its own micro-batch."""

    micro_batch_size: int | None = option(None, mutability="placement", ge=1)
    """Samples per micro-batch, instead of filling micro-batches up to --max-tokens-per-gpu."""

    balance_data: bool = option(False, mutability="placement")
    """Distribute the micro-batches of a step so that data-parallel ranks have equal work, estimated in FLOPs."""

    log_probs_chunk_size: int = option(4096, mutability="placement", ge=1)
    """Number of tokens whose logits are computed at a time; smaller values save memory."""

    save_trained_tokens: bool = option(True, mutability="placement")
    """Store with each round what the trainer has computed for every trained token, for reports, queries and `samples
    --explain`: log-prob, advantage and, if the algorithm uses them, entropy, value and log-prob of the reference."""

    keep_step_logprobs: bool = option(False, mutability="placement")
    """Also store the log-prob of every trained token in its optimizer step (4 bytes per token before compression), so
    that the loss of rounds with several optimizer steps can be recomputed by `export --round`."""

    # ---- optimizer ---------------------------------------------------------------------------------------------------

    lr: float = option(1e-6, gt=0)
    """Learning rate; with a warm-up or decay, its maximum."""

    min_lr: float = option(0.0, ge=0)
    """Learning rate at the end of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine"] = option("constant")
    """Learning-rate schedule after the warm-up."""

    lr_warmup_iters: int = option(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""

    lr_warmup_fraction: float | None = option(None, ge=0, lt=1)
    """Warm-up as a fraction of --lr-decay-iters, in place of --lr-warmup-iters."""

    lr_decay_iters: int | None = option(None, ge=1)
    """Optimizer steps until --min-lr is reached, including the warm-up; default: all steps of the --num-rollout rounds
    with which the run was started."""

    weight_decay: float = option(0.01, ge=0)
    """Decoupled weight decay of matrices (not of norms and biases)."""

    adam_beta1: float = option(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""

    adam_beta2: float = option(0.999, ge=0, lt=1)
    """Decay rate of Adam's second moment; 0.98 is usual in RL."""

    adam_eps: float = option(1e-8, gt=0)
    """Adam's epsilon."""

    clip_grad: float = option(1.0, ge=0)
    """Maximum global norm of the gradient; 0 disables clipping."""

    # ---- numerics ----------------------------------------------------------------------------------------------------

    seed: int = option(1234)
    """Seed of all random number generators of the trainer."""

    params_dtype: Literal["fp32", "bf16"] | None = option(None)
    """Data type of weights and activations (optimizer states are fp32); default: bf16 on GPUs, fp32 on CPUs. Engines
    compute in this type on CPUs and in bf16 on GPUs, unless the engine's own option dtype is given."""

    fp32_lm_head: bool = option(False)
    """Compute logits in fp32 although the model is in bf16, both in the trainer and in the engines, so that their
    log-probs differ less."""

    deterministic_mode: bool = option(False, mutability="placement")
    """Use only deterministic GPU kernels; CPU kernels are always deterministic."""

    # ---- parallelism and placement -----------------------------------------------------------------------------------

    actor_num_nodes: int = option(1, mutability="placement", ge=1)
    """Number of training machines."""

    actor_num_gpus_per_node: int = option(1, mutability="placement", ge=1)
    """Trainer ranks per machine: GPUs, or processes where there is no GPU."""

    tensor_model_parallel_size: int = option(1, mutability="placement", ge=1)
    """Number of ranks that split each weight matrix."""

    pipeline_model_parallel_size: int = option(1, mutability="placement", ge=1)
    """Number of pipeline stages; each rank of a pipeline holds consecutive layers."""

    context_parallel_size: int = option(1, mutability="placement", ge=1)
    """Number of ranks that split each sequence."""

    expert_model_parallel_size: int = option(1, mutability="placement", ge=1)
    """Number of ranks over which the experts are distributed."""

    expert_tensor_parallel_size: int | None = option(None, mutability="placement", ge=1)
    """Number of ranks that split each expert's weight matrices; default: --tensor-model-parallel-size."""

    virtual_pipeline_model_parallel_size: int | None = option(None, mutability="placement", ge=1)
    """Model chunks per pipeline rank (interleaved schedule)."""

    sequence_parallel: bool = option(False, mutability="placement")
    """Split the activations of norms and residuals by position over the tensor-parallel ranks."""

    megatron: MegatronOptions = option(default_factory=MegatronOptions)
    """Options of Megatron-core that have an effect, by Megatron's names."""

    mtp_num_layers: int | None = option(None, mutability="placement", ge=0)
    """Number of multi-token prediction layers that --hf-checkpoint must have. They are not trained (see --mtp)."""

    trainer_threads: int | None = option(None, mutability="placement", ge=1)
    """CPU threads per trainer rank (they change the rounding of fp32 sums); default: an equal share of the cores."""

    train_timeout: float = option(3600.0, mutability="placement", gt=0)
    """Timeout in seconds of a call to the trainer (load, train, save, publish); on timeout all ranks are restarted."""

    @property
    def num_ranks(self) -> int:
        """Number of trainer ranks on all machines."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def data_parallel_size(self) -> int:
        """Number of data-parallel replicas of the model."""
        return self.num_ranks // (
            self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        )

    @property
    def parallel_layout(self) -> ParallelLayout:
        """Parallel layout of all models of the trainer."""
        return ParallelLayout(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            expert_tensor=self.expert_tensor_parallel_size,
            virtual_pipeline=self.virtual_pipeline_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
        )

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """Optimizer options of the policy: field -> value."""
        return self.model_dump(include=OPTIMIZER_FIELDS)

    @property
    def fills_microbatches_by_tokens(self) -> bool:
        """True if micro-batches are filled up to a number of tokens, False if they hold a fixed number of samples."""
        return self.micro_batch_size is None if self.use_dynamic_batch_size is None else self.use_dynamic_batch_size

    def batch_rule(self, global_batch_size: int) -> tuple[object, str]:
        """Return the rule (is violated, error message) that each data-parallel replica gets a sample per step."""
        return (
            global_batch_size < self.data_parallel_size,
            f"--global-batch-size {global_batch_size} is smaller than the {self.data_parallel_size} data-parallel "
            "replicas, each of which needs a sample per step: raise --global-batch-size, or use fewer trainer ranks",
        )

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from super().rules()
        model = self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size
        yield (
            self.num_ranks % model,
            f"{self.num_ranks} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) are not divisible by "
            "--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size = "
            f"{model}: change one of these options",
        )
        expert_tensor = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        experts = expert_tensor * self.expert_model_parallel_size * self.pipeline_model_parallel_size
        yield (
            self.num_ranks % experts,
            f"{self.num_ranks} trainer ranks (--actor-num-nodes x --actor-num-gpus-per-node) are not divisible by "
            "--expert-tensor-parallel-size x --expert-model-parallel-size x --pipeline-model-parallel-size = "
            f"{experts}: change one of these options",
        )
        if self.global_batch_size is not None:
            yield self.batch_rule(self.global_batch_size)
        yield (
            self.distills_vocabulary and self.hinted and self.context_parallel_size > 1,
            f"--opd-divergence with --opd-self needs the positions of a token after two prompts on one rank, but "
            f"--context-parallel-size {self.context_parallel_size} splits sequences by position: use 1, or omit "
            "--opd-divergence",
        )
        yield (
            self.keep_step_logprobs and (not self.save_trained_tokens or self.loss_type == "sft_loss"),
            "--keep-step-logprobs needs --save-trained-tokens, and excludes --loss-type sft_loss: omit one of them",
        )
        yield (
            self.virtual_pipeline_model_parallel_size and self.pipeline_model_parallel_size == 1,
            f"--virtual-pipeline-model-parallel-size {self.virtual_pipeline_model_parallel_size} needs "
            "--pipeline-model-parallel-size above 1: raise it, or omit --virtual-pipeline-model-parallel-size",
        )
        yield (
            self.megatron.bf16 and self.params_dtype == "fp32",
            "--bf16 contradicts --params-dtype fp32: omit --bf16, or give --params-dtype bf16",
        )

    def lr_schedule(self, num_steps: int) -> dict[str, int | None]:
        """Return the learning-rate schedule of a run of `num_steps` optimizer steps (0: unknown): lr_decay_iters,
        lr_warmup_iters. Raises OptionError if the options contradict each other, or the schedule needs
        --lr-decay-iters."""
        decay, warmup_iters, fraction = self.lr_decay_iters, self.lr_warmup_iters, self.lr_warmup_fraction
        needs_steps = self.lr_decay_style != "constant" or fraction is not None
        if needs_steps and decay is None:
            decay = num_steps
        if fraction is not None:
            warmup_iters = int(fraction * (decay or 0))
        flag = "--lr-warmup-fraction" if self.lr_decay_style == "constant" else "--lr-decay-style"
        rates = {"--lr": self.lr, "--critic-lr": self.critic_lr, "--vision-lr": self.vision_lr}
        warmups = {"--lr-warmup-iters": warmup_iters, "--critic-lr-warmup-iters": self.critic_lr_warmup_iters}
        rules: list[tuple[object, str]] = [
            (
                needs_steps and not decay,
                f"{flag} needs --lr-decay-iters, the number of optimizer steps until the learning rate reaches "
                "--min-lr, because --num-rollout does not give it: add --lr-decay-iters",
            ),
            (
                self.lr_warmup_iters not in (0, warmup_iters),
                f"--lr-warmup-fraction {fraction or 0:g} is {warmup_iters} steps, but --lr-warmup-iters is "
                f"{self.lr_warmup_iters}: omit --lr-warmup-fraction, or --lr-warmup-iters",
            ),
        ]
        rules += [
            (self.min_lr > rate, f"--min-lr {self.min_lr:g} is above {name} {rate:g}: lower --min-lr")
            for name, rate in rates.items()
            if rate is not None
        ]
        rules += [
            (
                self.lr_decay_style != "constant" and (warmup or 0) >= (decay or 0),
                f"--lr-decay-iters {decay} includes the warm-up and must be above {name} {warmup}: "
                "raise --lr-decay-iters",
            )
            for name, warmup in warmups.items()
        ]
        check_rules(rules)
        return {"lr_decay_iters": decay, "lr_warmup_iters": warmup_iters}
