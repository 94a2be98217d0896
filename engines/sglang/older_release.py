"""What Penstock does only for SGLang releases before 0.5.21: 0.5.15.post1, which some GPU images contain.

To require 0.5.21, delete this file and its uses. A release below `CURRENT` also gets other requests from
weight_update.py, and `parse_generation` reads its responses. launch.py cannot import this file; it skips two of its
patches if SGLang does not have the modules to patch.
"""

from __future__ import annotations

import ast
import re
from importlib.metadata import version
from typing import Any

from penstock.storage.errors import EngineError

Release = tuple[int, ...]  # for instance (0, 5, 21)
OLDEST: Release = (0, 5, 15)  # the first release with the route /model_info
CURRENT: Release = (0, 5, 21)  # servers before it need the functions of this file
# Entries of `checks.LIMITS` (largest batches with a CUDA graph) that differ in the older release.
GRAPH_LIMITS = {35: (24, 80)}
STREAMING, VISION = "--async-mode streaming", "--no-freeze-vision"
ADAPTERS = "--lora-publish adapter with several GPUs per engine or --check-weight-update-equal"
# Option that needs 0.5.21 -> what earlier releases do, and what to do instead.
NEEDS_CURRENT = {
    STREAMING: ("do not report the weight version of each token", "use --async-mode ahead"),
    VISION: ("use the embeddings of images again after a weight update", "omit the option"),
    ADAPTERS: ("load adapters only on one GPU and do not compare checksums", "use --lora-publish merged"),
}
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


def check_release(option: str, release: Release | None = None, url: str = "") -> None:
    """Check that a server, or the installed SGLang if no `release` is given, has the release that `option` needs."""
    why, instead = NEEDS_CURRENT[option]
    name = version("sglang") if release is None else ".".join(map(str, release))
    if is_installed() if release is None else release < CURRENT:
        where = f"the engine at {url} runs SGLang {name}" if url else f"SGLang {name} is installed"
        raise EngineError(
            f"{option} needs SGLang 0.5.21 or later, because earlier releases {why}, but {where}: upgrade it, or "
            f"{instead}"
        )


def reason_against_adapters(gpus_per_engine: int, *, compare: bool) -> str | None:
    """Return why the installed SGLang cannot serve adapters, or None if it can."""
    if is_installed():
        if gpus_per_engine > 1:
            return "SGLang before 0.5.21 cannot read adapters on several GPUs (--rollout-num-gpus-per-engine)"
        if compare:
            return "SGLang before 0.5.21 does not compare adapters (--check-weight-update-equal)"
    return None
