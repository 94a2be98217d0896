"""Layouts: what Megatron's rows mean, against naive loops, and that nothing is lost either way."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from storage.layouts import layout_for
from storage.layouts.ops import GateUp, InterleavedQKV, PaddedVocab


def shape(**changes: Any) -> Any:
    fields = dict(
        family="qwen3", num_layers=3, num_attention_heads=6, num_query_groups=2, head_dim=4, vocab_size=11, tied_embeddings=False
    )
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize("rest", [(), (5,)], ids=["bias", "weight"])
@pytest.mark.parametrize(("groups", "heads", "dim"), [(1, 1, 2), (2, 3, 4), (4, 1, 3), (1, 5, 2)])
def test_qkv_rows_go_group_by_group(groups: int, heads: int, dim: int, rest: tuple[int, ...]) -> None:
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


def test_padding_of_the_vocabulary_is_cut_off() -> None:
    padded = torch.randn(16, 4)
    (found,) = PaddedVocab(11).split("embedding", padded)
    assert torch.equal(found, padded[:11])


@pytest.mark.parametrize("tied", [True, False])
def test_every_name_of_the_model_is_covered(tied: bool) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = dict(
        num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=4, hidden_size=8, intermediate_size=12
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(vocab_size=11, tie_word_embeddings=tied, **config))
    real = {name: parameter for name, parameter in model.named_parameters()}  # a tied head is no parameter of its own
    layout = layout_for(shape(tied_embeddings=tied))
    assert layout.hf_names() == set(real)
    assert layout.copies == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    for name in layout.megatron_names():
        for hf_name, tensor in layout.to_hf(name, layout.to_megatron(name, real.__getitem__)):
            assert tensor.shape == real[hf_name].shape


def test_the_way_there_and_back_changes_nothing() -> None:
    layout = layout_for(shape())
    rows = {"q_proj": 24, "k_proj": 8, "v_proj": 8, "lm_head": 11, "embed_tokens": 11}
    hf = {name: torch.randn(next((n for part, n in rows.items() if part in name), 10), 8) for name in layout.hf_names()}
    back = {}
    for name in layout.megatron_names():
        back |= dict(layout.to_hf(name, layout.to_megatron(name, hf.__getitem__)))
    assert back.keys() == hf.keys() and all(torch.equal(back[name], hf[name]) for name in hf)


def test_layers_keep_their_numbers() -> None:
    layout = layout_for(shape(num_layers=12))
    assert layout.hf_of("decoder.layers.11.mlp.linear_fc2.weight") == ("model.layers.11.mlp.down_proj.weight",)
    with pytest.raises(ValueError, match=r"no tensor 'decoder.layers.12"):
        layout.to_hf("decoder.layers.12.mlp.linear_fc2.weight", torch.zeros(1))


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"'llama9' has no layout; Penstock has qwen3"):
        layout_for(shape(family="llama9"))
    with pytest.raises(ValueError, match=r"linear_qkv.weight: found shape \[39, 8\], needed 40 rows"):
        layout_for(shape()).to_hf("decoder.layers.0.self_attention.linear_qkv.weight", torch.zeros(39, 8))
    mixed = {"gate": torch.zeros(4, 2), "up": torch.zeros(4, 2, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match="one dtype"):
        layout_for(shape()).to_megatron(
            "decoder.layers.0.mlp.linear_fc1.weight", lambda name: mixed["up" if "up" in name else "gate"]
        )
