"""The norm and the scaling of gradients, compared with Megatron's own functions."""

from __future__ import annotations

import pytest
import torch

from penstock.engines.megatron import patches as clipping

SHAPES = [(3, 5), (1,), (4096,), (64, 32)]


def make_tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def test_norm_equals_that_of_all_elements() -> None:
    tensors = make_tensors()
    norm, per_tensor = clipping.l2_norm(1, torch.zeros(1), [tensors], False)
    expected = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    assert norm.shape == (1,) and per_tensor is None
    assert norm.double().item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("in_place", [True, False])
def test_scaled_tensors_equal_megatrons_bit_for_bit(in_place: bool) -> None:
    from penstock.engines.megatron.compat import import_megatron

    import_megatron()
    from megatron.core.utils import local_multi_tensor_scale

    sources, expected = make_tensors(), make_tensors()
    targets = sources if in_place else [torch.empty_like(tensor) for tensor in sources]
    clipping.scale(1, torch.zeros(1), [sources, targets], 0.37)
    local_multi_tensor_scale(1, torch.zeros(1), [expected, expected], 0.37)
    assert all(torch.equal(found, wanted) for found, wanted in zip(targets, expected, strict=True))
    if not in_place:
        assert all(torch.equal(found, wanted) for found, wanted in zip(sources, make_tensors(), strict=True))


@pytest.mark.gpu
def test_megatron_uses_the_functions() -> None:
    from penstock.engines.megatron.compat import import_megatron

    import_megatron()
    from megatron.core.optimizer import clip_grads

    assert clip_grads.l2_norm_impl is clipping.l2_norm
    assert clip_grads.multi_tensor_scale_impl is clipping.scale
