"""fp8 weights in blocks, as DeepSeek's own checkpoints hold them: e4m3 numbers and one fp32 scale for every 128 x 128 of them.

Pure tensor functions, and the rule that says which weights of a model are quantised. Reading and writing files is `hf_files` and
`hf_writer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_AMAX = 1e-12  # a block of zeros gets a scale that is no zero: it is divided by

# what travels in config.json; activations are quantised when the model runs, so nothing of them is stored
QUANTIZATION: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether DeepSeek quantises the weight of this Hugging Face name: the projections of attention, MLPs and experts.

    Not embeddings, head, norms, routers, and the projection that joins embedding and state in a multi-token prediction layer.
    """
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    return name.endswith(".weight") and len(shape) == 2 and "_proj" in module and module != "eh_proj"


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[int, int]:
    """Shape of the scales of a weight."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def dequantise(weight: Tensor, scales: Tensor, first_row: int = 0, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """[r, c] rows of a quantised weight as bf16.

    Args:
        weight: [r, c] in e4m3, the rows from `first_row` on.
        scales: of the whole weight.
        first_row: where the rows stand in the weight.
        block: rows and columns that share a scale.
    """
    num_rows, num_columns = weight.shape
    of_row = torch.arange(first_row, first_row + num_rows) // block[0]
    first, last = int(of_row[0]), int(of_row[-1]) + 1
    out = torch.empty(num_rows, num_columns, dtype=torch.bfloat16)
    for row in range(first, last):  # one row of blocks after the other: few temporaries
        rows = slice(max(row * block[0] - first_row, 0), min((row + 1) * block[0] - first_row, num_rows))
        scale = scales[row].float().repeat_interleave(block[1])[:num_columns]  # [c]
        out[rows] = weight[rows].float() * scale
    return out


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[r, c] -> the same in e4m3, and the scales [r / 128, c / 128] that multiply it back."""
    rows, columns = scale_shape(tuple(weight.shape))
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=_SMALLEST_AMAX) / LARGEST  # [rows, columns]
    quantised = (blocks / scales[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return quantised[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales
