"""Check sampling parameters: whether the installed SGLang supports them, whether its router forwards them, and whether
they make the sampling distribution differ from the policy that the trainer computes.

Parameter names are parsed from SGLang's source without importing SGLang, as in `args.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from penstock.engines.sglang import older_release
from penstock.engines.sglang.args import package_directory
from penstock.engines.sources import parse_source
from penstock.storage.errors import EngineError
from penstock.storage.near_names import nearest_name

# Parameters that cannot be set with --rollout-sampling: most have an option of their own. Name -> advice for the error.
RESERVED = {
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
DROPPED_BY_ROUTER = (
    *("stop_regex", "structural_tag", "spaces_between_special_tokens", "stream_interval", "logit_bias"),
    "custom_params",
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


def check_sampling(params: Mapping[str, Any], *, routed: bool) -> None:
    """Check the parameters of `--rollout-sampling`.

    Args:
        params: parameter name -> value.
        routed: whether generation requests are sent through SGLang's router.

    Raises:
        EngineError: a parameter is unknown to SGLang, has an option of its own, or is dropped by the router.
    """
    known = sampling_parameter_names()
    for name in params:
        if name in RESERVED:
            raise EngineError(f"--rollout-sampling {name} is not allowed: {RESERVED[name]}")
        if known and name not in known:
            near = nearest_name(name, known)
            hint = f"did you mean {near}?" if near else f"choose from {', '.join(sorted(known))}"
            raise EngineError(f"--rollout-sampling {name} is not a sampling parameter of the installed SGLang: {hint}")
        if routed and name in DROPPED_BY_ROUTER:
            raise EngineError(
                f"--rollout-sampling {name} has no effect with --use-router, because SGLang's router drops it: "
                "omit one of the two"
            )


def check_sampling_seeds(use_seeds: bool, params: Mapping[str, Any], server_flags: Mapping[str, Any]) -> None:
    """Check `--rollout-sampling-seeds` (`use_seeds`) against the other sampling parameters and the server's flags.

    Raises:
        EngineError: seeds are combined with min_p, or deterministic inference is enabled without seeds.
    """
    if use_seeds and params.get("min_p"):
        raise EngineError(
            f"--rollout-sampling min_p={params['min_p']} cannot be combined with --rollout-sampling-seeds, because "
            "SGLang does not support min_p with seeds: omit one of them"
        )
    flags = {name.replace("-", "_"): value for name, value in server_flags.items()}
    for name in ("enable_deterministic_inference", "rl_on_policy_target"):
        if flags.get(name) not in (None, False) and not use_seeds:
            raise EngineError(
                f"--sglang-{name.replace('_', '-')} makes SGLang sample every request with the same seed, so all "
                "samples of a prompt would be equal: add --rollout-sampling-seeds"
            )


def find_biasing_params(params: Mapping[str, Any]) -> list[str]:
    """Return those of the sampling parameters, as `name=value`, that make the sampling distribution differ from the
    policy that the trainer computes.

    SGLang returns log-probs of the full softmax, before top-p, top-k and min-p remove tokens. With penalties, logit
    biases and grammars it returns log-probs of the modified logits, which the trainer cannot reproduce.
    """
    return [f"{name}={value}" for name, value in params.items() if name in NEUTRAL and value != NEUTRAL[name]]


@cache
def sampling_parameter_names(root: Path | None = None) -> frozenset[str]:
    """Return the names of SGLang's sampling parameters that a request may set; empty if SGLang is not installed.

    SGLang declares them as fields of `SamplingParams`, together with the INTERNAL fields.

    Args:
        root: directory of the `sglang` package to read; by default the installed package.
    """
    root = root or package_directory("sglang")
    if root is None:
        return frozenset()
    tree = parse_source((root / "srt/sampling/sampling_params.py").read_text(encoding="utf-8"))
    [params] = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = [
        node.target.id for node in params.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return frozenset(fields) - INTERNAL if fields else older_release.sampling_parameter_names(params)
