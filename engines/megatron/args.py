"""Names of Megatron-core's options, for the command line and for preflight, without importing megatron or torch.

They are the fields of four dataclasses, read from the installed source. Megatron-LM's command line knows some of them under other
names (`--recompute-activations`): a table of these spellings stands here. Values are checked where the model is built.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = {  # in megatron/core
    "transformer/transformer_config.py": "TransformerConfig",
    "model_parallel_config.py": "ModelParallelConfig",
    "optimizer/optimizer_config.py": "OptimizerConfig",
    "distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig",
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
}


@dataclass(frozen=True)
class MegatronFlag:
    """One option: its name, and the type as Megatron writes it (`Optional[int]`)."""

    name: str
    annotation: str
    owner: str  # the dataclass, or "alias"


@cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """All options by name, other spellings included."""
    flags: dict[str, MegatronFlag] = {}
    for file, owner in SOURCES.items():
        for name, annotation in _fields(_core() / file, owner).items():
            flags.setdefault(name, MegatronFlag(name, annotation, owner))
    for alias, target in ALIASES.items():
        flags[alias] = MegatronFlag(alias, "Any" if ... in target.values() else "bool", "alias")
    return flags


def check_megatron_args(args: dict[str, Any]) -> dict[str, Any]:
    """The same options under the names of Megatron's fields.

    Raises:
        ValueError: an option that the installed megatron-core does not know; the nearest one is named.
    """
    known, out = megatron_flags(), {}
    for given, value in args.items():
        name = given.lstrip("-").replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise ValueError(f"unknown megatron option {given!r}{f': did you mean {near[0]!r}?' if near else ''}")
        if known[name].owner != "alias":
            out[name] = value
        elif value is not False:  # a switch that is off
            out |= {field: value if fixed is ... else fixed for field, fixed in ALIASES[name].items()}
    return out


def _core() -> Path:
    """Where megatron/core lies; finding the namespace package `megatron` imports nothing."""
    spec = importlib.util.find_spec("megatron")
    for place in spec.submodule_search_locations or () if spec else ():
        if (Path(place) / "core" / "model_parallel_config.py").is_file():
            return Path(place) / "core"
    raise ValueError("megatron-core is not installed: pip install megatron-core==0.16.1")


def _fields(path: Path, owner: str) -> dict[str, str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
            return {line.target.id: ast.unparse(line.annotation) for line in lines if isinstance(line.target, ast.Name)}
    raise AssertionError(f"{path} has no class {owner}")
