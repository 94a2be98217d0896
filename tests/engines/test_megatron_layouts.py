"""Data, tensor, sequence, pipeline, virtual pipeline and context parallelism over two real processes."""

from collections.abc import Callable

import pytest


@pytest.mark.integration
def test_every_layout_of_two_ranks_is_the_same_model(run_two_ranks: Callable[[str, float], str]) -> None:
    """Losses, gradients, gathered weights, bit-exact resume, and checkpoints that load under another layout."""
    run_two_ranks("megatron_ranks.py", 240)
