"""The GPU plan of a run: which GPUs trainer and engines use, and an estimate of the memory per GPU.

The plan is checked before a run starts (`preflight`), and `penstock doctor --plan` prints it. Both also warn of engines
that would generate slowly on these GPUs (`speed_warnings`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engines.backends import EngineMemory, engine_backend
from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.memory_plan import RUNTIME, TrainerMemory, TrainerOptions, estimate_trainer_memory
from penstock.engines.parallel_layout import (
    check_grouped_experts,
    check_model_parallel,
    check_pipeline,
    has_grouped_experts,
)
from penstock.engines.training import GIB
from penstock.flows.config import Flow, PostTrainConfig
from penstock.flows.runtime.engine_options import engine_options, gpus_per_node, teacher_options
from penstock.stages.train.config import TrainConfig
from penstock.storage.errors import EngineError, LayoutError, OptionError, check_rules


@dataclass(frozen=True)
class GpuPlan:
    """Estimated memory use of trainer and engine, in bytes, on the GPU that needs the most memory."""

    gpu_bytes: int
    trainer: TrainerMemory | None  # None: the flow does not train
    engine: EngineMemory | None  # None: the run starts no engine
    colocated: bool  # whether trainer and engines share GPUs
    offload_train: bool = False
    offload_rollout: bool = False
    teacher: EngineMemory | None = None  # the engine of --opd-teacher-engine, which has its own GPUs; None: no teacher

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory use, in bytes, of the GPU that needs the most."""
        if self.trainer and self.engine and self.colocated:
            return self.colocated_peak_bytes(self.offload_train, self.offload_rollout)
        sizes = [self.trainer.peak_bytes if self.trainer else 0, self.engine.static_bytes if self.engine else 0]
        return max(sizes)  # the engine of the teacher is not counted: it never uses more than its share of its GPUs

    def colocated_peak_bytes(self, offload_train: bool = False, offload_rollout: bool = False) -> int:
        """Return the peak memory use, in bytes, of a GPU that trainer and engine share.

        `offload_train`: the trainer frees its memory while the engine generates; `offload_rollout`: the engine frees
        its memory while the trainer works.
        """
        assert self.trainer and self.engine, "only a trainer and an engine can share a GPU"
        training = self.trainer.peak_bytes + (0 if offload_rollout else self.engine.static_bytes)
        rollout = self.engine.static_bytes + RUNTIME + (0 if offload_train else self.trainer.resident_bytes)
        return max(training, rollout)


def plan_gpu_memory(flow: Flow, config: PostTrainConfig, shape: ModelShape, gpu_bytes: int) -> GpuPlan:
    """Return the GPU plan of a run on GPUs with `gpu_bytes` of memory each. Raises InputError if the parallel sizes or
    an engine's memory options are invalid."""
    train, opd, options = config.train, config.train.opd, engine_options(config)
    trainer = engine = None
    if flow.trains:
        trainer_options = TrainerOptions(
            dtype=train.params_dtype or "bf16",
            max_tokens=microbatch_tokens(config),
            log_probs_chunk_size=train.log_probs_chunk_size,
            fp32_head=train.fp32_lm_head,
            critic=train.uses_critic,
            num_frozen=(train.uses_reference and not (train.lora and not train.ref_load))
            + len(train.teacher_names) * train.loads_teacher
            + 2 * bool(train.hinted and train.hinted.opd_self_ema),
            num_copied_heads=len(train.teacher_names) if opd and opd.opd_divergence and not opd.opd_top_k else 0,
            lora=train.lora,
            freeze_vision=train.freeze_vision,
            megatron=train.megatron.model_dump(),
        )
        trainer = estimate_trainer_memory(shape, train.parallel_layout, train.num_ranks, trainer_options)
    if flow.generates and not options.external:
        engine = engine_backend(options.engine).estimate_memory(options, shape, gpu_bytes)
    run, teacher = config.run, None
    if flow.has_rollouts and (of_teacher := teacher_options(config)) and Path(of_teacher.spec.model_path).is_dir():
        teacher_shape = read_shape(of_teacher.spec.model_path, config.convert.model_family_path)
        teacher = engine_backend(of_teacher.engine).estimate_memory(of_teacher, teacher_shape, gpu_bytes)
    colocated = options.num_gpus is None
    return GpuPlan(gpu_bytes, trainer, engine, colocated, run.offloads_trainer, run.offloads_engines, teacher)


