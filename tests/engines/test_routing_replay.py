"""Routing replay compared with transformers (with forced routers), under recomputation, under layouts of two ranks."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.packing import UNKNOWN, StreamRouting
from tests.engines.megatron_reference import SELECTIVE
from tests.engines.replay_ranks import make_engine, put_records, replay_packs
from tests.families import hf_model, make_family


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("replay") / "qwen3-moe", "qwen3-moe")


@pytest.fixture(scope="module")
def shapes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    """Return an MoE model with softmax scores, and one with expert groups, correction bias and a dense first layer."""
    deepseek = make_family(tmp_path_factory.mktemp("replay") / "deepseek-v3", "deepseek-v3")
    return {"qwen3-moe": read_shape(checkpoint), "deepseek-v3": read_shape(deepseek)}


def logprobs_of(hidden: Tensor, head: Any, pack: Any) -> Tensor:
    targets = pack.token_ids.to(hidden.device).roll(-1)
    return head(hidden).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]


def forward_backward(engine: Any, packs: list[Any], routing: Any = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of every pack and the gradients of their sum."""

    def loss_fn(hidden: Tensor, head: Any, pack: Any) -> Any:
        logprobs = logprobs_of(hidden, head, pack)
        return logprobs.sum(), {"logprobs": logprobs.detach()}

    outputs = engine.forward_backward(packs, loss_fn, routing=routing)
    gradients = {name: param.main_grad.clone() for chunk in engine.chunks for name, param in chunk.named_parameters()}
    return [output["logprobs"] for output in outputs], gradients


def forward_only(engine: Any, packs: list[Any], routing: Any) -> list[Tensor]:
    """Return the log-probs of a pass without gradients."""

    def loss_fn(*inputs: Any) -> Any:
        return None, {"logprobs": logprobs_of(*inputs)}

    outputs = engine.forward_backward(packs, loss_fn, forward_only=True, routing=routing)
    return [output["logprobs"] for output in outputs]


def test_record_gets_the_rows_of_a_rank() -> None:
    rows = torch.tensor([5, 2, 4, UNKNOWN])  # the last row is padding
    choices = {7: torch.tensor([[1, 2]] * 3 + [[UNKNOWN] * 2] * 3, dtype=torch.int16)}
    free = torch.tensor([[10, 11], [12, 13], [14, 15], [16, 17]])
    chosen = torch.tensor([[10, 11], [1, 2], [14, 15], [16, 17]])
    assert torch.equal(StreamRouting(choices, 6, rows, recording=False).replay(7, free), chosen)
    assert choices[7][5].tolist() == [UNKNOWN] * 2, "a replay must not record"
    assert torch.equal(StreamRouting(choices, 6, rows, recording=True).replay(7, free), chosen)
    assert choices[7].tolist() == [[1, 2], [1, 2], [1, 2], [-1, -1], [14, 15], [10, 11]]
    assert torch.equal(StreamRouting(choices, 6, rows, recording=True).replay(8, free), free)
    assert choices[8].tolist() == [[-1, -1], [-1, -1], [12, 13], [-1, -1], [14, 15], [10, 11]]


def test_replay_after_a_step_uses_the_recorded_experts(world: None, shapes: dict[str, ModelShape]) -> None:
    shape = shapes["deepseek-v3"]
    engine, packs = make_engine(shape), replay_packs()
    before = forward_backward(engine, packs)
    recorded = forward_only(engine, packs, "record")
    assert all(torch.equal(x, y) for x, y in zip(recorded, before[0])), "recording must not change results"
    assert shape.experts is not None
    layers = range(shape.experts.num_dense_layers, shape.num_layers)
    records = [{layer: choice.clone() for layer, choice in pack.routing.items()} for pack in packs]
    assert [list(record) for record in records] == [list(layers)] * len(packs)
    again = forward_backward(engine, packs, "replay")
    assert all(torch.equal(x, y) for x, y in zip(again[0], before[0]))
    assert all(torch.equal(gradient, before[1][key]) for key, gradient in again[1].items())

    engine.optimizer_step()  # lr 1e-2: the router now selects other experts for many tokens
    other = replay_packs()
    free = forward_only(engine, other, "record")
    moved = sum((a.routing[i] != b[i]).any(-1).sum() for a, b in zip(other, records) for i in b)
    assert moved > 100, f"only {moved} selections changed"
    replayed = forward_only(engine, packs, "replay")
    assert all((x - y).abs().max() > 1e-3 for x, y in zip(free, replayed))
    forward_only(engine, packs, "record")
    assert all(torch.equal(pack.routing[i], record[i]) for pack, record in zip(packs, records) for i in record)


