"""Tensor tables: Megatron's rows against naive loops, and round trips without loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.families.tensor_rows import GateUp, InterleavedQKV, PaddedVocab, TensorLayout
from penstock.storage.errors import ModelError
from tests.engines.megatron_reference import SHAPE
from tests.families import FAMILIES, make_family

SMALL = dict(num_layers=3, hidden_size=8, num_attention_heads=6, num_query_groups=2, head_dim=4, tied_embeddings=False)


def layout_of(**changes: Any) -> TensorLayout:
    return tensor_layout(SHAPE.model_copy(update={**SMALL, **changes}))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a tiny bf16 checkpoint of every family and of the older GLM, two of them with an MTP layer."""
    directory = tmp_path_factory.mktemp("families")
    made = {name: make_family(directory / name, name, dtype="bfloat16") for name in FAMILIES}
    made["glm"] = make_family(directory / "glm", "glm4", architecture="GlmForCausalLM")
    for name in ("glm4.5", "deepseek-v3"):
        made[f"{name}-mtp"] = make_family(directory / f"{name}-mtp", name, num_nextn_predict_layers=1)
    return made


@pytest.mark.parametrize("rest", [(), (5,)], ids=["bias", "weight"])
@pytest.mark.parametrize(("groups", "heads", "dim"), [(2, 3, 4), (4, 1, 3), (1, 5, 2)])
def test_qkv_rows_are_interleaved_by_query_group(groups: int, heads: int, dim: int, rest: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(groups * n * dim, *rest) for n in (heads, 1, 1))
    joined = InterleavedQKV(groups, heads, dim).join("qkv", [q, k, v])
    expected = []
    for group in range(groups):
        for head in range(heads):
            start = (group * heads + head) * dim
            expected += list(q[start : start + dim])
        expected += [*k[group * dim : (group + 1) * dim], *v[group * dim : (group + 1) * dim]]
    assert torch.equal(joined, torch.stack(expected))
    for found, part in zip(InterleavedQKV(groups, heads, dim).split("qkv", joined), [q, k, v]):
        assert torch.equal(found, part)


def test_gate_rows_come_before_up_rows() -> None:
    gate, up = torch.randn(6, 4), torch.randn(6, 4)
    joined = GateUp().join("fc1", [gate, up])
    assert torch.equal(joined[:6], gate) and torch.equal(joined[6:], up)
    assert all(torch.equal(a, b) for a, b in zip(GateUp().split("fc1", joined), [gate, up]))


def test_vocabulary_padding_is_removed() -> None:
    padded = torch.randn(16, 4)
    (found,) = PaddedVocab(11).split("embedding", padded)
    assert torch.equal(found, padded[:11])


@pytest.mark.parametrize("name", [*FAMILIES, "glm", "glm4.5-mtp", "deepseek-v3-mtp"])
def test_round_trip_of_every_tensor_is_exact(checkpoints: dict[str, Path], name: str) -> None:
    layout, hf = tensor_layout(read_shape(checkpoints[name])), load_file(checkpoints[name] / "model.safetensors")
    carried = {hf_name for hf_name in hf if layout.is_untrained(hf_name)}
    assert layout.hf_shapes.keys() == set(hf) - carried and bool(carried) == name.endswith("mtp")
    back: dict[str, torch.Tensor] = {}
    for megatron in layout.megatron_names():
        back |= layout.to_hf(megatron, layout.to_megatron(megatron, hf.__getitem__))
    assert back.keys() == layout.hf_shapes.keys()
    assert all(torch.equal(back[key], hf[key]) and back[key].dtype == hf[key].dtype for key in back)


def test_a_tied_head_is_a_copy_and_an_untied_one_is_not() -> None:
    tied, untied = layout_of(tied_embeddings=True), layout_of()
    assert tied.copies == {"lm_head.weight": "model.embed_tokens.weight"} and "lm_head.weight" not in tied.hf_shapes
    assert untied.copies == {} and untied.hf_names_of("output_layer.weight") == ("lm_head.weight",)


def test_sandwich_norms_by_name(checkpoints: dict[str, Path]) -> None:
    """All have one shape, so a round trip does not see an exchange."""
    layout = tensor_layout(read_shape(checkpoints["glm4"]))
    for name, hf in {
        "input_layernorm": "input_layernorm",
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_mlp_layernorm",
    }.items():
        assert layout.hf_names_of(f"decoder.layers.2.{name}.weight") == (f"model.layers.2.{hf}.weight",)


@pytest.mark.parametrize(
    ("name", "untrained"),
    [
        ("model.layers.3.eh_proj.weight", True),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", True),
        ("model.rotary_emb.inv_freq", True),
        ("model.layers.4.eh_proj.weight", False),
        ("model.layers.30.x", False),
        ("lm_head.bias", False),
    ],
)
def test_only_mtp_layers_and_rope_frequencies_are_untrained(name: str, untrained: bool) -> None:
    assert layout_of(num_mtp_layers=1).is_untrained(name) == untrained
    assert layout_of().is_untrained(name) == name.endswith("inv_freq")  # config.json has no prediction layers


def test_layers_keep_their_numbers() -> None:
    layout = layout_of(num_layers=12)
    assert layout.hf_names_of("decoder.layers.11.mlp.linear_fc2.weight") == ("model.layers.11.mlp.down_proj.weight",)
    with pytest.raises(ModelError, match=r"'decoder.layers.12"):
        layout.to_hf("decoder.layers.12.mlp.linear_fc2.weight", torch.zeros(1))


def test_errors_name_the_tensor_or_family() -> None:
    with pytest.raises(ModelError, match="'llama9'"):
        layout_of(family="llama9")
    with pytest.raises(ModelError, match=r"linear_qkv.weight: .*\[39, 8\].*40 rows"):
        layout_of().to_hf("decoder.layers.0.self_attention.linear_qkv.weight", torch.zeros(39, 8))
    mixed = {"gate": torch.zeros(4, 2), "up": torch.zeros(4, 2, dtype=torch.bfloat16)}
    with pytest.raises(ModelError, match=r"float32.*bfloat16"):
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        layout_of().to_megatron(name, lambda name: mixed["up" if "up" in name else "gate"])
