"""Choose the kernel that computes causal attention over packed sequences (`--attention-backend`)."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from typing import Literal

import torch

from penstock.engines.families.shape import ModelShape
from penstock.storage.errors import OptionError

# "padded": batches of sequences of similar length, any device and dtype; "torch": torch's variable-length
# FlashAttention-2; "fa4": FlashAttention-4
AttentionKernel = Literal["padded", "torch", "fa4"]
FA4 = "flash-attn-4"  # package
FA4_WIDTHS = ((64, 64), (128, 128), (192, 128))  # of keys, of values; those tested


def choose_attention_kernel(backend: str | None, dtype: str, shape: ModelShape) -> AttentionKernel:
    """Return the kernel for a value of `--attention-backend`, on this machine.

    "auto", "flash", "fused" and None: in bf16 on a GPU "fa4" if it is installed and supports the GPU and the widths of
    the heads, else "torch"; without a GPU or in fp32 "padded". "unfused" and "local": "padded". "torch" and "fa4" name
    a kernel.
    """
    if backend in ("unfused", "local"):
        return "padded"
    kernel = torch_attention_kernel(dtype)
    if backend == "torch":
        if kernel == "padded":
            raise OptionError(
                f"--attention-backend torch needs bf16 on a GPU; found {dtype} on {_device_name()}: use auto"
            )
        return kernel
    problem = _fa4_problem(dtype, shape)
    if backend == "fa4" and problem:
        raise OptionError(
            f"--attention-backend fa4 needs bf16 on a Hopper GPU, the package {FA4}, and heads "
            f"of {' or '.join(map(str, FA4_WIDTHS))} (keys, values); found {problem}: use auto"
        )
    return kernel if problem else "fa4"


def runs_hopper_kernels(dtype: str) -> bool:
    """Return whether FlashAttention-4 and torch's grouped GEMM run here. They were tested in bf16 on Hopper only."""
    return torch.cuda.is_available() and dtype == "bf16" and torch.cuda.get_device_capability()[0] == 9


def torch_attention_kernel(dtype: str) -> AttentionKernel:
    """Return the best kernel of torch on this machine."""
    return "torch" if torch.cuda.is_available() and dtype == "bf16" else "padded"


def prepare_fa4() -> None:
    """Pass the GPU's number of processors to FlashAttention-4, which otherwise asks the driver in every forward pass:
    10 % of the host's time in a step of a 0.6B model on an H100."""
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    os.environ.setdefault("FLASH_ATTENTION_NUM_SMS", str(processors))


def _fa4_problem(dtype: str, shape: ModelShape) -> str:
    """Return why FlashAttention-4 does not work with this model on this machine, or "" if it does."""
    widths = (shape.head_dim, shape.latent.v_head_dim if shape.latent else shape.head_dim)
    if not runs_hopper_kernels(dtype):
        return f"{dtype} on {_device_name()}"
    if not any(distributions(name=FA4)):
        return "no such package"
    return "" if widths in FA4_WIDTHS else f"heads of {widths}"


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
