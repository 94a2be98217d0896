"""The choice of the parameters that are not trained: the vision tower (--freeze-vision), and patterns of names
(--freeze-params-name-list, --only-train-params-name-list). The driver imports this module, which does not import torch.

A pattern is a regular expression that is searched in both names that a parameter has in Megatron-core: the name in its
local layers, which Penstock uses, and the name in TransformerEngine's layers. Layers and experts are numbered over the
whole model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.engines.families import tensor_layout
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import VISION
from penstock.storage.errors import OptionError, check_rules
from penstock.storage.preemption import time_limit

FREEZE, ONLY_TRAIN = "--freeze-params-name-list", "--only-train-params-name-list"
EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
FUSED_NORMS = {  # name in Megatron's local layers -> name in TransformerEngine's, which fuses a norm with a projection
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def frozen_parameters(
    shape: ModelShape, freeze: Sequence[str] | None, only_train: Sequence[str] | None, freeze_vision: bool = True
) -> set[str]:
    """Return the names (of Megatron's local layers) of the parameters that are not trained: those that match a pattern
    in `freeze`, or those that match none in `only_train`; with `freeze_vision` also those of the vision tower."""
    flag, patterns = (FREEZE, freeze) if freeze else (ONLY_TRAIN, only_train)
    names = [name for name in tensor_layout(shape).megatron_names() if not name.endswith("router.expert_bias")]
    vision = {name for name in names if freeze_vision and name.startswith(VISION)}
    if not patterns:
        return vision
    matched: set[str] = set()
    for pattern in patterns:
        found: set[str] = set()
        problem = (
            f" matches no parameter of the model; give a part of a name such as {names[-2]} (a tied LM head is part of "
            "embedding.word_embeddings.weight)"
        )
        try:
            with time_limit("the search"):
                found = {name for name in names if any(re.search(pattern, text) for text in _names_of(shape, name))}
        except TimeoutError as error:
            problem = f": {error}; give a pattern without nested repetitions"
        except (re.error, RecursionError, OverflowError) as error:
            problem = f": not a regular expression ({error}); correct it"
        if not found:
            raise OptionError(f"{flag} {pattern}{problem}")
        matched |= found
    frozen, given = (matched if freeze else set(names) - matched) | vision, f"{flag} {' '.join(patterns)}"
    of_layer = {name: EXPERT.sub(r".local_experts.*.\2.weight", name) for name in names}
    split = {of_layer[name] for name in frozen} & {of_layer[name] for name in set(names) - frozen}
    rules = (
        (
            len(frozen) == len(names),
            f"{given} freezes every parameter: leave some to train{', or add --no-freeze-vision' if vision else ''}",
        ),
        (
            split,
            f"{given} freezes some of {min(split, default=None)}: the experts of a layer are frozen together; give a "
            "pattern without the number of an expert",
        ),
    )
    check_rules(rules)
    return frozen


def check_frozen_layers(shape: ModelShape, frozen: set[str], num_stages: int) -> None:
    """Raise OptionError if, because of the `frozen` parameters, a pipeline stage could lack one of Megatron's two
    optimizers (for the experts, and for all other parameters) that other stages have."""
    if num_stages == 1 or not frozen:
        return
    names = [name for name in tensor_layout(shape).megatron_names() if not name.endswith("router.expert_bias")]
    experts = {name for name in names if EXPERT.search(name)}
    layers = {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
    trained = {name.split(".")[2] for name in set(names) - frozen - experts if name.startswith("decoder.layers.")}
    if layers - trained or (experts & frozen and experts - frozen):
        raise OptionError(
            f"--pipeline-model-parallel-size {num_stages} needs a trained parameter outside of the experts in every "
            "layer, and the experts of all layers or none frozen: use --pipeline-model-parallel-size 1, or freeze "
            "other parameters"
        )


def _names_of(shape: ModelShape, name: str) -> list[str]:
    """Return the names of a parameter in Megatron's local layers and in TransformerEngine's."""
    if expert := EXPERT.search(name):
        return [name, EXPERT.sub(rf".{expert[2]}.weight{expert[1]}", name)]
    match = re.match(r"(decoder\.layers\.(\d+)\.)(.+)", name)
    if match is None or match[3] not in FUSED_NORMS:
        return [name]
    is_fused = shape.latent is not None
    if match[3] == "input_layernorm.weight":
        is_fused = shape.latent is None
    elif match[3] == "pre_mlp_layernorm.weight":
        is_fused = shape.experts is None or int(match[2]) < shape.experts.num_dense_layers
    return [name, match[1] + FUSED_NORMS[match[3]]] if is_fused else [name]
