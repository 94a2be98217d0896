"""Release a server's GPU memory while the trainer uses the GPU, and resume it (`--offload-rollout`).

The weight version that a server reports also tells which memory it has, so a new driver knows it, too:

    <run>/<number>   weights and KV cache
    overwritten      both; the weights are random values
    released         neither: the server is paused
    loading:<...>    weights, which are being loaded, but no KV cache: the server is paused
    loaded:<...>     all weights of this version, but no KV cache: the server is paused

SGLang ends the server if memory is released twice or resumed without having been released.
"""

from __future__ import annotations

from penstock.engines.generation import EngineGone, EngineRefused
from penstock.engines.sglang import control

RELEASED, LOADING, LOADED = "released", "loading:", "loaded:"
OVERWRITTEN = "overwritten"
UPDATING = "updating:"  # before the version that an update loads; left by an update that failed halfway
WEIGHTS, KV_CACHE = "weights", "kv_cache"
TIMEOUT = 300.0  # seconds


def has_kv_cache(version: str) -> bool:
    """Return whether a server that reports this weight version has a KV cache."""
    return not version.startswith((RELEASED, LOADING, LOADED))


def is_released(url: str, timeout: float) -> bool:
    """Return whether the server answers and has no KV cache; it is paused then."""
    try:
        info = control.call_server(url, "/model_info", timeout=timeout)
    except (EngineGone, EngineRefused):
        return False
    return not has_kv_cache(str(info.get("weight_version", "")))


def release_gpu_memory(url: str) -> None:
    """Release weights and KV cache. Running requests are aborted; the server keeps its CUDA graphs."""
    version = control.weight_version(url)
    if version == RELEASED:
        return
    if has_kv_cache(version):
        control.call_server(url, "/pause_generation", {"mode": "abort"}, TIMEOUT)
    tags = [KV_CACHE, WEIGHTS] if has_kv_cache(version) else [WEIGHTS]
    control.call_server(url, "/release_memory_occupation", {"tags": tags}, TIMEOUT)
    control.set_weight_version(url, RELEASED)


def resume_weights(url: str, version: str) -> None:
    """Allocate the memory of the weights again. The values are undefined until the weights of `version` are loaded."""
    control.call_server(url, "/resume_memory_occupation", {"tags": [WEIGHTS]}, TIMEOUT)
    control.set_weight_version(url, f"{LOADING}{version}")


def resume_kv_cache(url: str) -> None:
    """Allocate the KV cache again and resume generation, if all weights are loaded but the KV cache is released."""
    state, _, version = control.weight_version(url).partition(":")
    if f"{state}:" == LOADED:
        control.call_server(url, "/resume_memory_occupation", {"tags": [KV_CACHE]}, TIMEOUT)
        control.set_weight_version(url, version)
        control.resume_generation(url)


def overwrite_weights(url: str) -> None:
    """Overwrite all parameters and buffers with random values, except the buffers that SGLang computes itself."""
    state = "" if has_kv_cache(control.weight_version(url)) else LOADING
    control.set_weight_version(url, f"{state}{OVERWRITTEN}")
    control.call_server(url, "/weights_checker", {"action": "reset_tensors"}, TIMEOUT)
