"""The norm and the scaling of gradients, in one launch each for all parameters.

Megatron without TransformerEngine and apex computes both tensor by tensor, and waits for the GPU at every norm. The
arguments are those of apex's functions, which Megatron calls (`patches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def l2_norm(chunk_size: int, flag: Tensor, tensors: Sequence[Sequence[Tensor]], *_: Any) -> tuple[Tensor, None]:
    """Return the L2 norm of all elements of `tensors[0]`. [1]

    Args:
        chunk_size, flag: not used.
        tensors: one list of fp32 tensors.
    """
    norms = torch._foreach_norm(list(tensors[0]))
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, flag: Tensor, tensors: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Set tensors[1][i] = tensors[0][i] * factor.

    Args:
        chunk_size, flag: not used.
        tensors: two lists of tensors of equal shapes, which may be the same tensors.
        factor: the factor.
    """
    sources, targets = map(list, tensors)
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)
