"""One of two processes that `test_megatron_layouts.py` starts: the same step under every layout, compared with Hugging Face.

usage: megatron_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_reference import (
    LENGTHS,
    OPTIMIZER,
    SHAPE,
    hf_loss,
    hf_model,
    make_pack,
    put_weights,
    shard,
    targets_of,
    to_megatron,
)
from torch import Tensor

from engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel

LAYOUTS = {
    "data": ParallelLayout(),
    "tensor": ParallelLayout(tensor=2),
    "sequence": ParallelLayout(tensor=2, sequence_parallel=True),
    "pipeline": ParallelLayout(pipeline=2),
    "virtual": ParallelLayout(pipeline=2, virtual_pipeline=2),
    "context": ParallelLayout(context=2),
}
PACKS = [make_pack(LENGTHS, 0), make_pack([3, 4, 50], 1), make_pack([21], 2), make_pack([1, 1, 30, 7], 3)]


def run(name: str, rank: int, directory: Path, hf: Any, untied: bool) -> None:
    layout = LAYOUTS[name]
    shape = SHAPE.model_copy(update={"tied_embeddings": not untied})
    init_parallel(rank, 2, f"file://{directory}/{name}-{untied}", layout)
    from engines.megatron.engine import MegatronEngine
    from engines.megatron.weights import local_parameters

    full = to_megatron({key: value.detach() for key, value in hf.state_dict().items()}, shape)
    buckets = {"overlap_grad_reduce": True, "bucket_size": 3000} if name == "data" else {}  # padding between gradient buckets
    engine = MegatronEngine(shape, layout, dtype="fp32", optimizer=OPTIMIZER, overrides=buckets)
    put_weights(engine, full)
    data_rank, data_size = engine.data_parallel
    mine = PACKS[data_rank::data_size]
    tensor_rank, tensor_size = (engine.tensor_group.rank(), engine.tensor_group.size()) if engine.tensor_group else (0, 1)

    def loss_fn(hidden: Tensor, head: Any, packed: Any) -> Any:
        targets, counted = targets_of(packed)
        rows = engine.rows_of(packed)
        if rows is not None:
            targets, counted = targets[rows], counted[rows]
        assert len(hidden) == len(targets)
        logits = head(hidden)
        if tensor_size > 1:  # every rank sums over the whole vocabulary
            from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

            logits = gather_from_tensor_model_parallel_region(logits, engine.tensor_group)
        loss = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
        return loss, {"loss": loss.detach()}

    before = engine.forward_backward(mine, loss_fn, forward_only=True)
    engine.zero_grad()
    after = engine.forward_backward(mine, loss_fn)
    assert [x["loss"] for x in before] == [x["loss"] for x in after], "a forward-only pass computes something else"
    total = torch.stack([x["loss"] for x in after]).sum() if after else torch.zeros(())
    dist.all_reduce(total)
    total /= tensor_size

    hf.zero_grad()
    reference = hf_loss(hf, PACKS)
    reference.backward()
    assert abs(total - reference) < 1e-5 * reference, (name, total, reference)
    grads = to_megatron({key: value.grad for key, value in hf.named_parameters()}, shape)
    if data_size * engine.context_parallel[1] == 1:  # otherwise the optimizer shards them
        for chunk in engine.chunks:
            for key, param in local_parameters(chunk):
                error = (param.main_grad - shard(key, grads[key], param, tensor_rank, tensor_size)).abs().max() / grads[
                    key
                ].abs().max()
                assert error < 1e-5, (name, key, error)
    _, norm = engine.step()
    expected = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    assert abs(norm - expected) < 1e-5 * expected, (name, norm, expected)

    put_weights(engine, full)
    gathered = list(engine.named_weights())
    assert [key for key, _ in gathered] and {key for key, _ in gathered} == set(full)
    for key, tensor in gathered:
        assert torch.equal(tensor, full[key]), (name, key)
    if not untied:
        check_checkpoint(engine, directory / f"checkpoint-{name}", mine, loss_fn)
        check_other_layout(engine, directory, mine, loss_fn)
    shutdown_parallel()


def check_other_layout(engine: Any, directory: Path, packs: list[Any], loss_fn: Any) -> None:
    """Load what the first layout saved: the same weights; make a step: the same weights but for rounding."""
    assert engine.load(directory / "checkpoint-data") == {"version": 2}
    weights = [{key: tensor.clone() for key, tensor in engine.named_weights()}]
    engine.zero_grad()
    engine.forward_backward(packs, loss_fn)
    engine.step()
    weights.append({key: tensor.clone() for key, tensor in engine.named_weights()})
    known = directory / "weights.pt"
    if not known.exists():
        dist.barrier()
        if dist.get_rank() == 0:
            torch.save(weights, known)
        dist.barrier()
    for tolerance, ours, theirs in zip((0, 1e-5), weights, torch.load(known)):
        for key, tensor in ours.items():
            assert (tensor - theirs[key]).abs().max() <= tolerance, key


def check_checkpoint(engine: Any, directory: Path, packs: list[Any], loss_fn: Any) -> None:
    """Save; train on; load; train on: the same digests."""

    def train() -> dict[str, str]:
        for _ in range(2):
            engine.zero_grad()
            engine.forward_backward(packs, loss_fn)
            engine.step()
        return engine.digest()

    train()
    engine.save(directory, {"version": 2})
    first = train()
    assert engine.load(directory) == {"version": 2}
    assert train() == first


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    for name, untied in itertools.product(LAYOUTS, (False, True)):
        if untied and name in ("data", "context", "sequence"):
            continue  # nothing there depends on the head
        run(name, rank, directory, hf_model(SHAPE.model_copy(update={"tied_embeddings": not untied})), untied)
        print(name, "untied" if untied else "tied", "ok", flush=True)
