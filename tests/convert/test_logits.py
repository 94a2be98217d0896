"""Logits are compared with transformers' once per conversion: small models as a whole, large ones in part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from converted import commit_of
from families import make_family

from penstock.engines.families import read_config, shape_from_config
from penstock.stages.convert import conversion_check as logits
from penstock.stages.convert.conversion_check import (
    MAX_WHOLE_PARAMETERS,
    TOLERANCE,
    choose_part_to_compare,
    compare_logits,
    verify_existing,
)
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.errors import ModelError
from penstock.storage.store import Store
from tests.engines.real_models import REAL_MODELS


def test_logits_are_compared_once_and_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, store = make_family(tmp_path / "hf", "qwen2"), Store(str(tmp_path / "store"))
    ref = convert_hf(store, source, check_logits=True)
    commit = commit_of(store, ref)
    assert 0 < commit.summary["convert/logits_difference"] < TOLERANCE / 10 and "logits" in commit.seconds
    assert "computed with the whole model, differ by at most" in commit.state["logits"]
    monkeypatch.setattr(logits, "compare_logits", lambda *_: pytest.fail("compared again"))
    assert verify_existing(store, commit, source).logits == commit.state["logits"]
    assert convert_hf(store, source, check_logits=True) == ref


def test_different_logits_are_refused_and_leave_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, store = make_family(tmp_path / "hf", "qwen2"), Store(str(tmp_path / "store"))
    monkeypatch.setattr(logits, "TOLERANCE", 1e-12)
    with pytest.raises(ModelError, match="1e-12"):
        convert_hf(store, source, check_logits=True)
    assert not [name for name in store.list("models") if name.endswith(".commit.json")]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3-moe", {"moe_intermediate_size": 23, "intermediate_size": 57, "vocab_size": 59}),
        pytest.param(
            "deepseek-v3",
            {"moe_intermediate_size": 13, "intermediate_size": 29, "v_head_dim": 11, "kv_lora_rank": 19},
            marks=pytest.mark.full,
        ),
        pytest.param("glm4", {"intermediate_size": 53}, marks=pytest.mark.full),
    ],
)
def test_odd_widths(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    """transformers' grouped products of experts want rows of a multiple of 16 bytes."""
    source, store = make_family(tmp_path / "hf", name, **sizes), Store(str(tmp_path / "store"))
    commit = commit_of(store, convert_hf(store, source, check_logits=True))
    assert commit.summary["convert/logits_difference"] < TOLERANCE / 10


@pytest.mark.parametrize(
    ("name", "layers", "experts"),
    [
        ("deepseek-v3", (0, 1, 3), 12),
        pytest.param("glm4.7-flash", (0, 1, 3), 3, marks=pytest.mark.full),
        pytest.param("llama3.2", (0, 3), None, marks=pytest.mark.full),
    ],
)
def test_part_equals_transformers(name: str, layers: tuple[int, ...], experts: int | None, tmp_path: Path) -> None:
    source, store = make_family(tmp_path / "hf", name), Store(str(tmp_path / "store"))
    uri = Path(convert_hf(store, source).uri)
    part = choose_part_to_compare(read_config(source / "config.json"), max_whole_parameters=0)
    assert part.layers == layers and (part.shape.experts.num_experts if part.shape.experts else None) == experts
    result = compare_logits(uri, source, part)
    assert result.difference is not None and result.difference < TOLERANCE / 10
    other = make_family(tmp_path / "other", name, seed=1)
    with pytest.raises(ModelError, match="layers 0, "):
        compare_logits(uri, other, part)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_part_of_a_real_model_is_small(name: str) -> None:
    model = REAL_MODELS[name]
    values = {"architectures": [model.architecture], **model.config}
    whole, part = shape_from_config(values), choose_part_to_compare(values)
    assert part.is_whole == (whole.num_parameters <= MAX_WHOLE_PARAMETERS) and part.shape.num_parameters < 2.5e9
    assert len(part.layers) <= 3 or part.is_whole
    assert part.layers[-1] == whole.num_layers - 1 or len(part.layers) == 2
    if whole.experts and part.shape.experts:
        assert part.shape.experts.top_k == whole.experts.top_k < part.shape.experts.num_experts
        assert part.shape.experts.num_groups == whole.experts.num_groups


def test_part_larger_than_memory_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_family(tmp_path / "hf", "qwen2")
    monkeypatch.setattr(logits.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert str(compare_logits(tmp_path, source)).startswith("not compared: the comparison takes 0.0 GB of memory")


def test_config_refused_by_transformers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, store = make_family(tmp_path / "hf", "qwen2"), Store(str(tmp_path / "store"))
    path = source / "config.json"
    path.write_text(path.read_text().replace('"attention_dropout": 0.0', '"attention_dropout": "none"'))
    with pytest.raises(ModelError, match="transformers") as error:
        convert_hf(store, source, check_logits=True)
    assert "\n" not in str(error.value)
