"""How fast a device could multiply matrices, for model FLOPs utilisation (Chowdhery et al. 2022, appendix B)."""

from __future__ import annotations

import torch

# dense bf16 FLOP/s as the makers' data sheets give them; the first name that a device's name contains counts
BF16_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def peak_flops(dtype: str) -> float | None:
    """Of this process's GPU, per second; None on a CPU, in another number format than bf16, and for devices that are not listed."""
    if dtype != "bf16" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in BF16_PEAKS.items() if known in name), None)
