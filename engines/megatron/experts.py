"""The numbers of a mixture of experts that replaying its routing needs. No torch here, so preflight and the rollout can ask."""

from __future__ import annotations

from engines.megatron.shape import ModelShape
from storage.errors import OptionError
from storage.routed_experts import ExpertsFormat


def experts_format(shape: ModelShape, option: str) -> ExpertsFormat:
    """How a model's routed experts are stored.

    Args:
        shape: of the model.
        option: that asks for it, for the error.

    Raises:
        OptionError: the model has no experts.
    """
    if shape.experts is None:
        raise OptionError(f"{option}, but the {shape.architecture} of this checkpoint has no experts: drop the option")
    return ExpertsFormat(
        num_layers=shape.num_layers,
        num_dense_layers=shape.experts.num_dense_layers,
        num_experts=shape.experts.num_experts,
        top_k=shape.experts.top_k,
    )