def test_replay_equals_transformers_with_the_same_experts(
    world: None, checkpoint: Path, shapes: dict[str, ModelShape]
) -> None:
    """Log-probs and gradients, the router's included, of random experts; some tokens have no record."""
    engine = make_engine(shapes["qwen3-moe"], checkpoint)
    packs = put_records(replay_packs(), shapes["qwen3-moe"])
    ours, gradients = forward_backward(engine, packs, "replay")

    model = hf_model(checkpoint)
    total = torch.zeros(())
    for pack, logprobs in zip(packs, ours):
        starts = pack.cu_seqlens.tolist()
        for start, end in pairwise(starts):
            force(model, {layer: choice[start:end].long() for layer, choice in pack.routing.items()})
            targets = pack.token_ids.roll(-1)[start:end]
            logits = model(input_ids=pack.token_ids[None, start:end]).logits[0]
            theirs = -F.cross_entropy(logits, targets, reduction="none")
            assert (logprobs[start:end] - theirs).abs().max() < 1e-4
            total = total + theirs.sum()
    total.backward()
    theirs_gradients = {name: param.grad for name, param in model.named_parameters()}
    names = {"mlp.router.weight": "mlp.gate.weight", "self_attention.linear_proj.weight": "self_attn.o_proj.weight"}
    for layer in range(shapes["qwen3-moe"].num_layers):
        for name, hf_name in names.items():
            theirs = theirs_gradients[f"model.layers.{layer}.{hf_name}"]
            error = (gradients[f"decoder.layers.{layer}.{name}"] - theirs).abs().max()
            assert error < 1e-4 * theirs.abs().max(), (layer, name)


def force(model: Any, choices: dict[int, Tensor]) -> None:
    """Make transformers' routers use these experts; -1 lets them select."""
    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate

        def forward(hidden: Tensor, gate: Any = gate, choice: Tensor = choices[number]) -> tuple[Tensor, ...]:
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            scores = logits.softmax(-1)
            indices = torch.where(choice >= 0, choice, scores.topk(choice.shape[1]).indices)
            weights = scores.gather(1, indices)
            return logits, weights / weights.sum(-1, keepdim=True), indices

        gate.forward = forward


def test_recomputation_replays_the_same_experts(world: None, shapes: dict[str, ModelShape]) -> None:
    """`replay_ranks.py` replays with the other kinds of recomputation."""
    shape, packs = shapes["deepseek-v3"], put_records(replay_packs(), shapes["deepseek-v3"])
    engine = make_engine(shape)
    plain, gradients = forward_backward(engine, packs, "replay")
    free, _ = forward_backward(engine, packs)
    recomputing = make_engine(shape, overrides=SELECTIVE | {"recompute_modules": ["moe", "layernorm"]})
    recomputed, same_gradients = forward_backward(recomputing, packs, "replay")
    assert all(torch.equal(x, y) for x, y in zip(plain, recomputed))
    for name, gradient in gradients.items():
        torch.testing.assert_close(same_gradients[name], gradient, rtol=1e-5, atol=1e-6)
    assert max((x - y).abs().max() for x, y in zip(plain, free)) > 1e-3, "replay must change the results"


@pytest.mark.integration
def test_replay_under_every_layout_of_two_ranks(run_two_ranks: Callable[..., str]) -> None:
    assert run_two_ranks("replay_ranks.py").count(" ok") == 2 * 4
