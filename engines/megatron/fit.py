"""Check that a model can be sharded with the requested parallel sizes, before any rank starts.

No torch here: preflight uses it too.
"""

from __future__ import annotations

from typing import Any

from engines.megatron.args import check_megatron_args
from engines.megatron.shape import ModelShape
from storage.errors import LayoutError

FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"


def check_fit(
    shape: ModelShape, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None, sequence_parallel: bool = False
) -> None:
    """Check parallel sizes against a model.

    Args:
        shape: of the model.
        tensor: ranks that share every matrix.
        expert: ranks that share the experts of a layer.
        expert_tensor: ranks that share every expert's matrices; None: `tensor`.
        sequence_parallel: whether tensor-parallel ranks share norms and residuals.

    Raises:
        LayoutError: the sizes do not fit.
    """
    _divides(shape.num_attention_heads, "attention heads", tensor, "--tensor-model-parallel-size")
    if shape.latent is None and max(shape.num_query_groups, tensor) % min(shape.num_query_groups, tensor):
        found = f"--tensor-model-parallel-size {tensor}, but the model has {shape.num_query_groups} key heads"
        raise LayoutError(f"{found}: one number must divide the other")
    if shape.experts is None or shape.experts.num_dense_layers:
        _divides(shape.ffn_hidden_size, "rows of the MLP", tensor, "--tensor-model-parallel-size")
    if shape.experts is None:
        if expert > 1:
            found = f"--expert-model-parallel-size {expert}, but the {shape.architecture} of this checkpoint has no experts"
            raise LayoutError(f"{found}: drop the option")
    else:
        _divides(shape.experts.num_experts, "experts", expert, "--expert-model-parallel-size")
        _divides(shape.experts.shared_ffn_hidden_size, "rows of the shared experts", tensor, "--tensor-model-parallel-size")
        ranks, option = (
            (tensor, "--tensor-model-parallel-size")
            if expert_tensor is None
            else (expert_tensor, "--expert-tensor-parallel-size")
        )
        _divides(shape.experts.ffn_hidden_size, "rows of an expert", ranks, option)
    if (shape.experts or shape.latent) and tensor > 1 and not sequence_parallel:
        found = f"{shape.architecture} over {tensor} tensor-parallel ranks needs sequence parallelism"
        raise LayoutError(f"{found} (gradients of its replicated parts would not be summed): add --sequence-parallel")


def check_pipeline(
    shape: ModelShape, pipeline: int = 1, virtual: int | None = None, megatron_options: dict[str, Any] | None = None
) -> None:
    """Check that the layers can be split over pipeline stages.

    Args:
        shape: of the model.
        pipeline: number of stages.
        virtual: pieces of every stage (interleaved schedule).
        megatron_options: under any of Megatron's spellings; those that say how layers are split are used.

    Raises:
        LayoutError: they cannot; the message offers flags with which they can.
        OptionError: an option that Megatron does not know.
    """
    options = check_megatron_args(megatron_options or {})
    if options.get("pipeline_model_parallel_layout"):
        return  # Megatron checks its own notation
    first, last = (options.get(f"num_layers_in_{end}_pipeline_stage") for end in ("first", "last"))
    extra = sum(bool(options.get(f"account_for_{part}_in_pipeline_split")) for part in ("embedding", "loss"))
    given = " ".join(f"{flag} {value}" for flag, value in ((FIRST, first), (LAST, last)) if value is not None)
    wrong_type = any(value is not None and (type(value) is not int or value < 1) for value in (first, last))
    if given and (pipeline == 1 or extra or wrong_type):
        needed = "needs at least two pipeline stages" if pipeline == 1 else "must be positive and without --account-for-* flags"
        raise LayoutError(f"{given} {needed}: drop it or change --pipeline-model-parallel-size {pipeline}")
    stages = split_layers(shape.num_layers + extra, pipeline, first, last)
    if stages is None or any(layers % (virtual or 1) for layers in stages):
        sizes = f"--pipeline-model-parallel-size {pipeline}"
        if virtual:
            sizes += f" with --virtual-pipeline-model-parallel-size {virtual}"
        found = f"{sizes} {given}".strip() + f" cannot share the model's {shape.num_layers} layers"
        raise LayoutError(f"{found} equally: {_offer(shape.num_layers, pipeline, virtual or 1)}")


def split_layers(num_layers: int, pipeline: int, first: int | None = None, last: int | None = None) -> list[int] | None:
    """Return the number of layers of every pipeline stage, or None if the stages between cannot have equally many, at least one."""
    ends = [size for size in (first, last) if size is not None]
    rest, stages = num_layers - sum(ends), pipeline - len(ends)
    if stages < 0 or (rest if stages == 0 else rest < stages or rest % stages):
        return None
    middle = [rest // stages] * stages if stages else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _offer(num_layers: int, pipeline: int, virtual: int) -> str:
    """Flags that split the layers: a smaller last stage, which also has the head, else other sizes of the first and the last."""
    if pipeline > 1 and num_layers % virtual == 0:
        ends = range(virtual, num_layers + 1, virtual)
        splits = [(None, last) for last in ends] + [
            (first, last) for first in ends for last in ends if abs(first - last) <= virtual
        ]
        fitting = [(split, ends) for ends in splits if (split := split_layers(num_layers, pipeline, *ends))]
        fitting = [(split, ends) for split, ends in fitting if not any(layers % virtual for layers in split)]
        if fitting:
            split, (first, last) = min(fitting, key=lambda entry: (max(entry[0]), entry[1][0] or 0, entry[1][1]))
            flags = f"{LAST} {last}" if first is None else f"{FIRST} {first} {LAST} {last}"
            return f"use {flags} (stages of {_counted(split)} layers)"
    divisors = [size for size in range(1, num_layers + 1) if num_layers % (size * virtual) == 0]
    if divisors:
        return f"use one of {', '.join(map(str, divisors[:12]))} stages"
    return "leave --virtual-pipeline-model-parallel-size out"


def _counted(split: list[int]) -> str:
    """`[8, 8, 8, 5]` -> "3 x 8, 5"."""
    runs: list[tuple[int, int]] = []
    for layers in split:
        runs = [*runs[:-1], (runs[-1][0] + 1, layers)] if runs and runs[-1][1] == layers else [*runs, (1, layers)]
    return ", ".join(f"{count} x {layers}" if count > 1 else str(layers) for count, layers in runs)


def _divides(number: int, what: str, ranks: int, option: str) -> None:
    if number % ranks:
        raise LayoutError(f"{option} {ranks} does not divide the model's {number} {what}: use a divisor of {number}")
