"""Every entry of config.json that changes a model's logits is read, or refused by a ModelError: compared with
transformers' sources."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.engines.families import FAMILIES, read_shape, shape_from_config
from penstock.engines.families.entries import FOREIGN
from penstock.engines.families.shape import YarnScaling
from penstock.engines.megatron.model.norm_and_rope import rope_dim, rope_frequencies, yarn_attention_factor
from penstock.storage.errors import ModelError

# read by transformers' code of these families, and without effect on logits
HARMLESS = {
    # how it computes, padding, and weights that are loaded anyway
    "_attn_implementation", "pad_token_id", "initializer_range",
    "attention_dropout",  # of transformers' own training only: Penstock trains without dropout
    "output_router_logits", "router_aux_loss_coef",  # a loss that balances experts
    "qk_head_dim",  # derived: qk_nope_head_dim + qk_rope_head_dim
}  # fmt: skip
TEXT = {name: family for name, family in FAMILIES.items() if "VL" not in name}  # test_vision_shapes.py has the others
ODD = {"Glm4MoeForCausalLM": {"head_dim": 128}}  # RoPE cannot rotate half of its default heads of 42 dimensions


def values_of(architecture: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **ODD.get(architecture, {}), **changes}


class Recorder(dict[str, Any]):
    """A config.json that records which of its entries were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


def entries_of_transformers(architecture: str) -> set[str]:
    """Return the entries that the source of transformers' model reads."""
    source = Path(inspect.getsourcefile(getattr(transformers, architecture)) or "").read_text()
    return {*re.findall(r"config\.([a-z_]+)", source), *re.findall(r'getattr\([a-z_.]*config, "([a-z_]+)"', source)}


@pytest.mark.parametrize("architecture", TEXT)
def test_every_entry_that_transformers_reads_is_read(architecture: str) -> None:
    names = entries_of_transformers(architecture)
    values = Recorder(values_of(architecture, use_sliding_window=True, sliding_window=None))
    shape_from_config(values)
    assert {"hidden_size", "rope_parameters"} <= names
    assert names - HARMLESS <= values.seen
    assert {"is_causal", "tie_word_embeddings"} <= values.seen


SCALINGS = {
    "llama3": dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "yarn": dict(rope_type="yarn", rope_theta=1e4, factor=4.0),
}
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # entries at the top, entries among the rotary settings
    "nowhere": ({}, {}),
    "inside": ({}, {"original_max_position_embeddings": 64}),
    "top": ({"original_max_position_embeddings": 64}, {}),
    "both": ({"original_max_position_embeddings": 64}, {"original_max_position_embeddings": 128}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "DeepseekV3ForCausalLM", "Glm4ForCausalLM"]
)
def test_original_max_positions_equal_transformers(architecture: str, place: str) -> None:
    top, inside = PLACES[place]
    kind = "llama3" if architecture == "LlamaForCausalLM" else "yarn"
    fields = {"max_position_embeddings": 4096, **top, "rope_parameters": {**SCALINGS[kind], **inside}}
    if architecture == "Glm4ForCausalLM":
        fields["rope_parameters"]["partial_rotary_factor"] = 0.5
    shape = shape_from_config(values_of(architecture, **json.loads(json.dumps(fields))))
    config = getattr(transformers, architecture).config_class(**fields)
    expected, length = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(rope_frequencies(shape.rotary, rope_dim(shape)), expected, rtol=1e-6, atol=0)
    scaling = shape.rotary.scaling
    assert (yarn_attention_factor(scaling) if isinstance(scaling, YarnScaling) else 1.0) == pytest.approx(length)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"rope_parameters": {**SCALINGS["yarn"], "truncate": False}},
        {"rope_parameters": {**SCALINGS["yarn"], "attention_factor": 1.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"layer_types": ["full_attention"] * 3},
        {"model_type": "llama"},
        *(
            {name: 0.5 if neutral is None else not neutral if isinstance(neutral, bool) else 2}
            for name, neutral in FOREIGN.items()
        ),
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_entries_of_other_models_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as error:
        shape_from_config(values_of("Qwen3ForCausalLM", **changes), "there/config.json")
    text, name = str(error.value), next(iter(changes))
    assert text.startswith("there/config.json ") and len(text) <= 300
    assert {"rope_parameters": "YaRN", "rope_scaling": "rope_type"}.get(name, name) in text


def test_neutral_values_of_other_models_entries_are_accepted() -> None:
    expected = shape_from_config(values_of("Qwen3ForCausalLM"))
    neutral = {"is_causal": True, "model_type": "qwen3", "attention_dropout": 0.1, **FOREIGN}
    assert shape_from_config(values_of("Qwen3ForCausalLM", **neutral)) == expected
    unused = values_of("Qwen3ForCausalLM", original_max_position_embeddings=64)  # no scaling needs it
    assert shape_from_config(unused) == expected
    for family in TEXT.values():
        for model_type in family.model_types:
            shape_from_config(values_of(family.architecture, model_type=model_type))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_hidden_layers", value) for value in ("four", -1, 0, True, 2.5, 10**31, None, [], float("nan"))),
        *(("rms_norm_eps", value) for value in ("small", -1, True, {}, float("nan"))),
    ],
)
def test_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        shape_from_config(values_of("LlamaForCausalLM", **{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": "Qwen3ForCausalLM"},
        {"architectures": [["Qwen3ForCausalLM"]]},
        {"tie_word_embeddings": "yes"},
        {"use_sliding_window": 1},
        {"rope_parameters": []},
        {"rope_theta": -1.0},
        {"rope_parameters": {**SCALINGS["yarn"], "factor": "4"}},
        {"rope_parameters": {"rope_type": ["yarn"]}},
        {"head_dim": "64"},
        {"hidden_size": 8, "num_attention_heads": 32, "head_dim": None},
        {"model_type": 5},
    ],
    ids=str,
)
def test_wrong_types_are_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError) as error:
        shape_from_config(values_of("Qwen3ForCausalLM") | changes)
    assert len(str(error.value)) <= 300 and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[]", "null", "", "[" * 100_000, "\udcff", '{"a": 1'], ids=repr)
def test_config_that_is_not_a_json_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ModelError, match=r"config.json") as error:
        read_shape(tmp_path)
    assert len(str(error.value).replace(str(tmp_path), "")) <= 300 and "\n" not in str(error.value)


@pytest.mark.parametrize("place", ["", "config.json/deeper", "file"])
def test_directory_in_place_of_config_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ModelError, match="file" if place == "file" else r"config\.json"):
        read_shape(tmp_path / place)


def test_hub_id_is_refused_with_the_download_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("Qwen/Qwen3-0.6B", tmp_path / "Qwen/Qwen3-0.6B", "./Qwen/Qwen3-0.6B"):
        with pytest.raises(ModelError, match=r"hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"):
            read_shape(given)
    with pytest.raises(ModelError, match="--hf-checkpoint"):
        read_shape(tmp_path / "models" / "deeper" / "qwen")
