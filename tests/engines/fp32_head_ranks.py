"""Run as two processes by `test_fp32_head.py`: log-probs and gradients with an fp32 head under layouts of two ranks
equal those of one rank.

usage: fp32_head_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from penstock.stages.train.algorithms.logprobs import token_logprobs
from tests.engines.megatron_reference import PACKS, SHAPE, UNTIED, Pack, make_engine, targets_of

SHAPES = {"tied": SHAPE, "untied": UNTIED}
LAYOUTS = {
    "tied": {"tensor": ParallelLayout(tensor=2), "pipeline": ParallelLayout(pipeline=2)},
    "untied": {"sequence": ParallelLayout(tensor=2, sequence_parallel=True)},
}


def policy(name: str, layout: ParallelLayout) -> Any:
    engine = make_engine(SHAPES[name], layout=layout, dtype="bf16", overrides={"init_method_std": 0.15})
    for chunk in engine.chunks:
        chunk.fp32_head = True
    return engine


def step(engine: Any, weight: Tensor) -> tuple[int, float]:
    """Compare the log-probs of each micro-batch with those of the whole head `weight` [V, H] on the same hidden states.
    Return the number of micro-batches, 0 before the last pipeline stage, and the gradient's norm."""

    def loss(hidden: Tensor, head: Any, packed: Pack) -> Any:
        targets, counted = (tensor.to(hidden.device) for tensor in targets_of(packed))
        logprobs, _ = token_logprobs(
            hidden[counted], head, targets[counted], temperature=0.9, chunk_size=16, group=engine.tensor_group
        )
        whole = (hidden.detach().double() @ weight.double().T / 0.9)[counted].log_softmax(-1)
        assert logprobs.dtype == torch.float32
        torch.testing.assert_close(logprobs.double(), whole.gather(-1, targets[counted][:, None])[:, 0])
        return -logprobs.sum(), {}

    outputs = engine.forward_backward(PACKS, loss)
    return len(outputs), engine.optimizer_step()[1]


def main(rank: int, directory: Path) -> None:
    for name in SHAPES:
        init_parallel(0, 1, f"file://{directory}/alone-{name}-{rank}")
        alone = policy(name, ParallelLayout())
        base = directory / f"base-{name}-{rank}"
        alone.save(base, None)
        chunk = alone.chunks[0]
        tied = SHAPES[name].tied_embeddings
        weight = (chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight).detach().clone()
        norm = step(alone, weight)[1]
        shutdown_parallel()
        for case, layout in LAYOUTS[name].items():
            init_parallel(rank, 2, f"file://{directory}/{case}-{name}", layout)
            engine = policy(name, layout)
            assert engine.fingerprint()["head"] == "fp32"
            engine.load_weights(directory / f"base-{name}-0")
            num_compared, found = step(engine, weight)
            assert num_compared == (len(PACKS) if layout.pipeline == 1 or rank == 1 else 0), case
            assert abs(found - norm) < 0.05 * norm, (case, name, found, norm)  # sums of bf16 are split over the ranks
            shutdown_parallel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
