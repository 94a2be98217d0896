"""A trainer of this package starts from a checkpoint under TransformerEngine's names."""

from pathlib import Path

import pytest
from families import make_family

from penstock.stages.convert.conversion_check import TOLERANCE, compare_logits
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.store import Store


@pytest.mark.full
@pytest.mark.parametrize("family", ["moonlight", "qwen3-moe"])
def test_engine_starts_from_transformer_engines_names(family: str, tmp_path: Path) -> None:
    source = make_family(tmp_path / "hf", family, num_hidden_layers=2)
    convert_hf(
        Store(str(tmp_path / "store")), source, options=ConversionOptions(save=str(tmp_path / "ours"), names="te")
    )
    difference = compare_logits(tmp_path / "ours" / "release", source).difference
    assert difference is not None and difference < TOLERANCE
