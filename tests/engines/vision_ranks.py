"""Run as two processes by `test_vision.py`: vision-language models with trained towers under every layout that affects
them, compared with transformers: weights, logits, gradients and their norm.

usage: vision_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines.family_ranks import OPTIMIZER, check_close, check_logits, check_norm, gradients_of, save_alone
from tests.engines.megatron_reference import FULL, make_engine
from tests.engines.vision_reference import MIXED, Reference, reference_of
from tests.families import VISION_FAMILIES, make_family

TOLERANCE = 2e-5  # of logits, and of gradients relative to the largest of their tensor
ALL, WINDOWS, DEEPSTACK, MOE = list(VISION_FAMILIES), "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"
SEQUENCE = ParallelLayout(tensor=2, sequence_parallel=True)
# From the second step on Megatron starts a reduction when the gradients that the last micro-batch of the first step had
# are complete. On rank 1 the last micro-batch has images in the first step, and none in the second.
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 3000}
CASES: dict[str, tuple[ParallelLayout, list[str], dict[str, Any]]] = {
    "data": (ParallelLayout(), [WINDOWS, DEEPSTACK], OVERLAP),
    "tensor": (ParallelLayout(tensor=2), [DEEPSTACK], {}),
    "sequence": (SEQUENCE, [WINDOWS, MOE], {}),
    "recompute": (SEQUENCE, [DEEPSTACK], FULL),
    "pipeline": (ParallelLayout(pipeline=2), [DEEPSTACK, MOE], {}),
    "interleaved": (ParallelLayout(pipeline=2, virtual_pipeline=2), [WINDOWS], {}),
    "context": (ParallelLayout(context=2), [WINDOWS, DEEPSTACK], {}),
    "experts": (ParallelLayout(expert=2), [MOE], {}),
}


@cache
def loaded(directory: Path, name: str) -> Reference:
    return torch.load(directory / f"{name}.pt", weights_only=False)


def prepare(directory: Path, name: str) -> None:
    reference = reference_of(make_family(directory / name, name), MIXED)
    save_alone(reference.shape, reference.weights, directory / name / "saved")
    torch.save(reference, directory / f"{name}.pt")


def run(case: str, overrides: dict[str, Any], layout: ParallelLayout, name: str, directory: Path) -> None:
    reference = loaded(directory, name)
    engine = make_engine(reference.shape, overrides, layout=layout, optimizer=OPTIMIZER, freeze_vision=False)
    engine.load_weights(directory / name / "saved")
    weights = dict(engine.gather_weights().tensors)
    assert weights.keys() == reference.weights.keys()
    assert all(torch.equal(tensor, reference.weights[key]) for key, tensor in weights.items())

    rank, size = engine.data_parallel_rank_and_size
    chosen = list(range(len(MIXED)))[rank::size][::-1]
    packs, logits = ([values[index] for index in chosen] for values in (reference.packs, reference.logits))
    if overrides is OVERLAP:
        check_logits(engine, packs[::-1], logits[::-1], TOLERANCE)
    worst = check_logits(engine, packs, logits, TOLERANCE)
    error, _ = check_close("gradients", gradients_of(engine), reference.gradients, TOLERANCE)
    check_norm(engine, reference.gradients, TOLERANCE)
    if layout.pipeline > 1:  # the tower's parameter groups are empty on the second stage
        state, saved = engine.optimizer_state_digest(), directory / f"{case}-{name}"
        engine.save(saved, {})
        engine.load(saved)
        assert engine.optimizer_state_digest() == state
    print(f"{case}, {name}: logits {worst:.1e}, gradients {error:.1e}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    init_parallel(0, 1, f"file://{directory}/alone-{rank}")
    for name in ALL[rank::2]:
        prepare(directory, name)
        gc.freeze()  # Megatron collects garbage at every save and load
    shutdown_parallel()
    for case, (layout, names, overrides) in CASES.items():
        init_parallel(rank, 2, f"file://{directory}/{case}", layout)
        for name in names:
            run(case, overrides, layout, name, directory)
        shutdown_parallel()
