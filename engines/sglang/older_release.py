"""Everything that Penstock does only for SGLang releases before 0.5.21: 0.5.15.post1, which some GPU images contain.

To require 0.5.21, delete this file and the calls of its functions. (launch.py cannot import this file; it skips two of
its patches if SGLang does not have the modules to patch.)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from penstock.storage.errors import EngineError

Release = tuple[int, ...]  # for instance (0, 5, 21)
OLDEST: Release = (0, 5, 15)  # the first release with the route /model_info
CURRENT: Release = (0, 5, 21)  # servers before it need the functions of this file
# Entries of `checks.LIMITS` (largest batches with a CUDA graph) that differ in the older release.
GRAPH_LIMITS = {35: (24, 80)}
# Flags of the older release -> the flag and value that replace them (... stands for the value that was given).
RENAMED: dict[str, tuple[str, Any]] = {
    "cuda_graph_bs": ("cuda_graph_bs_decode", ...),
    "cuda_graph_max_bs": ("cuda_graph_max_bs_decode", ...),
    "enable_deepep_moe": ("moe_a2a_backend", "deepep"),
    "enable_flashinfer_mla": ("attention_backend", "flashinfer"),
    "enable_flashmla": ("attention_backend", "flashmla"),
}
# Flags of older releases without a successor -> why they may be omitted.
DROPPED = {
    "router_ip": "the run starts the router itself; use --use-router, or --rollout-external-engine-addrs",
    "router_port": "the run starts the router itself; use --use-router",
    "enable_nan_detection": "the installed SGLang does not have it; omit it",
    "enable_ep_moe": "SGLang divides experts by --sglang-ep-size; omit it",
    "enable_mixed_chunk_prefill": "its name is now --sglang-enable-mixed-chunk; use that",
    "disable_custom_cuda_graph": "its name is now --sglang-disable-cuda-graph; use that",
}


def is_installed() -> bool:
    """Return whether the SGLang in this environment is before 0.5.21."""
    return tuple(map(int, re.findall(r"\d+", version("sglang"))[:3])) < CURRENT


def release_name(release: Release) -> str:
    """Return a release as text, for instance "0.5.21"."""
    return ".".join(map(str, release))


# ---- flags -----------------------------------------------------------------------------------------------------------


def to_current_flag(name: str, value: Any, known: set[str]) -> tuple[str, Any]:
    """Return a flag and its value as the installed release spells them."""
    successor, new_value = RENAMED.get(name, (name, ...))
    if name in known or successor not in known:
        return name, value
    return successor, value if new_value is ... else new_value


def sampling_parameter_names(params: ast.ClassDef) -> frozenset[str]:
    """Return the names of the sampling parameters, which are arguments of `SamplingParams.__init__`."""
    [init] = [node for node in params.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return frozenset(argument.arg for argument in [*init.args.args, *init.args.kwonlyargs]) - {"self"}


# ---- features that the older release lacks ---------------------------------------------------------------------------


def check_external_release(url: str, release: Release) -> None:
    """Check that an external server has a release that Penstock supports."""
    if release < OLDEST:
        raise EngineError(
            f"the external engine at {url} runs SGLang {release_name(release)}, but Penstock needs 0.5.15.post1 or "
            "later: upgrade SGLang there"
        )


def check_streaming() -> None:
    """Check that the installed SGLang can update weights while requests run."""
    if is_installed():
        raise EngineError(
            "--async-mode streaming needs SGLang 0.5.21 or later, which reports the weight version of each token, but "
            f"SGLang {version('sglang')} is installed: upgrade it, or use --async-mode ahead"
        )


def check_update_in_flight(url: str, release: Release) -> None:
    """Check that a server reports which weights sampled each token."""
    if release < CURRENT:
        raise EngineError(
            f"the engine at {url} runs SGLang {release_name(release)}, which does not report the weight version of "
            "each token: use SGLang 0.5.21 or later, or --async-mode ahead"
        )


def check_trained_vision() -> None:
    """Check that the installed SGLang forgets the embeddings of images when its weights change."""
    if is_installed():
        raise EngineError(
            "--no-freeze-vision needs SGLang 0.5.21 or later, since earlier releases reuse image embeddings after a "
            f"weight update, but SGLang {version('sglang')} is installed: upgrade it, or omit the option"
        )


def reason_against_adapters(gpus_per_engine: int, *, compare: bool) -> str | None:
    """Return why the installed SGLang cannot serve adapters, or None if it can."""
    if is_installed():
        if gpus_per_engine > 1:
            return "SGLang before 0.5.21 cannot read adapters on several GPUs (--rollout-num-gpus-per-engine)"
        if compare:
            return "SGLang before 0.5.21 does not compare adapters (--check-weight-update-equal)"
    return None


# ---- requests and responses ------------------------------------------------------------------------------------------


def update_fields(path: str) -> dict[str, Any]:
    """Return the fields with which a request to `path` does not change the draft layers of speculative decoding. A
    broadcast needs none: it never reaches the draft layers."""
    return {"disable_draft_model": True} if path == "/update_weights_from_tensor" else {}


def check_adapter(url: str, release: Release, tp_size: int, checksums: Mapping[str, Any]) -> None:
    """Check that an older server can load an adapter: it runs on one GPU, and no checksums are compared."""
    if tp_size > 1 or checksums:
        raise EngineError(
            f"the engine at {url} runs SGLang {release_name(release)}, which loads adapters only on one GPU per "
            "engine and without comparing checksums: use 0.5.21 or later, or --lora-publish merged"
        )


def weight_versions(meta: Mapping[str, Any], num_tokens: int) -> list[dict[str, Any]]:
    """Return one span that covers all tokens of a response, which reports only the weight version of its last token."""
    return [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]
