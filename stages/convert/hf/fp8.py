"""Block-quantized fp8 weights as in DeepSeek's checkpoints: e4m3 values and one fp32 scale per 128 x 128 block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    """Return whether DeepSeek's checkpoints quantize the weight with this Hugging Face name. Quantized are the
    projections of attention, MLPs and experts, but not `eh_proj` of multi-token prediction layers."""
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return name.endswith(".weight") and len(shape) == 2 and "_proj" in module and module != "eh_proj"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[int, int]:
    """Return the shape of a weight's scales, [blocks of rows, blocks of columns]; `shape` is the weight's."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantize(weight: Tensor, scales: Tensor, first_row: int = 0, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """Return consecutive rows of a quantized weight in bf16, [r, c].

    Args:
        weight: the rows in e4m3, [r, c].
        scales: scales of the whole weight, [blocks of rows, blocks of columns].
        first_row: index of the first of these rows in the whole weight.
        block: (rows, columns) that share a scale.
    """
    num_rows, num_columns = weight.shape
    block_of_row = torch.arange(first_row, first_row + num_rows) // block[0]
    first, last = int(block_of_row[0]), int(block_of_row[-1]) + 1
    out = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
    for row in range(first, last):  # one row of blocks at a time, to keep temporaries small
        rows = slice(max(row * block[0] - first_row, 0), min((row + 1) * block[0] - first_row, num_rows))
        scale = scales[row].float().repeat_interleave(block[1])[:num_columns]  # [c]
        out[rows] = weight[rows].float() * scale
    return out


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight [r, c]. Return its e4m3 values [r, c] and its fp32 scales [ceil(r / 128), ceil(c / 128)];
    weight = value * scale."""
    rows, columns = scale_shape(tuple(weight.shape))
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=_SMALLEST_AMAX) / LARGEST  # [rows, columns]
    quantized = (blocks / scales[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales
