"""Bytes of models that are built. As a program, run as two processes by `test_memory_plan.py`: compare the plan of
every layout of two ranks with the built model.

usage: built_memory.py RANK DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.memory_plan import (
    TrainerOptions,
    count_stage_parameters,
    estimate_trainer_memory,
    stage_layers,
)
from penstock.engines.parallel_layout import ParallelLayout
from tests.engines.megatron_reference import EXPERTS, LATENT, SHAPE, make_engine

SIGMOID_EXPERTS = EXPERTS.model_copy(update={"score": "sigmoid", "bias": True})
UNTIED: dict[str, Any] = {"tied_embeddings": False}
NO_NORM: dict[str, Any] = {"qk_layernorm": False, **UNTIED}
SHAPES: dict[str, ModelShape] = {
    "dense": SHAPE,
    "biases": SHAPE.model_copy(update={"family": "qwen2", "qkv_bias": True, **NO_NORM}),
    "sandwich": SHAPE.model_copy(update={"family": "glm4", "sandwich_norms": True, **NO_NORM}),
    "mixture": SHAPE.model_copy(update={"family": "glm4_moe", "experts": SIGMOID_EXPERTS, **UNTIED}),
    "latent": LATENT.model_copy(update={"family": "deepseek_v3", "experts": SIGMOID_EXPERTS, **UNTIED}),
}
LAYOUTS: list[tuple[str, ParallelLayout]] = [
    ("dense", ParallelLayout(context=2)),
    ("dense", ParallelLayout(tensor=2, sequence_parallel=True)),
    ("mixture", ParallelLayout(expert=2)),
    ("mixture", ParallelLayout(tensor=2, sequence_parallel=True, expert=2, expert_tensor=1)),
    ("latent", ParallelLayout(pipeline=2, virtual_pipeline=2)),
]


def built_bytes(
    shape: ModelShape, layout: ParallelLayout, dtype: Any, options: dict[str, Any], critic: bool
) -> tuple[int, int, int]:
    """Return the bytes of this rank's weights, gradients, and optimizer tensors that are not model weights and not
    offloaded."""
    from penstock.engines.megatron.optimizer import inner_optimizers, optimizer_tensors_on_device

    weights = gradients = optimizer = 0
    for role in ("policy", "value") if critic else ("policy",):
        engine = make_engine(shape, layout=layout, dtype=dtype, overrides=options, role=role)
        for param in (param for chunk in engine.chunks for param in chunk.parameters()):
            weights += param.numel() * param.element_size()
            gradients += param.main_grad.numel() * param.main_grad.element_size()
        own = {param.untyped_storage().data_ptr() for chunk in engine.chunks for param in chunk.parameters()}
        for inner in inner_optimizers(engine.optimizer):
            for tensor in optimizer_tensors_on_device(inner):
                if tensor.untyped_storage().data_ptr() not in own:
                    optimizer += tensor.numel() * tensor.element_size()
    return weights, gradients, optimizer


def compare(rank: int, directory: Path, number: int, name: str, layout: ParallelLayout) -> None:
    """Compare one layout's plan with this rank, and the optimizer with the sum over both ranks."""
    from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel

    init_parallel(rank, 2, f"file://{directory}/meet-{number}", layout)
    shape, stage = SHAPES[name], rank if layout.pipeline > 1 else 0
    weights, gradients, optimizer = built_bytes(shape, layout, "bf16", {}, critic=False)
    layers = stage_layers(shape.num_layers, layout, {})[stage]
    count = count_stage_parameters(shape, layout, layers, stage).total
    assert (weights, gradients) == (2 * count, 4 * count), (name, layout, weights, gradients, count)
    total = torch.tensor(optimizer)
    dist.all_reduce(total)
    plan = estimate_trainer_memory(shape, layout, 2, TrainerOptions())
    if layout.pipeline == 1:  # with data parallelism the shards of the two ranks differ, but not their sum
        assert total.item() == 2 * plan.optimizer, (name, layout, total.item(), plan.optimizer)
    else:
        assert optimizer == 12 * count, (name, layout, optimizer, count)
    shutdown_parallel()


if __name__ == "__main__":
    for number, (name, layout) in enumerate(LAYOUTS):
        compare(int(sys.argv[1]), Path(sys.argv[2]), number, name, layout)
    print(f"{len(LAYOUTS)} layouts equal")
