"""Choose the kernel that computes causal attention over packed sequences (`--attention-backend`)."""

from __future__ import annotations

from importlib.metadata import distributions
from typing import Literal

import torch

from penstock.storage.errors import OptionError

# "padded": batches of sequences of similar length, any device and dtype; "torch": torch's variable-length
# FlashAttention-2; "fa4": FlashAttention-4
AttentionKernel = Literal["padded", "torch", "fa4"]
FA4 = "flash-attn-4"  # package
FA4_CAPABILITIES = (9, 10)  # major compute capabilities for which it has a deterministic backward pass


def choose_attention_kernel(backend: str | None, dtype: str) -> AttentionKernel:
    """Return the kernel for a value of `--attention-backend`, on this machine.

    "auto", "flash", "fused" and None: "torch" in bf16 on a GPU, else "padded". "unfused" and "local": "padded". "torch"
    and "fa4" name a kernel.

    Raises:
        OptionError: the named kernel does not work on this machine or with this dtype.
    """
    if backend in ("unfused", "local"):
        return "padded"
    found = f"{dtype} on {torch.cuda.get_device_name() if torch.cuda.is_available() else 'a CPU'}"
    has_flash = torch.cuda.is_available() and dtype == "bf16"
    if backend == "torch" and not has_flash:
        raise OptionError(f"--attention-backend torch needs bf16 on a GPU; found {found}: use auto")
    if backend == "fa4":
        is_installed = any(distributions(name=FA4))
        if not has_flash or torch.cuda.get_device_capability()[0] not in FA4_CAPABILITIES or not is_installed:
            raise OptionError(
                f"--attention-backend fa4 needs the package {FA4}, and bf16 on a GPU of compute capability 9 or 10; "
                f"found {found}{'' if is_installed else ' without the package'}: use auto"
            )
        return "fa4"
    return "torch" if has_flash else "padded"
