"""LoRA adapters in the real SGLang: its log-probs are those of the model with the adapter, requests in flight keep
theirs, and prefixes are not shared."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import hf_model, logprob_error, make_family
from small_servers import generate_once

from penstock.engines.backends import engine_backend
from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.generation import Generation, PublishedAdapter, WeightTransport
from penstock.engines.lora import PREFIX, LoraOptions, served_config, served_modules, served_tensors
from penstock.engines.options import EngineOptions, ServedAdapters
from penstock.engines.serving import endpoints
from penstock.engines.serving.endpoints import BASE, adapter_suffix
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang import control
from penstock.engines.sglang.backend import SGLangServer
from penstock.engines.sglang.client import SGLangClient

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
PROMPT = [2, 9, 12, 16, 14, 21, 1, 3]
TOLERANCE = 1e-4  # fp32; measured 3e-7
DIFFERENCE = 0.01  # of log-probs with and without an adapter


def options_of(*modules: str) -> LoraOptions:
    return LoraOptions(lora_rank=4, lora_alpha=8, lora_target_modules=list(modules), lora_use_rslora=True)


@contextmanager
def serve(model: Path, lora: LoraOptions, log_dir: Path) -> Iterator[str]:
    """Start a server as a run with these adapters does, and yield its URL."""
    served = ServedAdapters(rank=lora.lora_rank, modules=served_modules(lora, read_shape(model)), max_versions=3)
    spec = ServerSpec(model_path=str(model), weight_version=BASE, log_dir=str(log_dir))
    args = engine_backend().server_args(EngineOptions(spec, adapters=served), has_gpus=torch.cuda.is_available())
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES", "0"),) if torch.cuda.is_available() else ()
    server = SGLangServer(spec.model_copy(update={"args": args}), gpu_ids=gpus)
    url = server.start()
    try:
        yield url
    finally:
        endpoints.set_adapter(url, None)
        server.stop()


def matrices(model: Path, lora: LoraOptions, seed: int) -> dict[str, torch.Tensor]:
    """Return random adapters by PEFT's names."""
    shape, generator = read_shape(model), torch.Generator().manual_seed(seed)
    shapes = tensor_layout(shape).hf_shapes
    result = {}
    for name in served_tensors(lora, shape):
        module, _, kind = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        out, size = shapes[f"{module}.weight"]
        matrix = (lora.lora_rank, size) if kind == "lora_A" else (out, lora.lora_rank)
        result[name] = 0.2 * torch.randn(matrix, generator=generator)
    return result


def publish(url: str, model: Path, lora: LoraOptions, version: str, seed: int, **transport: Any) -> str:
    """Load random adapters into the server, make requests use them, and return their name."""
    name = version + adapter_suffix("test")
    named, config = matrices(model, lora, seed), served_config(lora, read_shape(model), str(model))
    adapter = PublishedAdapter(name, config, len(named), compare="kind" not in transport)
    client = SGLangClient([url])
    client.update_weights(iter(named.items()), version, WeightTransport(adapter=adapter, **transport))
    client.use_adapter(name)
    return name


def sample(url: str) -> list[Generation]:
    return generate_once([url], PROMPT, {"max_new_tokens": 12, "ignore_eos": True}, n=4)


def worst_difference(model: Path, generations: list[Generation], lora: LoraOptions, seed: int | None) -> float:
    """Return the largest difference between the engine's log-probs and transformers', whose weights have the adapters
    of `seed` added to them (None: no adapters)."""
    reference = hf_model(model)
    if seed is not None:
        named, weights = matrices(model, lora, seed), dict(reference.named_parameters())
        for name in (name for name in named if "lora_A" in name):
            delta = lora.scale * named[name.replace("lora_A", "lora_B")] @ named[name]
            weights[name.removeprefix(PREFIX).replace(".lora_A", "")].data += delta
    return max(logprob_error(reference, PROMPT, generation) for generation in generations)


