"""The words in which a run says where it stands in its data. They lie in every rollout's commit: old ones must always be understood."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from storage.refs import Frozen


class Segment(Frozen):
    """A block of rows of one file that entered the run together."""

    file: int  # index in --prompt-data (paths may move, the order of the files may not)
    start: int
    rows: int
    digest: str  # xxh3-64 of the rows
    order: Literal["stored", "computed"] = "stored"  # how it is shuffled: order.permutation or .scattered

    @model_serializer(mode="wrap")
    def _as_before(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A segment is compared with what earlier commits say of it, and they may not know `order`."""
        return {key: value for key, value in plain(self).items() if (key, value) != ("order", "stored")}


class Place(Frozen):
    """Where a run stands in one of several weighted sources."""

    epoch: int = 0
    cursor: int = 0  # prompts of this epoch already visited
    credit: int = 0  # what is owed to it, in order.WHOLE-ths of a prompt


class SourceState(Frozen):
    """Where a run stands in its data."""

    epoch: int = 0  # of the files one after another; with weights, `places` has them instead
    cursor: int = 0  # prompts of this epoch already visited: issued or skipped
    issued: int = 0  # prompts issued in all
    skipped: int = 0  # prompts not admitted, in all
    segments: tuple[Segment, ...]
    places: tuple[Place, ...] = ()  # one per entry of --prompt-data if they are weighted, else none

    @property
    def num_rows(self) -> int:
        """Prompts in an epoch."""
        return sum(segment.rows for segment in self.segments)
