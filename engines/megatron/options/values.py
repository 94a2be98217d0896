"""Check the values of Megatron-core's options without importing megatron or torch, so that preflight checks
report errors that Megatron's dataclasses would raise only in the trainer.

Types and choices are read from the annotations of the installed source (`args.py`). Listed here are
some rules of `TransformerConfig.__post_init__`, and values that Penstock does not support.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from penstock.engines.megatron.options.args import megatron_flags, normalize_megatron_args
from penstock.storage.errors import OptionError

NUMBERS = {"bool": (bool,), "int": (int,), "float": (int, float)}
CHOICES = {  # allowed values of options that Megatron's source annotates only as `str`
    "rope_type": ("rope", "yarn"),
    "optimizer": ("adam",),
    "attention_backend": ("auto", "flash", "fused", "unfused", "local", "fa4", "torch"),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer_dp_sharding_strategy": ("no_shard", "optim"),
}
# valid values of --recompute-modules
RECOMPUTABLE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
NEEDED_PACKAGES = {  # (option, value) -> package that the value needs; Penstock does not install these packages
    ("transformer_impl", "transformer_engine"): "transformer_engine",
    ("cross_entropy_fusion_impl", "te"): "transformer_engine",
    ("cuda_graph_impl", "transformer_engine"): "transformer_engine",
}
UNSUPPORTED = {  # (option, value) -> reason, for "... is not supported, because it <reason>"
    ("moe_router_load_balancing_type", "sinkhorn"): "selects other experts than the checkpoint's router",
    ("use_precision_aware_optimizer", True): "needs TransformerEngine's Adam, which Penstock does not use",
    ("moe_token_dispatcher_type", "allgather"): "needs micro-batches of equal length, but their lengths differ",
}
TYPE_TEXTS = {  # type in an annotation -> its name in error messages
    "Any": "any value",
    "tuple": "a list",
    "AttnBackend": "text",
    "CudaGraphScope": "text",
    "PipelineParallelLayerLayout": "text",
    "bool": "no value (a switch)",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "None": "none",
}


def check_option_values(options: dict[str, Any]) -> None:
    """Check the types and values of user-defined Megatron-core options.

    Args:
        options: option -> value; the options may be in any of Megatron's spellings.

    Raises:
        OptionError: a value has the wrong type or is not one of the choices, or options contradict each other.
    """
    flags = megatron_flags()
    for spelling, value in options.items():
        known = flags.get(spelling.lstrip("-").replace("-", "_"))
        if known is not None and known.owner == "alias" and known.annotation == "bool" and not isinstance(value, bool):
            raise OptionError(f"{_to_flag(spelling)} is a switch and takes no value; found {_shorten(value)}")
    normalized = normalize_megatron_args(options)
    for name, value in normalized.items():
        _check_type(name, value, flags[name].annotation)
        texts = [str(item) for item in value] if isinstance(value, list) else [] if value is None else [str(value)]
        unknown = next((text for text in texts if text not in CHOICES.get(name, texts)), None)
        if unknown is not None:
            raise _unknown_choice(name, unknown, CHOICES[name])
        if isinstance(value, list | dict):
            continue
        package = NEEDED_PACKAGES.get((name, value))
        if package and find_spec(package) is None:
            raise OptionError(
                f"{_to_flag(name)} {value} needs the package {package}, which is not installed: install {package}, or "
                "drop the option"
            )
        if reason := UNSUPPORTED.get((name, value)):
            raise OptionError(f"{_to_flag(name)} {value} is not supported, because it {reason}: drop the option")
    for is_violated, message in _option_rules(normalized):
        if is_violated:
            raise OptionError(message)


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Check that an option's value has the type annotated in Megatron's source. Raises OptionError if not."""
    alternatives = list(_allowed_types(ast.parse(annotation, mode="eval").body))
    if (value is None and "None" in alternatives) or any(_has_type(value, kind) for kind in alternatives):
        return
    choices = [kind[1] for kind in alternatives if isinstance(kind, tuple)]
    if choices:
        raise _unknown_choice(name, value, choices)
    if not all(kind in TYPE_TEXTS for kind in alternatives):
        raise OptionError(
            f"{_to_flag(name)} takes {annotation}, which cannot be given on a command line or in TOML: drop the option"
        )
    types = " or ".join(TYPE_TEXTS[kind] for kind in alternatives if kind != "None")
    raise OptionError(f"{_to_flag(name)} takes {types}; found {_shorten(value)}")


