"""Run as two processes by `test_routing_replay.py`: replay and record routing under layouts of two ranks, and compare
with one rank.

usage: replay_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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


def run(name: str, rank: int, directory: Path, shape: ModelShape) -> None:
    engine = make_engine(shape, layout=LAYOUTS[name], overrides=RECOMPUTED.get(name))
    assert ("context" in engine.fingerprint()) == (name == "context")
    engine.load_weights(directory / "saved")
    expected = torch.load(directory / "alone.pt", weights_only=False)
    data_rank, data_size = engine.data_parallel_rank_and_size
    numbers = list(range(len(LENGTHS)))[data_rank::data_size]
    packs = [replay_packs()[number] for number in numbers]
    for number, pack in zip(numbers, packs):
        pack.routing = random_record(len(pack.token_ids), shape, number)
    compare(name, engine, packs, [expected["replayed"][number] for number in numbers], expected["replayed norm"])

    packs = [replay_packs()[number] for number in numbers]
    forward_only(engine, packs, "record")
    for number, pack in zip(numbers, packs):
        theirs: list[Any] = [None, None]
        dist.all_gather_object(theirs, pack.routing)
        for layer, choice in expected["recorded"][number].items():
            parts = [record[layer] for record in (theirs if data_size == 1 else [pack.routing]) if layer in record]
            merged = torch.stack(parts).amax(0)  # -1 where only the other rank has the token
            assert torch.equal(merged, choice), (name, number, layer)
    compare(name, engine, packs, [expected["free"][number] for number in numbers], expected["free norm"])
    print(name, "ok", flush=True)


def compare(name: str, engine: Any, packs: list[Any], expected: list[Tensor], expected_norm: float) -> None:
    """Check replayed log-probs and the gradient's norm."""
    outputs = engine.forward_backward(packs, loss_fn_of(engine), routing="replay")
    for output, pack, logprobs in zip(outputs, packs, expected):
        rows = engine.pack_stream(pack).pack_slice
        error = (output["logprobs"] - logprobs[rows]).abs().max()
        assert error < 1e-4, f"{name}: log-probs differ by {error:.1e}"
    learning_rate = engine.optimizer.param_groups[0]["lr"]
    for group in engine.optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    _, norm, _ = engine.optimizer_step()
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    assert abs(norm - expected_norm) < 1e-4 * expected_norm, f"{name}: gradient norm {norm}, not {expected_norm}"


def forward_only(engine: Any, packs: list[Any], routing: Any) -> list[Any]:
    loss_fn = loss_fn_of(engine)
    return engine.forward_backward(
        packs, lambda *inputs: (None, loss_fn(*inputs)[1]), forward_only=True, routing=routing
    )


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
    expected: dict[str, Any] = {}
    for kind in ("free", "replayed"):
        packs = replay_packs()
        if kind == "replayed":
            for number, pack in enumerate(packs):
                pack.routing = random_record(len(pack.token_ids), shape, number)
        forward_only(engine, packs, "record" if kind == "free" else None)
        expected |= {"recorded": [pack.routing for pack in packs]} if kind == "free" else {}
        outputs = engine.forward_backward(packs, loss_fn_of(engine), routing="replay")
        expected[kind] = [output["logprobs"] for output in outputs]
        gradient = torch.cat([param.main_grad.flatten() for param in engine.chunks[0].parameters()])
        expected[f"{kind} norm"] = gradient.norm().item()
    changes = [(x - y).abs().max() for x, y in zip(expected["free"], expected["replayed"])]
    assert max(changes) > 0.1, "replay must change the results"
    torch.save(expected, directory / "alone.pt")


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
        run(name, rank, directory, shape)
        shutdown_parallel()
