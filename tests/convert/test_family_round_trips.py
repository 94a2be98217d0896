"""Every family: Hugging Face -> torch_dist -> Hugging Face gives the same names, dtypes, shapes and bits, and the same
config.json."""

import json
from pathlib import Path

import pytest
import torch
from converted import check_same_tensors, commit_of
from families import FAMILIES, make_family

from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import CARRIED, Origin, find_conversion
from penstock.stages.convert.to_hf import export_hf, export_to
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.store import Store

OTHERS = [name for name in FAMILIES if name != "qwen3"]  # see test_conversion.py
SOME = ("llama3.2", "glm4", "glm4.5", "deepseek-v3", "moonlight")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SOME else pytest.mark.full) for name in OTHERS]
)
def test_round_trip_is_exact(family: str, store: Store, tmp_path: Path) -> None:
    dtype = "float32" if family in ("glm4", "moonlight") else "bfloat16"  # a router's correction is always float32
    source = make_family(tmp_path / "hf", family, seed=7, dtype=dtype)
    model = convert_hf(store, source)
    back = export_to(
        store, model.uri, Origin(Path(model.uri) / "hf_assets"), str(tmp_path / "back"), shard_bytes=40_000
    )
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    check_same_tensors(source, back.uri)
    assert (Path(back.uri) / "config.json").read_text() == (source / "config.json").read_text()


MTP_FAMILIES = ["glm4.5", "glm4.7-flash", "deepseek-v3"]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.full) for name in MTP_FAMILIES[:-1]] + MTP_FAMILIES[-1:]
)
def test_prediction_layers_are_skipped_or_kept_as_requested(family: str, store: Store, tmp_path: Path) -> None:
    source = make_family(tmp_path / "hf", family, dtype="bfloat16", num_hidden_layers=2, num_nextn_predict_layers=1)
    extra = {name for name in HFWeights(source).info if name.startswith("model.layers.2.")}
    skipped, kept = convert_hf(store, source), convert_hf(store, source, options=ConversionOptions(mtp="keep"))
    assert skipped.key != kept.key and kept.key.endswith("-mtp.commit.json")
    assert [commit_of(store, ref).state["skipped"]["count"] for ref in (skipped, kept)] == [len(extra), 0]
    assert [find_conversion(store, str(source), mtp, None) for mtp in ("skip", "keep")] == [skipped, kept]
    without = export_to(store, skipped.uri, Origin(Path(skipped.uri) / "hf_assets"), str(tmp_path / "without"))
    assert set(HFWeights(without.uri).info) == set(HFWeights(source).info) - extra
    assert json.loads((Path(without.uri) / "config.json").read_text())["num_nextn_predict_layers"] == 0
    whole = export_to(store, kept.uri, Origin(Path(kept.uri) / "hf_assets"), str(tmp_path / "whole"))
    check_same_tensors(source, whole.uri)
    assert not (Path(whole.uri) / CARRIED).exists()
    # a run's export has the original directory as its assets: there the layers are found too, if they are wanted
    export = export_hf(store, skipped.uri, Origin(source, mtp="keep"), "exports/1")
    check_same_tensors(source, store.path(export.attempt or ""))


def test_router_correction_stays_float32(store: Store, tmp_path: Path) -> None:
    source = make_family(tmp_path / "hf", "kimi-k2", dtype="float32", num_hidden_layers=2)
    back = export_to(store, convert_hf(store, source).uri, Origin(source, "bfloat16"), str(tmp_path / "back"))
    with HFWeights(back.uri) as found, HFWeights(source) as expected:
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert {info.dtype for other, info in found.info.items() if other != name} == {torch.bfloat16}
        assert torch.equal(found.fetch(name), expected.fetch(name)) and found.info[name].dtype == torch.float32
    assert json.loads((Path(back.uri) / "config.json").read_text())["dtype"] == "bfloat16"
