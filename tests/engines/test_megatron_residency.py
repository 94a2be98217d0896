"""State that moves to host memory and back: its device memory is really freed, and no bit of the results changes."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engines.training import STATE_KINDS, StateKind
from tests.engines import megatron_reference
from tests.engines.megatron_reference import MIXTURE, train
from tests.engines.test_megatron_optimizer import OFFLOAD, make_engine

WEIGHTS: StateKind = "weights"
GRADIENTS: StateKind = "gradients"
OPTIMIZER: StateKind = "optimizer"
pytestmark = pytest.mark.usefixtures("deterministic_kernels")


def sizes(engine: Any) -> dict[StateKind, set[int]]:
    """Return the sizes in bytes of the storages of each kind of state; the optimizer's without scalars."""
    from penstock.engines.megatron.optimizer import inner_optimizers

    buffers = [b for chunk in engine.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    tensors: dict[StateKind, list[Tensor]] = {
        WEIGHTS: [buffer.param_data for buffer in buffers] + list(engine.chunks[0].parameters()),
        GRADIENTS: [buffer.grad_data for buffer in buffers] + [p.main_grad for p in engine.chunks[0].parameters()],
        OPTIMIZER: [
            tensor
            for inner in inner_optimizers(engine.optimizer)
            for param, state in inner.state.items()
            for tensor in ([param] if engine.dtype == "bf16" else []) + [state["exp_avg"], state["exp_avg_sq"]]
        ],
    }
    return {kind: {t.untyped_storage().nbytes() for t in of_kind} for kind, of_kind in tensors.items()}


STATE_ON_HOST = {**OFFLOAD, "optimizer_offload_fraction": 0.4}


@pytest.mark.parametrize(
    ("dtype", "overrides"), [("fp32", {}), ("bf16", STATE_ON_HOST)], ids=["fp32", "bf16 with state on host"]
)
def test_training_with_offloads_between_steps_gives_identical_bits(
    dtype: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engines.megatron import residency

    monkeypatch.setattr(residency, "BUFFER_BYTES", 10_000)  # storages that lie in several host buffers
    plain, moved = make_engine(MIXTURE, dtype, **overrides), make_engine(MIXTURE, dtype, **overrides)
    for step in range(2):
        moved.offload(STATE_KINDS)
        moved.onload(STATE_KINDS)
        assert train(moved, range(step, step + 1)) == train(plain, range(step, step + 1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offload_frees_all_storages_and_is_idempotent(dtype: str) -> None:
    engine = make_engine(MIXTURE, dtype)
    train(engine, range(1))
    before, digests = sizes(engine), (engine.digest(), engine.optimizer_state_digest())
    assert all(0 not in of_kind for of_kind in before.values())

    switch = engine.offload(STATE_KINDS)
    assert switch.name == "policy: offload weights, gradients, optimizer" and switch.seconds > 0
    assert sizes(engine) == {kind: {0} for kind in STATE_KINDS}
    assert engine.offload(STATE_KINDS) is None
    assert sizes(engine) == {kind: {0} for kind in STATE_KINDS}

    assert engine.onload(STATE_KINDS).name == "policy: onload weights, gradients, optimizer"
    assert engine.onload(STATE_KINDS) is None
    assert sizes(engine) == before
    assert (engine.digest(), engine.optimizer_state_digest()) == digests


def test_reloaded_gradients_are_zero() -> None:
    engine = make_engine()
    train(engine, range(1))
    [buffer] = engine.wrapped[0].buffers
    assert buffer.grad_data.any()
    engine.offload([GRADIENTS])
    engine.onload([GRADIENTS])
    assert not buffer.grad_data.any()


def test_weights_are_published_while_the_rest_is_offloaded() -> None:
    engine = make_engine(MIXTURE, "bf16")
    train(engine, range(1))
    expected = {name: tensor.clone() for name, tensor in engine.gather_weights().tensors}
    state = engine.optimizer_state_digest()
    assert engine.offload([OPTIMIZER, GRADIENTS]).name == "policy: offload gradients, optimizer"
    assert sizes(engine) == {**sizes(make_engine(MIXTURE, "bf16")), GRADIENTS: {0}, OPTIMIZER: {0}}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.gather_weights().tensors)

    assert engine.offload(STATE_KINDS).name == "policy: offload weights"
    assert engine.onload([WEIGHTS]).name == "policy: onload weights"
    assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.gather_weights().tensors)
    with pytest.raises(AssertionError, match=r"optimizer .*are offloaded"):
        engine.optimizer_state_digest()
    engine.onload(STATE_KINDS)
    assert engine.optimizer_state_digest() == state


def test_checkpoint_after_an_onload_is_the_same_and_loads(tmp_path: Path) -> None:
    engine = make_engine(MIXTURE, "bf16", **STATE_ON_HOST)
    train(engine, range(1))
    engine.offload(STATE_KINDS)
    engine.onload([WEIGHTS, OPTIMIZER])
    engine.save(tmp_path, {})
    engine.onload([GRADIENTS])
    expected = train(engine, range(5, 6))
    for _ in range(2):  # a load replaces the moments' tensors
        engine.offload(STATE_KINDS)
        engine.onload(STATE_KINDS)
        engine.load(tmp_path)
        engine.offload(STATE_KINDS)
        engine.onload(STATE_KINDS)
        assert train(engine, range(5, 6)) == expected


def test_methods_refuse_offloaded_state(tmp_path: Path) -> None:
    engine = make_engine()
    engine.offload([GRADIENTS])
    with pytest.raises(AssertionError, match="gradients"):
        train(engine, range(1))
    engine.offload([WEIGHTS])
    for read in (engine.digest, engine.gather_weights, engine.snapshot_weights, lambda: engine.save(tmp_path, None)):
        with pytest.raises(AssertionError, match="weights"):
            read()


def test_offloads_use_the_buffers_that_a_thread_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a load, which replaces the moments' tensors. Nothing else is allocated, before or later."""
    from penstock.engines.megatron import residency

    allocate, allocated = residency._allocate_buffers, list[tuple[int, threading.Thread]]()

    def record(num_bytes: int) -> list[Tensor]:
        allocated.append((num_bytes, threading.current_thread()))
        return allocate(num_bytes)

    monkeypatch.setattr(residency, "BUFFER_BYTES", 10_000)
    monkeypatch.setattr(residency, "_allocate_buffers", record)
    plain = make_engine(MIXTURE, "bf16", **STATE_ON_HOST)
    expected = train(plain, range(2))
    plain.save(tmp_path, {})
    assert not allocated, "an engine that may never be offloaded allocates nothing"

    options = {"init_method_std": 0.15, **STATE_ON_HOST}
    moved = megatron_reference.make_engine(MIXTURE, options, dtype="bf16", offloads=True)
    moved.load(tmp_path)
    for _ in range(2):
        moved.offload([OPTIMIZER, GRADIENTS])
        moved.offload(STATE_KINDS)
        moved.onload(STATE_KINDS)
    assert (moved.digest(), moved.optimizer_state_digest()) == expected[2:]
    on_host: dict[StateKind, list[Tensor]] = moved._memory._host
    assert [size for size, _ in allocated] == [sum(map(len, on_host[kind])) for kind in (OPTIMIZER, WEIGHTS)]
    assert all(thread is not threading.current_thread() for _, thread in allocated)
    if torch.cuda.is_available():
        assert all(buffer.is_pinned() for buffers in on_host.values() for buffer in buffers)


def test_first_offload_raises_the_error_of_an_allocation_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engines.megatron import residency

    def fail(num_bytes: int) -> list[Tensor]:
        raise RuntimeError(f"CUDA error: out of memory ({threading.current_thread().name})")

    monkeypatch.setattr(residency, "_allocate_buffers", fail)
    engine = megatron_reference.make_engine(offloads=True)
    before, expected = sizes(engine), train(megatron_reference.make_engine(), range(1))
    with pytest.raises(RuntimeError, match=r"out of memory \(allocate host memory"):
        engine.offload([OPTIMIZER, GRADIENTS])
    assert sizes(engine) == before and train(engine, range(1)) == expected