def _allowed_types(node: ast.expr) -> Iterator[Any]:
    """Yield the types that a type annotation allows: type names ("int", "None", "list"), and ("choice", value) for each
    value of a `Literal`."""
    if isinstance(node, ast.Subscript):
        name, inner = ast.unparse(node.value), node.slice
        items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Optional":
            yield "None"
        if name in ("Optional", "Union"):
            for item in items:
                yield from _allowed_types(item)
        elif name == "Literal":
            yield from (("choice", ast.literal_eval(item)) for item in items)
        else:
            yield name.lower() if name in ("List", "Tuple", "list", "tuple") else name
    elif isinstance(node, ast.Name | ast.Attribute | ast.Constant):
        yield ast.unparse(node)


def _has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a type that `_allowed_types` yielded."""
    if isinstance(kind, tuple):
        return bool(value == kind[1])
    if kind in NUMBERS:
        return isinstance(value, NUMBERS[kind]) and (kind == "bool" or not isinstance(value, bool))
    if kind in ("list", "tuple"):
        return isinstance(value, list | tuple)
    return kind == "Any" or (kind in ("str", "AttnBackend") and isinstance(value, str))


def _option_rules(options: dict[str, Any]) -> Iterator[tuple[object, str]]:
    """Yield (whether the rule is violated, error message) for every rule about option values and combinations."""
    granularity, method = options.get("recompute_granularity"), options.get("recompute_method")
    layers, modules = options.get("recompute_num_layers"), options.get("recompute_modules") or []
    modules = [modules] if isinstance(modules, str) else modules
    yield (
        options.get("moe_permute_fusion") and options.get("moe_grouped_gemm") is False,
        "--moe-permute-fusion permutes tokens for grouped GEMMs, but moe_grouped_gemm is false: drop one of them",
    )
    yield (
        granularity == "full" and (method is None or layers is None),
        "--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers: add them",
    )
    yield (
        granularity != "full" and (method is not None or layers is not None),
        "--recompute-method and --recompute-num-layers have an effect only with --recompute-granularity full: "
        "add this option, or drop both",
    )
    yield (
        modules and granularity != "selective",
        "--recompute-modules has an effect only with --recompute-granularity selective: add this option, or drop "
        "--recompute-modules",
    )
    unknown = next((module for module in modules if module not in RECOMPUTABLE_MODULES), None)
    yield (
        unknown is not None,
        f"--recompute-modules {unknown} is not one of {', '.join(RECOMPUTABLE_MODULES)}: choose one of these",
    )
    yield layers is not None and layers < 1, f"--recompute-num-layers {layers} is not positive: give 1 or more"
    fraction = options.get("optimizer_offload_fraction", 1.0)
    yield not 0 <= fraction <= 1, f"--optimizer-offload-fraction {fraction} is not between 0 and 1: change it"
    yield options.get("fp16"), "--fp16 is not supported: use --params-dtype bf16 or fp32"
    for name in ("hidden_dropout", "attention_dropout"):
        yield (
            not 0 <= options.get(name, 0.0) < 1,
            f"{_to_flag(name)} {options.get(name)} is not a probability in [0, 1): change it",
        )


def _unknown_choice(name: str, value: Any, choices: Any) -> OptionError:
    """Return the error for a value that is not one of an option's choices."""
    known = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value)[:64], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "choose one of these"
    return OptionError(f"{_to_flag(name)} takes {', '.join(known)}; found {_shorten(value)}: {hint}")


def _to_flag(name: str) -> str:
    """Return an option's spelling on the command line."""
    return "--" + name.lstrip("-").replace("_", "-")


def _shorten(value: Any) -> str:
    """Return the repr of a value, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
