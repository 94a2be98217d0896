"""Pass options on to SGLang: flags of its server (`--sglang-*`) and of its router (`--router-*`), and sampling
parameters (`--rollout-sampling`). This module checks their names and builds command lines.

Names are parsed from the source of the installed SGLang, without importing torch or SGLang; SGLang checks the values.
0.5.15.post1 declares the server's flags in one dataclass, 0.5.21 in twelve.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engines.sglang import older_release
from penstock.engines.sglang.older_release import DROPPED, RENAMED, to_current_flag
from penstock.engines.sources import parse_source
from penstock.storage.errors import EngineError, check_rules, nearest_name

# ---- flags -----------------------------------------------------------------------------------------------------------

# Flags that Penstock sets -> the option or value from which it sets them.
RESERVED = {
    "model_path": "--hf-checkpoint",
    "model": "--hf-checkpoint",
    "host": "the engine's own address",
    "port": "--engine-port, by default a free port for each engine",
    "tp_size": "--rollout-num-gpus-per-engine",
    "tensor_parallel_size": "--rollout-num-gpus-per-engine",
    "nnodes": "--rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "the engine's placement",
    "dist_init_addr": "the address of the engine's first node",
    "nccl_init_addr": "the address of the engine's first node",
    "base_gpu_id": "the engine's placement",
    "gpu_id_step": "the engine's placement",
    "weight_version": "the policy version at every weight update",
    "admin_api_key": "--sglang-api-key, which is the key of all routes",
    "config": "[rollout.engine_options] of Penstock's configuration file",
    "enable_return_routed_experts": "--use-rollout-routing-replay",
    "enable_fp32_lm_head": "--fp32-lm-head, for trainer and engines",
    "enable_lora": "--lora-rank and --lora-publish",
    "max_lora_rank": "--lora-rank",
    "lora_target_modules": "--lora-target-modules",
}
# Reason -> flags that Penstock refuses for this reason; a name that ends with "_" means all flags that begin with it.
_REFUSED = {
    "its cached keys and values outlive the weights that computed them": "hicache_storage_ enable_lmcache lmcache_ "
    "enable_flexkv flexkv_ radix_cache_backend enable_unified_cache_external_linker unified_cache_external_ "
    "enable_streaming_session",
    "every engine does both prefill and decode": "disaggregation_ enable_pd_role_switch",
    "every engine encodes the images of its requests itself": "encoder_ language_model_only",
    "images have the size that the trainer uses (--image-min-pixels, --image-max-pixels)": "mm_process_config",
    "it is always on for a vision-language model": "enable_precise_embedding_interpolation",
    "weights come from --hf-checkpoint and then from the trainer": "load_format remote_instance_weight_loader_",
    "engines get their adapters from the trainer": "lora_ enable_lora_",
    "it would unload adapters that requests still use": "max_loaded_loras",
    "requests always consist of token ids": "skip_tokenizer_init",
    "the tokenizer is that of --hf-checkpoint": "tokenizer_path",
    "an engine's GPUs do not change": "elastic_ep_ ep_join_",
}
REFUSED = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
PASSED_ON = {"lora_backend"}  # flags that are not refused although REFUSED has the beginning of their name
ROUTER_RESERVED = {
    "host": "the router listens on loopback only",
    "port": "a free port is chosen",
    **dict.fromkeys(
        ("worker_urls", "prefill", "decode", "pd_disaggregation", "mini_lb", "service_discovery"),
        "Penstock's engines all have the same role and are registered with the router by Penstock",
    ),
}


class ServerFlag(NamedTuple):
    """One command-line flag of SGLang's server or router."""

    flag: str  # spelling on SGLang's command line, for instance "--tp-size"
    switch: bool  # True if the flag takes no value


def package_directory(package: str) -> Path | None:
    """Return the directory of a Python package, or None if the package is not installed."""
    spec = find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def sglang_flags(root: Path | None = None) -> dict[str, ServerFlag]:
    """Return the flags of SGLang's server, by name with underscores and without leading dashes; a flag with several
    spellings has several names. {} if SGLang is not installed. `root`: the directory of its package."""
    return _parse_flags(root or package_directory("sglang"), "srt/server_args.py", "srt/arg_groups/fields/*.py")


def router_flags() -> dict[str, ServerFlag]:
    """Return the flags of SGLang's router by name, as `sglang_flags` does; {} if sglang-router is not installed."""
    return _parse_flags(package_directory("sglang_router"), "router_args.py")


