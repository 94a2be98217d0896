"""Names of Megatron-core's options, for the command line and for preflight, without importing megatron or torch.

They are the fields of five dataclasses, read from the installed source. Megatron-LM's command line knows some of them under other
names (`--recompute-activations`), and has options that no dataclass has (`--vocab-size`): tables of both stand here. Values are
checked against the checkpoint by `model_options.py`, and where the model is built.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engines.sources import parsed
from storage.errors import InputError, OptionError

SOURCES = {  # class -> file in megatron/core
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
# of Megatron-LM's command line, and of forks of it (the last two), in no dataclass: they describe the model
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
# the usual spellings of Megatron-LM's command line -> what they set
ALIASES: dict[str, dict[str, Any]] = {
    "recompute_activations": {"recompute_granularity": "selective"},
    "no_masked_softmax_fusion": {"masked_softmax_fusion": False},
    "no_bias_gelu_fusion": {"bias_activation_fusion": False},
    "no_bias_swiglu_fusion": {"bias_activation_fusion": False},
    "no_bias_dropout_fusion": {"bias_dropout_fusion": False},
    "no_rope_fusion": {"apply_rope_fusion": False},
    "no_gradient_accumulation_fusion": {"gradient_accumulation_fusion": False},
    "no_persist_layer_norm": {"persist_layer_norm": False},
    "no_check_for_nan_in_loss_and_grad": {"check_for_nan_in_grad": False},
    "accumulate_allreduce_grads_in_fp32": {"grad_reduce_in_fp32": True},
    "disable_bias_linear": {"add_bias_linear": False},
    "ddp_bucket_size": {"bucket_size": ...},  # `...` stands for the value given
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
    """One option: its name, and the type as Megatron writes it (`Optional[int]`)."""

    name: str
    annotation: str
    owner: str  # the dataclass, "alias" or "command line"


@cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """All options by name, other spellings included."""
    flags: dict[str, MegatronFlag] = {}
    for owner, file in SOURCES.items():
        for name, annotation in _fields(_core() / file, owner).items():
            flags.setdefault(name, MegatronFlag(name, annotation, owner))
    for name, annotation in COMMAND_LINE.items():
        assert name not in flags, f"{name} is a field, and no option of the command line alone"
        flags[name] = MegatronFlag(name, annotation, "command line")
    for alias, target in ALIASES.items():
        flags[alias] = MegatronFlag(alias, "Any" if ... in target.values() else "bool", "alias")
    return flags


def check_megatron_args(args: dict[str, Any]) -> dict[str, Any]:
    """The same options under the names of Megatron's fields.

    Raises:
        OptionError: an option that the installed megatron-core does not know, the nearest one is named; or no pattern of layers.
    """
    known, out = megatron_flags(), {}
    for given, value in args.items():
        name = given.lstrip("-").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise OptionError(f"unknown megatron option {given!r}{f': did you mean {near[0]!r}?' if near else ''}")
        if known[name].owner != "alias":
            out[name] = value
        elif value is not False:  # a switch that is off
            out |= {field: value if fixed is ... else fixed for field, fixed in ALIASES[name].items()}
    if isinstance(out.get("moe_layer_freq"), str):
        out["moe_layer_freq"] = _pattern(out["moe_layer_freq"])
    return out


def _pattern(text: str) -> list[int]:
    """`([0]*3+[1]*58)`, as Megatron-LM writes which layers are mixtures -> the list."""
    terms = [re.fullmatch(r"\[(\d(?:,\d)*)\](?:\*(\d+))?", term) for term in re.sub(r"[()'\"\s]", "", text).split("+")]
    if None in terms:
        raise OptionError(f"megatron option moe_layer_freq = {text!r} is not a layer pattern: write it like '([0]*3+[1]*58)'")
    return [int(digit) for term in terms if term for digit in term[1].split(",") * int(term[2] or 1)]


def _core() -> Path:
    """Where megatron/core lies; finding the namespace package `megatron` imports nothing."""
    spec = importlib.util.find_spec("megatron")
    for place in spec.submodule_search_locations or () if spec else ():
        if (Path(place) / "core" / "model_parallel_config.py").is_file():
            return Path(place) / "core"
    raise InputError("megatron-core is not installed: pip install megatron-core==0.16.1")


def _fields(path: Path, owner: str) -> dict[str, str]:
    for node in parsed(path.read_text(encoding="utf-8"), str(path)).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
            return {line.target.id: ast.unparse(line.annotation) for line in lines if isinstance(line.target, ast.Name)}
    raise AssertionError(f"{path} has no class {owner}")
