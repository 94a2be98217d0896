"""Sampling parameters: which the installed SGLang knows, which pass its router, and which change what the trainer must know of.

Read from SGLang's source without importing it, as in args.py.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from engines.sglang.args import installed
from engines.sources import parsed
from storage.errors import EngineError

# Have an option of their own, which the rest of Penstock reads too, or make no sense here.
RESERVED = {
    "temperature": "use --rollout-temperature, the trainer divides its logits by it too",
    "top_p": "use --rollout-top-p",
    "top_k": "use --rollout-top-k",
    "max_new_tokens": "use --rollout-max-response-len",
    "stop": "use --rollout-stop",
    "stop_token_ids": "use --rollout-stop-token-ids",
    "sampling_seed": "use --rollout-sampling-seeds",
    "n": "use --n-samples-per-prompt",
    "beam_width": "leave it out, a beam is no sample of the policy",
    "skip_special_tokens": "use --rollout-skip-special-tokens, the text is decoded here",
}
# sglang-router 0.3.2 builds requests anew from the fields it knows, and leaves these out without a word (each was tried).
LOST_IN_ROUTER = (
    "stop_regex",
    "structural_tag",
    "spaces_between_special_tokens",
    "stream_interval",
    "logit_bias",
    "custom_params",
)
# Parameters that change which tokens can come, and the values with which they do nothing.
NEUTRAL: dict[str, Any] = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": None},
    **dict.fromkeys(("regex", "json_schema", "ebnf", "structural_tag")),
}


def check_sampling(params: Mapping[str, Any], *, routed: bool) -> None:
    """Of `--rollout-sampling`.

    Raises:
        EngineError: SGLang knows no parameter of that name, it has an option of its own, or the router would lose it.
    """
    known = sampling_names()
    for name in params:
        if name in RESERVED:
            raise EngineError(f"--rollout-sampling {name} has a place of its own: {RESERVED[name]}")
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it knows {', '.join(sorted(known))}"
            raise EngineError(f"--rollout-sampling {name} is not a sampling parameter of the installed SGLang: {hint}")
        if routed and name in LOST_IN_ROUTER:
            raise EngineError(f"--rollout-sampling {name} does not pass SGLang's router, which drops it: leave --use-router out")


def check_seeds(seeded: bool, params: Mapping[str, Any], server: Mapping[str, Any]) -> None:
    """Of `--rollout-sampling-seeds`.

    Raises:
        EngineError: with seeds, min_p; or deterministic engines without seeds.
    """
    if seeded and params.get("min_p"):
        raise EngineError(
            f"--rollout-sampling min_p={params['min_p']} with --rollout-sampling-seeds: SGLang samples wrongly with both (it asserts that "
            "they do not meet): leave one out"
        )
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):
        value = {name.replace("-", "_"): value for name, value in server.items()}.get(name)
        if value not in (None, False) and not seeded:
            raise EngineError(
                f"--sglang-{name.replace('_', '-')} makes SGLang sample every request with the same seed, so that all samples of a prompt "
                "are equal: give --rollout-sampling-seeds too"
            )


def inexact(params: Mapping[str, Any]) -> list[str]:
    """Those parameters, `name=value`, that make tokens come from another distribution than the log-probs that are stored with them.

    SGLang's log-probs are those of the softmax before top-p, top-k and min-p have cut tokens off; with penalties, biases and grammars they
    are of the changed logits, which the trainer does not know.
    """
    return [f"{name}={value}" for name, value in params.items() if name in NEUTRAL and value != NEUTRAL[name]]


def sampling_names(root: Path | None = None) -> frozenset[str]:
    """Every parameter of SGLang's `SamplingParams` that a request may give. Empty if SGLang is not installed here.

    Args:
        root: the `sglang` package to read; the installed one by default.
    """
    root = root or installed("sglang")
    return _read_names(root) if root else frozenset()


@cache
def _read_names(root: Path) -> frozenset[str]:
    """0.5.21 declares them as fields, those that it fills in itself after a comment; earlier ones are arguments of `__init__`."""
    source = (root / "srt/sampling/sampling_params.py").read_text(encoding="utf-8")
    [params] = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = [node.target.id for node in params.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    if fields:
        return frozenset(fields) - INTERNAL
    [init] = [node for node in params.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return frozenset(argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]) - {"self"}


INTERNAL = frozenset(
    ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized", "ebnf_full_assistant")
)
