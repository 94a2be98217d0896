"""Rotary position embedding (Su et al. 2021) as the families have it: on all or on the first dimensions of a head, halves or neighbours
turning together, with Llama 3.1's or YaRN's stretched wavelengths.

Cosines and sines are looked up once per micro-batch by position; every layer turns its queries and keys with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from engines.megatron.shape import Llama3Scaling, ModelShape, Rotary, YarnScaling


def rotary_width(shape: ModelShape) -> int:
    """Dimensions of a query or key head that turn. In latent attention only the last ones, which carry the position, can."""
    return int((shape.latent.qk_rope_head_dim if shape.latent else shape.head_dim) * shape.rotary.fraction)


def cosines_and_sines(positions: Tensor, width: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Rotary embedding at these positions.

    Args:
        positions: [t]
        width: dimensions that turn.
        rotary: of the model.

    Returns:
        cosines and sines, [t, 1, width], fp32.
    """
    angles = torch.outer(positions.float(), frequencies(rotary, width, positions.device))
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    length = yarn_length(rotary.scaling) if isinstance(rotary.scaling, YarnScaling) else 1.0
    return (angles.cos(), angles.sin()) if length == 1.0 else (angles.cos() * length, angles.sin() * length)


def frequencies(rotary: Rotary, width: int, device: torch.device | None = None) -> Tensor:
    """Angle per position of every pair of dimensions. [width / 2]"""
    plain = 1.0 / (rotary.base ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width))
    if isinstance(rotary.scaling, Llama3Scaling):
        return _llama3(plain, rotary.scaling)
    if isinstance(rotary.scaling, YarnScaling):
        return _yarn(plain, rotary.base, width, rotary.scaling)
    return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths are stretched by the factor, short ones are not, those between partly. [n] -> [n]"""
    turns = scaling.original_max_positions * plain / (2 * math.pi)  # within the context that the model was trained on
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(plain: Tensor, base: float, width: int, scaling: YarnScaling) -> Tensor:
    """Like Llama 3's, but the part that is kept falls linearly over the dimensions. [n] -> [n]"""

    def dimension(turns: float) -> float:  # whose pair turns so often within the original context
        return width * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    if low == high:
        high += 0.001  # type: ignore[assignment]  # as in YaRN's own code: a step, not a division by zero
    ramp = (torch.arange(width // 2, dtype=torch.float32, device=plain.device) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def yarn_length(scaling: YarnScaling) -> float:
    """By how much turned queries and keys are longer. DeepSeek's two mscales divide each other; without both only the factor counts."""
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def softmax_scale(shape: ModelShape) -> float:
    """By which products of queries and keys are multiplied. Latent attention puts YaRN's mscale on all dimensions here."""
    scale, scaling = shape.head_dim**-0.5, shape.rotary.scaling
    if shape.latent and isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= _mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def turn(x: Tensor, cos_sin: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate the first dimensions of every head. x: [t, heads, head_dim]"""
    return (_fused_rotate() if x.is_cuda else rotate)(x, *cos_sin, interleaved)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, interleaved: bool = False) -> Tensor:
    """The rotation, computed in fp32 like the engine's kernel does. x: [t, heads, head_dim]

    Interleaved pairs (0, 1), (2, 3), ... come out as halves: queries and keys alike, so their products are the same.
    """
    width = cosines.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cosines, sines, interleaved), x[..., width:]), dim=-1)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


@cache
def _fused_rotate() -> Callable[..., Tensor]:
    """One kernel forwards and one backwards; for any number of tokens."""
    return torch.compile(rotate, dynamic=True)
