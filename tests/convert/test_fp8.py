"""fp8 in blocks of 128 x 128: scales as DeepSeek's files have them, in and out, and which weights are quantized at
all."""

import json
from pathlib import Path

import pytest
import torch
from families import make_family
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.weights.fp8_blocks import dequantize, quantize, should_quantize
from penstock.stages.convert.conversion_check import TOLERANCE, compare_logits
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_to
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.errors import ModelError
from penstock.storage.store import Store


def naive(weight: Tensor, scales: Tensor) -> Tensor:
    """Block after block, in float64."""
    out = torch.empty(weight.shape, dtype=torch.float64)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            out[box] = weight[box].double() * scales[i, j].double()
    return out.to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(128, 128), (300, 200), (1, 129), (257, 1)])
def test_quantization_equals_a_naive_loop(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(torch.bfloat16)
    quantized, scales = quantize(weight)
    assert quantized.dtype == torch.float8_e4m3fn and quantized.is_contiguous()
    assert torch.equal(dequantize(quantized, scales), naive(quantized, scales))
    rows = slice(shape[0] // 3, shape[0])
    assert torch.equal(dequantize(quantized[rows], scales, rows.start), naive(quantized, scales)[rows])
    # e4m3 has a 3-bit mantissa: half a step is 1/16 of a number, and what is below the smallest step is off by it
    step = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]] * 2.0**-9
    assert ((naive(quantized, scales).float() - weight.float()).abs() <= weight.float().abs() / 15 + step).all()


def test_block_of_zeros_stays_zero() -> None:
    quantized, scales = quantize(torch.zeros(130, 130, dtype=torch.bfloat16))
    assert not dequantize(quantized, scales).any() and torch.isfinite(scales).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.0.mlp.gate_up_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", True),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.61.eh_proj.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_quantized_weights_by_name(name: str, expected: bool) -> None:
    assert should_quantize(name, (256, 256)) == expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for more than one block."""
    sizes = dict(hidden_size=136, intermediate_size=144, moe_intermediate_size=24, num_hidden_layers=2)
    return make_family(
        tmp_path_factory.mktemp("hf") / "plain", "deepseek-v3", dtype="bfloat16", num_nextn_predict_layers=1, **sizes
    )


@pytest.fixture(scope="module")
def quantized(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model by our own export: e4m3 weights with scales."""
    directory = tmp_path_factory.mktemp("fp8")
    model = convert_hf(Store(str(directory / "store")), plain, options=ConversionOptions(mtp="keep"))
    return Path(
        export_to(
            Store(str(directory)), model.uri, Origin(Path(model.uri) / "hf_assets", "fp8"), str(directory / "hf")
        ).uri
    )


def test_fp8_export_has_the_tensors_and_config_of_the_hub(plain: Path, quantized: Path) -> None:
    found, original = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    for name, tensor in original.items():
        if should_quantize(name, tuple(tensor.shape)):
            expected, scales = quantize(tensor)
            assert torch.equal(found.pop(name).view(torch.int8), expected.view(torch.int8)), name
            assert torch.equal(found.pop(name + "_scale_inv"), scales), name
        else:
            assert torch.equal(found.pop(name), tensor), name
    assert not found
    config = json.loads((quantized / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128] and config["dtype"] == "bfloat16"
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(config["quantization_config"]["modules_to_not_convert"])


def test_fp8_source_converts_to_bf16_and_exports_to_the_same_fp8(quantized: Path, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    model = convert_hf(
        store, quantized, options=ConversionOptions(mtp="keep")
    )  # verified bit for bit against the dequantized source
    assert (
        compare_logits(Path(model.uri), quantized).difference or 1
    ) < TOLERANCE  # with what the fp8 weights stand for
    assets = Path(model.uri) / "hf_assets"
    stored = load_file(quantized / "model.safetensors")
    back = Path(export_to(store, model.uri, Origin(assets), str(tmp_path / "bf16")).uri)
    layout = tensor_layout(read_shape(back))
    with HFWeights(back) as weights:
        assert {info.dtype for name, info in weights.info.items() if name in layout.hf_shapes} == {
            torch.bfloat16,
            torch.float32,
        }
        for name in weights.info:
            scales = stored.get(name + "_scale_inv")
            expected = stored[name] if scales is None else naive(stored[name], scales)
            assert torch.equal(weights.fetch(name), expected), name
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    again = load_file(
        Path(export_to(store, model.uri, Origin(assets, "fp8"), str(tmp_path / "fp8")).uri) / "model.safetensors"
    )
    assert again.keys() == stored.keys()
    # the largest of a block is bf16 now, so its scale moves by a rounding of bf16, and numbers by one step of e4m3 at
    # most
    for name in (name for name in stored if name.endswith("_scale_inv")):
        torch.testing.assert_close(again[name], stored[name], rtol=2**-8, atol=0)


def test_quantized_weight_with_other_blocks_or_without_scales_is_refused(quantized: Path, tmp_path: Path) -> None:
    config, tensors = (quantized / "config.json").read_text(), load_file(quantized / "model.safetensors")
    entry = json.loads(config)["quantization_config"] | {"weight_block_size": [64, 64]}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | {"quantization_config": entry}))
    with pytest.raises(ModelError, match="weight_block_size"):
        HFWeights(tmp_path)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"F8_E4M3.*o_proj\.weight_scale_inv"):
        HFWeights(tmp_path)
