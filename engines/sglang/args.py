"""Flags of SGLang's server (`--sglang-*` on Penstock's command line) and of its router (`--router-*`): check the names
and build the command line.

Flag names are parsed from the source of the installed SGLang, without importing torch or SGLang. Values are checked by
SGLang's own parser when the server starts. SGLang 0.5.15.post1 declares the flags in one dataclass, 0.5.21 in
twelve.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from penstock.engines.sglang.older_release import DROPPED, to_current_flag
from penstock.engines.sglang.server_options import reason_for_refusal
from penstock.engines.sources import parse_source
from penstock.storage.errors import EngineError
from penstock.storage.near_names import nearest_name

UNSUPPORTED = (
    "omit it, because Penstock's engines all have the same role and are registered with the router by Penstock"
)
ROUTER_RESERVED = {
    "host": "omit it, the router listens on loopback only",
    "port": "omit it, a free port is chosen",
    **dict.fromkeys(
        ("worker_urls", "prefill", "decode", "pd_disaggregation", "mini_lb", "service_discovery"), UNSUPPORTED
    ),
}


class ServerFlag(BaseModel):
    """One command-line flag of SGLang's server or router."""

    model_config = ConfigDict(frozen=True)

    flag: str  # spelling on SGLang's command line, for instance "--tp-size"
    switch: bool  # True if the flag takes no value


@cache
def sglang_flags(root: Path | None = None) -> dict[str, ServerFlag]:
    """Return the flags of SGLang's server by name; empty if SGLang is not installed.

    A flag is listed under each of its spellings, with underscores and without leading dashes.

    Args:
        root: directory of the `sglang` package to read; by default the installed package.
    """
    root = root or package_directory("sglang")
    if root is None:
        return {}
    return _parse_flags([root / "srt/server_args.py", *sorted((root / "srt/arg_groups/fields").glob("*.py"))])


@cache
def router_flags() -> dict[str, ServerFlag]:
    """Return the flags of SGLang's router by name (see `sglang_flags`); empty if sglang-router is not installed."""
    root = package_directory("sglang_router")
    return _parse_flags([root / "router_args.py"]) if root else {}


def package_directory(package: str) -> Path | None:
    """Return the directory of a Python package, or None if the package is not installed."""
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def check_sglang_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of SGLang server flags; return the flags with underscores in their names, in the spelling of the
    installed release.

    Raises:
        EngineError: SGLang does not have a flag (the message suggests the closest one), or Penstock sets the flag or
            cannot serve it.
    """
    known = sglang_flags()
    current = {}
    for key, value in args.items():
        name = key.lstrip("-").replace("-", "_")
        if reason := reason_for_refusal(name) or (name not in known and DROPPED.get(name)):
            raise EngineError(f"--sglang-{name.replace('_', '-')} is not allowed: {reason}")
        name, value = to_current_flag(name, value, set(known))
        current[name] = value
    return _check_names(current, "sglang", known, {})


def check_router_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of SGLang router flags; return the flags with underscores in their names.

    Raises:
        EngineError: sglang-router is not installed or does not have a flag, or Penstock sets the flag.
    """
    flags = router_flags()
    if not flags:
        raise EngineError("sglang-router is not installed: pip install sglang-router, or omit --use-router")
    return _check_names(args, "router", flags, ROUTER_RESERVED)


def _check_names(
    args: Mapping[str, Any], prefix: str, known: dict[str, ServerFlag], reserved: dict[str, str]
) -> dict[str, Any]:
    """Check the names of flags with this prefix ("sglang" or "router"); return the flags with underscored names."""
    program, module = {
        "sglang": ("SGLang", "sglang.launch_server"),
        "router": ("sglang-router", "sglang_router.launch_router"),
    }[prefix]
    checked = {}
    for key, value in args.items():
        name = key.lstrip("-").replace("-", "_")
        flag = f"--{prefix}-" + name.replace("_", "-")
        if name in reserved:
            raise EngineError(f"{flag} is not allowed: {reserved[name]}")
        if known and name not in known:
            near = nearest_name(name, known)
            hint = f"did you mean --{prefix}-{near.replace('_', '-')}?" if near else f"see `python -m {module} --help`"
            raise EngineError(f"{flag} is not a flag of the installed {program}: {hint}")
        checked[name] = value
    return checked


