"""Values of Megatron-core's options, checked without importing megatron or torch: what its dataclasses would only refuse in the trainer.

The types and choices are the annotations of the installed source (args.py); a few rules of `TransformerConfig.__post_init__`, and what
Penstock settles itself, stand here.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from engines.megatron.args import check_megatron_args, megatron_flags
from storage.errors import OptionError

NUMBERS = {"bool": (bool,), "int": (int,), "float": (int, float)}
CHOICES = {  # annotated as `str` in the source
    "rope_type": ("rope", "yarn"),
    "optimizer": ("adam",),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer_dp_sharding_strategy": ("no_shard", "optim"),
}
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")  # of --recompute-modules
NEEDED_PACKAGES = {  # that Penstock does not install
    ("transformer_impl", "transformer_engine"): "transformer_engine",
    ("cross_entropy_fusion_impl", "te"): "transformer_engine",
    ("cuda_graph_impl", "transformer_engine"): "transformer_engine",
}
REFUSED = {
    ("moe_router_load_balancing_type", "sinkhorn"): "chooses other experts than the checkpoint does",
    ("use_precision_aware_optimizer", True): "needs TransformerEngine's Adam, which Penstock does not use",
    ("moe_token_dispatcher_type", "allgather"): "needs packs of equal length on all ranks, and Penstock's are not",
}


def check_option_values(options: dict[str, Any]) -> None:
    """Check the user's `megatron` options, under any of Megatron's spellings.

    Raises:
        OptionError: a value of another type, an unknown choice, or options that contradict each other.
    """
    flags = megatron_flags()
    for given, value in options.items():
        known = flags.get(given.lstrip("-").replace("-", "_"))
        if known is not None and known.owner == "alias" and known.annotation == "bool" and not isinstance(value, bool):
            raise OptionError(f"{_flag(given)} is a switch, it takes no value; found {_shown(value)}")
    checked = check_megatron_args(options)
    for name, value in checked.items():
        _check_type(name, value, flags[name].annotation)
        if name in CHOICES and not set(_texts(value)) <= {*CHOICES[name]}:
            raise _unknown_choice(name, next(text for text in _texts(value) if text not in CHOICES[name]), CHOICES[name])
        if isinstance(value, list | dict):
            continue
        package = NEEDED_PACKAGES.get((name, value))
        if package and find_spec(package) is None:
            raise OptionError(
                f"{_flag(name)} {value} needs the package {package}, which is not installed: install it, or leave this out"
            )
        if reason := REFUSED.get((name, value)):
            raise OptionError(f"{_flag(name)} {value} {reason}: leave it out")
    for wrong, sentence in _contradictions(checked):
        if wrong:
            raise OptionError(sentence)


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Check a value against an annotation of Megatron's source."""
    alternatives = list(_alternatives(ast.parse(annotation, mode="eval").body))
    if (value is None and "None" in alternatives) or any(_fits(value, kind) for kind in alternatives):
        return
    choices = [kind[1] for kind in alternatives if isinstance(kind, tuple)]
    if choices:
        raise _unknown_choice(name, value, choices)
    if not all(kind in _WORDS for kind in alternatives):
        raise OptionError(f"{_flag(name)} takes {annotation}, which cannot be written in a command or in TOML: leave it out")
    kinds = " or ".join(_WORDS[kind] for kind in alternatives if kind != "None")
    raise OptionError(f"{_flag(name)} takes {kinds}; found {_shown(value)}")


_WORDS = {
    "Any": "any value",
    "tuple": "a list",
    "AttnBackend": "text",
    "CudaGraphScope": "text",
    "PipelineParallelLayerLayout": "text",
}
_WORDS |= {
    "bool": "no value (a switch)",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "None": "none",
}


def _alternatives(node: ast.expr) -> Iterator[Any]:
    """Return what an annotation admits: "int", "None", "list", ("choice", "full") and so on."""
    if isinstance(node, ast.Subscript):
        name, inner = ast.unparse(node.value), node.slice
        items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Optional":
            yield "None"
        if name in ("Optional", "Union"):
            for item in items:
                yield from _alternatives(item)
        elif name == "Literal":
            yield from (("choice", ast.literal_eval(item)) for item in items)
        else:
            yield name.lower() if name in ("List", "Tuple", "list", "tuple") else name
    elif isinstance(node, ast.Name | ast.Attribute | ast.Constant):
        yield ast.unparse(node)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return bool(value == kind[1])
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if kind in ("list", "tuple"):
        return isinstance(value, list | tuple)
    return kind == "Any" or (kind in ("str", "AttnBackend") and isinstance(value, str))


def _contradictions(options: dict[str, Any]) -> Iterator[tuple[object, str]]:
    granularity, method = options.get("recompute_granularity"), options.get("recompute_method")
    layers, modules = options.get("recompute_num_layers"), options.get("recompute_modules") or []
    modules = [modules] if isinstance(modules, str) else modules
    yield (
        granularity == "full" and (method is None or layers is None),
        "--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers: add them",
    )
    yield (
        granularity != "full" and (method is not None or layers is not None),
        "--recompute-method and --recompute-num-layers have an effect only with --recompute-granularity full: add it, or leave them out",
    )
    yield (
        modules and granularity != "selective",
        "--recompute-modules has an effect only with --recompute-granularity selective: add it, or leave it out",
    )
    unknown = next((module for module in modules if module not in MODULES), None)
    yield unknown is not None, f"--recompute-modules {unknown} is not one of {', '.join(MODULES)}: choose one of these"
    yield layers is not None and layers < 1, f"--recompute-num-layers {layers} is not positive: give 1 or more"
    fraction = options.get("optimizer_offload_fraction", 1.0)
    yield not 0 <= fraction <= 1, f"--optimizer-offload-fraction {fraction} is not between 0 and 1: give a share"
    yield options.get("fp16"), "--fp16 is not supported: use --params-dtype bf16 or fp32"
    for name in ("hidden_dropout", "attention_dropout"):
        yield not 0 <= options.get(name, 0.0) < 1, f"{_flag(name)} {options.get(name)} is not a probability below 1: change it"


def _unknown_choice(name: str, value: Any, choices: Any) -> OptionError:
    known = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value)[:64], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "choose one of these"
    return OptionError(f"{_flag(name)} takes {', '.join(known)}; found {_shown(value)}: {hint}")


def _texts(value: Any) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else [] if value is None else [str(value)]


def _flag(name: str) -> str:
    return "--" + name.lstrip("-").replace("_", "-")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
