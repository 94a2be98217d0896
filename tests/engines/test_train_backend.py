"""The training engine's backend: --freeze-params-name-list and --only-train-params-name-list choose parameters, which
keep their bits; environment variables of the trainer's processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engines.families.shape import ModelShape
from penstock.engines.megatron.frozen_parameters import check_frozen_layers, frozen_parameters
from penstock.engines.megatron.train_backend import MegatronBackend
from penstock.engines.parallel_layout import ParallelLayout
from penstock.engines.training import STATE_KINDS
from penstock.storage.errors import OptionError
from tests.engines import megatron_reference
from tests.engines.megatron_reference import FULL, MIXTURE, OPTIMIZER, SHAPE, train


def test_patterns_choose_parameters_by_their_names() -> None:
    assert frozen_parameters(SHAPE, None, None) == set()
    assert frozen_parameters(SHAPE, ["embedding"], None) == {"embedding.word_embeddings.weight"}
    layers = frozen_parameters(SHAPE, None, [r"layers\.[23]\."])
    assert "embedding.word_embeddings.weight" in layers and "decoder.layers.1.mlp.linear_fc1.weight" in layers
    assert not [name for name in layers if name.startswith(("decoder.layers.2.", "decoder.layers.3."))]


def test_patterns_match_the_names_of_transformer_engine_too() -> None:
    assert frozen_parameters(SHAPE, [r"layers.0.*linear_qkv.layer_norm_weight"], None) == {
        "decoder.layers.0.input_layernorm.weight"
    }
    norms = frozen_parameters(MIXTURE, ["mlp.linear_fc1.layer_norm_weight"], None)
    assert norms == {"decoder.layers.0.pre_mlp_layernorm.weight"}, "the norm before experts is not fused"
    experts = frozen_parameters(MIXTURE, [r"experts\.linear_fc1\.weight\d"], None)
    assert len(experts) == 12 and all(".local_experts." in name for name in experts)


@pytest.mark.parametrize(
    ("shape", "freeze", "only_train", "message"),
    [
        (SHAPE, ["output_layer"], None, "--freeze-params-name-list output_layer matches no parameter .* tied LM head"),
        (SHAPE, None, ["mlp", "experts"], "--only-train-params-name-list experts matches no parameter"),
        (SHAPE, ["("], None, r"--freeze-params-name-list \(: not a regular expression"),
        (SHAPE, ["."], None, "freezes every parameter"),
        (MIXTURE, [r"local_experts\.2\."], None, r"freezes some of .*local_experts\.\*\..* frozen together"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(
    shape: ModelShape, freeze: list[str] | None, only_train: list[str] | None, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        frozen_parameters(shape, freeze, only_train)


def test_pipeline_stage_without_trained_parameters_is_refused() -> None:
    for shape, patterns in (
        (SHAPE, [r"layers\.3\."]),
        (MIXTURE, ["experts"]),
        (MIXTURE, [r"layers\.2\..*experts", "attention"]),
    ):
        frozen = frozen_parameters(shape, None, patterns)
        check_frozen_layers(shape, frozen, 1)
        with pytest.raises(OptionError, match="--pipeline-model-parallel-size 2 needs a trained parameter"):
            check_frozen_layers(shape, frozen, 2)
    check_frozen_layers(MIXTURE, frozen_parameters(MIXTURE, ["experts", "embedding"], None), 2)


def make_engine(shape: ModelShape, overrides: dict[str, Any] | None = None, **fields: Any) -> Any:
    return megatron_reference.make_engine(shape, overrides, seed=3, **fields)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("shape", "freeze", "only_train", "overrides", "dtype"),
    [
        (SHAPE, ["embedding", "final_layernorm"], None, {}, "fp32"),
        (SHAPE, None, [r"layers\.3\."], {}, "bf16"),
        (MIXTURE, None, [r"\.experts\."], {}, "fp32"),
        (MIXTURE, None, ["layers.2.*experts", "router"], {"moe_grouped_gemm": True}, "bf16"),
    ],
)
def test_frozen_parameters_keep_their_bits_and_all_others_are_trained(
    shape: ModelShape,
    freeze: list[str] | None,
    only_train: list[str] | None,
    overrides: dict[str, Any],
    dtype: str,
    tmp_path: Path,
) -> None:
    frozen, choice = frozen_parameters(shape, freeze, only_train), {"freeze": freeze, "only_train": only_train}
    engine = make_engine(shape, overrides, dtype=dtype, **choice)
    before = engine.digest()
    train(engine, range(1))
    engine.save(tmp_path, {})
    changed = {name for name, value in engine.digest().items() if before[name] != value}
    assert changed == before.keys() - frozen
    expected = train(engine, range(2, 3))
    other = make_engine(shape, overrides, dtype=dtype, **choice)
    other.load(tmp_path)
    other.offload(STATE_KINDS)
    weights = list(other.chunks[0].parameters())
    assert {weight.untyped_storage().nbytes() for weight in weights} == {0}, "frozen weights are offloaded, too"
    other.onload(STATE_KINDS)
    assert train(other, range(2, 3)) == expected


@pytest.mark.usefixtures("world")
def test_recomputed_layers_above_frozen_ones_are_trained() -> None:
    frozen = ["embedding", r"layers\.0\."]
    plain, recomputing = make_engine(SHAPE, freeze=frozen), make_engine(SHAPE, FULL, freeze=frozen)
    assert train(plain, range(2)) == train(recomputing, range(2))


@pytest.mark.usefixtures("world")
def test_gradients_of_trained_parameters_do_not_depend_on_frozen_ones() -> None:
    """The first step of both runs has the same gradients, and no clipping: the trained parameters get the same bits."""
    digests = []
    for freeze in (None, ["linear_qkv"]):
        engine = make_engine(SHAPE, optimizer={**OPTIMIZER, "clip_grad": 0.0}, freeze=freeze)
        digests.append(train(engine, range(1))[2])
    frozen = frozen_parameters(SHAPE, ["linear_qkv"], None)
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} == frozen


NAMES = ("NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("name", NAMES)
def test_rank_environment_keeps_the_variables_of_the_driver(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in NAMES:
        monkeypatch.delenv(other, raising=False)

    def environment(**sizes: int) -> dict[str, str]:
        return MegatronBackend().rank_environment(ParallelLayout(**sizes), 3)

    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment(context=2, pipeline=2)
    assert environment(tensor=2)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "pinned" in environment()["PYTORCH_ALLOC_CONF"]
    monkeypatch.setenv(name, "7")
    assert environment(tensor=2).items() >= {name: "7", "OMP_NUM_THREADS": "3"}.items()
    assert ("PYTORCH_ALLOC_CONF" in environment()) == (name != "PYTORCH_CUDA_ALLOC_CONF")  # the older name
