"""Names of Megatron-core's options, for the command line and preflight checks, without importing megatron or torch.

The options are the fields of five dataclasses (`SOURCES`), parsed from the installed source. Megatron-LM's command line
spells some options differently (`--recompute-activations`, listed in `ALIASES`), and has options that are not fields of
a dataclass (`--vocab-size`, listed in `COMMAND_LINE`). Values are checked by `values.py`, against the checkpoint by
`model_options.py`, and again when the model is built.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.engines.megatron.options.table import TABLE
from penstock.engines.sources import parse_source
from penstock.storage.errors import InputError, OptionError
from penstock.storage.near_names import nearest_name

SOURCES = {  # name of the dataclass -> file in megatron/core
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
# Options that describe the model, but are not fields of a dataclass: name -> type. They are options of Megatron-LM's
# command line or, the last two, of its forks. The other options of its command line are in `table.py`.
COMMAND_LINE = {
    "vocab_size": "int",
    "max_position_embeddings": "int",
    "untie_embeddings_and_output_weights": "bool",
    "group_query_attention": "bool",
    "position_embedding_type": "str",
    "use_rotary_position_embeddings": "bool",
    "no_position_embedding": "bool",
    "use_rope_scaling": "bool",
    "rope_scaling_factor": "float",
    "post_self_attn_layernorm": "bool",
    "post_mlp_layernorm": "bool",
}
# Spelling on Megatron-LM's command line -> the fields that the option sets.
ALIASES: dict[str, dict[str, Any]] = {
    "recompute_activations": {"recompute_granularity": "selective"},
    "no_masked_softmax_fusion": {"masked_softmax_fusion": False},
    "no_bias_gelu_fusion": {"bias_activation_fusion": False},
    "no_bias_swiglu_fusion": {"bias_activation_fusion": False},
    "no_bias_dropout_fusion": {"bias_dropout_fusion": False},
    "no_rope_fusion": {"apply_rope_fusion": False},
    "no_gradient_accumulation_fusion": {"gradient_accumulation_fusion": False},
    "no_persist_layer_norm": {"persist_layer_norm": False},
    "no_async_tensor_model_parallel_allreduce": {"async_tensor_model_parallel_allreduce": False},
    "no_check_for_nan_in_loss_and_grad": {"check_for_nan_in_grad": False},
    "accumulate_allreduce_grads_in_fp32": {"grad_reduce_in_fp32": True},
    "grad_reduce_in_bf16": {"grad_reduce_in_fp32": False},
    "disable_bias_linear": {"add_bias_linear": False},
    "ddp_bucket_size": {"bucket_size": ...},  # `...` is replaced by the option's value
    "ddp_average_in_collective": {"average_in_collective": True},
    "no_overlap_p2p_communication": {"overlap_p2p_comm": False},
    "norm_epsilon": {"layernorm_epsilon": ...},
    "num_experts": {"num_moe_experts": ...},
    "decoder_first_pipeline_num_layers": {"num_layers_in_first_pipeline_stage": ...},
    "decoder_last_pipeline_num_layers": {"num_layers_in_last_pipeline_stage": ...},
    "swiglu": {"gated_linear_unit": True},
}


@dataclass(frozen=True)
class MegatronFlag:
    """One option of Megatron-core or of Megatron-LM's command line."""

    name: str
    annotation: str  # type annotation in Megatron's source, for instance "Optional[int]"
    owner: str  # name of the dataclass that has the field, "alias" or "command line"
    default: Any = None  # of the field, if it is a literal


@cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """Return all Megatron options by name, aliases included.

    Raises:
        InputError: megatron-core is not installed.
    """
    spec = importlib.util.find_spec("megatron")  # finding this namespace package imports nothing
    folders = [Path(folder) / "core" for folder in spec.submodule_search_locations or ()] if spec else []
    core = next((folder for folder in folders if (folder / "model_parallel_config.py").is_file()), None)
    if core is None:
        raise InputError("megatron-core is not installed: pip install megatron-core==0.16.1")
    flags: dict[str, MegatronFlag] = {}
    for owner, file in SOURCES.items():
        tree = parse_source((core / file).read_text(encoding="utf-8"), str(core / file))
        [source] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        for line in source.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                default = line.value.value if isinstance(line.value, ast.Constant) else None
                name, annotation = line.target.id, ast.unparse(line.annotation)
                flags.setdefault(name, MegatronFlag(name, annotation, owner, default))
    for name, annotation in COMMAND_LINE.items():
        assert name not in flags, f"{name} is also a field of a dataclass"
        flags[name] = MegatronFlag(name, annotation, "command line")
    for name in TABLE.keys() - flags.keys():
        flags[name] = MegatronFlag(name, "Any", "command line")
    for alias, target in ALIASES.items():
        flags[alias] = MegatronFlag(alias, "Any" if ... in target.values() else "bool", "alias")
    return flags


def normalize_megatron_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return the Megatron options under the names of Megatron-core's dataclass fields.

    Args:
        args: option -> value; an option may be spelled with dashes or underscores, or be an alias.

    Raises:
        OptionError: the installed megatron-core does not have an option (the message suggests the closest one), or
            moe_layer_freq is not a layer pattern like `([0]*3+[1]*58)`.
    """
    known, out = megatron_flags(), {}
    for spelling, value in args.items():
        name = spelling.lstrip("-").replace("-", "_")
        if name not in known:
            near = nearest_name(name, known)
            raise OptionError(f"unknown megatron option {spelling!r}{f': did you mean {near!r}?' if near else ''}")
        if known[name].owner != "alias":
            out[name] = value
        elif value is not False:  # False: the switch is not set
            out |= {field: value if fixed is ... else fixed for field, fixed in ALIASES[name].items()}
    if isinstance(out.get("recompute_modules"), str):  # one module on a command line
        out["recompute_modules"] = [out["recompute_modules"]]
    if isinstance(out.get("moe_layer_freq"), str):
        out["moe_layer_freq"] = _parse_layer_pattern(out["moe_layer_freq"])
    return out


def _parse_layer_pattern(text: str) -> list[int]:
    """Parse Megatron-LM's layer pattern, for instance `([0]*3+[1]*58)`; return 1 for each MoE layer, 0 for each dense
    layer."""
    terms = [re.fullmatch(r"\[(\d(?:,\d)*)\](?:\*(\d+))?", term) for term in re.sub(r"[()'\"\s]", "", text).split("+")]
    if None in terms:
        raise OptionError(
            f"megatron option moe_layer_freq = {text!r} is not a layer pattern: write it like '([0]*3+[1]*58)'"
        )
    return [int(digit) for term in terms if term for digit in term[1].split(",") * int(term[2] or 1)]
