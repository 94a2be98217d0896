"""Model families: reading a `config.json`, the mapping between Hugging Face and Megatron tensors, and the number of
parameters of a rank.

A new family is one file that defines a `Family` and is listed in FAMILIES, or an external file (`--model-family-path`).
Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from penstock.engines.families.deepseek_and_glm import DEEPSEEK_V3, GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE
from penstock.engines.families.entries import (
    ConfigEntries,
    merge_text_config,
    read_config,
    refuse_unsupported,
    rotary_from_config,
)
from penstock.engines.families.family import Family, load_family
from penstock.engines.families.llama import LLAMA, QWEN2, QWEN3, QWEN3_MOE
from penstock.engines.families.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import EMBEDDING, HEAD, VISION, TensorLayout, TensorRow
from penstock.storage.errors import ModelError, PenstockError, PluginError

FAMILIES = {  # architecture -> family
    family.architecture: family
    for family in (
        *(LLAMA, QWEN2, QWEN3, QWEN3_MOE, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE),
        *(GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK_V3),
    )
}
MAX_EXPERT_MATRICES = 1_000_000  # upper limit of (number of layers) x (experts per layer)
# Megatron names of weights that every tensor rank holds
REPLICATED = re.compile(rf"layernorm|router\.|_down_proj\.|^{VISION}")
FROZEN = ".expert_bias"  # suffix of the names of frozen buffers, which are not counted as parameters


def read_shape(directory: str | Path, family_path: str | None = None, flag: str = "--hf-checkpoint") -> ModelShape:
    """Return the model shape that the config.json of a Hugging Face directory describes. `family_path`: file or module
    of an external family (--model-family-path). `flag`: the option that names the directory, for errors."""
    path = Path(directory) / "config.json"
    return shape_from_config(read_config(path, flag), str(path), family_path)


def shape_from_config(
    values: dict[str, Any], source: str = "config.json", family_path: str | None = None
) -> ModelShape:
    """Return the model shape that the entries `values` of a config.json describe. Raises ModelError, which names
    `source` (the path of the file), and PluginError if the external family at `family_path` fails."""
    given = ConfigEntries(values, source, {})
    values, architecture = merge_text_config(given), (given["architectures"] or ["none"])[0]
    external = load_family(family_path) if family_path else None
    families = FAMILIES | ({external.architecture: external} if external else {})
    if architecture not in families:
        raise ModelError(
            f"{source} names the architecture {architecture!r}; Penstock converts {', '.join(families)}: use a "
            "checkpoint of one of these, or add the family with --model-family-path"
        )
    family = families[architecture]
    config = ConfigEntries(values, source, family.defaults, family.entry_types)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    fields: dict[str, Any] = dict(
        architecture=architecture,
        family=family.name,
        family_path=family_path if family is external else None,
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"] or heads,
        head_dim=config["head_dim"] or hidden // heads,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        qk_layernorm=False,
        qkv_bias=False,
        tied_embeddings=bool(config["tie_word_embeddings"]),
    )
    refuse_unsupported(config, architecture)
    model_type = config["model_type"]
    owners = {name: other.architecture for other in families.values() for name in other.model_types}
    if owners.get(model_type, architecture) != architecture:
        config.refuse_contradiction(f"model_type {model_type!r} and architecture {architecture!r}")
    try:
        fields |= family.read(config)
        if "rotary" not in fields:
            fields["rotary"] = rotary_from_config(config)
        shape = ModelShape.model_validate(fields, extra="forbid")
    except Exception as error:
        if family is not external or isinstance(error, PenstockError):
            raise
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        raise PluginError(
            f"--model-family-path {family_path} fails to read {source} ({reason}): correct the family's `read` function"
        ) from error
    if shape.experts and shape.experts.num_dense_layers >= shape.num_layers:
        shape = shape.model_copy(update={"experts": None})  # every layer is dense
    _check_sizes(shape, config)
    return shape


def family_of(shape: ModelShape) -> Family:
    """Return the family to which a model of this shape belongs."""
    if shape.family_path:
        return load_family(shape.family_path)
    for family in FAMILIES.values():
        if family.name == shape.family:
            return family
    known = ", ".join(family.name for family in FAMILIES.values())
    raise ModelError(
        f"model family {shape.family!r} is unknown; Penstock has {known}: use a checkpoint of one of these"
    )


def tensor_layout(shape: ModelShape) -> TensorLayout:
    """Return the tensor names of a model of this shape in Megatron and Hugging Face format, with the conversion between
    the formats. Raises ModelError if the model's family is unknown."""
    return TensorLayout(shape, family_of(shape).rows(shape))


