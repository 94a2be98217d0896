"""Run as two processes by `test_routing_replay.py`: replay records of engines under layouts of two ranks, and compare
with one rank. `tests/train/layout_ranks.py` replays what the trainer records, under every layout.

usage: replay_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.packing import UNKNOWN
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines import megatron_reference
from tests.engines.megatron_reference import FULL, SELECTIVE, Pack, full_logits, make_pack, targets_of
from tests.families import make_family

LENGTHS = [[5, 40, 1, 17, 33], [3, 4, 50], [21, 8, 9], [1, 30]]
LAYOUTS = {
    "sequence": ParallelLayout(tensor=2, sequence_parallel=True),
    "context": ParallelLayout(context=2),
    "virtual": ParallelLayout(pipeline=2, virtual_pipeline=2),
    "experts": ParallelLayout(expert=2),
}
RECOMPUTED = {  # pipelines run other micro-batches between a forward pass and its recomputation
    "virtual": {**SELECTIVE, "recompute_modules": ["moe"]},
    "experts": FULL,
}


def replay_packs() -> list[Pack]:
    return [make_pack(lengths, seed) for seed, lengths in enumerate(LENGTHS)]


def random_record(num_tokens: int, shape: ModelShape, seed: int) -> dict[int, torch.Tensor]:
    """Return random distinct experts, as if an engine's router were unrelated; every seventh token has no record."""
    experts = shape.experts
    assert experts is not None
    generator = torch.Generator().manual_seed(seed)
    record = {}
    for layer in range(experts.num_dense_layers, shape.num_layers):
        choice = torch.rand(num_tokens, experts.num_experts, generator=generator).topk(experts.top_k).indices.short()
        choice[::7] = UNKNOWN
        record[layer] = choice
    return record


def make_engine(shape: ModelShape, checkpoint: Path | None = None, **options: Any) -> Any:
    """Return an engine with a checkpoint's weights, or with random ones (on one rank the same in every call)."""
    from penstock.engines.families import tensor_layout
    from penstock.engines.megatron.weights import local_parameters

    engine = megatron_reference.make_engine(shape, **options)
    if checkpoint is not None:
        from safetensors.torch import load_file

        hub, layout = load_file(checkpoint / "model.safetensors"), tensor_layout(shape)
        with torch.no_grad():
            for name, tensor in local_parameters(engine.chunks[0]):
                tensor.copy_(layout.to_megatron(name, hub.__getitem__))
        engine.optimizer.reload_model_params()
    return engine


def put_records(packs: list[Pack], shape: ModelShape) -> list[Pack]:
    for number, pack in enumerate(packs):
        pack.routing = random_record(len(pack.token_ids), shape, number)
    return packs


def run(name: str, directory: Path, shape: ModelShape) -> None:
    """Compare log-probs and the gradient's norm of a replay with those of one rank."""
    engine = make_engine(shape, layout=LAYOUTS[name], overrides=RECOMPUTED.get(name))
    assert ("context" in engine.fingerprint()) == (name == "context")
    engine.load_weights(directory / "saved")
    expected, expected_norm = torch.load(directory / "alone.pt")
    rank, size = engine.data_parallel_rank_and_size
    packs = put_records(replay_packs(), shape)[rank::size]
    outputs = engine.forward_backward(packs, loss_fn_of(engine), routing="replay")
    for output, pack, logprobs in zip(outputs, packs, expected[rank::size]):
        rows = engine.pack_stream(pack).pack_slice
        error = (output["logprobs"] - logprobs[rows]).abs().max()
        assert error < 1e-4, f"{name}: log-probs differ by {error:.1e}"
    _, norm, _ = engine.optimizer_step()
    assert abs(norm - expected_norm) < 1e-4 * expected_norm, f"{name}: gradient norm {norm}, not {expected_norm}"
    print(name, "ok", flush=True)


def loss_fn_of(engine: Any) -> Any:
    def loss_fn(hidden: Tensor, head: Any, pack: Any) -> Any:
        logits = full_logits(engine, head(hidden))[:, : engine.shape.vocab_size]
        rows = engine.pack_stream(pack).pack_slice
        targets, counted = (x[rows] for x in targets_of(pack))
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] * counted
        return -logprobs.sum(), {"logprobs": logprobs.detach()}

    return loss_fn


def run_one_rank(directory: Path) -> None:
    """Save the weights and results of one rank."""
    checkpoint = make_family(directory / "model", "deepseek-v3")
    shape = read_shape(checkpoint)
    engine = make_engine(shape, checkpoint)
    engine.save(directory / "saved", {})
    results = {}
    for routing in (None, "replay"):
        packs = put_records(replay_packs(), shape)
        results[routing] = engine.forward_backward(packs, loss_fn_of(engine), routing=routing)
    free, replayed = ([output["logprobs"] for output in results[routing]] for routing in (None, "replay"))
    assert max((x - y).abs().max() for x, y in zip(free, replayed)) > 0.1, "replay must change the results"
    gradient = torch.cat([param.main_grad.flatten() for param in engine.chunks[0].parameters()])
    torch.save((replayed, gradient.norm().item()), directory / "alone.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    init_parallel(0, 1, f"file://{directory}/alone-{rank}")
    if rank == 0:
        run_one_rank(directory)
    shutdown_parallel()
    for name in LAYOUTS:
        init_parallel(rank, 2, f"file://{directory}/{name}", LAYOUTS[name])
        shape = read_shape(directory / "model")
        run(name, directory, shape)
        shutdown_parallel()
