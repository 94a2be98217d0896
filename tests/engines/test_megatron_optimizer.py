"""Options that move or delay an optimizer's data change no bit of the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engines.families.shape import ModelShape
from penstock.flows.config import options_by_mutability, validate_config
from tests.engines import megatron_reference
from tests.engines.megatron_reference import FULL, LATENT, MIXTURE, SELECTIVE, SHAPE, train

OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True}
pytestmark = pytest.mark.usefixtures("deterministic_kernels")


def make_engine(shape: ModelShape = SHAPE, dtype: Any = "fp32", **overrides: Any) -> Any:
    return megatron_reference.make_engine(shape, dtype=dtype, overrides={"init_method_std": 0.15, **overrides})


def moments(engine: Any) -> list[Tensor]:
    from penstock.engines.megatron.optimizer import inner_optimizers

    inners = inner_optimizers(engine.optimizer)
    return [state[name] for inner in inners for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]


def share_of_freed_main_params(engine: Any) -> float:
    """Return the fraction of the main parameters' elements without device memory."""
    from penstock.engines.megatron.optimizer import inner_optimizers

    params = [param for inner in inner_optimizers(engine.optimizer) for param in inner.state]
    freed = [param for param in params if param.untyped_storage().nbytes() == 0]
    return sum(param.numel() for param in freed) / sum(param.numel() for param in params)


