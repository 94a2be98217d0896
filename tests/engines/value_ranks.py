"""Run as two processes by `test_megatron_value.py`: a critic with experts under layouts of two ranks equals that of one
rank. `tests/train/layout_ranks.py` trains a dense critic under every layout.

usage: value_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engines.families.shape import Experts
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines.megatron_reference import OPTIMIZER, PACKS, SHAPE, Pack, make_engine, make_pack

EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=24)
MIXTURE = SHAPE.model_copy(update={"tied_embeddings": False, "experts": EXPERTS})
LAYOUTS = {"sequence": ParallelLayout(tensor=2, sequence_parallel=True), "experts": ParallelLayout(expert=2)}
FOUR_PACKS = [*PACKS, make_pack([21], 2), make_pack([1, 1, 30, 7], 3)]
OPTIONS: dict[str, Any] = {"optimizer": OPTIMIZER | {"adam_eps": 1e-3}}


def step(engine: Any) -> tuple[float, float]:
    """Return the loss over all ranks, and the gradient's norm."""
    rank, size = engine.data_parallel_rank_and_size

    def squared_error(hidden: Tensor, head: Any, packed: Pack) -> Any:
        targets = torch.sin(packed.token_ids.double() + packed.position_ids).float()
        rows = engine.pack_stream(packed).pack_slice
        loss = (head(hidden)[:, 0] - targets[rows]).square().sum()
        return loss, {"loss": loss.detach()}

    outputs = engine.forward_backward(FOUR_PACKS[rank::size], squared_error)
    total = torch.stack([output["loss"] for output in outputs]).sum() if outputs else torch.zeros(())
    dist.all_reduce(total)
    copies = engine.tensor_group.size() if engine.tensor_group else 1
    return total.item() / copies, engine.optimizer_step()[1]


def weights(engine: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.gather_weights().tensors}


def run_one_rank(rank: int, directory: Path) -> dict[str, Any]:
    """Return the results of four steps from a policy's weights, in a world of one rank."""
    init_parallel(0, 1, f"file://{directory}/alone-{rank}")
    base = directory / f"base-{rank}"
    make_engine(MIXTURE, overrides={"init_method_std": 0.15}, **OPTIONS).save(base, None)
    engine = make_engine(MIXTURE, role="value", **OPTIONS)
    engine.load_weights(base)
    initial, first, after = weights(engine), step(engine), weights(engine)
    steps = [first, *(step(engine) for _ in range(3))]
    shutdown_parallel()
    return {"initial": initial, "steps": steps, "weights": after}


def close(ours: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    return all(abs(a - b) < 2e-5 * abs(b) for a, b in zip(ours, theirs, strict=True))


def check(case: str, rank: int, directory: Path, expected: dict[str, Any], before: str | None) -> None:
    """Compare with one rank, from the base and then from the checkpoint of the layout `before`."""
    init_parallel(rank, 2, f"file://{directory}/{case}", LAYOUTS[case])
    engine = make_engine(MIXTURE, layout=LAYOUTS[case], role="value", **OPTIONS)
    engine.load_weights(directory / "base-0")
    for key, tensor in weights(engine).items():
        assert torch.equal(tensor, expected["initial"][key]), (case, key)
    first = step(engine)
    assert close(first, expected["steps"][0]), (case, first, expected["steps"][0])
    for key, tensor in weights(engine).items():
        assert (tensor - expected["weights"][key]).abs().max() < 2e-5, (case, key)
    if before:
        assert engine.load(directory / f"saved-{before}") == {"version": 1}
    engine.save(directory / f"saved-{case}", {"version": 1})
    for expected_step in expected["steps"][1:]:
        result = step(engine)
        assert close(result, expected_step), (case, result, expected_step)
    shutdown_parallel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    expected = run_one_rank(rank, directory)
    check("sequence", rank, directory, expected, None)
    check("experts", rank, directory, expected, "sequence")