@cache
def _parse_flags(root: Path | None, *patterns: str) -> dict[str, ServerFlag]:
    """Return the flags that the files below `root` declare, in one of two ways:

    - a dataclass field `name: A[bool, Arg(aliases=[...], cli_name=...)] = ...`, where `no_cli=True` means no flag;
    - a call `parser.add_argument("--name", ...)`, for flags with computed choices and for deprecated spellings.
    """
    flags: dict[str, ServerFlag] = {}
    paths = [path for pattern in patterns for path in sorted(root.glob(pattern))] if root else []
    for node in (node for path in paths for node in ast.walk(parse_source(path.read_bytes(), str(path)))):
        match node:
            case ast.AnnAssign(ast.Name(name), ast.Subscript(ast.Name("A" | "Annotated"), ast.Tuple([kind, *extras]))):
                calls = [extra for extra in extras if isinstance(extra, ast.Call)]
                options = {keyword.arg: _texts(keyword.value) for call in calls for keyword in call.keywords}
                if "no_cli" in options:
                    continue
                spellings = [*options.get("cli_name", ()), f"--{name}", *options.get("aliases", ())]
                switch = ast.unparse(kind) in ("bool", "Optional[bool]", "bool | None")
                flags |= dict.fromkeys(_names(spellings), ServerFlag(spellings[0].replace("_", "-"), switch))
            case ast.Call(ast.Attribute(attr="add_argument"), arguments, keywords):
                actions = [ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "action"]
                switch = any("store_" in action or "Store" in action for action in actions)
                for name in _names(text for argument in arguments for text in _texts(argument)):
                    flags[name] = ServerFlag("--" + name.replace("_", "-"), switch)
    return flags


def _names(spellings: Iterable[str]) -> list[str]:
    """Return the names of the strings in `spellings` that are flags: without leading dashes, with underscores."""
    return [text.removeprefix("--").replace("-", "_") for text in spellings if text.startswith("--")]


def _texts(node: ast.expr) -> list[str]:
    """Return the values of a string literal, or of the string literals in a list; [] for any other syntax node."""
    match node:
        case ast.Constant(str(text)):
            return [text]
        case ast.List(items):
            return [text for item in items for text in _texts(item)]
        case ast.JoinedStr(parts):  # the router's f"--{prefix}policy": the prefix is omitted
            return ["".join(text for part in parts for text in _texts(part))]
    return []


def check_sglang_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of SGLang server flags; return the flags as the installed release spells them."""
    known, checked = sglang_flags(), {}
    for key, value in args.items():
        name = key.lstrip("-").replace("-", "_")
        reason = reason_for_refusal(name)
        rules = (
            (reason, f"{flag_name(name)} is not allowed: {reason}; omit it"),
            (name in DROPPED and name not in known, f"{flag_name(name)} is not allowed: {DROPPED.get(name)}"),
        )
        check_rules(rules, EngineError)
        name, value = to_current_flag(name, value, set(known))
        _check_known("--sglang-", name, known, "SGLang", "sglang.launch_server")
        checked[name] = value
    return checked


def reason_for_refusal(name: str) -> str:
    """Return why Penstock refuses a server flag (underscores, without prefix), or "" if it does not."""
    if name in RESERVED:
        return f"Penstock sets it from {RESERVED[name]}"
    if name in PASSED_ON:
        return ""
    beginnings = (key for key in REFUSED if key.endswith("_") and name.startswith(key))
    return REFUSED.get(name) or next((REFUSED[key] for key in beginnings), "")


def check_router_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names of SGLang router flags; return the flags with underscores in their names."""
    known = router_flags()
    checked = {key.lstrip("-").replace("-", "_"): value for key, value in args.items()}
    rules = (
        (not known, "sglang-router is not installed: pip install sglang-router, or omit --use-router"),
        *(
            (
                name in ROUTER_RESERVED,
                f"{flag_name(name, '--router-')} is not allowed: {ROUTER_RESERVED.get(name)}; omit it",
            )
            for name in checked
        ),
    )
    check_rules(rules, EngineError)
    for name in checked:
        _check_known("--router-", name, known, "sglang-router", "sglang_router.launch_router")
    return checked


def _check_known(prefix: str, name: str, known: Collection[str], program: str, module: str) -> None:
    """Check that `name` is in `known`, the flags of a program. If `known` is empty, because the program is not
    installed, accept every name."""
    if known and name not in known:
        near = nearest_name(name, known)
        hint = f"did you mean {flag_name(near, prefix)}?" if near else f"see `python -m {module} --help`"
        raise EngineError(f"{flag_name(name, prefix)} is not a flag of the installed {program}: {hint}")


def flag_name(name: str, prefix: str = "--sglang-") -> str:
    """Return how a flag (`name`, with underscores) is spelled on Penstock's command line."""
    return prefix + name.strip("_").replace("_", "-")


def flag_tables() -> dict[str, dict[str, str]]:
    """Return the tables of flags for the reference page; see `EngineBackend.flag_tables`."""
    refused = {flag_name(name): f"set from {source}" for name, source in RESERVED.items()}
    refused |= {flag_name(name) + ("..." if name.endswith("_") else ""): text for name, text in REFUSED.items()}
    refused |= {flag_name(name, "--router-"): text for name, text in ROUTER_RESERVED.items()}
    renamed = {
        flag_name(name): f"means {flag_name(new)}{'' if value is ... else f' {value}'}"
        for name, (new, value) in RENAMED.items()
    }
    return {
        "All flags of the installed SGLang are passed on with the prefix `--sglang-`, and those of its router with "
        "`--router-`, except:": refused,
        "Names of older releases, if the installed one does not have them:": renamed
        | {flag_name(name): f"refused: {text}" for name, text in DROPPED.items()},
    }


