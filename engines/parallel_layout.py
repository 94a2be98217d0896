"""Tensor-, pipeline-, context- and expert-parallel sizes of a model, and the check that it can be sharded with them.
Does not import torch, because preflight and the driver use this module.
"""

from __future__ import annotations

from itertools import groupby
from math import prod
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from penstock.engines.families.shape import ModelShape
from penstock.storage.errors import LayoutError, OptionError, check_rules


class ParallelLayout(BaseModel):
    """Sizes and switches of model parallelism."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    context: int = Field(default=1, ge=1)
    expert: int = Field(default=1, ge=1)
    expert_tensor: int | None = None  # tensor-parallel size of the experts; None: same as `tensor`
    virtual_pipeline: int | None = None  # model chunks per pipeline rank (interleaved schedule)
    sequence_parallel: bool = False

    def data_parallel_size(self, world_size: int) -> int:
        """Return the data-parallel size of `world_size` trainer ranks. Raises LayoutError if the sizes do not divide
        it."""
        expert_tensor = self.expert_tensor or self.tensor
        dense = {"tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}
        experts = {"expert tensor": expert_tensor, "expert": self.expert, "pipeline": self.pipeline}
        for replicas, sizes, where in (("replicas", dense, ""), ("expert replicas", experts, ", for the experts")):
            if world_size % (ranks := prod(sizes.values())):
                product = " x ".join(f"{name} {size}" for name, size in sizes.items())
                raise LayoutError(
                    f"{world_size} trainer ranks cannot be divided into {replicas} of {ranks} ranks ({product}): use a "
                    f"multiple of {ranks} ranks, or smaller parallel sizes{where}"
                )
        return world_size // prod(dense.values())


FIRST_STAGE_FLAG, LAST_STAGE_FLAG = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EXPERT_FLAG = "--expert-model-parallel-size"


def check_model_parallel(
    shape: ModelShape,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    sequence_parallel: bool = False,
) -> None:
    """Check that a model can be sharded with these tensor- and expert-parallel sizes."""
    experts, flag = shape.experts, "--tensor-model-parallel-size"
    divided = [(tensor, flag, shape.num_attention_heads, "attention heads")]  # ranks, their flag, what they divide
    if experts is None or experts.num_dense_layers:
        divided.append((tensor, flag, shape.ffn_hidden_size, "rows of the MLP's up projection"))
    if experts is not None:
        own = (tensor, flag) if expert_tensor is None else (expert_tensor, "--expert-tensor-parallel-size")
        divided += [
            (expert, EXPERT_FLAG, experts.num_experts, "experts"),
            (tensor, flag, experts.shared_ffn_hidden_size, "rows of the shared experts' up projection"),
            (*own, experts.ffn_hidden_size, "rows of an expert's up projection"),
        ]
    groups = shape.num_query_groups
    rules = (
        *(
            (size % ranks, f"{name} {ranks} does not divide the model's {size} {dimension}: use a divisor of {size}")
            for ranks, name, size, dimension in divided
        ),
        (
            shape.latent is None and max(groups, tensor) % min(groups, tensor),
            f"{flag} {tensor}, but the model has {groups} key-value heads: use a divisor or a multiple of {groups}",
        ),
        (
            experts is None and expert > 1,
            f"{EXPERT_FLAG} {expert}, but the {shape.architecture} of this checkpoint has no experts: omit the option",
        ),
        (
            (experts or shape.latent) and tensor > 1 and not sequence_parallel,
            f"{shape.architecture} over {tensor} tensor-parallel ranks needs sequence parallelism (otherwise the "
            "gradients of its replicated weights are not all-reduced): add --sequence-parallel",
        ),
    )
    check_rules(rules, LayoutError)


def has_grouped_experts(shape: ModelShape, megatron_options: dict[str, Any], default: bool = False) -> bool:
    """Return whether grouped GEMMs compute the experts of a model; `default` if no option decides it."""
    if not shape.experts:
        return False
    chosen = megatron_options.get("moe_grouped_gemm")
    return bool(chosen if chosen is not None else megatron_options.get("moe_permute_fusion") or default)


def check_grouped_experts(shape: ModelShape, expert_tensor: int, bytes_per_element: int) -> None:
    """Check that torch's grouped GEMM can multiply the experts of a model: it needs rows of multiples of 16 bytes."""
    if row := unaligned_row(shape, expert_tensor, bytes_per_element):
        raise OptionError(
            f"--moe-grouped-gemm and --moe-permute-fusion need rows of multiples of 16 bytes; found {row} with "
            f"{bytes_per_element} bytes per element: omit the options"
        )