def add_return_experts_flag(args: dict[str, Any]) -> dict[str, Any]:
    """Return the server flags `args` plus the flag that makes SGLang return the routed expert ids of every token.

    Raises:
        EngineError: the installed SGLang does not have the flag.
    """
    name, known = "enable_return_routed_experts", sglang_flags()
    if known and name not in known:
        raise EngineError(
            f"--use-rollout-routing-replay needs the server flag {name}, which the installed SGLang does not have: "
            "install 0.5.15.post1 or later, or use --use-routing-replay, which does not depend on the engine"
        )
    return {**args, name: True}


def to_command_line(args: Mapping[str, Any], known: dict[str, ServerFlag] | None = None) -> list[str]:
    """Return a program's flags as a list of command-line arguments.

    `True` becomes a flag without a value; `False` and `None` are omitted; a list becomes several values, a dictionary
    JSON.

    Args:
        args: flag name with underscores -> value.
        known: all flags of the program by name; by default those of SGLang's server.
    """

    def text(value: Any) -> str:
        return json.dumps(value) if isinstance(value, dict) else str(value)

    known = sglang_flags() if known is None else known
    argv: list[str] = []
    for name, value in args.items():
        flag = known.get(name)
        if flag and flag.switch and isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"  # Penstock's command line passes values as text
        if value is None or value is False:
            continue
        argv.append(flag.flag if flag else "--" + name.replace("_", "-"))
        if isinstance(value, (list, tuple)):
            argv += map(text, value)
        elif value is not True:
            argv.append(text(value))
    return argv


def _parse_flags(sources: list[Path]) -> dict[str, ServerFlag]:
    """Return the command-line flags that these Python files declare, by name."""
    flags: dict[str, ServerFlag] = {}
    for path in sources:
        for node in ast.walk(parse_source(path.read_text(encoding="utf-8"), str(path))):
            flags |= _flag_of_annotated_field(node) | _flag_of_add_argument_call(node)
    return flags


def _flag_of_annotated_field(node: ast.AST) -> dict[str, ServerFlag]:
    """Return the flag that a dataclass field `name: A[bool, Arg(aliases=[...], cli_name=...)] = ...` declares, under
    each spelling; {} for any other syntax node."""
    if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
        return {}
    annotation = node.annotation
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
        return {}
    if ast.unparse(annotation.value) not in ("A", "Annotated"):
        return {}
    kind, *extras = annotation.slice.elts
    options = {
        keyword.arg: keyword.value for extra in extras if isinstance(extra, ast.Call) for keyword in extra.keywords
    }
    if "no_cli" in options:
        return {}
    name = node.target.id
    flag = _string_value(options.get("cli_name")) or "--" + name.replace("_", "-")
    names = [name, *_flag_names(options.get("aliases")), *_flag_names(options.get("cli_name"))]
    switch = ast.unparse(kind) in ("bool", "Optional[bool]", "bool | None")
    return {name: ServerFlag(flag=flag, switch=switch) for name in names}


def _flag_of_add_argument_call(node: ast.AST) -> dict[str, ServerFlag]:
    """Return the flags that a call `parser.add_argument("--name", ...)` declares; {} for any other syntax node.

    SGLang uses such calls for flags with computed choices and for deprecated spellings.
    """
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
        return {}
    names = [name for argument in node.args for name in _flag_names(argument)]
    action = next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "action"), "")
    return {
        name: ServerFlag(flag="--" + name.replace("_", "-"), switch="store_" in action or "Store" in action)
        for name in names
    }


def _flag_names(node: ast.expr | None) -> list[str]:
    """Return the flag names in a string literal or a list of string literals, without leading dashes, with
    underscores."""
    items = node.elts if isinstance(node, ast.List) else [node]
    return [
        text.removeprefix("--").replace("-", "_")
        for text in map(_string_value, items)
        if text and text.startswith("--")
    ]


def _string_value(node: ast.expr | None) -> str | None:
    """Return the value of a string literal; None for any other syntax node."""
    if isinstance(node, ast.JoinedStr):  # the router's f"--{prefix}policy": the prefix is omitted
        return "".join(_string_value(part) or "" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