@pytest.mark.parametrize(("dtype", "fraction"), [("fp32", 0.4), pytest.param("bf16", 1.0, marks=pytest.mark.full)])
def test_offloaded_state_gives_the_same_results(
    dtype: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engines.megatron import optimizer as offload

    monkeypatch.setattr(offload, "CHUNK_NUMEL", 3000)  # several chunks, and parameters larger than a chunk
    plain = make_engine(MIXTURE, dtype)
    offloaded = make_engine(MIXTURE, dtype, **OFFLOAD, optimizer_offload_fraction=fraction)
    assert train(offloaded, range(2)) == train(plain, range(2))
    if torch.cuda.is_available():
        on_host = [moment for moment in moments(offloaded) if moment.device.type == "cpu"]
        assert all(moment.is_pinned() for moment in on_host)
        share = sum(m.numel() for m in on_host) / sum(m.numel() for m in moments(offloaded))
        assert fraction <= share < (1.01 if fraction == 1 else 0.7)
        assert all(moment.is_cuda for moment in moments(plain))
    least = fraction if dtype == "bf16" else 0.0  # main parameters of an fp32 model are views of its weights
    assert least <= share_of_freed_main_params(offloaded) <= least + (0.3 if 0 < least < 1 else 0)

    offloaded.save(tmp_path / "offloaded", {})
    plain.save(tmp_path / "plain", {})
    expected = train(plain, range(5, 6))
    for saved, engine in (("plain", offloaded), ("offloaded", plain)):  # checkpoints do not depend on offloading
        places = [moment.data_ptr() for moment in moments(offloaded)]
        freed = share_of_freed_main_params(engine)
        engine.load(tmp_path / saved)
        assert train(engine, range(5, 6)) == expected
        engine.load_weights(tmp_path / saved)
        assert share_of_freed_main_params(engine) == freed
        if fraction == 1:
            assert [moment.data_ptr() for moment in moments(offloaded)] == places  # pinned memory is allocated once
    assert train(offloaded, range(1)) == train(plain, range(1))


def test_step_moves_state_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two chunks of main parameters are on the device at a time, and every parameter is stepped once."""
    from penstock.engines.megatron import optimizer as offload
    from penstock.engines.megatron.optimizer import inner_optimizers

    monkeypatch.setattr(offload, "CHUNK_NUMEL", 3000)
    engine = make_engine(SHAPE, "bf16", **OFFLOAD)
    [inner] = inner_optimizers(engine.optimizer)
    params = [param for group in inner.param_groups for param in group["params"]]
    chunks: list[list[Tensor]] = []
    on_device: list[int] = []

    def record(optimizer: Any, *_: Any) -> None:
        chunks.append(optimizer.param_groups[0]["params"])
        on_device.append(sum(param.numel() for param in params if param.untyped_storage().nbytes()))

    inner.register_step_pre_hook(record)
    train(engine, range(1))
    assert [id(param) for chunk in chunks for param in chunk] == [id(param) for param in params]
    assert len(chunks) > 5
    assert all(len(chunk) == 1 or sum(param.numel() for param in chunk) <= 3000 for chunk in chunks)
    numels = [sum(param.numel() for param in chunk) for chunk in chunks]
    assert on_device == [sum(numels[index : index + 2]) for index in range(len(chunks))]


def test_bf16_gradient_buffers_train_and_keep_no_fp32_copies() -> None:
    """The optimizer step copies the gradients to fp32, as many bytes as the plan counts, and frees the copies."""
    from penstock.engines.megatron.memory_plan import TrainerOptions, estimate_trainer_memory
    from penstock.engines.megatron.optimizer import inner_optimizers
    from penstock.engines.parallel_layout import ParallelLayout

    options = {"grad_reduce_in_fp32": False}
    engine, offloaded = make_engine(SHAPE, "bf16", **options), make_engine(SHAPE, "bf16", **options, **OFFLOAD)
    plain = make_engine(SHAPE, "bf16")
    assert {buffer.grad_data.dtype for chunk in engine.wrapped for buffer in chunk.buffers} == {torch.bfloat16}
    [inner] = inner_optimizers(engine.optimizer)
    params = [param for group in inner.param_groups for param in group["params"]]
    copies: list[int] = []
    inner.register_step_pre_hook(lambda *_: copies.append(sum(param.grad.nbytes for param in params)))
    before = engine.digest()
    result = train(engine, range(2))
    assert copies == [estimate_trainer_memory(SHAPE, ParallelLayout(), 1, TrainerOptions(megatron=options)).update] * 2
    assert not any(param.grad is not None for param in params)
    assert train(offloaded, range(2)) == result and before.items().isdisjoint(result[2].items())
    expected = train(plain, range(2))
    assert result[:2] != expected[:2]
    for ours, theirs in zip(result[:2], expected[:2]):
        assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "dtype", "overrides"),
    [
        (SHAPE, "fp32", {**FULL, "recompute_method": "block", "recompute_num_layers": 3}),
        (SHAPE, "bf16", {**SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}),
        (MIXTURE, "fp32", {**SELECTIVE, "recompute_modules": ["moe", "core_attn"]}),
        (MIXTURE, "bf16", {**SELECTIVE, "recompute_modules": ["shared_experts"]}),
        (MIXTURE, "fp32", {**SELECTIVE, "recompute_modules": ["moe_act", "mlp"], "moe_grouped_gemm": True}),
        (LATENT, "bf16", {**FULL, "recompute_num_layers": 2}),
        (LATENT, "fp32", {**SELECTIVE, "recompute_modules": ["mla_up_proj"]}),
    ],
)
def test_recomputation_gives_identical_results(shape: ModelShape, dtype: str, overrides: dict[str, Any]) -> None:
    """Without the options that a resumed run may change, the results are the same."""
    fixed = {name: value for name, value in overrides.items() if name == "moe_grouped_gemm"}
    recomputing, plain = make_engine(shape, dtype, **overrides), make_engine(shape, dtype, **fixed)
    assert train(recomputing, range(2)) == train(plain, range(2))


def test_options_that_change_no_result_are_recognized() -> None:
    free = {"recompute_granularity": "selective", "optimizer_cpu_offload": True, "overlap_param_gather": True}
    fixed = {"attention_backend": "flash", "overlap_grad_reduce": True, "grad_reduce_in_fp32": False}
    options = free | fixed | {"recompute_modules": ["mlp", "layernorm"]}
    identity = options_by_mutability(validate_config({"train": {"megatron": options}}), "identity")
    kept = {name: identity[f"train.megatron.{name}"] for name in options if f"train.megatron.{name}" in identity}
    assert kept == fixed | {"recompute_modules": ["layernorm"]}


def test_recomputed_norms_differ_only_by_rounding() -> None:
    """On a CPU a norm's input has two gradients and the residual one: recomputation adds the two first."""
    recomputing = make_engine(LATENT, **SELECTIVE, recompute_modules=["layernorm"])
    ours, theirs = train(recomputing, range(2)), train(make_engine(LATENT), range(2))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and ours[1] == pytest.approx(theirs[1], rel=1e-5)


@pytest.mark.integration
@pytest.mark.full
def test_overlapped_param_gather_never_reads_stale_weights(run_two_ranks: Callable[..., str]) -> None:
    run_two_ranks("gather_ranks.py")
