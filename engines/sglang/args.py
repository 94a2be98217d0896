"""SGLang's own flags (`--sglang-*` on our command line) and its router's (`--router-*`): which exist, and how a dictionary becomes a
command line.

The names are read from the source of the installed SGLang by `ast`, so asking costs neither torch nor SGLang's imports. The
values are checked by SGLang's parser when the server starts. 0.5.15.post1 declares them in one dataclass, 0.5.21 in twelve.
"""

from __future__ import annotations

import ast
import difflib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from engines.sources import parsed
from storage.errors import EngineError

# Set by Penstock; the value says what to use instead.
RESERVED = {
    "model_path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "the engine's own address",
    "port": "a free port, chosen for each engine",
    "tp_size": "--rollout-num-gpus-per-engine",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "base_gpu_id": "the engine's placement",
    "gpu_id_step": "the engine's placement",
    "weight_version": "the policy version, set with every publish",
    "admin_api_key": "--sglang-api-key, which is the key of all routes",
    "config": "[rollout.sglang] in Penstock's own file",
}

ONE_KIND = "leave it out, its engines are all of one kind and are named to the router as they come and go"
ROUTER_RESERVED = {
    "host": "leave it out, the router listens on this machine alone",
    "port": "leave it out, a free one is chosen",
    **dict.fromkeys(("worker_urls", "prefill", "decode", "pd_disaggregation", "mini_lb", "service_discovery"), ONE_KIND),
}


class ServerFlag(BaseModel):
    """One flag of the server."""

    model_config = ConfigDict(frozen=True)

    flag: str  # as on SGLang's command line
    switch: bool  # takes no value


def sglang_flags(root: Path | None = None) -> dict[str, ServerFlag]:
    """Every spelling of every flag, with underscores and without dashes in front. Empty if SGLang is not installed here.

    Args:
        root: the `sglang` package to read; the installed one by default.
    """
    root = root or installed("sglang")
    return _read_flags(root) if root else {}


def router_flags() -> dict[str, ServerFlag]:
    """The same of the router. Empty if it is not installed here."""
    root = installed("sglang_router")
    return _read_router_flags(root) if root else {}


def installed(package: str) -> Path | None:
    """Where a package's source is."""
    found = find_spec(package)
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def check_sglang_args(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with underscored names.

    Raises:
        EngineError: a name SGLang does not know (the nearest one is named), or one that Penstock sets.
    """
    reserved = {name: f"use {instead}" for name, instead in RESERVED.items()}
    return _checked(args, sglang_flags(), reserved, "sglang", "SGLang", "sglang.launch_server")


def check_router_args(args: dict[str, Any]) -> dict[str, Any]:
    """The router's arguments with underscored names.

    Raises:
        EngineError: it is not installed, does not know a name, or Penstock sets it.
    """
    flags = router_flags()
    if not flags:
        raise EngineError(
            "a router is asked for, but sglang-router is not installed: pip install sglang-router, or leave --use-router out"
        )
    return _checked(args, flags, ROUTER_RESERVED, "router", "sglang-router", "sglang_router.launch_router")


def _checked(
    args: dict[str, Any], known: dict[str, ServerFlag], reserved: dict[str, str], prefix: str, program: str, module: str
) -> dict[str, Any]:
    checked = {}
    for given, value in args.items():
        name = given.lstrip("-").replace("-", "_")
        flag = f"--{prefix}-" + name.replace("_", "-")
        if name in reserved:
            raise EngineError(f"{flag} was given, but Penstock sets it: {reserved[name]}")
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean --{prefix}-{near[0].replace('_', '-')}?" if near else f": see `python -m {module} --help`"
            raise EngineError(f"{flag} is not a flag of the installed {program}{hint}")
        checked[name] = value
    return checked


def returning_experts(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of servers that return which experts they chose.

    Raises:
        EngineError: the installed SGLang cannot.
    """
    name, known = "enable_return_routed_experts", sglang_flags()
    if known and name not in known:
        raise EngineError(
            f"--use-rollout-routing-replay, but the installed SGLang has no {name}: install 0.5.15.post1 or later, or use --use-routing-replay, "
            "which needs nothing of the engine"
        )
    return {**args, name: True}


def repeatable(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of servers that make the same tokens from the same sampling seed."""
    return {**args, "enable_deterministic_inference": True}


def command_line(args: dict[str, Any], known: dict[str, ServerFlag] | None = None) -> list[str]:
    """Command-line words for SGLang, or for what has the flags `known`: `True` is a bare flag, `False` and `None` nothing, a list several
    values, a table JSON."""
    known = sglang_flags() if known is None else known
    words: list[str] = []
    for name, value in args.items():
        flag = known[name].flag if name in known else "--" + name.replace("_", "-")
        if isinstance(value, str) and value.lower() in ("true", "false") and name in known and known[name].switch:
            value = value.lower() == "true"  # a flag that came through our command line as text
        if value is None or value is False:
            continue
        words.append(flag)
        if isinstance(value, (list, tuple)):
            words += [_word(item) for item in value]
        elif value is not True:
            words.append(_word(value))
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


@cache
def _read_flags(root: Path) -> dict[str, ServerFlag]:
    flags: dict[str, ServerFlag] = {}
    for path in [root / "srt/server_args.py", *sorted((root / "srt/arg_groups/fields").glob("*.py"))]:
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.AnnAssign):
                flags |= _annotated_field(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                flags |= _added_argument(node)
    return flags


@cache
def _read_router_flags(root: Path) -> dict[str, ServerFlag]:
    tree = parsed((root / "router_args.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    flags: dict[str, ServerFlag] = {}
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            flags |= _added_argument(call)
    return flags


def _annotated_field(node: ast.AnnAssign) -> dict[str, ServerFlag]:
    """`name: A[bool, Arg(aliases=[...], cli_name=...)] = ...` in a class body; anything else gives nothing."""
    annotation, target = node.annotation, node.target
    if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple) and isinstance(target, ast.Name)):
        return {}
    if ast.unparse(annotation.value) not in ("A", "Annotated"):
        return {}
    kind, *extras = annotation.slice.elts
    options = {keyword.arg: keyword.value for extra in extras if isinstance(extra, ast.Call) for keyword in extra.keywords}
    if "no_cli" in options:
        return {}
    flag = _text(options.get("cli_name")) or "--" + target.id.replace("_", "-")
    names = [target.id, *_names(options.get("aliases")), *_names(options.get("cli_name"))]
    switch = ast.unparse(kind) in ("bool", "Optional[bool]", "bool | None")
    return {name: ServerFlag(flag=flag, switch=switch) for name in names}


def _added_argument(node: ast.Call) -> dict[str, ServerFlag]:
    """`parser.add_argument("--name", ...)`: the fields whose choices SGLang computes, and old spellings."""
    names = [name for argument in node.args for name in _names(argument)]
    action = next((ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "action"), "")
    return {
        name: ServerFlag(flag="--" + name.replace("_", "-"), switch="store_" in action or "Store" in action) for name in names
    }


def _names(node: ast.expr | None) -> list[str]:
    """Flags in a string or a list of strings, underscored."""
    items = node.elts if isinstance(node, ast.List) else [node]
    return [text.removeprefix("--").replace("-", "_") for text in map(_text, items) if text and text.startswith("--")]


def _text(node: ast.expr | None) -> str | None:
    if isinstance(node, ast.JoinedStr):  # the router's f"--{prefix}policy"; without the prefix here
        return "".join(_text(part) or "" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
