"""Blocking HTTP calls to one SGLang server: health, weight version, pause and resume, and release of its GPU memory
while the trainer uses the GPU (`--offload-rollout`). Imports only the standard library and Penstock.

The weight version that a server reports also says which memory is released (`EngineClient` lists the states), so a new
driver knows this, too. SGLang ends the server if memory is released twice or resumed without having been released.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from penstock.engines.generation import EngineGone, EngineRefused
from penstock.engines.serving import endpoints

RELEASED, LOADING, LOADED = "released", "loading:", "loaded:"
OVERWRITTEN = "overwritten"
UPDATING = "updating:"  # prefix of the reported version during an update; remains if the update fails halfway
WEIGHTS, KV_CACHE = "weights", "kv_cache"
MEMORY_TIMEOUT = 300.0  # seconds
# Buffers of M-RoPE that SGLang computes, but whose names its checks of weights do not skip by themselves (0.5.21).
COMPUTED = {"skip_tensor_list": ["rotary_emb.axis_map"]}

# Requests contain an API key, and engines are in the private network of the nodes, so no proxy must be used.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call_server(
    url: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout: float = 60,
    method: str | None = None,
    *,
    with_key: bool = True,
) -> dict[str, Any]:
    """Send an HTTP request to a server and return the JSON object in the response; {} if it is not a JSON object.
    The default method is POST with a body, otherwise GET. Raises EngineGone if the server did not answer, and
    EngineRefused if the response has an error status."""
    request = urllib.request.Request(
        url + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", **(endpoints.auth_headers(url) if with_key else {})},
        method=method,
    )
    try:
        with _direct.open(request, timeout=timeout) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        hint = " (the server needs another API key: give it with --sglang-api-key)" if error.code == 401 else ""
        message = error.read().decode(errors="replace")[:500]
        raise EngineRefused(f"{url}{path} answered HTTP {error.code}{hint}: {message}") from error
    except (OSError, HTTPException) as error:  # URLError and timeouts are OSErrors
        raise EngineGone(
            f"{url}{path} did not answer within {timeout:.0f} s or closed the connection: {error}"
        ) from error
    return json.loads(text) if text.strip().startswith(b"{") else {}


def get_succeeds(url: str, path: str, timeout: float) -> bool:
    """Return whether a GET request for `path` succeeds within `timeout` seconds."""
    try:
        call_server(url, path, timeout=timeout)
    except (EngineGone, RuntimeError):
        return False
    return True


def generates_tokens(url: str, timeout: float = 30) -> bool:
    """Return whether the server generates tokens: for its running requests or, if it is idle, one token for this check.
    A server whose KV cache is released is paused; for it, return whether it answers.

    Takes about a second. SGLang waits up to 20 s (SGLANG_HEALTH_CHECK_TIMEOUT) for output of its scheduler; the output
    of running requests suffices.
    """
    with suppress(EngineGone, EngineRefused):
        if not has_kv_cache(str(call_server(url, "/model_info", timeout=timeout).get("weight_version", ""))):
            return True
    return get_succeeds(url, "/health_generate", timeout)


def weight_version(url: str, timeout: float = 30) -> str:
    """Return the weight version that the server reports with every response ("default" before any update)."""
    # `/server_info` of SGLang 0.5.21 always has the version that was set when the server started.
    return str(call_server(url, "/model_info", timeout=timeout)["weight_version"])


def num_requests(url: str, timeout: float = 30) -> tuple[int, int]:
    """Return how many requests the server is generating and how many wait. SGLang's schedulers write these numbers into
    shared memory anyway, so the server's answer does not interrupt them."""
    loads = call_server(url, "/v1/loads?include=core", timeout=timeout)["loads"]
    return sum(load["num_running_reqs"] for load in loads), sum(load["num_waiting_reqs"] for load in loads)


def release_and_tp_size(url: str) -> tuple[tuple[int, ...], int]:
    """Return SGLang's release as three numbers, for instance (0, 5, 21), and the server's tensor-parallel size."""
    info = call_server(url, "/server_info", timeout=30)
    numbers = ["".join(c for c in part if c.isdigit()) for part in str(info["version"]).split(".")[:3]]
    return tuple(int(number or 0) for number in numbers), int(info["tp_size"])


def weight_checksums(url: str) -> list[dict[str, str]]:
    """Return for each rank of the server: name of a parameter or buffer -> checksum of its values."""
    answer = call_server(url, "/weights_checker", {"action": "checksum", **COMPUTED}, timeout=600)
    return [dict(rank["checksums"]) for rank in answer["ranks"]]


def loaded_adapters(url: str, timeout: float = 30) -> list[str]:
    """Return the names of the LoRA adapters that the server has loaded."""
    models = call_server(url, "/v1/models", timeout=timeout)["data"]
    return [str(model["id"]) for model in models if model.get("parent") is not None]


def set_weight_version(url: str, version: str) -> None:
    """Set the weight version that the server reports."""
    call_server(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False}, 60)


# ---- GPU memory ----------------------------------------------------------------------------------------------------


def has_kv_cache(version: str) -> bool:
    """Return whether a server that reports this weight version has a KV cache."""
    return not version.startswith((RELEASED, LOADING, LOADED))


def release_gpu_memory(url: str) -> None:
    """Release weights and KV cache. Running requests are aborted; the server keeps its CUDA graphs."""
    version = weight_version(url)
    if version == RELEASED:
        return
    if has_kv_cache(version):
        call_server(url, "/pause_generation", {"mode": "abort"}, MEMORY_TIMEOUT)
    tags = [KV_CACHE, WEIGHTS] if has_kv_cache(version) else [WEIGHTS]
    call_server(url, "/release_memory_occupation", {"tags": tags}, MEMORY_TIMEOUT)
    set_weight_version(url, RELEASED)


def resume_weights(url: str, version: str) -> None:
    """Allocate the memory of the weights again. The values are undefined until the weights of `version` are loaded."""
    call_server(url, "/resume_memory_occupation", {"tags": [WEIGHTS]}, MEMORY_TIMEOUT)
    set_weight_version(url, f"{LOADING}{version}")


def resume_kv_cache(url: str) -> None:
    """Allocate the KV cache again and resume generation, if all weights are loaded but the KV cache is released."""
    state, _, version = weight_version(url).partition(":")
    if f"{state}:" == LOADED:
        call_server(url, "/resume_memory_occupation", {"tags": [KV_CACHE]}, MEMORY_TIMEOUT)
        set_weight_version(url, version)
        call_server(url, "/continue_generation", {})


def overwrite_weights(url: str) -> None:
    """Overwrite all parameters and buffers with random values, except the buffers that SGLang computes itself."""
    state = "" if has_kv_cache(weight_version(url)) else LOADING
    set_weight_version(url, f"{state}{OVERWRITTEN}")
    call_server(url, "/weights_checker", {"action": "reset_tensors", **COMPUTED}, MEMORY_TIMEOUT)
