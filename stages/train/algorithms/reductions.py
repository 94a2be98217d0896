"""How token losses become one number: as weights per token, computed once for a whole optimizer step.

Because the denominators are inside the weights, the step's loss is the plain sum of weight x loss over all tokens wherever they
are, so it cannot depend on micro-batches, packing, data, context or pipeline parallelism. Only trained tokens are counted: a
fully masked sample, or trajectory, adds nothing to any denominator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stages.plugins import load_function
from storage.errors import PluginError


def per_sample_weights(
    trajectory_index: Tensor,  # [N] trajectory of each trained token of the step, 0 .. num_trajectories-1
    num_trajectories: int,
) -> Tensor:  # [N] float64, sums to 1
    """Mean over trajectories of the mean over a trajectory's trained tokens (siblings of one agent execution share theirs)."""
    num_tokens = torch.bincount(trajectory_index, minlength=num_trajectories)
    num_trained = (num_tokens > 0).sum().clamp(min=1)
    return 1.0 / (num_tokens[trajectory_index].double() * num_trained)


def per_token_weights(
    trajectory_index: Tensor,  # [N]
    num_trajectories: int,
) -> Tensor:  # [N] float64, sums to 1
    """Mean over all trained tokens of the step (`--calculate-per-token-loss`)."""
    num_tokens = len(trajectory_index)
    return torch.full((num_tokens,), 1.0 / max(num_tokens, 1), dtype=torch.float64)


# trajectory_index [m], sample_index [m], num_trajectories -> weights [m]
Reducer = Callable[[Tensor, Tensor, int], Tensor]


def custom_reducer(path: str) -> Reducer:
    """The user's weights of the policy-gradient part of the loss, for the m trained tokens of a step (all samples, all ranks).

    Raises:
        PluginError: no such function; when called, if it returns something else than a finite number per token.
    """
    function = load_function(path, usual_name="weights")

    def weigh(trajectory_index: Tensor, sample_index: Tensor, num_trajectories: int) -> Tensor:
        weights = function(trajectory_index, sample_index, num_trajectories)
        if weights.shape != trajectory_index.shape or not weights.isfinite().all():
            raise PluginError(
                f"{path} returned weights of shape {list(weights.shape)}: return a finite one for each of the "
                f"{len(trajectory_index)} trained tokens"
            )
        return weights.double()

    return weigh
