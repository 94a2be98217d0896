"""Derive from a model's shape the format in which the routed expert ids of tokens are stored. Does not import torch,
because preflight and the rollout use this module."""

from __future__ import annotations

from penstock.engines.families.shape import ModelShape
from penstock.storage.errors import OptionError
from penstock.storage.samples.routed_experts import ExpertsFormat


def experts_format(shape: ModelShape, option: str) -> ExpertsFormat:
    """Return the format in which the routed expert ids of a model's tokens are stored.

    Args:
        shape: shape of the MoE model.
        option: command-line flag that needs routed experts, for the error message.

    Raises:
        OptionError: the model has no experts.
    """
    if shape.experts is None:
        raise OptionError(f"{option} needs an MoE model, but {shape.architecture} has no experts: drop the option")
    return ExpertsFormat(
        num_layers=shape.num_layers,
        num_dense_layers=shape.experts.num_dense_layers,
        num_experts=shape.experts.num_experts,
        top_k=shape.experts.top_k,
    )
