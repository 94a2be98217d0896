"""Estimate the GPU memory of a trainer's rank before a run starts: weights, gradients, optimizer and activations.

Parameters are counted from the tensor shapes of the model family, so weights, gradients and optimizer states are exact
except for the padding of Megatron's buffers (at most 64 elements per tensor). Activations are estimated
(`layer_activations`). Does not import torch, because preflight uses this module.

The formulas of the activations that one layer keeps for its backward pass are those of Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (sections 4 and 5), adapted to the layers of `model/`:
no dropout, RMSNorm, SwiGLU with a fused activation, grouped-query or latent attention, flash attention (no attention
matrix), and packed sequences. Per token and layer of a dense model with hidden size h, query width q, key and value
width k each, MLP width f, and n bytes per element:

    n (4 h  +  3 q + 4 k  +  q with QK norms  +  3 f) + 4 bytes x attention heads

which are the inputs and outputs of both norms; the QKV projection (q + 2 k), its copy of the queries for the QK norm,
the rotated queries and keys, the output of attention; the output of the first MLP matrix (2 f) and of SwiGLU (f).
Tensor parallelism divides the attention and MLP terms; the terms in h are divided only with sequence parallelism.
Tokens are counted per rank, after context parallelism.

How many tokens of a micro-batch belong to images depends on the data: all of them are assumed to. Every rank of the
first stage computes all images of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from penstock.engines.families import RankParameters, count_rank_parameters, tensor_layout
from penstock.engines.families.shape import ModelShape, Vision
from penstock.engines.families.tensor_rows import EMBEDDING, HEAD, VISION
from penstock.engines.lora import EXPERT, LoraOptions, adapter_targets
from penstock.engines.parallel_layout import ParallelLayout, has_grouped_experts, split_layers

GIB = 1 << 30
FP32 = 4  # bytes
BYTES = {"fp32": 4, "bf16": 2}
MOMENTS = 2 * FP32  # bytes per parameter
# CUDA context, libraries, workspaces and fragmentation of the caching allocator. Three totals measured on an H100
# exceed the estimate of the tensors by 5.2 to 5.6 GiB (tests/engines/test_memory_plan.py).
RUNTIME = 5 * GIB
# Number of parameter elements that --optimizer-cpu-offload updates at a time (384 MiB of optimizer state). A parameter
# with more elements is updated alone.
CHUNK_NUMEL = 2**25
MLP_PARTS = ("router", "moe", "moe_act", "shared_experts")  # recomputed together by `--recompute-modules moe`


@dataclass(frozen=True)
class TrainerOptions:
    """Options of the trainer that determine its memory."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    max_tokens: int = 8192  # maximum number of tokens of a micro-batch on one rank
    log_probs_chunk_size: int = 4096  # tokens whose logits are computed at a time
    fp32_head: bool = False  # --fp32-lm-head
    critic: bool = False  # whether every rank also trains a critic
    num_frozen: int = 0  # number of reference and teacher models, whose weights are in host memory
    num_copied_heads: int = 0  # output heads of teachers, whose distributions over the vocabulary the update needs
    lora: LoraOptions | None = None  # with adapters, the model's own weights have no gradients and optimizer state
    freeze_vision: bool = True  # --freeze-vision: the vision tower has no gradients and optimizer state
    megatron: dict[str, Any] = field(default_factory=dict)  # a dump of `MegatronOptions`