def to_command_line(args: Mapping[str, Any], known: dict[str, ServerFlag] | None = None) -> list[str]:
    """Return a program's flags (by default of SGLang's server) as a list of command-line arguments. `True` becomes a
    flag without a value; `False` and `None` are omitted; a list becomes several values, a dictionary JSON."""
    known = sglang_flags() if known is None else known
    argv: list[str] = []
    for name, value in args.items():
        flag = known.get(name)
        if flag and flag.switch and isinstance(value, str) and value.lower() in ("true", "false"):
            value = value.lower() == "true"  # Penstock's command line passes values as text
        if value is None or value is False:
            continue
        argv.append(flag.flag if flag else flag_name(name, "--"))
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        argv += [json.dumps(each) if isinstance(each, dict) else str(each) for each in values]
    return argv


# ---- sampling parameters ---------------------------------------------------------------------------------------------

# Parameters that cannot be set with --rollout-sampling, mostly because they have a separate option -> advice for the
# error.
RESERVED_SAMPLING = {
    "temperature": "use --rollout-temperature, by which the trainer divides its logits, too",
    "top_p": "use --rollout-top-p",
    "top_k": "use --rollout-top-k",
    "max_new_tokens": "use --rollout-max-response-len",
    "stop": "use --rollout-stop",
    "stop_token_ids": "use --rollout-stop-token-ids",
    "sampling_seed": "use --rollout-sampling-seeds",
    "n": "use --n-samples-per-prompt",
    "beam_width": "omit it, because beam search does not sample from the policy",
    "skip_special_tokens": "use --rollout-skip-special-tokens, because Penstock decodes the text",
}
# sglang-router 0.3.2 rebuilds requests from the fields that it knows, and drops these parameters silently (tested).
DROPPED_BY_ROUTER = frozenset(
    ("stop_regex", "structural_tag", "spaces_between_special_tokens", "stream_interval", "logit_bias", "custom_params")
)
# Parameters that change the token distribution -> the value with which the parameter has no effect.
NEUTRAL: dict[str, Any] = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None},
    **dict.fromkeys(("regex", "json_schema", "ebnf", "structural_tag")),
}
# Fields of SGLang's `SamplingParams` that SGLang sets itself; a request cannot set them.
INTERNAL = frozenset(
    ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant")
)


def check_sampling(
    params: Mapping[str, Any], use_seeds: bool, server_flags: Mapping[str, Any], *, routed: bool
) -> None:
    """Check the parameters of `--rollout-sampling`, and `--rollout-sampling-seeds` (`use_seeds`), against each other
    and the server's flags (underscores in their names). `routed`: requests go through SGLang's router."""
    known, rules = sampling_parameter_names(), list[tuple[object, str]]()
    for name in params:
        near = nearest_name(name, known)
        hint = f"did you mean {near}?" if near else f"choose from {', '.join(sorted(known))}"
        rules += [
            (
                name in RESERVED_SAMPLING,
                f"--rollout-sampling {name} is not allowed: {RESERVED_SAMPLING.get(name)}",
            ),
            (
                known and name not in known,
                f"--rollout-sampling {name} is not a sampling parameter of the installed SGLang: {hint}",
            ),
            (
                routed and name in DROPPED_BY_ROUTER,
                f"--rollout-sampling {name} has no effect with --use-router, because SGLang's router drops it: "
                f"omit {name}, or --use-router",
            ),
            (
                use_seeds and name == "min_p" and params[name],
                f"--rollout-sampling min_p={params[name]} cannot be combined with --rollout-sampling-seeds, because "
                "SGLang does not support min_p with seeds: omit min_p, or --rollout-sampling-seeds",
            ),
        ]
    rules += [
        (
            not use_seeds and server_flags.get(name) not in (None, False),
            f"{flag_name(name)} makes SGLang sample every request with the same seed, so all samples of a prompt would "
            "be equal: add --rollout-sampling-seeds",
        )
        for name in ("enable_deterministic_inference", "rl_on_policy_target")
    ]
    check_rules(rules, EngineError)


def find_biasing_params(params: Mapping[str, Any]) -> list[str]:
    """Return the sampling parameters in `params`, as `name=value`, that make the sampling distribution differ from the
    policy that the trainer computes.

    SGLang returns log-probs of the full softmax, before top-p, top-k and min-p remove tokens. With penalties, logit
    biases and grammars it returns log-probs of the modified logits, which the trainer cannot reproduce.
    """
    return [f"{name}={value}" for name, value in params.items() if name in NEUTRAL and value != NEUTRAL[name]]


@cache
def sampling_parameter_names(root: Path | None = None) -> frozenset[str]:
    """Return the names of SGLang's sampling parameters that a request may set: fields of `SamplingParams` that are not
    INTERNAL; empty if SGLang is not installed."""
    root = root or package_directory("sglang")
    if root is None:
        return frozenset()
    tree = parse_source((root / "srt/sampling/sampling_params.py").read_text(encoding="utf-8"))
    [params] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = [
        node.target.id for node in params.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return frozenset(fields) - INTERNAL if fields else older_release.sampling_parameter_names(params)
