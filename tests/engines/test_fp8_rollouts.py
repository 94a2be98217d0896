"""Weight updates of engines with fp8 weights: what is sent equals the fp8 export of the same model, bit for bit."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from families import make_family
from safetensors.torch import load_file
from small_servers import generate_once
from torch import Tensor

from penstock.engines.backends import engine_backend
from penstock.engines.cluster import Cluster
from penstock.engines.families import read_shape
from penstock.engines.generation import WeightTransport
from penstock.engines.options import EngineOptions
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.weight_sender import write_weights
from penstock.engines.sglang.weight_update import split_into_buckets
from penstock.engines.weights.fp8_blocks import fp8_weights, keeps_scales, quantize, quantize_weights
from penstock.engines.weights.transfer import ProcessPlace
from penstock.flows.options.flags import parse_config
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_to
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.store import Store

Model = tuple[Path, Path]  # the same weights in bf16 and in fp8
PROMPT = [2, 10, 11, 12, 13, 1, 3]


def export_fp8(plain: Path, directory: Path) -> Path:
    """What `penstock convert --hf-checkpoint` and `penstock convert --load --export-dtype fp8` write."""
    model = convert_hf(Store(str(directory / "store")), plain)
    origin = Origin(Path(model.uri) / "hf_assets", "fp8")
    return Path(export_to(Store(str(directory)), model.uri, origin, str(directory / "fp8")).uri)


@pytest.fixture(scope="module", params=["deepseek-v3", "qwen3-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of which no width is a multiple of a block; the first has fused MLA weights."""
    directory = tmp_path_factory.mktemp(request.param)
    sizes = dict(hidden_size=136, intermediate_size=144, moe_intermediate_size=24, num_hidden_layers=2)
    plain = make_family(directory / "plain", request.param, dtype="bfloat16", **sizes)
    return plain, export_fp8(plain, directory)


def sent(model: Model) -> Iterator[tuple[str, Tensor]]:
    """What the trainer sends to engines with the fp8 weights."""
    plain, quantized = model
    return quantize_weights(load_file(plain / "model.safetensors").items(), fp8_weights(str(quantized)))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_sent_weights_equal_the_fp8_export(model: Model) -> None:
    exported = load_file(model[1] / "model.safetensors")
    weights = dict(sent(model))
    assert weights.keys() == exported.keys()
    for name, tensor in exported.items():
        assert same_bits(weights[name], tensor), name
    assert fp8_weights(str(model[1])) == {name for name, tensor in exported.items() if tensor.dtype.itemsize == 1}
    assert fp8_weights(str(model[0])) == frozenset()


@pytest.mark.parametrize("max_bytes", [1, 20_000, 100_000])
def test_buckets_keep_scales_and_fused_weights_together(model: Model, max_bytes: int) -> None:
    buckets = [bucket for bucket, _ in split_into_buckets(sent(model), max_bytes)]
    place = {name: index for index, bucket in enumerate(buckets) for name, _ in bucket}
    assert place.keys() == dict(sent(model)).keys()
    for name in fp8_weights(str(model[1])):
        assert place[name] == place[name + "_scale_inv"]
        assert place[name] == place.get(name.replace(".q_a_proj.", ".kv_a_proj_with_mqa."), place[name])
    largest = max(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets)
    assert largest <= max_bytes or (max_bytes == 1 and largest < 60_000)  # counted in fp8


def test_transport_quantizes_the_weights_that_the_checkpoint_has_in_fp8(model: Model) -> None:
    here, (plain, quantized) = ProcessPlace("node", pid=7), model
    for path in (plain, quantized):
        options = EngineOptions(ServerSpec(model_path=str(path)))
        transport = options.weight_transport({"http://engine": here}, [here], "")
        assert transport.fp8_weights == fp8_weights(str(path))


def test_estimated_engine_memory_is_the_size_of_the_fp8_weights(model: Model) -> None:
    for path in model:
        shape, options = read_shape(path), EngineOptions(ServerSpec(model_path=str(path)))
        size = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
        assert engine_backend().estimate_memory(options, shape, 80 << 30).weight_bytes == pytest.approx(size, rel=5e-3)