@dataclass(frozen=True)
class TrainerMemory:
    """Memory of one rank, in bytes."""

    stage: int  # pipeline stage of the rank
    parameters: int  # weights of policy and critic
    weights: int
    gradients: int
    optimizer: int
    activations: int  # activations of all micro-batches in flight
    temporary: int  # peak of the backward pass above `activations`: logits and their gradient, or one layer
    update: int  # peak of the optimizer step above resident_bytes: fp32 copies of gradients, chunks of offloaded state
    host: int  # in host memory: reference, teacher and offloaded optimizer state; not counted above
    copied_heads: int = 0  # output heads of teachers, on the last pipeline stage

    @property
    def resident_bytes(self) -> int:
        """Return the GPU bytes that are in use all the time: weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak_bytes(self) -> int:
        """Return the GPU bytes in use at the peak of a training step: in the backward pass or in the optimizer step."""
        peak = max(self.activations + self.temporary, self.update)
        return self.resident_bytes + self.copied_heads + peak + RUNTIME


def estimate_trainer_memory(
    shape: ModelShape, layout: ParallelLayout, num_ranks: int, options: TrainerOptions | None = None
) -> TrainerMemory:
    """Return the estimated memory of the trainer rank that needs the most."""
    layout.data_parallel_size(num_ranks)  # raises LayoutError
    options = options or TrainerOptions()
    stages = range(layout.pipeline)
    return max(
        (estimate_stage_memory(shape, layout, num_ranks, options, stage) for stage in stages),
        key=lambda m: m.peak_bytes,
    )


def estimate_stage_memory(
    shape: ModelShape, layout: ParallelLayout, num_ranks: int, options: TrainerOptions, stage: int
) -> TrainerMemory:
    """Return the estimated memory of a rank of one pipeline stage. Optimizer state is sharded over data- and
    context-parallel ranks; the optimizer state of experts is sharded over the ranks with the same experts. An fp32
    model has no second copy of its weights."""
    megatron, size = options.megatron, BYTES[options.dtype]
    layers = stage_layers(shape.num_layers, layout, megatron)[stage]
    count = partial(count_stage_parameters, shape, layout, layers, stage)
    roles = (False, True) if options.critic else (False,)
    models = [count(critic) for critic in roles]
    parameters = sum(model.total for model in models)
    trained = [count(critic, has_vision=False) for critic in roles] if options.freeze_vision else models
    if options.lora is not None:
        trained = [count_adapter_parameters(shape, layers, options.lora, layout.expert)]
        parameters += trained[0].total
    gradient_size = FP32 if megatron.get("grad_reduce_in_fp32", True) else size
    offloaded = megatron.get("optimizer_offload_fraction", 1.0) if megatron.get("optimizer_cpu_offload") else 0.0
    state_size = (FP32 if options.dtype != "fp32" else 0) + MOMENTS
    replicas = num_ranks // (layout.tensor * layout.pipeline)
    expert_replicas = num_ranks // ((layout.expert_tensor or layout.tensor) * layout.expert * layout.pipeline)
    # For each model the number of parameters whose optimizer state this rank has.
    shards = [model.dense / replicas + model.expert / expert_replicas for model in trained]
    state = state_size * sum(shards)
    # models are updated one after another, and each frees the copies of its gradients
    update = FP32 * max(shards) if gradient_size < FP32 else 0.0
    if offloaded:
        largest = max(shape.vocab_size, 2 * shape.ffn_hidden_size) * shape.hidden_size // layout.tensor
        if shape.experts and has_grouped_experts(shape, megatron, default=options.dtype == "bf16"):
            # gate and up projections of all experts of a rank are one parameter
            width = shape.experts.ffn_hidden_size // (layout.expert_tensor or layout.tensor)
            stack = shape.experts.num_experts // layout.expert * 2 * width * shape.hidden_size
            largest = max(largest, stack // expert_replicas)
        update += state_size * min(max(shards), CHUNK_NUMEL + max(CHUNK_NUMEL, largest))
    activations, temporary = activation_bytes(shape, layout, options, layers, stage)
    head = -(-shape.vocab_size // layout.tensor) * shape.hidden_size
    return TrainerMemory(
        stage=stage,
        parameters=parameters,
        weights=size * parameters,
        gradients=gradient_size * sum(model.total for model in trained),
        optimizer=round((1 - offloaded) * state),
        activations=round(activations),
        temporary=round(temporary),
        update=round(update),
        host=round(offloaded * state) + options.num_frozen * size * models[0].total,
        copied_heads=size * head * options.num_copied_heads if stage == layout.pipeline - 1 else 0,
    )


def count_adapter_parameters(
    shape: ModelShape, layers: Sequence[int], options: LoraOptions, expert: int
) -> RankParameters:
    """Return how many adapter parameters a rank has in these layers, as if no adapter were sharded over tensor-parallel
    ranks. `expert`: expert-parallel size."""
    counts, hf_shapes = {True: 0, False: 0}, tensor_layout(shape).hf_shapes
    for name, target in adapter_targets(shape, options.lora_target_modules).items():
        if int(name.split(".")[2]) in layers:
            rows = [hf_shapes[f"{module}.weight"] for module in target.hf_modules]
            counts[EXPERT in name] += options.lora_rank * (sum(out for out, _ in rows) + sum(size for _, size in rows))
    return RankParameters(counts[False], counts[True] // expert)


def count_stage_parameters(
    shape: ModelShape,
    layout: ParallelLayout,
    layers: Sequence[int],
    stage: int,
    critic: bool = False,
    has_vision: bool = True,
) -> RankParameters:
    """Return how many parameters a rank of the pipeline stage `stage` has, whose layers are `layers`. The first stage
    has the embedding and, with `has_vision`, the vision tower; the last has the final norm and the head, which is a
    copy of the embedding if both are tied and on different stages. A critic has a value head of one row instead of the
    LM head."""
    first, last = stage == 0, stage == layout.pipeline - 1
    outer = {EMBEDDING} if first else set()
    if first and shape.vision is not None and has_vision:
        outer |= {VISION + name for name in shape.vision.tensor_shapes}
    if last:
        outer.add("decoder.final_layernorm.weight")
        if not critic:
            outer.add(EMBEDDING if shape.tied_embeddings else HEAD)
    tensor, expert, expert_tensor = layout.tensor, layout.expert, layout.expert_tensor
    count = count_rank_parameters(shape, layers, tensor=tensor, expert=expert, expert_tensor=expert_tensor, outer=outer)
    return RankParameters(count.dense + (shape.hidden_size if critic and last else 0), count.expert)


def stage_layers(num_layers: int, layout: ParallelLayout, megatron: dict[str, Any]) -> list[list[int]]:
    """Return the indices of the layers of every pipeline stage, as Megatron splits them."""
    stages, virtual = layout.pipeline, layout.virtual_pipeline or 1
    first, last = (megatron.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    embedding, loss = (bool(megatron.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    sizes = split_layers(num_layers + embedding + loss, stages, first, last)
    if sizes is None:
        embedding = loss = False
        sizes = [num_layers // stages + (stage < num_layers % stages) for stage in range(stages)]
        virtual = 1
    chunks = [sizes[stage] // virtual for _ in range(virtual) for stage in range(stages)]
    chunks[0] -= embedding
    chunks[-1] -= loss
    layers: list[list[int]] = [[] for _ in range(stages)]
    start = 0
    for index, count in enumerate(chunks):
        layers[index % stages] += range(start, start + count)
        start += count
    return layers


def activation_bytes(
    shape: ModelShape, layout: ParallelLayout, options: TrainerOptions, layers: Sequence[int], stage: int
) -> tuple[float, float]:
    """Return the bytes of the activations of all micro-batches in flight, and of the largest temporary tensors.

    The first of p stages keeps the activations of p micro-batches (1F1B), later stages keep fewer. With m virtual
    chunks per stage the first stage keeps p + (p - 1) / m (Korthikanti et al. 2022, section 4.2).
    """
    size, tokens, virtual = BYTES[options.dtype], options.max_tokens, layout.virtual_pipeline or 1
    stored, temporary = (tokens * x for x in layer_activations(shape, layers, layout, size, options.megatron))
    if shape.vision is not None and stage == 0:
        tower, block = vision_activations(shape.vision, size, options)
        stored, temporary = stored + tokens * layout.context * tower, max(temporary, tokens * layout.context * block)
    later = layout.pipeline - 1 - stage
    stored *= later + 1 if virtual == 1 else (2 * later + (virtual - 1) * layout.pipeline + 1) / virtual
    if stage == layout.pipeline - 1:
        vocabulary = -(-shape.vocab_size // layout.tensor)
        chunk = min(tokens, options.log_probs_chunk_size)
        logits = (FP32 if options.fp32_head else size) * vocabulary * chunk
        # Logits and their gradient, and the gradient of the head's weight.
        temporary = max(temporary, 2 * logits + size * vocabulary * shape.hidden_size)
        residual = size * shape.hidden_size * tokens
        # The input of the head, and the input and output of the final norm.
        stored += residual + 2 * residual / (layout.tensor if layout.sequence_parallel else 1)
    return stored, temporary


def vision_activations(vision: Vision, bytes_per_element: int, options: TrainerOptions) -> tuple[float, float]:
    """Return the activation memory of the vision tower in bytes per image token: the memory kept until the backward
    pass, and that of one block. A tower that is not trained keeps only the deepstack features.

    A block keeps for each patch the inputs and outputs of both norms, queries, keys and values, the rotated queries and
    keys, the output of attention, and the MLP: output of the first matrix and of the activation, which SwiGLU also
    keeps before the product with its second half. A merger keeps three matrices of the size of its input.
    """
    size, hidden, mergers = bytes_per_element, vision.hidden_size, 1 + len(vision.deepstack_blocks)
    mlp = (4 if vision.variant == "qwen2.5" else 2) * vision.ffn_hidden_size
    block = size * (10 * hidden + mlp) + FP32 * vision.num_attention_heads
    patches, output = vision.merge_size**2, size * vision.output_size
    if options.freeze_vision:
        return (mergers - 1) * output, patches * block
    kept = size * hidden if options.megatron.get("recompute_granularity") == "full" else block
    tower = size * (vision.patch_dim + hidden) + vision.num_blocks * kept + 3 * mergers * size * hidden
    return patches * tower + mergers * output, patches * block


def layer_activations(
    shape: ModelShape, layers: Sequence[int], layout: ParallelLayout, bytes_per_element: int, megatron: dict[str, Any]
) -> tuple[float, float]:
    """Return the activation memory of a rank's consecutive layers (indices `layers`), in bytes per token that the rank
    processes: the memory kept from the forward pass to the backward pass, and the additional peak in the backward pass,
    while a part of the layers is recomputed and the largest layer is processed. `megatron` has the recomputation
    options."""
    parts = {layer: activation_bytes_by_module(shape, layer, layout, bytes_per_element) for layer in layers}
    full = [sum(parts[layer].values()) for layer in layers]
    largest = max(full, default=0.0)
    granularity, group = megatron.get("recompute_granularity"), megatron.get("recompute_num_layers") or 1
    if granularity == "full":
        inputs = [parts[layer]["input"] for layer in layers]
        if megatron.get("recompute_method") == "block":
            return sum(inputs[:group]) + sum(full[group:]), 2 * largest
        return sum(inputs[::group]), (group + 1) * largest
    if granularity == "selective":
        modules = megatron.get("recompute_modules") or ["core_attn"]
        dropped = {*modules, *(MLP_PARTS if "moe" in modules else ())}
        stored = [sum(size for name, size in parts[layer].items() if name not in dropped) for layer in layers]
        return sum(stored), max((a - b for a, b in zip(full, stored)), default=0.0) + largest
    return sum(full), largest


def activation_bytes_by_module(
    shape: ModelShape, layer: int, layout: ParallelLayout, bytes_per_element: int
) -> dict[str, float]:
    """Return the activation memory of one layer in bytes per token, by module. Keys that are values of
    --recompute-modules ("core_attn", "mlp", ...) can be recomputed selectively; the other keys ("input", "attention",
    ...) cannot, except "router" as a part of "moe".

    Flash attention pads the values of latent attention to the width of queries and keys. All experts are assumed to
    get equally many tokens.
    """
    sequence = layout.tensor if layout.sequence_parallel else 1  # ranks over which norms and residuals are split
    heads, size, exchanged = shape.num_attention_heads / layout.tensor, bytes_per_element, 0.0
    residual = size * shape.hidden_size / sequence
    parts = {"input": residual, "residual": residual, "layernorm": 2 * residual}
    if shape.sandwich_norms:
        parts["sandwich"] = 2 * residual
    if latent := shape.latent:
        width, padding = shape.head_dim, max(0, shape.head_dim - latent.v_head_dim)
        low_rank = 2 * (latent.q_lora_rank or 0) + 2 * latent.kv_lora_rank + latent.qk_rope_head_dim
        padded = padding + (width if padding else 0)  # padding of the values, and the output with its padding
        if layout.context > 1:
            exchanged = 2 * (width + latent.v_head_dim)  # queries, keys, values and output
        parts["attention"] = size * (low_rank / sequence + heads * latent.v_head_dim)
        parts["mla_up_proj"] = size * heads * (2 * width + latent.v_head_dim)
        parts["core_attn"] = size * heads * (padded + exchanged) + FP32 * heads
    else:
        query = heads * shape.head_dim
        key = max(1.0, shape.num_query_groups / layout.tensor) * shape.head_dim
        stored = (query + 2 * key) + (query if shape.qk_layernorm else 0) + (query + key) + query
        if layout.context > 1:
            exchanged = query  # the output before and after the exchange of heads
        parts["attention"], parts["core_attn"] = size * stored, size * exchanged + FP32 * heads
    experts = shape.experts
    if experts is None or layer < experts.num_dense_layers:
        return {**parts, "mlp": 3 * size * shape.ffn_hidden_size / layout.tensor}
    ranks = layout.expert_tensor or layout.tensor
    copies = experts.top_k * ranks / sequence  # token copies that the rank's experts process, per token of the rank
    expert_width = experts.ffn_hidden_size / ranks
    return {
        **parts,
        "router": 3 * FP32 * experts.num_experts / sequence,
        "moe": size * copies * (shape.hidden_size + 2 * expert_width),
        "moe_act": size * copies * expert_width,
        "shared_experts": 3 * size * experts.shared_ffn_hidden_size / layout.tensor,
    }
