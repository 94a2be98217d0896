"""What changes where an optimizer's numbers lie, or when they are fetched, and none of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engines.megatron.shape import Experts, LatentAttention, ModelShape
from tests.engines.megatron_reference import LENGTHS, OPTIMIZER, SHAPE, Pack, make_pack, targets_of

MIXTURE = SHAPE.model_copy(
    update={"experts": Experts(num_experts=4, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=16, num_dense_layers=1)}
)
LATENT = SHAPE.model_copy(
    update={
        "head_dim": 24,
        "num_query_groups": 4,
        "latent": LatentAttention(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    }
)
OFFLOAD: dict[str, Any] = {"optimizer_cpu_offload": True}
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_num_layers": 1}
DETERMINISTIC = torch.cuda.is_available()  # its fastest kernels for fp32 do not give the same bits twice


@pytest.fixture(autouse=True)
def _kernels(world: None) -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def make_engine(shape: ModelShape = SHAPE, dtype: Any = "fp32", **overrides: Any) -> Any:
    from engines.megatron.engine import MegatronEngine

    overrides = {"init_method_std": 0.15, **overrides}
    return MegatronEngine(shape, dtype=dtype, optimizer=OPTIMIZER, overrides=overrides, deterministic=DETERMINISTIC)


def cross_entropy(hidden: Tensor, head: Any, packed: Pack) -> tuple[Tensor, dict[str, Tensor]]:
    targets, counted = (x.to(hidden.device) for x in targets_of(packed))
    loss = F.cross_entropy(head(hidden).float()[counted], targets[counted], reduction="sum")
    return loss, {"loss": loss.detach()}


def train(engine: Any, seeds: range) -> tuple[list[tuple[float, float]], dict[str, str], dict[str, str]]:
    """Loss and norm of a step for every seed, and digests of all that the engine holds then."""
    seen = []
    for seed in seeds:
        engine.zero_grad()
        outputs = engine.forward_backward([make_pack(LENGTHS, seed), make_pack([9, 30], seed)], cross_entropy)
        seen.append((sum(output["loss"].item() for output in outputs), engine.step()[1]))
    return seen, engine.digest(), engine.state_digest()


def moments(engine: Any) -> list[Tensor]:
    from engines.megatron.optimizer import inner_optimizers

    inners = inner_optimizers(engine.optimizer)
    return [state[name] for inner in inners for state in inner.state.values() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize(("dtype", "fraction"), [("fp32", 1.0), ("bf16", 0.4)])
def test_moments_in_host_memory_are_the_same_moments(
    dtype: str, fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engines.megatron import offload

    monkeypatch.setattr(offload, "PART", 3000)  # several parts, and parameters larger than one
    plain = make_engine(MIXTURE, dtype)
    away = make_engine(MIXTURE, dtype, **OFFLOAD, optimizer_offload_fraction=fraction)
    assert train(away, range(3)) == train(plain, range(3))
    if torch.cuda.is_available():
        held = [moment for moment in moments(away) if moment.device.type == "cpu"]
        assert all(moment.is_pinned() for moment in held)
        assert fraction <= sum(m.numel() for m in held) / sum(m.numel() for m in moments(away)) < (1.01 if fraction == 1 else 0.7)
        assert all(moment.is_cuda for moment in moments(plain))

    away.save(tmp_path / "away", {})
    plain.save(tmp_path / "plain", {})
    going_on = train(plain, range(5, 8))
    for saved, engine in (("plain", away), ("away", plain)):  # a checkpoint does not know where moments were
        places = [moment.device for moment in moments(engine)]
        engine.load(tmp_path / saved)
        assert [moment.device for moment in moments(engine)] == places
        assert train(engine, range(5, 8)) == going_on
        engine.load_weights(tmp_path / saved)
        assert [moment.device for moment in moments(engine)] == places
    assert train(away, range(3)) == train(plain, range(3))


def test_a_step_moves_moments_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than a part of them is beside the parameters, and every parameter has its turn."""
    from engines.megatron import offload
    from engines.megatron.optimizer import inner_optimizers

    monkeypatch.setattr(offload, "PART", 3000)
    engine = make_engine(**OFFLOAD)
    [inner] = inner_optimizers(engine.optimizer)
    turns: list[list[Tensor]] = []
    inner.register_step_pre_hook(lambda optimizer, *_: turns.append(optimizer.param_groups[0]["params"]))
    train(engine, range(1))
    params = [param for group in inner.param_groups for param in group["params"]]
    assert [id(param) for turn in turns for param in turn] == [id(param) for param in params]
    assert len(turns) > 5
    assert all(len(turn) == 1 or sum(param.numel() for param in turn) <= 3000 for turn in turns)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({**OFFLOAD, "optimizer_offload_fraction": 1.5}, "between 0 and 1"),
        ({**OFFLOAD, "use_precision_aware_optimizer": True}, "TransformerEngine"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_engine(**options)


@pytest.mark.parametrize(
    ("shape", "overrides"),
    [
        (SHAPE, {**FULL, "recompute_method": "block", "recompute_num_layers": 3}),
        (SHAPE, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}),
        (MIXTURE, {**FULL, "recompute_method": "uniform"}),
        (MIXTURE, {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}),
        (MIXTURE, {"recompute_granularity": "selective", "recompute_modules": ["shared_experts"]}),
        (LATENT, {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}),
        (LATENT, {"recompute_activations": True}),
        (LATENT, {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}),
    ],
)
def test_recomputation_changes_no_bit(shape: ModelShape, overrides: dict[str, Any]) -> None:
    assert train(make_engine(shape, **overrides), range(2)) == train(make_engine(shape), range(2))


@pytest.mark.parametrize("shape", [SHAPE, MIXTURE, LATENT])
def test_recomputed_norms_change_an_order_of_sums(shape: ModelShape) -> None:
    """On a CPU a norm uses its input twice, and the residual once: with recomputation the two are added first."""
    overrides: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    for ours, theirs in zip(train(make_engine(shape, **overrides), range(2))[0], train(make_engine(shape), range(2))[0]):
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.integration
def test_weights_fetched_during_the_forward_pass_are_never_old_ones(run_two_ranks: Callable[[str, float], str]) -> None:
    run_two_ranks("gather_ranks.py", 120)
