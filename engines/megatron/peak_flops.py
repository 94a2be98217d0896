"""Peak matrix-multiplication throughput of GPUs, for model FLOPs utilization (Chowdhery et al. 2022, appendix B)."""

from __future__ import annotations

import torch

# Dense bf16 FLOP/s per GPU from the vendors' data sheets. The first key that is a substring of the GPU's name is used.
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
    """Return the peak FLOP/s of this process's GPU; None on a CPU, for a dtype other than bf16, and for a GPU that is
    not in BF16_PEAKS."""
    if dtype != "bf16" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in BF16_PEAKS.items() if known in name), None)
