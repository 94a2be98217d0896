"""Megatron models of every family: configuration, determinism and resume, and two ranks against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.engines.families import read_shape
from penstock.engines.families.shape import Experts, ModelShape
from penstock.engines.megatron.checkpoints.layout import checkpoint_layout
from penstock.engines.megatron.checkpoints.safe_load import read_metadata
from penstock.engines.megatron.parallel import ParallelLayout
from penstock.engines.parallel_layout import check_model_parallel
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.storage.errors import OptionError
from tests.engines import megatron_reference
from tests.engines.built_memory import SHAPES
from tests.engines.family_ranks import runs_of
from tests.engines.megatron_reference import FULL, LATENT_ATTENTION, SELECTIVE, SHAPE, train
from tests.engines.real_models import REAL_MODELS
from tests.families import make_family

MIXTURE = Experts(num_experts=8, top_k=2, ffn_hidden_size=24)


@pytest.mark.parametrize(
    ("change", "sizes", "message"),
    [
        ({}, {"tensor": 3}, "tensor-model-parallel-size 3 .* 4 attention heads: use a divisor"),
        ({"num_attention_heads": 12, "num_query_groups": 3}, {"tensor": 2}, "3 key-value heads: use a divisor"),
        ({"ffn_hidden_size": 47}, {"tensor": 2}, "47 rows of the MLP"),
        ({}, {"expert": 2}, "has no experts: omit"),
        ({"experts": MIXTURE}, {"expert": 3}, "does not divide the model's 8 experts"),
        ({"experts": MIXTURE}, {"expert_tensor": 5}, "expert-tensor-parallel-size 5 .* 24 rows of an expert"),
        ({"experts": MIXTURE}, {"tensor": 2}, "add --sequence-parallel"),
        ({"latent": LATENT_ATTENTION}, {"tensor": 2}, "add --sequence-parallel"),
    ],
)
def test_parallel_sizes_that_do_not_divide_are_refused(
    change: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    from penstock.engines.megatron.model.transformer_config import transformer_config

    shape = SHAPE.model_copy(update=change)
    with pytest.raises(ValueError, match=message):
        check_model_parallel(shape, **sizes)
    with pytest.raises(ValueError, match=message):
        transformer_config(shape, ParallelLayout(**sizes))


def test_parallel_sizes_that_divide_are_accepted() -> None:
    one_key_head = SHAPE.model_copy(update={"num_query_groups": 1})
    check_model_parallel(one_key_head, tensor=4)  # each rank has a copy
    mixture = SHAPE.model_copy(update={"experts": MIXTURE, "ffn_hidden_size": 47})  # of no layer
    check_model_parallel(mixture, tensor=2, expert=8, expert_tensor=3, sequence_parallel=True)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    directory = tmp_path_factory.mktemp("families")
    return {name: read_shape(make_family(directory / name, name)) for name in ("deepseek-v3", "glm4")}


def make_engine(shape: ModelShape, **options: Any) -> Any:
    """Return an engine with deterministic random weights and nonzero router corrections."""
    from penstock.engines.megatron.weights import local_parameters

    engine = megatron_reference.make_engine(shape, **options)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in local_parameters(engine.chunks[0]):
        if name.endswith("expert_bias"):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    engine.optimizer.reload_model_params()
    return engine


@pytest.mark.parametrize(
    ("name", "options"),
    [("deepseek-v3", SELECTIVE | {"recompute_modules": ["mla_up_proj", "moe", "mlp"]}), ("glm4", FULL)],
    ids=["deepseek-v3", "glm4"],
)
def test_recomputation_does_not_change_results(
    world: None, shapes: dict[str, ModelShape], name: str, options: dict[str, Any]
) -> None:
    plain, other = make_engine(shapes[name]), make_engine(shapes[name], overrides=options)
    assert train(other, range(2)) == train(plain, range(2))


def test_grouped_experts_train_the_same_and_share_checkpoints(world: None, tmp_path: Path) -> None:
    shape = SHAPES["mixture"]
    plain, grouped = make_engine(shape), make_engine(shape, overrides={"moe_grouped_gemm": True})
    train(plain, range(1))
    plain.save(tmp_path / "plain", {})
    grouped.load(tmp_path / "plain")
    assert grouped.digest() == plain.digest()
    grouped.save(tmp_path / "grouped", {})
    layout = checkpoint_layout(shape)
    ours, theirs = (TorchDistWeights(tmp_path / directory, layout) for directory in ("grouped", "plain"))
    assert all(torch.equal(ours.fetch(weight).clone(), theirs.fetch(weight)) for weight in layout.slices)
    losses = train(grouped, range(2))[0]
    plain.load(tmp_path / "grouped")
    assert train(plain, range(2))[0] == pytest.approx(losses, rel=1e-6)


def test_checkpoint_files_of_a_mixture_separate_weights_from_optimizer_state(
    world: None, shapes: dict[str, ModelShape], tmp_path: Path
) -> None:
    from penstock.engines.megatron.checkpoints.writer import is_weight

    shape = shapes["deepseek-v3"]
    engine = make_engine(shape, dtype="bf16", overrides={"moe_grouped_gemm": True})
    assert len(engine.optimizer.chained_optimizers) == 2  # of the routed experts, and of all other parameters
    in_fp32 = {name for name, tensor in engine.gather_weights().tensors if tensor.dtype == torch.float32}
    assert in_fp32 == {name for name in engine.digest() if name.endswith("expert_bias")}
    engine.save(tmp_path, {})
    metadata = read_metadata(tmp_path)
    entries = metadata.state_dict_metadata.items()
    tensors = {key for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
    weights = {piece.key for piece in checkpoint_layout(shape).all_slices()}
    trained = {key for key in weights if not key.endswith("expert_bias")}
    assert {key for key in tensors if is_weight(key)} == weights
    assert {key for key in tensors if not is_weight(key)} == {
        f"optimizer.state.{name}.{key}" for name in ("param", "exp_avg", "exp_avg_sq") for key in trained
    }
    files = {place.relative_path for index, place in metadata.storage_data.items() if index.fqn in weights}
    others = {place.relative_path for index, place in metadata.storage_data.items() if index.fqn not in weights}
    assert files and others and files.isdisjoint(others)


@pytest.mark.parametrize(
    ("change", "layout"), [({"hidden_size": 42}, ParallelLayout()), ({}, ParallelLayout(expert_tensor=12))], ids=str
)
def test_grouped_experts_with_rows_of_odd_size_are_refused(change: dict[str, Any], layout: ParallelLayout) -> None:
    from penstock.engines.megatron.model.transformer_config import transformer_config

    shape = SHAPE.model_copy(update={"experts": MIXTURE, **change})
    with pytest.raises(OptionError, match=r"--moe-grouped-gemm .*16 bytes"):
        transformer_config(shape, layout, overrides={"moe_permute_fusion": True})


def test_grouped_experts_are_the_default_where_they_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.engines.megatron.model.transformer_config import uses_grouped_experts

    shape, capability = SHAPE.model_copy(update={"experts": MIXTURE}), [9, 0]
    assert not uses_grouped_experts(shape, 1, "bf16", {}) or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert uses_grouped_experts(shape, 1, "bf16", {})
    assert not uses_grouped_experts(SHAPE, 1, "bf16", {})
    assert not uses_grouped_experts(shape, 1, "bf16", {"moe_grouped_gemm": False})
    assert not uses_grouped_experts(shape, 1, "fp32", {})
    assert not uses_grouped_experts(shape.model_copy(update={"hidden_size": 42}), 1, "bf16", {})
    capability[0] = 10
    assert not uses_grouped_experts(shape, 1, "bf16", {})
    with pytest.raises(OptionError, match=r"--moe-grouped-gemm .* Hopper"):
        uses_grouped_experts(shape, 1, "bf16", {"moe_grouped_gemm": True})


def test_snapshot_and_digest_include_router_corrections(world: None, shapes: dict[str, ModelShape]) -> None:
    engine = make_engine(shapes["deepseek-v3"])
    start, held = engine.digest(), engine.snapshot_weights()
    assert set(start) == {name for name, _ in engine.gather_weights().tensors}
    correction = dict(engine.gather_weights().tensors)["decoder.layers.1.mlp.router.expert_bias"]
    correction += 1
    changed = engine.digest()
    assert [name for name in start if changed[name] != start[name]] == ["decoder.layers.1.mlp.router.expert_bias"]
    with engine.using_weights(held):
        assert engine.digest() == start
    assert engine.digest() == changed


def test_meta_model_of_a_real_size(world: None) -> None:
    """One layer of each kind of DeepSeek-V3, with 256 experts, takes no memory."""
    from penstock.engines.megatron.model.gpt import build_meta_model

    shape = REAL_MODELS["deepseek-v3"].shape
    assert shape.experts
    experts = shape.experts.model_copy(update={"num_dense_layers": 1})
    shape = shape.model_copy(update={"num_layers": 2, "experts": experts})
    model = build_meta_model(shape)
    assert all(param.is_meta for param in model.parameters())
    assert sum(param.numel() for param in model.parameters()) == shape.num_parameters


@pytest.mark.integration
@pytest.mark.parametrize("selection", ["some", pytest.param("others", marks=pytest.mark.full)])
def test_every_family_over_two_ranks(run_two_ranks: Callable[..., str], selection: str) -> None:
    """`family_ranks.py` compares logits, gradients, loaded and gathered weights."""
    said = run_two_ranks("family_ranks.py", selection)
    assert not [run for run in runs_of(selection) if f"{', '.join(run)}:" not in said]