def microbatch_tokens(config: PostTrainConfig) -> int:
    """Return the maximum number of tokens of a micro-batch on one rank. With --micro-batch-size it is estimated from
    --rollout-max-context-len or, if not given, from --rollout-max-response-len, which does not count prompts."""
    train, rollout = config.train, config.rollout
    if train.fills_microbatches_by_tokens:
        return train.max_tokens_per_gpu
    longest = rollout.rollout_max_context_len or rollout.rollout_max_response_len
    return -(-(train.micro_batch_size or 1) * longest // train.context_parallel_size)


def check_gpu_sizes(flow: Flow, config: PostTrainConfig, shape: ModelShape, num_gpus: int = 0) -> None:
    """Check that the trainer's ranks and tensor-parallel groups fit the GPUs of a node, and that
    --rollout-num-gpus-per-engine divides the GPUs of the engines, the GPUs of a node and the attention heads of the
    model. If the run gets only the `num_gpus` GPUs of this machine, also check that they are enough. Raises
    LayoutError."""
    run, train, rollout = config.run, config.train, config.rollout
    of_node, tensor = gpus_per_node(config), train.tensor_model_parallel_size
    rows: list[tuple[object, str]] = [  # (wrong, message)
        (
            of_node and train.actor_num_gpus_per_node > of_node,
            f"--actor-num-gpus-per-node {train.actor_num_gpus_per_node} exceeds --num-gpus-per-node {of_node}: use "
            "fewer ranks per node and more nodes (--actor-num-nodes), or raise --num-gpus-per-node",
        ),
        (
            of_node and train.num_ranks > of_node > tensor and of_node % tensor,
            f"--tensor-model-parallel-size {tensor} does not divide the {of_node} GPUs of a node, so that a "
            f"tensor-parallel group would span two nodes: use a divisor of {of_node}",
        ),
    ]
    if flow.generates and not rollout.rollout_external_engine_addrs:
        size, ranks, heads = rollout.rollout_num_gpus_per_engine, train.num_ranks, shape.num_attention_heads
        shared = run.colocate or rollout.rollout_num_gpus is None
        or_own = ", or give the engines their own GPUs with --rollout-num-gpus" if shared else ""
        gpus = of_node or (train.actor_num_gpus_per_node if shared else size)
        flag = f"--rollout-num-gpus-per-engine {size}"
        rows += [
            (
                shared and size > ranks,
                f"{flag} exceeds the trainer's {ranks} GPUs (--actor-num-nodes x --actor-num-gpus-per-node), which the "
                f"engines share: use at most {ranks}{or_own}",
            ),
            (
                shared and ranks % size,
                f"{flag} does not divide the trainer's {ranks} GPUs, which the engines share: use a divisor of "
                f"{ranks}{or_own}",
            ),
            (
                size % gpus and gpus % size,
                f"{flag} is neither a divisor nor a multiple of the {gpus} GPUs of a node (--num-gpus-per-node), and "
                f"an engine that spans nodes uses all GPUs of each: use a divisor or a multiple of {gpus}{or_own}",
            ),
            (
                heads % size and not config.engine_facts.replicates_attention,
                f"{flag} does not divide the model's {heads} attention heads: use a divisor of {heads}",
            ),
        ]
    if num_gpus:
        rows.append(gpu_count_rule(flow, config, num_gpus))
    check_rules(rows, LayoutError)


def check_layout(shape: ModelShape, train: TrainConfig) -> None:
    """Check that a model can be trained with the parallel sizes and Megatron options of a config. Raises InputError."""
    megatron = train.megatron.model_dump()
    if train.mtp_num_layers not in (None, shape.num_mtp_layers):
        raise OptionError(
            f"--mtp-num-layers {train.mtp_num_layers} contradicts --hf-checkpoint, which has {shape.num_mtp_layers} "
            "multi-token prediction layers: omit the option"
        )
    check_model_parallel(
        shape,
        train.tensor_model_parallel_size,
        train.expert_model_parallel_size,
        train.expert_tensor_parallel_size,
        train.sequence_parallel,
    )
    if has_grouped_experts(shape, megatron):
        expert_tensor = train.expert_tensor_parallel_size or train.tensor_model_parallel_size
        check_grouped_experts(shape, expert_tensor, 2 if train.params_dtype == "bf16" else 4)
    check_pipeline(shape, train.pipeline_model_parallel_size, train.virtual_pipeline_model_parallel_size, megatron)


def gpu_count_rule(flow: Flow, config: PostTrainConfig, num_gpus: int) -> tuple[object, str]:
    """Return the rule that the `num_gpus` GPUs of this machine are enough for the trainer and the engines of a run."""
    options = engine_options(config)
    trainer = config.train.num_ranks if flow.trains else 0
    starts_engines = flow.generates and not options.external
    engines = options.num_engines_to_start(True) * options.gpus_per_engine if starts_engines else 0
    needed = max(trainer, options.first_gpu + engines if engines else 0)
    of_teacher = ""
    if flow.has_rollouts and (teacher := teacher_options(config)):
        needed, of_teacher = needed + teacher.gpus_per_engine, ", --opd-teacher-num-gpus for the teacher"
    return (
        needed > num_gpus,
        f"this machine has {num_gpus} GPUs, but the run needs {needed} (--actor-num-nodes x "
        f"--actor-num-gpus-per-node for the trainer, --rollout-num-gpus for the engines{of_teacher}): use fewer "
        "GPUs, or join a Ray cluster with --ray-address",
    )


def check_memory(plan: GpuPlan) -> None:
    """Check that weights, gradients and optimizer of the trainer fit a GPU, and that the weights of each engine fit its
    share of the GPU. Activations are not checked here: their estimate is less exact, so they lead to a warning only
    (`memory_warnings`)."""
    trainer, engine = plan.trainer, plan.engine
    if trainer and trainer.resident_bytes > plan.gpu_bytes:
        raise LayoutError(
            f"the trainer needs {format_gib(trainer.resident_bytes)} GiB per GPU ("
            f"weights {format_gib(trainer.weights)}, gradients {format_gib(trainer.gradients)}, "
            f"optimizer {format_gib(trainer.optimizer)}), but a GPU has "
            f"{format_gib(plan.gpu_bytes)} GiB: use more GPUs, larger parallel sizes, or --optimizer-cpu-offload"
        )
    if engine and engine.weight_bytes >= engine.static_bytes:
        raise EngineError(
            f"an engine needs {format_gib(engine.weight_bytes)} GiB per GPU for weights, but its static share "
            f"({engine.share_flag}) is {format_gib(engine.static_bytes)} of {format_gib(plan.gpu_bytes)} GiB: "
            f"raise --rollout-num-gpus-per-engine or {engine.share_flag}"
        )
    if plan.teacher and plan.teacher.weight_bytes >= plan.teacher.static_bytes:
        raise EngineError(
            f"the engine of --opd-teacher-engine needs {format_gib(plan.teacher.weight_bytes)} GiB per GPU for "
            f"weights, but has {format_gib(plan.teacher.static_bytes)} of {format_gib(plan.gpu_bytes)} GiB: raise "
            "--opd-teacher-num-gpus"
        )


def memory_warnings(plan: GpuPlan) -> list[str]:
    """Return a list with one warning if a training step may exceed the GPU's memory, else an empty list."""
    if plan.peak_bytes <= plan.gpu_bytes:
        return []
    parts = []
    if trainer := plan.trainer:
        parts.append(f"weights, gradients and optimizer {format_gib(trainer.resident_bytes)}")
        backward = trainer.activations + trainer.temporary
        parts.append(
            f"activations and logits {format_gib(backward)}"
            if backward >= trainer.update
            else f"optimizer step {format_gib(trainer.update)}"
        )
    if plan.engine and plan.colocated:
        parts.append(f"engine {format_gib(plan.engine.static_bytes)}")
    return [
        f"a training step may need {format_gib(plan.peak_bytes)} GiB per GPU ({', '.join(parts)}), but a GPU has "
        f"{format_gib(plan.gpu_bytes)} GiB; if the step runs out of memory, lower --max-tokens-per-gpu"
        f"{f' or {plan.engine.share_flag}' if plan.engine else ''}, "
        "or add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ]


def speed_warnings(flow: Flow, config: PostTrainConfig, gpu_bytes: int) -> list[str]:
    """Return a list with one warning if the engines of a run would generate slowly, else an empty list. They do so when
    they decode larger batches than they capture CUDA graphs for, which by default depends on the memory of a GPU
    (`gpu_bytes`). Evaluations are not considered."""
    options = engine_options(config)
    if not flow.has_rollouts or config.run.debug_train_only or options.external:
        return []
    warning = engine_backend(options.engine).graph_warning(options, samples_per_engine(config), gpu_bytes)
    return [warning] if warning else []


def samples_per_engine(config: PostTrainConfig) -> int:
    """Return the maximum number of samples that one engine generates at the same time during a rollout with GPUs."""
    rollout, run = config.rollout, config.run
    num_engines, num_samples = engine_options(config).num_engines_to_start(True), rollout.n_samples_per_prompt
    if config.eval.eval_mode == "apart":
        num_engines -= config.eval.eval_num_engines
    num_engines = max(1, num_engines)  # `preflight` refuses a run that leaves no engine for rollouts

    if run.streams:
        num_groups = rollout.rollout_batch_size * (run.max_staleness + 1)
    else:
        num_groups = max(rollout.rollout_batch_size, rollout.over_sampling_batch_size or 0)
    slots = max(1, rollout.engine_concurrency * num_engines // num_samples)
    return -(-min(num_groups, slots) // num_engines) * num_samples


def format_gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB with one decimal."""
    return f"{num_bytes / GIB:.1f}"
