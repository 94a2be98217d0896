"""`penstock doctor --plan`: print the estimated memory per GPU of a run, without starting it and without GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape, Vision
from penstock.engines.local_gpus import visible_gpu_bytes
from penstock.engines.megatron.memory_plan import BYTES, RUNTIME
from penstock.engines.training import GIB
from penstock.flows.config import Flow, PostTrainConfig, validate_config
from penstock.flows.gpu_plan import (
    GpuPlan,
    check_gpu_sizes,
    check_layout,
    format_gib,
    microbatch_tokens,
    plan_gpu_memory,
    speed_warnings,
)
from penstock.flows.options.argv import parse_integer, parse_number, short_repr, split_args
from penstock.flows.options.flags import parse_values
from penstock.flows.runtime.engine_options import teacher_options
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_store
from penstock.flows.terminal.console import print_table
from penstock.stages.train.config import TrainConfig
from penstock.storage.config import entries_of
from penstock.storage.errors import check_rules

if TYPE_CHECKING:
    from penstock.engines.megatron.memory_plan import TrainerMemory

FLAGS = {"--plan": False, "--gpu-memory-gib": True, "--num-gpus": True, "--num-gpus-per-node": True}
DEFAULT_GPU_BYTES = 80 * GIB
GPUS_PER_NODE = 8
IMAGE_SIDE = 448  # pixels of the image whose FLOPs are printed
Row = tuple[str, str, str]


def main(argv: list[str]) -> int:
    """Run `penstock doctor --plan`. Return 0 if the run fits the memory of the GPUs, 1 if not."""
    positional, own, rest = split_args(argv, FLAGS)
    values = parse_values(rest)
    distribute_gpus(values, own)
    config = validate_config(values)
    gpu_bytes = min(visible_gpu_bytes(), default=DEFAULT_GPU_BYTES)
    if "--gpu-memory-gib" in own:
        gpu_bytes = round(parse_number("--gpu-memory-gib", own["--gpu-memory-gib"]) * GIB)
    rules = (
        (positional, f"penstock doctor --plan takes only options; found {short_repr(' '.join(positional))}"),
        (not config.convert.hf_checkpoint, "--hf-checkpoint is missing: give a directory with the model's config.json"),
        (not gpu_bytes, "--gpu-memory-gib 0 is not the memory of a GPU: give a positive number"),
    )
    check_rules(rules)
    flow = Flow.SFT if config.train.loss_type == "sft_loss" else Flow.TRAIN
    config = resolve(flow, config, open_store(config.run, probe=False), counts_rows=False)
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    check_layout(shape, config.train)
    check_gpu_sizes(flow, config, shape)
    plan = plan_gpu_memory(flow, config, shape, gpu_bytes)
    print_plan(plan, config, shape)
    for warning in speed_warnings(flow, config, plan.gpu_bytes):
        print(f"warning: {warning}")
    return 0 if plan_fits(plan) else 1


def distribute_gpus(values: dict[str, dict[str, Any]], flag_values: Mapping[str, str]) -> None:
    """Distribute --num-gpus over machines: the trainer gets all GPUs that --rollout-num-gpus and the teacher's engine
    do not use. `values` (section -> option -> value) are updated in place."""
    if "--num-gpus-per-node" in flag_values:
        per_node = parse_integer("--num-gpus-per-node", flag_values["--num-gpus-per-node"], minimum=1)
        values.setdefault("run", {})["num_gpus_per_node"] = per_node
    if "--num-gpus" not in flag_values:
        return
    total = parse_integer("--num-gpus", flag_values["--num-gpus"], minimum=1)
    engines = values.get("rollout", {}).get("rollout_num_gpus")
    of_teacher, teacher = entries_of(values, "train.opd.engine"), 0
    if of_teacher:
        teacher = parse_integer("--opd-teacher-num-gpus", str(of_teacher.get("opd_teacher_num_gpus", 1)))
    trainer = total - teacher - (0 if engines is None else parse_integer("--rollout-num-gpus", str(engines)))
    beside = f"--rollout-num-gpus {engines}" + (f" and {teacher} GPUs of the teacher" if teacher else "")
    own_per_node = flag_values.get("--num-gpus-per-node", str(max(1, min(GPUS_PER_NODE, trainer))))
    per_node = parse_integer("--num-gpus-per-node", own_per_node, minimum=1)
    rules = (
        (trainer < 1, f"--num-gpus {total} leaves no GPU for the trainer besides {beside}: raise --num-gpus"),
        (
            trainer % per_node,
            f"--num-gpus-per-node {per_node} does not divide the trainer's {trainer} GPUs: give a divisor of "
            f"{trainer}, or change --num-gpus",
        ),
    )
    check_rules(rules)
    values.setdefault("train", {}).update(actor_num_nodes=trainer // per_node, actor_num_gpus_per_node=per_node)


def plan_fits(plan: GpuPlan) -> bool:
    """Return whether the run fits: its peak memory fits a GPU, and the weights of the engine and of the teacher's
    engine fit the share of a GPU that each has."""
    too_large = any(engine and engine.weight_bytes >= engine.static_bytes for engine in (plan.engine, plan.teacher))
    return plan.peak_bytes <= plan.gpu_bytes and not too_large


def print_plan(plan: GpuPlan, config: PostTrainConfig, shape: ModelShape) -> None:
    """Print the estimated memory of trainer and engine as a table, and whether the run fits."""
    rows: list[Row] = []
    if plan.trainer:
        rows += trainer_rows(plan.trainer, config, plan.offload_train)
        rows[1:1] = [] if shape.vision is None else [vision_row(shape, shape.vision, config.train)]  # after the weights
    if plan.engine:
        engine, share = plan.engine, plan.engine.static_bytes / plan.gpu_bytes
        per_engine = config.rollout.rollout_num_gpus_per_engine
        tokens = f"{engine.kv_cache_bytes // engine.bytes_per_token:,} tokens of {engine.bytes_per_token:,} bytes"
        rows += [
            ("engine, weights", format_gib(engine.weight_bytes), f"{per_engine} GPUs per engine"),
            ("engine, KV cache", format_gib(engine.kv_cache_bytes), tokens),
            ("engine", format_gib(engine.static_bytes), f"static share {share:.2f} of the GPU"),
        ]
    if plan.teacher and (options := teacher_options(config)):
        sizes = f"{options.gpus_per_engine} GPUs of its own (--opd-teacher-num-gpus)"
        rows += [
            ("teacher, weights", format_gib(plan.teacher.weight_bytes), sizes),
            ("teacher", format_gib(plan.teacher.static_bytes), "weights and KV cache"),
        ]
    if plan.trainer and plan.engine:
        separate = max(plan.trainer.peak_bytes, plan.engine.static_bytes)
        for what, peak in (
            ("shared GPU, both resident", plan.colocated_peak_bytes()),
            ("shared GPU, each offloaded in turn", plan.colocated_peak_bytes(True, True)),
            ("separate GPUs, the larger", separate),
        ):
            verdict = "fits" if peak <= plan.gpu_bytes else f"exceeds {format_gib(plan.gpu_bytes)}"
            rows.append((what, format_gib(peak), verdict))
    print_table(("per GPU", "  GiB", ""), [(what, size.rjust(5), detail) for what, size, detail in rows])
    placement = "shared by trainer and engines" if plan.colocated and plan.engine else "of the trainer or the engines"
    if plan.engine and plan.engine.weight_bytes >= plan.engine.static_bytes:
        verdict = f"does not fit: the engine's weights exceed its share of the GPU ({plan.engine.share_flag})"
    elif plan.teacher and plan.teacher.weight_bytes >= plan.teacher.static_bytes:
        verdict = "does not fit: the teacher's weights exceed its share of the GPU (--opd-teacher-num-gpus)"
    else:
        verdict = "fits" if plan_fits(plan) else "does not fit"
        verdict += (
            f": a GPU {placement} needs an estimated {format_gib(plan.peak_bytes)} of {format_gib(plan.gpu_bytes)} GiB"
        )
    print(verdict)


def trainer_rows(trainer: TrainerMemory, config: PostTrainConfig, offload_train: bool) -> list[Row]:
    """Return the rows of the trainer in the table of `print_plan`: what, GiB, details."""
    train = config.train
    sizes = (
        f"{train.num_ranks} GPUs: tensor {train.tensor_model_parallel_size} x pipeline "
        f"{train.pipeline_model_parallel_size} x context {train.context_parallel_size} x data "
        f"{train.data_parallel_size}, expert {train.expert_model_parallel_size}; stage {trainer.stage + 1} needs most"
    )
    recompute = train.megatron.recompute_granularity or "none"
    models = " of policy and critic" if train.uses_critic else ""
    frozen = [name for name, used in (("reference", train.uses_reference), ("teacher", train.loads_teacher)) if used]
    on_host = [*frozen, *(["weights", "optimizer"] if offload_train else [])]
    if train.megatron.optimizer_cpu_offload and not offload_train:
        on_host.append("optimizer")
    tokens, logits = microbatch_tokens(config), f"logits of {train.log_probs_chunk_size:,} tokens, or one layer"
    host = trainer.host + (trainer.weights + trainer.optimizer if offload_train else 0)
    heads = ("trainer, heads of teachers", format_gib(trainer.copied_heads), "for --opd-divergence; last stage")
    return [
        ("trainer, weights", format_gib(trainer.weights), f"{trainer.parameters:,} parameters{models}"),
        ("trainer, gradients", format_gib(trainer.gradients), ""),
        ("trainer, optimizer", format_gib(trainer.optimizer), "fp32 weights and moments, sharded"),
        ("trainer, activations", format_gib(trainer.activations), f"{tokens:,} tokens; recompute {recompute}"),
        ("trainer, temporary", format_gib(trainer.temporary), logits),
        *([heads] if trainer.copied_heads else []),
        ("trainer, update", format_gib(trainer.update), "after the activations: fp32 gradients, offloaded state"),
        ("trainer, CUDA and fragmentation", format_gib(RUNTIME), "measured"),
        ("trainer", format_gib(trainer.peak_bytes), sizes),
        ("host memory of a trainer rank", format_gib(host), ", ".join(on_host)),
    ]


def vision_row(shape: ModelShape, vision: Vision, train: TrainConfig) -> Row:
    """Return the row of the vision tower in the table of `print_plan`, with the tower's share of the FLOPs of an
    image."""
    side = IMAGE_SIDE // (vision.patch_size * vision.merge_size) * vision.merge_size
    grid = (1, side, side)
    tokens, num_parameters = vision.num_image_tokens(grid), sum(map(prod, vision.tensor_shapes.values()))
    trained, frozen = not train.freeze_vision, train.lora is not None
    flops = shape.train_flops(tokens, tokens**2, [grid], frozen=frozen, trains_vision=trained)
    share = vision.train_flops([grid], trained=trained) / flops
    return (
        "trainer, vision tower",
        format_gib(num_parameters * BYTES[train.params_dtype or "bf16"]),
        f"its weights, on the first pipeline stage; {'trained' if trained else 'frozen'}; "
        f"{share:.0%} of the {flops / 1e12:.1f} TFLOP of a {IMAGE_SIDE} x {IMAGE_SIDE} image ({tokens} tokens)",
    )
