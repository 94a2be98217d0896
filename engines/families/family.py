"""Definition of a model family (`Family`). `llama.py` has the shortest example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.engines.families.entries import ConfigEntries, EntryType
from penstock.engines.families.ops import TensorRow
from penstock.engines.families.rows import decoder_rows
from penstock.engines.families.shape import ModelShape


@dataclass(frozen=True)
class Family:
    """A model family: how its config.json is read, and the names of its tensors.

    Args:
        name: name of the family, stored with converted models.
        architecture: the family's value in config.json's `architectures`.
        model_types: values of config.json's `model_type` that only this architecture has.
        defaults: values of entries that config.json does not have, equal to the defaults of transformers' config class.
        read: returns the `ModelShape` fields that differ from those of a plain Llama, and calls `ConfigEntries.refuse`
            for values that Penstock does not support.
        rows: returns the tensor table of a shape: Megatron tensor names and their Hugging Face counterparts.
        entry_types: types of config.json entries that only this family has.
        expert_entries: function of the number of dense layers and of all layers that returns the config.json entries
            which set these numbers. Used to check the logits of a few layers of a large MoE model; with None, only
            the whole model can be checked.
    """

    name: str
    architecture: str
    model_types: tuple[str, ...]
    defaults: dict[str, Any]
    read: Callable[[ConfigEntries], dict[str, Any]]
    rows: Callable[[ModelShape], list[TensorRow]] = decoder_rows
    entry_types: dict[str, EntryType] = field(default_factory=dict)
    expert_entries: Callable[[int, int], dict[str, Any]] | None = None
