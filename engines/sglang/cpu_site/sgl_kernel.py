"""Stands in for `sgl_kernel` on a machine without CUDA, where the package has no build.

SGLang imports names from it but, with `--attention-backend torch_native --sampling-backend pytorch`, calls none of them. Any
name can be imported; calling one says what is missing.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

if torch.cuda.is_available():
    raise ImportError("this stand-in for sgl_kernel was imported on a machine with CUDA: install the real one")

__version__ = "0.0.0+cpu"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        flags = "--sglang-attention-backend torch_native --sglang-sampling-backend pytorch"
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build: use {flags}")

    kernel.__name__ = name
    return kernel
