"""Check the values of Megatron-core's options without importing megatron or torch, so that preflight checks
report errors that Megatron's dataclasses would raise only in the trainer.

Types and choices are read from the annotations of the installed source (`args.py`), refused options from the table
(`table.py`). Listed here are some rules of `TransformerConfig.__post_init__`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from typing import Any

from penstock.engines.megatron.options.args import ALIASES, megatron_flags, normalize_megatron_args
from penstock.engines.megatron.options.table import ACCEPTED_VALUES, KEEPS_RESULTS, ROUNDING_MODULE, TABLE
from penstock.engines.sources import parse_source
from penstock.storage.errors import OptionError

NUMBERS = {"bool": (bool,), "int": (int,), "float": (int, float)}
CHOICES = {  # allowed values of options that Megatron's source annotates only as `str`
    "rope_type": ("rope", "yarn"),
    "attention_backend": ("auto", "flash", "fused", "unfused", "local", "fa4", "torch"),
}
# valid values of --recompute-modules
RECOMPUTABLE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
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
        rule = TABLE.get(name)
        if rule is None:
            raise OptionError(
                f"{_to_flag(name)} is an option of Penstock: write it in [train], not in [train.megatron]"
            )
        if rule.kind == "refused" and not _asks_for_nothing(name, value):
            words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            flag = _to_flag(name) if value is True else f"{_to_flag(name)} {words[:80]}"
            raise OptionError(f"{flag} is not supported: {rule.text}")
        if rule.kind != "refused":
            _check_type(name, value, flags[name].annotation)
        if str(value) not in CHOICES.get(name, (str(value),)):
            raise _unknown_choice(name, value, CHOICES[name])
    for is_violated, message in _option_rules(normalized):
        if is_violated:
            raise OptionError(message)


def effective_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the user-defined options that the trainer uses, under the names of Megatron's fields: without those that
    are ignored, or refused with the value that Penstock uses anyway."""
    kinds = ("effective", "checked")
    return {name: value for name, value in normalize_megatron_args(options).items() if TABLE[name].kind in kinds}


def ignored_options(options: dict[str, Any]) -> list[str]:
    """Return the flags of user-defined options that have no effect, each with the reason."""
    rules = {name: TABLE[name] for name in normalize_megatron_args(options) if name in TABLE}
    return [f"{_to_flag(name)} ({rule.text})" for name, rule in rules.items() if rule.kind == "ignored"]


def options_that_change_results(options: dict[str, Any]) -> dict[str, Any]:
    """Return the user-defined options that can change a bit of the results; a resumed run keeps them.

    The others are those in `KEEPS_RESULTS` and the ignored ones. Of --recompute-modules only layernorm is returned. The
    options may be in any of Megatron's spellings, also unknown ones of another release.
    """
    kept: dict[str, Any] = {}
    for spelling, value in options.items():
        name = spelling.lstrip("-").replace("-", "_")
        if name == "recompute_modules" and ROUNDING_MODULE in str(value):
            kept[name] = [ROUNDING_MODULE]
        elif any(
            field not in KEEPS_RESULTS and not (field in TABLE and TABLE[field].kind == "ignored")
            for field in ALIASES.get(name, (name,))
        ):
            kept[spelling] = value
    return kept


def _asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a refused option has the value that Penstock uses anyway."""
    accepted = ACCEPTED_VALUES.get(name, (megatron_flags()[name].default, None, False))
    values = value if isinstance(value, list) and value not in accepted else [value]
    return all(item in accepted for item in values)


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Check that an option's value has the type annotated in Megatron's source. Raises OptionError if not."""
    alternatives = list(_allowed_types(parse_source(annotation, mode="eval").body))
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
    overlaps = options.get("overlap_grad_reduce")
    yield (
        options.get("bucket_size") is not None and not overlaps,
        "--ddp-bucket-size has an effect only with --overlap-grad-reduce: add this option, or drop --ddp-bucket-size",
    )
    granularity, method = options.get("recompute_granularity"), options.get("recompute_method")
    layers, modules = options.get("recompute_num_layers"), options.get("recompute_modules") or []
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


def _unknown_choice(name: str, value: Any, choices: Any) -> OptionError:
    """Return the error for a value that is not one of an option's choices."""
    known = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value)[:64], known, n=1, cutoff=0.7)
    hint = f"did you mean {near[0]}?" if near else "choose one of these"
    return OptionError(f"{_to_flag(name)} takes {', '.join(known)}; found {_shorten(value)}: {hint}")


def _to_flag(name: str) -> str:
    """Return an option's spelling on the command line."""
    return "--" + name.lstrip("-").replace("_", "-")


def _shorten(value: Any) -> str:
    """Return the repr of a value, truncated to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
