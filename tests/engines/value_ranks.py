"""Run as two processes by `test_megatron_value.py`: a critic under every layout of two ranks equals that of one rank.

usage: value_ranks.py RANK DIRECTORY [some]      with `some`, only the layouts of SOME
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engines.families.shape import Experts, ModelShape
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines.megatron_reference import OPTIMIZER, PACKS, SHAPE, Pack, make_engine, make_pack

EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=24)
SHAPES = {"dense": SHAPE, "mixture": SHAPE.model_copy(update={"tied_embeddings": False, "experts": EXPERTS})}
LAYOUTS: dict[str, tuple[ParallelLayout, list[str]]] = {
    "data": (ParallelLayout(), ["dense"]),
    "tensor": (ParallelLayout(tensor=2), ["dense"]),
    "sequence": (ParallelLayout(tensor=2, sequence_parallel=True), ["dense", "mixture"]),
    "pipeline": (ParallelLayout(pipeline=2), ["dense"]),
    "virtual": (ParallelLayout(pipeline=2, virtual_pipeline=2), ["dense"]),
    "context": (ParallelLayout(context=2), ["dense"]),
    "experts": (ParallelLayout(expert=2), ["mixture"]),
}
SOME = ["sequence", "pipeline", "experts"]
FOUR_PACKS = [*PACKS, make_pack([21], 2), make_pack([1, 1, 30, 7], 3)]
OPTIONS: dict[str, Any] = {"optimizer": OPTIMIZER | {"adam_eps": 1e-3}}


def critic(shape: ModelShape, layout: ParallelLayout) -> Any:
    return make_engine(shape, layout=layout, role="value", **OPTIONS)


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
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def run_one_rank(name: str, rank: int, directory: Path) -> dict[str, Any]:
    """Return the results of four steps from a policy's weights, in a world of one rank."""
    init_parallel(0, 1, f"file://{directory}/alone-{name}-{rank}")
    base = directory / f"base-{name}-{rank}"
    make_engine(SHAPES[name], overrides={"init_method_std": 0.15}, **OPTIONS).save_weights(base)
    engine = critic(SHAPES[name], ParallelLayout())
    engine.load_weights(base)
    initial, first, after = weights(engine), step(engine), weights(engine)
    steps = [first, *(step(engine) for _ in range(3))]
    shutdown_parallel()
    return {"initial": initial, "steps": steps, "weights": after}


def close(ours: tuple[float, ...], theirs: tuple[float, ...]) -> bool:
    return all(abs(a - b) < 2e-5 * abs(b) for a, b in zip(ours, theirs, strict=True))


def check(case: str, name: str, rank: int, directory: Path, expected: dict[str, Any], before: str | None) -> None:
    """Compare with one rank, from the base and then from the checkpoint of the layout `before`."""
    init_parallel(rank, 2, f"file://{directory}/{case}-{name}", LAYOUTS[case][0])
    engine = critic(SHAPES[name], LAYOUTS[case][0])
    assert ("context" in engine.fingerprint()) == (LAYOUTS[case][0].context > 1)
    engine.load_weights(directory / f"base-{name}-0")
    for key, tensor in weights(engine).items():
        assert torch.equal(tensor, expected["initial"][key]), (case, key)
    first = step(engine)
    assert close(first, expected["steps"][0]), (case, first, expected["steps"][0])
    for key, tensor in weights(engine).items():
        assert (tensor - expected["weights"][key]).abs().max() < 2e-5, (case, key)
    if before:
        assert engine.load(directory / f"saved-{name}-{before}") == {"version": 1}
    engine.save(directory / f"saved-{name}-{case}", {"version": 1})
    for expected_step in expected["steps"][1:]:
        result = step(engine)
        assert close(result, expected_step), (case, result, expected_step)
    shutdown_parallel()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    expected = {name: run_one_rank(name, rank, directory) for name in SHAPES}
    before: dict[str, str] = {}
    for case in SOME if "some" in sys.argv else LAYOUTS:
        for name in LAYOUTS[case][1]:
            check(case, name, rank, directory, expected[name], before.get(name))
            print(case, name, "ok", flush=True)
            before[name] = case
