"""Rotary position embedding (RoPE, Su et al. 2021) in the variants of the supported model families: full or partial
(applied to the first dimensions of a head only), half-split or interleaved pairs, and frequency scaling of Llama 3.1 or
YaRN; and M-RoPE of vision-language models, whose tokens have three positions.

The cosines and sines of all positions are computed once per micro-batch; every layer applies them to its queries and
keys.

RMSNorm for Megatron layers without TransformerEngine, and RMSNorm of query and key heads together with RoPE.

Megatron-core's own torch norm does not support sequence parallelism, where each tensor-parallel rank normalizes only
its part of the tokens. The norm here supports it: `weight.sequence_parallel = True` makes Megatron all-reduce the
weight's gradient over the tensor-parallel ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engines.families.shape import Llama3Scaling, ModelShape, Rotary, YarnScaling

if torch.cuda.is_available():
    from penstock.engines.megatron.triton_kernels import normalize_and_rotate


def rope_dim(shape: ModelShape) -> int:
    """Return the number of dimensions of a query or key head to which RoPE is applied. In MLA these are among
    the last `qk_rope_head_dim` dimensions of a head."""
    return int((shape.latent.qk_rope_head_dim if shape.latent else shape.head_dim) * shape.rotary.fraction)


def rope_cos_sin(positions: Tensor, dim: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return the RoPE cosines and sines for `dim` dimensions and the position of each token in its sequence, multiplied
    by YaRN's attention factor. [t], or [3, t] with M-RoPE -> [t, 1, dim] each, fp32"""
    frequencies = rope_frequencies(rotary, dim, positions.device)
    if positions.ndim == 1:
        angles = torch.outer(positions.float(), frequencies)
    else:
        assert rotary.sections is not None, "three positions need M-RoPE"
        # For each RoPE pair, which of a token's three positions rotates it: 0 time, 1 height, 2 width.
        axes = [axis for axis, size in enumerate(rotary.sections) for _ in range(size)]
        if rotary.alternating_sections:
            axes = [pair % 3 if pair < 3 * rotary.sections[pair % 3] else 0 for pair in range(len(axes))]
        angles = positions.float()[axes].T * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    factor = yarn_attention_factor(rotary.scaling) if isinstance(rotary.scaling, YarnScaling) else 1.0
    return (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)


def rope_frequencies(rotary: Rotary, dim: int, device: torch.device | None = None) -> Tensor:
    """Return the inverse frequencies (radians per position) of the RoPE pairs: scaling divides low ones by its factor,
    keeps high ones, and interpolates between them. [dim / 2]"""
    plain = 1.0 / (rotary.base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim))
    scaling = rotary.scaling
    if isinstance(scaling, Llama3Scaling):
        rotations = scaling.original_max_positions * plain / (2 * math.pi)  # full turns within the original context
        unscaled = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        unscaled = unscaled.clamp(0, 1)
        return (1 - unscaled) * plain / scaling.factor + unscaled * plain
    if isinstance(scaling, YarnScaling):
        # The ramp begins and ends at the pairs with these numbers of full turns within the original context.
        first, last = (
            dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        low, high = max(math.floor(first), 0), float(min(math.ceil(last), dim - 1))
        if low == high:
            high += 0.001  # avoids a division by zero, as in YaRN's own code
        ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / (high - low)
        unscaled = 1 - ramp.clamp(0, 1)
        return plain / scaling.factor * (1 - unscaled) + plain * unscaled
    return plain


def yarn_attention_factor(scaling: YarnScaling) -> float:
    """Return YaRN's attention factor, by which queries and keys are multiplied together with RoPE: with `mscale` and
    `mscale_all_dim` (DeepSeek) the quotient of the two magnitude scalings, otherwise that of the scaling factor."""
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """Return YaRN's magnitude scaling, 0.1 * weight * ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(shape: ModelShape) -> float:
    """Return the factor by which attention scores are multiplied before the softmax: 1 / sqrt(head_dim). MLA with YaRN
    multiplies this by the square of the magnitude scaling for `mscale_all_dim`."""
    scale, scaling = shape.head_dim**-0.5, shape.rotary.scaling
    if shape.latent and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= _mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def apply_rope(x: Tensor, cos_sin: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Apply RoPE to queries or keys, with a fused kernel on a GPU. [t, heads, head_dim] -> [t, heads, head_dim]

    Args:
        cos_sin: cosines and sines, [t, 1, dim] each; RoPE is applied to the first `dim` dimensions of a head.
        interleaved: whether pairs are (0, 1), (2, 3), ... instead of (0, dim / 2), (1, dim / 2 + 1), ...
    """
    dim = cos_sin[0].shape[-1]
    if not x.is_cuda:
        return apply_rope_unfused(x, *cos_sin, interleaved)
    rotated = normalize_and_rotate(x[..., :dim], cos_sin=cos_sin, interleaved=interleaved)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)


def apply_rope_unfused(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False) -> Tensor:
    """Apply RoPE in fp32 with plain torch operations; arguments and result as in `apply_rope`. [t, heads, head_dim]

    For interleaved pairs the result has the half-split order of dimensions. Queries and keys are permuted in the same
    way, so their dot products do not change.
    """
    dim = cosines.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((apply_rope_unfused(x[..., :dim], cosines, sines, interleaved), x[..., dim:]), dim=-1)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * weight over the last dimension, where rms(x) = sqrt(mean(x^2) + eps) in fp32."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return normalize_and_rotate(x.reshape(-1, 1, x.shape[-1]), self.weight, self.eps).view(x.shape)
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class HeadNorm(RMSNorm):
    """The norm of query or key heads. Megatron's attention layer calls it before RoPE; to compute both with one kernel,
    this call returns the heads unchanged, and `CoreAttention` calls `normalize_and_rotate`."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def normalize_and_rotate(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
        """Return RoPE(x / rms(x) * weight). [t, heads, head_dim]; arguments as in `apply_rope`"""
        if x.is_cuda and cos_sin[0].shape[-1] == x.shape[-1]:
            return normalize_and_rotate(x, self.weight, self.eps, cos_sin, interleaved)
        return apply_rope(super().forward(x), cos_sin, interleaved)
