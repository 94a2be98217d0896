"""One real rank of Megatron-core against Hugging Face, and against itself after a resume."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from engines.megatron.parallel import ParallelLayout, init_parallel
from tests.engines.megatron_reference import (
    LENGTHS,
    OPTIMIZER,
    SHAPE,
    Pack,
    hf_loss,
    hf_model,
    make_pack,
    put_weights,
    targets_of,
    to_megatron,
)

PACKS = [make_pack(LENGTHS, 0), make_pack([3, 4, 50], 1)]


if torch.cuda.is_available():  # the same tests on a GPU: its fastest kernels for fp32 do not give the same bits twice
    ENGINE = {"dtype": "fp32", "optimizer": OPTIMIZER, "deterministic": True}
else:
    ENGINE = {"dtype": "fp32", "optimizer": OPTIMIZER}


pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture(scope="module")
def hf() -> Any:
    return hf_model()


def make_engine(**options: Any) -> Any:
    from engines.megatron.engine import MegatronEngine

    return MegatronEngine(SHAPE, **{**ENGINE, **options})


@pytest.fixture
def engine(hf: Any) -> Any:
    engine = make_engine()
    put_weights(engine, to_megatron(dict(hf.state_dict())))
    return engine


def loss_fn(hidden: Tensor, head: Any, packed: Pack) -> tuple[Tensor, dict[str, Tensor]]:
    logits = head(hidden)
    targets, counted = (x.to(hidden.device) for x in targets_of(packed))
    loss = F.cross_entropy(logits[counted], targets[counted], reduction="sum")
    return loss, {"loss": loss.detach().cpu(), "logits": logits.detach().cpu()}


def train(engine: Any, seeds: range) -> list[tuple[float, float]]:
    """Loss and gradient norm of a step for every seed."""
    seen = []
    for seed in seeds:
        engine.zero_grad()
        outputs = engine.forward_backward([make_pack(LENGTHS, seed)], loss_fn)
        seen.append((outputs[0]["loss"].item(), engine.step()[1]))
    return seen


def test_packed_logits_equal_hugging_face_one_by_one(engine: Any, hf: Any) -> None:
    ours = [output["logits"] for output in engine.forward_backward(PACKS, loss_fn, forward_only=True)]
    for packed, logits in zip(PACKS, ours):
        sequences = torch.tensor_split(packed.token_ids, packed.cu_seqlens[1:-1].long())
        theirs = torch.cat([hf(input_ids=tokens[None]).logits[0] for tokens in sequences])
        assert (logits - theirs).abs().max() < 1e-4


def test_gradients_are_sums_and_equal_hugging_face(engine: Any, hf: Any) -> None:
    engine.zero_grad()
    outputs = engine.forward_backward(PACKS, loss_fn)
    hf.zero_grad()
    loss = hf_loss(hf, PACKS)
    loss.backward()
    torch.testing.assert_close(sum(output["loss"] for output in outputs), loss)
    grads = to_megatron({name: param.grad for name, param in hf.named_parameters()})
    for name, param in engine.chunks[0].named_parameters():
        assert (param.main_grad.cpu() - grads[name]).abs().max() < 1e-5 * grads[name].abs().max(), name
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    assert engine.step() == (True, pytest.approx(norm, rel=1e-5))


def test_first_step_is_adamw(engine: Any) -> None:
    before = {name: tensor.clone() for name, tensor in engine.named_weights()}
    engine.zero_grad()
    engine.forward_backward(PACKS, loss_fn)
    grads = {name: param.main_grad.clone() for name, param in engine.chunks[0].named_parameters()}
    _, norm = engine.step()
    for name, after in engine.named_weights():
        grad = grads[name] / (norm + 1e-6)  # clipped to 1
        decay = OPTIMIZER["lr"] * OPTIMIZER["weight_decay"] if grad.ndim > 1 else 0.0
        expected = before[name] * (1 - decay) - OPTIMIZER["lr"] * grad / (grad.abs() + OPTIMIZER["adam_eps"])
        torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def test_resume_is_bit_exact(engine: Any, tmp_path: Path) -> None:
    train(engine, range(2))
    engine.save(tmp_path, {"run": "r", "version": 2})
    going_on, digest = train(engine, range(10, 14)), engine.digest()
    other = make_engine(seed=99)
    assert other.load(tmp_path) == {"run": "r", "version": 2}
    assert train(other, range(10, 14)) == going_on
    assert other.digest() == digest


def test_resume_continues_the_schedule_of_this_run(tmp_path: Path) -> None:
    schedule = {**OPTIMIZER, "lr_decay_style": "linear", "lr_warmup_iters": 2, "lr_decay_iters": 10}
    engine = make_engine(optimizer=schedule)
    rates = [engine.lr]
    for _ in range(4):
        train(engine, range(1))
        rates.append(engine.lr)
    assert rates == pytest.approx([0, 0.005, 0.01, 0.00875, 0.0075])
    engine.save(tmp_path, {})
    longer = make_engine(optimizer={**schedule, "lr": 0.02, "lr_decay_iters": 18})
    longer.load(tmp_path)
    assert longer.lr == pytest.approx(0.02 * 14 / 16)


def test_load_weights_starts_afresh(engine: Any, tmp_path: Path) -> None:
    first = engine.digest()
    engine.save(tmp_path, {})
    from_start = train(engine, range(3)), engine.digest()
    assert from_start[1] != first
    engine.load_weights(tmp_path)
    assert engine.digest() == first
    assert (train(engine, range(3)), engine.digest()) == from_start


def test_load_refuses_what_is_no_checkpoint(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a torch_dist checkpoint"):
        engine.load(tmp_path)


def test_using_a_snapshot_changes_nothing_outside(engine: Any) -> None:
    held, start = engine.snapshot(), engine.digest()
    reference = engine.forward_backward(PACKS, loss_fn, forward_only=True)
    train(engine, range(1))
    trained = engine.digest()
    with engine.using(held):
        again = engine.forward_backward(PACKS, loss_fn, forward_only=True)
        assert engine.digest() == start
    assert all(torch.equal(a["logits"], b["logits"]) for a, b in zip(reference, again))
    assert engine.digest() == trained != start


def test_named_weights_are_all_weights_under_global_names(engine: Any, hf: Any) -> None:
    expected = to_megatron(dict(hf.state_dict()))
    found = {name: tensor.cpu() for name, tensor in engine.named_weights()}
    assert set(found) == set(expected) == set(engine.digest())
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_nan_gradients_raise_before_weights_change(engine: Any) -> None:
    before = engine.digest()
    engine.zero_grad()
    with pytest.raises(RuntimeError, match="NaN"):
        engine.forward_backward(PACKS, lambda hidden, head, packed: (head(hidden).sum() * torch.nan, {}))
    assert engine.digest() == before


@pytest.mark.parametrize(
    "options",
    [
        {"overrides": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
        {"overrides": {"recompute_activations": True}},
        {"overrides": {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}},
        {"deterministic": True},
    ],
    ids=["full recompute", "selective recompute", "several buckets", "deterministic"],
)
def test_options_change_speed_not_numbers(engine: Any, hf: Any, options: dict[str, Any], tmp_path: Path) -> None:
    try:
        other = make_engine(**options)
        put_weights(other, to_megatron(dict(hf.state_dict())))
        assert train(other, range(2)) == train(engine, range(2))
        other.save(tmp_path, {})  # several buckets: moments must not shift
        expected = train(other, range(3)), other.digest()
        other.load(tmp_path)
        assert (train(other, range(3)), other.digest()) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_bf16_trains_on_fp32_copies(hf: Any, tmp_path: Path) -> None:
    engine = make_engine(dtype="bf16", optimizer={**OPTIMIZER, "lr": 1e-4})
    put_weights(engine, to_megatron(dict(hf.state_dict())))
    outputs = engine.forward_backward(PACKS, loss_fn, forward_only=True)
    assert outputs[0]["loss"].item() == pytest.approx(hf_loss(hf, PACKS[:1]).item(), rel=0.02)
    train(engine, range(2))
    engine.save(tmp_path, {})
    expected = train(engine, range(3)), engine.digest()
    engine.load(tmp_path)
    assert (train(engine, range(3)), engine.digest()) == expected


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean"):
        make_engine(overrides={"recompute_granularty": "full"})
    with pytest.raises(ValueError, match="num_layers = 3"):
        make_engine(overrides={"num_layers": 3})
    with pytest.raises(ValueError, match="overlap_param_gather_with_optimizer_step"):
        make_engine(overrides={"overlap_param_gather_with_optimizer_step": True})
    with pytest.raises(ValueError, match="lr-decay-iters"):
        make_engine(optimizer={**OPTIMIZER, "lr_decay_style": "cosine"})


def test_layout_divides_the_world() -> None:
    assert ParallelLayout(tensor=2, context=2).data_parallel(12) == 3
    with pytest.raises(ValueError, match=re.escape("6 trainer ranks do not divide into replicas of 4")):
        ParallelLayout(tensor=2, context=2).data_parallel(6)
    assert ParallelLayout(tensor=2, expert=4, expert_tensor=1).data_parallel(4) == 2
    with pytest.raises(ValueError, match=re.escape("4 trainer ranks do not divide into replicas of 8 for the experts")):
        ParallelLayout(tensor=2, expert=4).data_parallel(4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL can")
def test_experts_cut_finer_than_the_rest_are_refused_without_nccl() -> None:
    with pytest.raises(
        ValueError, match="--expert-tensor-parallel-size 2 is above --tensor-model-parallel-size 1, which needs GPUs"
    ):
        init_parallel(0, 2, "file:///nowhere", ParallelLayout(expert_tensor=2))


def test_meta_model_has_every_name_and_no_memory() -> None:
    from engines.megatron.model import build_meta_model

    model = build_meta_model(SHAPE)
    assert all(param.is_meta for param in model.parameters())
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in make_engine().named_weights()}
    assert dist.get_world_size() == 1
