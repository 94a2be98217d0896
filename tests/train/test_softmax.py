"""Compare the passes over logits with plain formulas in float64: in torch, in Triton's interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.stages.train.algorithms import logprobs
from penstock.stages.train.algorithms.logprobs import softmax_gradient, softmax_sums
from tests.triton_interpreter import run_in_interpreter

CASES = [(rows, columns, temperature) for rows, columns in ((3, 5), (4, 5001), (0, 7)) for temperature in (1.0, 0.7)]


def awkward_logits(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return large logits, padded ones, and a row of one token and padding."""
    torch.manual_seed(rows * columns)
    logits = 8 * torch.randn(rows, columns)
    if rows:
        logits[0, columns // 2 :] = -1e30
        logits[1] = -1e30
        logits[1, 2] = 60.0
    return logits.to(dtype)


def check(logits: Tensor, temperature: float) -> None:
    """Compare sums and gradients with their formulas."""
    x = logits.double() / temperature
    max_x, sum_exp, sum_x_exp = softmax_sums(logits, temperature)
    highest = x.amax(-1)
    powers = (x - highest[:, None]).exp()
    expected = highest, powers.sum(-1), (powers * (x - highest[:, None])).sum(-1)
    for found, wanted in zip((max_x, sum_exp, sum_x_exp), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-5)

    scale, tilt, added = torch.randn(3, len(x), dtype=max_x.dtype, device=x.device)
    columns = torch.randint(x.shape[1], (len(x),), device=x.device)
    for slope in (None, tilt):
        found = softmax_gradient(logits, temperature, max_x, scale, slope, columns, added)
        factor = torch.zeros_like(scale) if slope is None else slope
        wanted = powers * (scale[:, None] + factor[:, None] * (x - highest[:, None]))
        wanted[torch.arange(len(x)), columns] += added
        assert found.dtype == logits.dtype
        rounding = 2**-7 if logits.dtype == torch.bfloat16 else 2e-5  # the interpreter cuts where a GPU rounds
        torch.testing.assert_close(found.double(), wanted, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "temperature"), CASES)
def test_softmax_passes_equal_their_formulas(rows: int, columns: int, temperature: float, dtype: torch.dtype) -> None:
    logits = awkward_logits(rows, columns, dtype)
    before = logits.clone()
    check(logits, temperature)
    assert torch.equal(logits, before)  # the head may still need them


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "temperature"), [*CASES, (9, 151936, 1.0)])
def test_kernels_equal_their_formulas(rows: int, columns: int, temperature: float, dtype: torch.dtype) -> None:
    logits = awkward_logits(rows, columns, dtype).cuda()
    check(logits, temperature)
    for parts in (softmax_sums(logits[:1], temperature), softmax_sums(logits[:1].repeat(50, 1), temperature)):
        for part, whole in zip(parts, softmax_sums(logits, temperature), strict=True):
            assert (part == whole[:1]).all()  # the same bits in any batch


@pytest.mark.integration
def test_kernels_in_tritons_interpreter() -> None:
    run_in_interpreter("tests.train.test_softmax:check_all")


def check_all() -> None:
    logprobs._use_triton_kernel = lambda logits: True
    for rows, columns, temperature in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            check(awkward_logits(rows, columns, dtype), temperature)