def _check_sizes(shape: ModelShape, config: ConfigEntries) -> None:
    """Raise ModelError if model sizes in config.json contradict each other."""
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    if not shape.head_dim:
        found = f"hidden_size {shape.hidden_size} and num_attention_heads {heads}"
        config.refuse(found, "which make head_dim zero", "correct config.json")
    if heads % groups:
        found = f"num_attention_heads {heads} and num_key_value_heads {groups}"
        config.refuse(found, "but the first must be a multiple of the second", "correct config.json")
    rotated = (shape.latent.qk_rope_head_dim if shape.latent else shape.head_dim) * shape.rotary.fraction
    if rotated % 2:
        config.refuse(
            f"RoPE on {rotated:g} dimensions of a head",
            "but RoPE rotates pairs, so this number must be even",
            "correct head_dim or partial_rotary_factor",
        )
    if experts := shape.experts:
        if shape.num_layers * experts.num_experts > MAX_EXPERT_MATRICES:
            config.refuse(
                f"{experts.num_experts} experts in {shape.num_layers} layers",
                f"but layers x experts must be at most {MAX_EXPERT_MATRICES:,}",
                "correct config.json",
            )
        if experts.top_k > experts.num_experts // experts.num_groups * experts.top_groups:
            needed = "which exceeds the number of experts that routing can select"
            config.refuse(f"num_experts_per_tok {experts.top_k}", needed, "correct config.json")


@dataclass(frozen=True)
class RankParameters:
    """Numbers of dense and of expert parameters that one rank holds: these are sharded over different sets of ranks."""

    dense: int
    expert: int = 0

    @property
    def total(self) -> int:
        """Return the number of dense and expert parameters together."""
        return self.dense + self.expert


def count_rank_parameters(
    shape: ModelShape,
    layers: Collection[int],
    *,
    tensor: int = 1,
    expert: int = 1,
    expert_tensor: int | None = None,
    outer: Collection[str] | None = None,
) -> RankParameters:
    """Return the number of parameters that one rank holds: in the layers with the indices `layers`, and in the weights
    outside of the layers (embedding, final norm, LM head) with the Megatron names `outer` (None: all).

    `tensor` is the tensor-parallel size, `expert_tensor` that of the experts, `expert` the expert-parallel size. The
    vocabulary is padded to a multiple of `tensor`.
    """
    dense = experts = 0
    for row in family_of(shape).rows(shape):
        if row.megatron.endswith(FROZEN):
            continue
        if row.layers is None:
            dense += 0 if outer is not None and row.megatron not in outer else _numel_per_rank(row, tensor)
            continue
        count = len(set(row.layers).intersection(layers))
        if ".local_experts." in row.megatron:
            experts += count * (row.num_experts // expert) * _numel_per_rank(row, expert_tensor or tensor)
        else:
            dense += count * _numel_per_rank(row, tensor)
    return RankParameters(dense, experts)


def _numel_per_rank(row: TensorRow, ranks: int) -> int:
    """Return the number of elements of a tensor's shard if the tensor is sharded over `ranks` tensor-parallel ranks. If
    the row describes a tensor of every layer or expert, count that of one layer and one expert."""
    if REPLICATED.search(row.megatron):
        return sum(prod(size) for size in row.hf.values())
    if row.megatron in (EMBEDDING, HEAD):
        [(rows, columns)] = row.hf.values()
        return -(-rows // ranks) * columns
    return sum(prod(size) for size in row.hf.values()) // ranks
