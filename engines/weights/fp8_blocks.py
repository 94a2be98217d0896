"""Block-quantized fp8 weights as in DeepSeek's checkpoints: e4m3 values and one fp32 scale per 128 x 128 block.

Conversions read and write such weights, and trainers send them to engines whose checkpoint has them. torch is imported
inside the functions, because preflight uses this module without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.families import tensor_layout
from penstock.engines.weights.hf_headers import SCALE, block_size, stored_tensors, weight_files

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.engines.families.shape import ModelShape


BLOCK = 128
LARGEST = 448.0  # largest finite value of float8_e4m3fn
_SMALLEST_AMAX = 1e-12  # avoids a division by zero for blocks of zeros

# `quantization_config` of config.json; activations are quantized at run time, without stored scales
QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def should_quantize(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether DeepSeek's checkpoints quantize the weight with this Hugging Face name. They quantize the
    projections of attention, MLPs and experts, but not `eh_proj` of multi-token prediction layers. Vision towers stay
    unquantized."""
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    is_linear = name.endswith(".weight") and len(shape) == 2 and "visual." not in name
    return is_linear and "_proj" in module and module != "eh_proj"


def find_unsupported_entry(quantization: Any) -> str | None:
    """Return the first entry ("name value") of a `quantization_config` that does not describe what `quantize` makes;
    None if all entries do."""
    if not isinstance(quantization, dict):
        return f"the value {str(quantization)[:40]}"
    for name, value in {**QUANTIZATION, "scale_fmt": None}.items():  # scale_fmt ue8m0 means scales that are powers of 2
        default = None if name in ("quant_method", "weight_block_size") else value
        if quantization.get(name, default) != value:
            return f"{name} {str(quantization.get(name))[:40]}"
    return None


def mean_bytes_per_weight(shape: ModelShape) -> float:
    """Return the mean number of bytes of a weight in an fp8 checkpoint of this model, including scales: weights for
    which `should_quantize` is True are in fp8, the others in bf16."""
    total = num_bytes = 0
    for name, size in tensor_layout(shape).hf_shapes.items():
        quantized = should_quantize(name, size)
        total += prod(size)
        num_bytes += prod(size) + 4 * prod(scale_shape(size)) if quantized else 2 * prod(size)
    return num_bytes / total


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[int, int]:
    """Return the shape of a weight's scales, [blocks of rows, blocks of columns]; `shape` is the weight's."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


@cache
def fp8_weights(directory: str) -> frozenset[str]:
    """Return the names of the weights that a Hugging Face directory stores in fp8: those with scales.

    The result is cached for the life of the process, so the files must not change.
    """
    path = Path(directory)
    if block_size(path) is None:
        return frozenset()
    return frozenset(name.removesuffix(SCALE) for name in stored_tensors(path, weight_files(path)) if SCALE in name)


def dequantize(weight: Tensor, scales: Tensor, first_row: int = 0, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """Return consecutive rows of a quantized weight (e4m3, [r, c]), which begin at row `first_row` of the whole weight,
    in bf16, [r, c]. `scales` has the scales of the whole weight, [blocks of rows, blocks of columns]."""
    import torch

    num_rows, num_columns = weight.shape
    out = torch.empty(num_rows, num_columns, dtype=torch.bfloat16, device=weight.device)
    last = (first_row + num_rows - 1) // block[0]
    for row in range(first_row // block[0], last + 1):  # one row of blocks at a time, to keep temporaries small
        rows = slice(max(row * block[0] - first_row, 0), min((row + 1) * block[0] - first_row, num_rows))
        scale = scales[row].float().repeat_interleave(block[1])[:num_columns]  # [c]
        out[rows] = weight[rows].float() * scale
    return out


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [r, c] on its device, without waiting for the device. Return its e4m3 values [r, c] and its
    fp32 scales [ceil(r / 128), ceil(c / 128)]; weight = value * scale."""
    import torch

    num_rows, num_columns = weight.shape
    rows, columns = scale_shape((num_rows, num_columns))
    if (num_rows, num_columns) != (rows * BLOCK, columns * BLOCK):
        padding = (0, columns * BLOCK - num_columns, 0, rows * BLOCK - num_rows)
        weight = torch.nn.functional.pad(weight, padding)
    blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3)).float().clamp(min=_SMALLEST_AMAX)  # [rows, columns]
    scales = amax / torch.full_like(amax, LARGEST)  # CUDA would multiply by the rounded reciprocal of a plain number
    quantized = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(rows * BLOCK, columns * BLOCK)
    return quantized[:num_rows, :num_columns].contiguous(), scales


def quantize_weights(named: Iterable[tuple[str, Tensor]], names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights `named` (Hugging Face name, tensor), those in `names` quantized, with their scales."""
    for name, tensor in named:
        if name in names:
            yield from zip((name, name + SCALE), quantize(tensor.detach()), strict=True)
        else:
            yield name, tensor


def keeps_scales(directory: str) -> bool:
    """Return whether the bits of an fp8 checkpoint stay the same if its weights are dequantized and quantized again.

    They do if each scale is the largest magnitude of a block of bf16 weights, divided by LARGEST. Scales that another
    quantizer chose may change by the rounding error of bf16.
    """
    from safetensors import safe_open

    for path in weight_files(Path(directory)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(SCALE):
                    scales = file.get_tensor(name).float()
                    amax = scales * LARGEST
                    again = amax.bfloat16().float() / LARGEST
                    if ((again != scales) & (amax > 2 * _SMALLEST_AMAX)).any():  # blocks of zeros keep their scale
                        return False
    return True
