"""Define the position of a run in its data, as stored in every rollout commit. Old commits must stay readable."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from penstock.storage.refs import Frozen


class Segment(Frozen):
    """Consecutive rows of one entry of --prompt-data that were added to the run at the same time."""

    file: int  # index of the entry in --prompt-data (paths may change, the order of the entries must not)
    start: int  # number of the first row
    rows: int  # number of rows
    digest: str  # xxh3-64 of the rows
    order: Literal["stored", "computed"] = "stored"  # shuffled with order.permutation (stored) or order.scattered

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `order` if it has its default value, because earlier commits have segments without this field."""
        return {key: value for key, value in plain(self).items() if (key, value) != ("order", "stored")}


class Place(Frozen):
    """The position in one weighted entry of --prompt-data."""

    epoch: int = 0
    cursor: int = 0  # number of prompts of this epoch already visited (issued or skipped)
    credit: int = 0  # credit of the entry in order.select_sources; order.WHOLE is one prompt


class SourceState(Frozen):
    """The position of a run in its data."""

    epoch: int = 0  # epoch without weights; with weights, see `places`
    cursor: int = 0  # number of prompts of this epoch already visited (issued or skipped)
    issued: int = 0  # number of prompts issued in the run
    skipped: int = 0  # number of prompts skipped in the run because they were too long
    segments: tuple[Segment, ...]  # all rows that the run has seen
    places: tuple[Place, ...] = ()  # with weights, one position per entry of --prompt-data; else empty

    @property
    def num_rows(self) -> int:
        """Number of prompts in an epoch of unweighted files."""
        return sum(segment.rows for segment in self.segments)
