"""One rank of Megatron-core, compared with Hugging Face and with itself after a resume."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.megatron.parallel import ParallelLayout, init_parallel
from penstock.storage.disk import hash_file
from penstock.storage.errors import LayoutError, ModelError
from tests.engines.megatron_reference import (
    LENGTHS,
    OPTIMIZER,
    PACKS,
    cross_entropy,
    hf_loss,
    hf_model,
    make_engine,
    make_pack,
    put_weights,
    to_megatron,
    train,
)

pytestmark = pytest.mark.usefixtures("deterministic_kernels")


@pytest.fixture(scope="module")
def hf() -> Any:
    return hf_model()


@pytest.fixture
def engine(hf: Any) -> Any:
    engine = make_engine()
    put_weights(engine, to_megatron(dict(hf.state_dict())))
    return engine


def test_packed_logits_equal_hugging_face_per_sequence(engine: Any, hf: Any) -> None:
    ours = [output["logits"] for output in engine.forward_backward(PACKS, cross_entropy, forward_only=True)]
    for packed, logits in zip(PACKS, ours):
        sequences = torch.tensor_split(packed.token_ids, packed.cu_seqlens[1:-1].long())
        theirs = torch.cat([hf(input_ids=tokens[None]).logits[0] for tokens in sequences])
        assert (logits - theirs).abs().max() < 1e-4


def test_passes_use_the_stream_of_a_micro_batch_and_do_not_change_it(engine: Any) -> None:
    pack, losses = make_pack(LENGTHS), []
    for stream in (None, engine.pack_stream(pack), engine.pack_stream(make_pack(LENGTHS, 5))):
        pack.stream = stream
        losses += [engine.forward_backward([pack], cross_entropy, forward_only=True)[0]["loss"] for _ in range(2)]
        assert pack.stream is stream and (stream is None or stream.cos_sin is None)
    assert losses[0] == losses[1] == losses[2] == losses[3] != losses[4] == losses[5]


def test_gradients_are_sums_and_equal_hugging_face(engine: Any, hf: Any) -> None:
    outputs = engine.forward_backward(PACKS, cross_entropy)
    hf.zero_grad()
    loss = hf_loss(hf, PACKS)
    loss.backward()
    torch.testing.assert_close(sum(output["loss"] for output in outputs), loss)
    grads = to_megatron({name: param.grad for name, param in hf.named_parameters()})
    for name, param in engine.chunks[0].named_parameters():
        assert (param.main_grad.cpu() - grads[name]).abs().max() < 1e-5 * grads[name].abs().max(), name
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    assert engine.optimizer_step()[:2] == (True, pytest.approx(norm, rel=1e-5))


def test_first_step_is_adamw(engine: Any) -> None:
    before = {name: tensor.clone() for name, tensor in engine.gather_weights().tensors}
    engine.forward_backward(PACKS, cross_entropy)
    grads = {name: param.main_grad.clone() for name, param in engine.chunks[0].named_parameters()}
    _, norm, _ = engine.optimizer_step()
    for name, after in engine.gather_weights().tensors:
        grad = grads[name] / (norm + 1e-6)  # clipped to 1
        decay = OPTIMIZER["lr"] * OPTIMIZER["weight_decay"] if grad.ndim > 1 else 0.0
        expected = before[name] * (1 - decay) - OPTIMIZER["lr"] * grad / (grad.abs() + OPTIMIZER["adam_eps"])
        torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)


def test_resume_is_bit_exact(engine: Any, tmp_path: Path) -> None:
    train(engine, range(1))
    engine.save(tmp_path, {"run": "r", "version": 2})
    expected = train(engine, range(10, 12))
    other = make_engine(seed=99)
    assert other.load(tmp_path) == {"run": "r", "version": 2}
    assert train(other, range(10, 12)) == expected


def test_saved_files_have_the_returned_hashes_and_load_in_megatron(engine: Any, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    hashes = engine.save(tmp_path, {})
    assert hashes == {path.name: hash_file(path) for path in tmp_path.glob("*.distcp")}
    state = {"model": make_engine(seed=99).chunks[0].sharded_state_dict()}
    loaded = dist_checkpointing.load(state, str(tmp_path))["model"]
    for name, tensor in engine.chunks[0].state_dict().items():
        assert tensor is None or torch.equal(loaded[name], tensor), name


def one_step(engine: Any) -> float:
    """Run one optimizer step and return its learning rate."""
    engine.forward_backward(PACKS, cross_entropy)
    return engine.optimizer_step()[2][0]


def test_resume_with_another_schedule_keeps_the_step_count(tmp_path: Path) -> None:
    schedule = {**OPTIMIZER, "lr_decay_style": "linear", "lr_warmup_iters": 2, "lr_decay_iters": 10}
    engine = make_engine(optimizer=schedule)
    assert [one_step(engine) for _ in range(4)] == pytest.approx([0, 0.005, 0.01, 0.00875])
    engine.save(tmp_path, {})
    longer = make_engine(optimizer={**schedule, "lr": 0.02, "lr_decay_iters": 18})
    longer.load(tmp_path)
    assert one_step(longer) == pytest.approx(0.02 * 14 / 16)


def test_load_weights_resets_the_optimizer(engine: Any, tmp_path: Path) -> None:
    first = engine.digest()
    engine.save(tmp_path, {})
    from_start = train(engine, range(2))
    assert engine.digest() != first
    engine.load_weights(tmp_path)
    assert engine.digest() == first
    assert train(engine, range(2)) == from_start


def test_load_of_an_empty_directory_fails(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        engine.load(tmp_path)


def test_nan_gradients_raise_before_weights_change(engine: Any) -> None:
    before = engine.digest()
    with pytest.raises(RuntimeError, match="NaN"):
        engine.forward_backward(PACKS, lambda hidden, head, packed: (head(hidden).sum() * torch.nan, {}))
    assert engine.digest() == before


def test_several_buckets_do_not_change_results(engine: Any, hf: Any, tmp_path: Path) -> None:
    plain = train(engine, range(2))
    other = make_engine(overrides={"overlap_grad_reduce": True, "bucket_size": 3000})
    put_weights(other, to_megatron(dict(hf.state_dict())))
    assert train(other, range(2))[:3] == plain[:3]
    other.save(tmp_path, {})  # moments must not shift
    expected = train(other, range(2))
    other.load(tmp_path)
    assert train(other, range(2)) == expected


def test_bf16_trains_on_fp32_copies(hf: Any, tmp_path: Path) -> None:
    engine = make_engine(dtype="bf16", optimizer={**OPTIMIZER, "lr": 1e-4})
    put_weights(engine, to_megatron(dict(hf.state_dict())))
    outputs = engine.forward_backward(PACKS, cross_entropy, forward_only=True)
    assert outputs[0]["loss"].item() == pytest.approx(hf_loss(hf, PACKS[:1]).item(), rel=0.02)
    train(engine, range(1))
    engine.save(tmp_path, {})
    expected = train(engine, range(2))
    engine.load(tmp_path)
    assert train(engine, range(2)) == expected


def test_world_size_must_be_a_multiple_of_the_parallel_sizes() -> None:
    assert ParallelLayout(tensor=2, context=2).data_parallel_size(12) == 3
    with pytest.raises(LayoutError, match=r"\b6\b.*\b4\b"):
        ParallelLayout(tensor=2, context=2).data_parallel_size(6)
    assert ParallelLayout(tensor=2, expert=4, expert_tensor=1).data_parallel_size(4) == 2
    with pytest.raises(LayoutError, match=r"\b4\b.*\b8\b.*experts"):
        ParallelLayout(tensor=2, expert=4).data_parallel_size(4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL supports it")
def test_expert_tensor_size_above_tensor_size_fails_without_nccl() -> None:
    with pytest.raises(LayoutError, match=r"--expert-tensor-parallel-size 2.*--tensor-model-parallel-size 1"):
        init_parallel(0, 2, "file:///nowhere", ParallelLayout(expert_tensor=2))
