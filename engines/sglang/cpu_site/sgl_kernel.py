"""Stub of SGLang's kernel package `sgl_kernel`, of which no build for machines without CUDA exists.

SGLang imports names from `sgl_kernel`, but does not call them with `--attention-backend torch_native --sampling-backend
pytorch`. Any name can be imported from this stub; calling it raises NotImplementedError.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

if torch.cuda.is_available():
    raise ImportError("the CPU stub of sgl_kernel was imported on a machine with CUDA: install the package sgl_kernel")

__version__ = "0.0.0+cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        flags = "--sglang-attention-backend torch_native --sglang-sampling-backend pytorch"
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build: use {flags}")

    kernel.__name__ = name
    return kernel