def test_only_scales_of_bf16_weights_are_kept_by_dequantization(model: Model, tmp_path: Path) -> None:
    _, quantized = model
    assert keeps_scales(str(quantized))
    dequantized = convert_hf(Store(str(tmp_path / "store")), quantized)
    origin = Origin(Path(dequantized.uri) / "hf_assets", "fp8")
    again = Path(export_to(Store(str(tmp_path)), dequantized.uri, origin, str(tmp_path / "again")).uri)
    first, second = (load_file(path / "model.safetensors") for path in (quantized, again))
    assert all(same_bits(first[name], second[name]) for name in first)
    other = {name: tensor * 1.001 if name.endswith("_scale_inv") else tensor for name, tensor in first.items()}
    write_weights(tmp_path / "other", other.items(), quantized, 1 << 30)
    assert not keeps_scales(str(tmp_path / "other"))


WIDTHS: dict[str, dict[str, int]] = {  # SGLang needs multiples of 128 for merged weights
    "qwen3": dict(hidden_size=512, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64),
    "qwen3-moe": dict(hidden_size=256, moe_intermediate_size=128, num_attention_heads=4, head_dim=64),
}


@contextmanager
def engine_of(cluster: Cluster, model: Path, log_dir: Path) -> Iterator[SGLangClient]:
    further = shlex.split(os.environ.get("PENSTOCK_TRAIN_OPTIONS", ""))  # that this machine's SGLang needs
    args = {
        "mem_fraction_static": 0.2,
        "disable_cuda_graph": True,
        **parse_config(["--run", "r", *further]).rollout.engine_options,
    }
    pool = EnginePool(cluster, ServerSpec(model_path=str(model), args=args, log_dir=str(log_dir)))
    try:
        yield SGLangClient(pool.urls)
    finally:
        pool.stop()


def greedy(client: SGLangClient) -> tuple[list[int], Tensor]:
    """Token ids and log-probs of a greedy response."""
    sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    [generation] = generate_once(client.urls, PROMPT, sampling)
    return generation.token_ids, torch.tensor(generation.logprobs)


def different(first: list[dict[str, str]], second: list[dict[str, str]]) -> list[str]:
    """Names of the parameters of a rank whose checksums differ."""
    return [name for mine, other in zip(first, second, strict=True) for name in mine if mine[name] != other[name]]


@pytest.mark.gpu
def test_weights_are_quantized_to_the_same_bits_on_gpu_and_cpu() -> None:
    torch.manual_seed(0)
    for shape in ((256, 384), (300, 200)):
        weight = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(torch.bfloat16)
        for on_gpu, on_cpu in zip(quantize(weight.cuda()), quantize(weight), strict=True):
            assert same_bits(on_gpu.cpu(), on_cpu)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", WIDTHS)
def test_updated_fp8_engine_equals_an_engine_of_the_fp8_export(family: str, cluster: Cluster, tmp_path: Path) -> None:
    plain = [
        make_family(tmp_path / f"plain{seed}", family, seed=seed, dtype="bfloat16", **WIDTHS[family]) for seed in (0, 1)
    ]
    first, second = (export_fp8(path, tmp_path / path.name[-1]) for path in plain)
    with engine_of(cluster, second, tmp_path) as client:
        checksums, (tokens, logprobs) = *client.weight_checksums().values(), greedy(client)
    names = fp8_weights(str(first))
    weights = {name: tensor.cuda() for name, tensor in load_file(plain[1] / "model.safetensors").items()}
    with engine_of(cluster, first, tmp_path) as client:
        [initial] = client.weight_checksums().values()
        assert "model.layers.0.self_attn.qkv_proj.weight" in different(initial, checksums)
        for number, kind in enumerate(("tensor", "disk", "tensor")):
            transport = WeightTransport(
                kind,  # type: ignore[arg-type]
                model_path=str(first),
                directory=str(tmp_path),
                bucket_bytes=200_000,
                fp8_weights=names,
            )
            client.overwrite_weights()
            client.update_weights(weights.items(), f"run/{number}", transport)
            [updated] = client.weight_checksums().values()
            assert different(updated, checksums) == [], kind
            updated_tokens, updated_logprobs = greedy(client)
            assert updated_tokens == tokens
            torch.testing.assert_close(updated_logprobs, logprobs, atol=1e-3, rtol=1e-3)