LORA = options_of("all-linear")


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(tiny_model, LORA, tmp_path_factory.mktemp("sglang")) as url:
        yield url


def test_engine_computes_with_the_published_adapter(url: str, tiny_model: Path, tmp_path: Path) -> None:
    base = sample(url)
    assert {version for generation in base for version, _ in generation.weight_versions} == {BASE}
    over_disk = {"kind": "disk", "model_path": str(tiny_model), "directory": str(tmp_path)}
    for version, transport in ((1, {}), (2, over_disk)):
        name = publish(url, tiny_model, LORA, f"run/{version}", version, **transport)
        assert SGLangClient([url]).weight_version(url) == f"run/{version}"
        generations = sample(url)
        assert {tuple(g.weight_versions) for g in generations} == {((f"run/{version}", 12),)}
        assert worst_difference(tiny_model, generations, LORA, version) < TOLERANCE
        assert worst_difference(tiny_model, generations, LORA, None) > DIFFERENCE, "the adapter has no effect"
        assert worst_difference(tiny_model, generations, LORA, 3 - version) > DIFFERENCE
    assert name in control.loaded_adapters(url)
    assert control.weight_version(url) == BASE


def test_request_in_flight_keeps_its_adapter(url: str, tiny_model: Path) -> None:
    first = publish(url, tiny_model, LORA, "run/3", 3)

    async def both() -> tuple[list[Generation], list[Generation]]:
        async with SGLangClient([url], timeout=120) as client:
            long = asyncio.create_task(client.generate(PROMPT, {"max_new_tokens": 150, "ignore_eos": True}, n=2))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(publish, url, tiny_model, LORA, "run/4", 4)
            short = await client.generate(PROMPT, {"max_new_tokens": 8, "ignore_eos": True}, n=2)
            assert not long.done(), "the request ended before the next version was in use"
            assert first in control.loaded_adapters(url), "unloaded while a request uses it"
            return await long, short

    long, short = asyncio.run(both())
    assert {tuple(g.weight_versions) for g in long} == {(("run/3", 150),)}
    assert {tuple(g.weight_versions) for g in short} == {(("run/4", 8),)}
    assert worst_difference(tiny_model, long, LORA, 3) < TOLERANCE
    assert worst_difference(tiny_model, short, LORA, 4) < TOLERANCE

    last = publish(url, tiny_model, LORA, "run/5", 5)
    SGLangClient([url]).unload_adapters()  # waits, also for the thread that `publish` has started
    assert not {first, last} & set(control.loaded_adapters(url))
    assert SGLangClient([url]).weight_version(url) == BASE


def test_adapters_share_no_keys_and_values_with_others_or_with_other_base_weights(url: str, tiny_model: Path) -> None:
    """Every adapter has an id of its own in SGLang, and the key of an entry counts the loads of base weights."""

    def cached_tokens() -> list[int]:
        return [sample(url)[0].counts.cached for _ in range(2)]

    reused = [0, len(PROMPT) - 1]
    for version in (6, 7):
        publish(url, tiny_model, LORA, f"run/{version}", version)
        assert cached_tokens() == reused
    client = SGLangClient([url])
    client.update_weights(iter(hf_model(tiny_model).state_dict().items()), BASE, WeightTransport(in_flight="in_place"))
    assert cached_tokens() == reused
    client.unload_adapters()
    assert cached_tokens() == reused


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2", "llama3.1", "qwen3-moe"])
def test_families_compute_with_the_published_adapter(family: str, tmp_path: Path) -> None:
    # On CPU SGLang rounds the width of the MLP up to 64, for its own kernels, but not the adapter's.
    model = make_family(tmp_path / "model", family, intermediate_size=64)
    lora = options_of("attention" if family == "qwen3-moe" else "all-linear")
    with serve(model, lora, tmp_path / "logs") as url:
        publish(url, model, lora, "run/1", 1)
        generations = sample(url)
    assert worst_difference(model, generations, lora, 1) < TOLERANCE
    assert worst_difference(model, generations, lora, None) > DIFFERENCE