def unaligned_row(shape: ModelShape, expert_tensor: int, bytes_per_element: int) -> str:
    """Return the first row of the experts' weights whose size is not a multiple of 16 bytes; "" without one."""
    width = shape.experts.ffn_hidden_size // expert_tensor if shape.experts else 0
    rows = {"the hidden size": shape.hidden_size, "the width of an expert on a rank": width}
    return next((f"{name} {size}" for name, size in rows.items() if size * bytes_per_element % 16), "")


def check_pipeline(
    shape: ModelShape, pipeline: int = 1, virtual: int | None = None, megatron_options: dict[str, Any] | None = None
) -> None:
    """Check that the model's layers can be split over the pipeline stages."""
    options = megatron_options or {}
    first, last = (options.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    extra = sum(bool(options.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    ends = [(flag, size) for flag, size in ((FIRST_STAGE_FLAG, first), (LAST_STAGE_FLAG, last)) if size is not None]
    flags = " ".join(f"{flag} {size}" for flag, size in ends)
    rules = (
        (
            ends and pipeline == 1,
            f"{flags} needs at least two pipeline stages: omit the option or raise --pipeline-model-parallel-size",
        ),
        (
            ends and (extra or any(type(size) is not int or size < 1 for _, size in ends)),
            f"{flags} needs positive whole numbers and cannot be combined with "
            "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split: correct the numbers "
            "or drop one of these options",
        ),
    )
    check_rules(rules, LayoutError)
    stages = split_layers(shape.num_layers + extra, pipeline, first, last)
    if stages is None or any(layers % (virtual or 1) for layers in stages):
        sizes = f"--pipeline-model-parallel-size {pipeline}"
        if virtual:
            sizes += f" with --virtual-pipeline-model-parallel-size {virtual}"
        found = f"{sizes} {flags}".strip() + f" cannot split the model's {shape.num_layers} layers"
        raise LayoutError(f"{found} equally: {suggest_split(shape.num_layers, pipeline, virtual or 1)}")
    layers = stages[0] // (virtual or 1) - bool(options.get("account_for_embedding_in_pipeline_split"))
    needed = len(shape.vision.deepstack_blocks) if shape.vision and pipeline > 1 else 0
    if layers < needed:
        raise LayoutError(
            f"the pipeline chunk with the vision tower has {layers} layers, but {shape.architecture} adds features of "
            f"the tower to the outputs of the first {needed}: use fewer stages, or {FIRST_STAGE_FLAG}"
        )


def split_layers(num_layers: int, pipeline: int, first: int | None = None, last: int | None = None) -> list[int] | None:
    """Return the number of layers of every pipeline stage, or None if the layers cannot be split equally. `first` and
    `last` set different numbers for the first and the last stage."""
    ends = [size for size in (first, last) if size is not None]
    rest, stages = num_layers - sum(ends), pipeline - len(ends)
    if stages < 0 or (rest if stages == 0 else rest < stages or rest % stages):
        return None
    middle = [rest // stages] * stages if stages else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def suggest_split(num_layers: int, pipeline: int, virtual: int) -> str:
    """Return a hint for an error message, the first that works: another size of the last stage, which also has the LM
    head; other sizes of the first and the last stage; another number of stages; no virtual stages."""
    if pipeline > 1 and num_layers % virtual == 0:
        sizes = range(virtual, num_layers + 1, virtual)
        pairs = [(first, last) for first in sizes for last in sizes if abs(first - last) <= virtual]
        ends_to_try = [*((None, last) for last in sizes), *pairs]
        splits = [(split_layers(num_layers, pipeline, *ends), ends) for ends in ends_to_try]
        fitting = [(split, ends) for split, ends in splits if split and not any(n % virtual for n in split)]
        if fitting:
            split, (first, last) = min(fitting, key=lambda entry: (max(entry[0]), entry[1][0] or 0, entry[1][1]))
            flags = ("" if first is None else f"{FIRST_STAGE_FLAG} {first} ") + f"{LAST_STAGE_FLAG} {last}"
            runs = [(len(list(run)), layers) for layers, run in groupby(split)]  # [8, 8, 8, 5] -> "3 x 8, 5"
            counts = ", ".join(f"{count} x {layers}" if count > 1 else str(layers) for count, layers in runs)
            return f"use {flags} (layers of the stages: {counts})"
    divisors = [size for size in range(1, num_layers + 1) if num_layers % (size * virtual) == 0]
    if divisors:
        return f"set --pipeline-model-parallel-size to one of {', '.join(map(str, divisors[:12]))}"
    return "omit --virtual-pipeline-model-parallel-size"
