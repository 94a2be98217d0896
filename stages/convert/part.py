"""A small part of a model that computes like the whole: its first and last layers, some experts, some rows of the vocabulary.

Weights are the model's own; only numbers of layers, experts and rows are smaller. Two implementations that agree on it agree on how
every kind of layer is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from engines.megatron.hf_config import shape_of
from engines.megatron.hf_entries import DEFAULTS
from engines.megatron.shape import Experts, ModelShape

WHOLE_PARAMETERS = 100_000_000  # models up to this size are not cut
MANY_PARAMETERS = 1_000_000_000  # parts above this size leave the last layer out
MAX_VOCABULARY = 4096


@dataclass(frozen=True)
class Part:
    """A model made of some of another one's weights."""

    values: dict[str, Any]  # its config.json
    shape: ModelShape
    layers: tuple[int, ...]  # of the whole model, in order
    is_whole: bool

    def source(self, name: str) -> str:
        """Return the whole model's name of a tensor, in Hugging Face's or Megatron's spelling."""
        return re.sub(r"(?<=\.layers\.)\d+", lambda match: str(self.layers[int(match[0])]), name)

    def __str__(self) -> str:
        if self.is_whole:
            return "the whole model"
        numbers = ", ".join(map(str, self.layers))
        experts = f", {self.shape.experts.num_experts} experts" if self.shape.experts else ""
        return f"layers {numbers}{experts} and {self.shape.vocab_size} rows of the vocabulary"


def part_of(values: dict[str, Any], max_whole: int = WHOLE_PARAMETERS) -> Part:
    """Return the part of a model that is compared.

    Args:
        values: entries of its config.json.
        max_whole: parameters of a model that is not cut.
    """
    values = {key: value for key, value in values.items() if key not in ("quantization_config", "auto_map")}
    values |= {"num_nextn_predict_layers": 0} if values.get("num_nextn_predict_layers") else {}
    whole = shape_of(values)
    if whole.num_parameters <= max_whole:
        return Part(values, whole, tuple(range(whole.num_layers)), True)
    first_sparse = whole.experts.num_dense_layers if whole.experts else 0
    part = _cut(values, whole, {0, first_sparse, whole.num_layers - 1})
    return (
        part if part.shape.num_parameters <= MANY_PARAMETERS else _cut(values, whole, {0, first_sparse or whole.num_layers - 1})
    )


def _cut(values: dict[str, Any], whole: ModelShape, chosen: set[int]) -> Part:
    """The part with these layers."""
    layers = tuple(sorted(chosen))
    num_dense = sum(layer < (whole.experts.num_dense_layers if whole.experts else whole.num_layers) for layer in layers)
    values = dict(values)
    values |= {"num_hidden_layers": len(layers), "vocab_size": min(whole.vocab_size, MAX_VOCABULARY), "pad_token_id": None}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][: len(layers)]
    values |= _mixture_entries(whole, num_dense, len(layers))
    return Part(values, shape_of(values), layers, False)


def _mixture_entries(whole: ModelShape, num_dense: int, num_layers: int) -> dict[str, Any]:
    """Entries that say which of the layers have experts, and how many."""
    defaults = DEFAULTS[whole.architecture]
    entries: dict[str, Any] = {}
    if "moe_intermediate_size" not in defaults:
        return {}
    if whole.architecture == "Qwen3MoeForCausalLM":
        entries["mlp_only_layers"] = list(range(num_dense))
    else:
        entries["first_k_dense_replace"] = num_dense
    if whole.architecture == "Glm4MoeLiteForCausalLM":
        entries["mlp_layer_types"] = ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)
    if whole.experts:
        name = "num_experts" if "num_experts" in defaults else "n_routed_experts"
        entries |= dict.fromkeys((name, "num_local_experts"), _num_experts(whole.experts))
    return entries


def _num_experts(experts: Experts) -> int:
    """Experts in equal groups, more than a token needs: routing must still choose."""
    in_group = max(2, -(-experts.top_k // experts.top_groups) + 1)
    return min(experts.num_experts, experts.num_groups * in_group)
