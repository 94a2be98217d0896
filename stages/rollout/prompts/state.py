"""Define the data position of a run, which every rollout commit stores."""

from __future__ import annotations

from typing import Literal

from penstock.storage.commit import Frozen


class Segment(Frozen):
    """Consecutive rows of one entry of --prompt-data that were added together: the rows that the entry had in the run's
    first round, or the rows appended to it before a later round."""

    file: int  # index of the entry in --prompt-data (paths may change, the order of the entries must not)
    start: int  # number of the first row
    rows: int  # number of rows
    digest: str  # xxh3-64 of the rows
    order: Literal["stored", "computed"]  # shuffled by order.permutation (stored) or order.permuted_index


class SourcePosition(Frozen):
    """The data position in one weighted entry of --prompt-data."""

    epoch: int = 0
    cursor: int = 0  # number of prompts of this epoch already visited (issued or skipped)
    credit: int = 0  # credit in the weighted round robin (order.select_sources); order.WHOLE is one prompt


class SourceState(Frozen):
    """The data position of a run: the epoch, the number of prompts already visited in it, and all rows of --prompt-data
    when the position was recorded."""

    epoch: int = 0  # current epoch without weights; with weights, see `places`
    cursor: int = 0  # number of prompts of this epoch already visited (issued or skipped)
    issued: int = 0  # number of prompts issued in the run
    skipped: int = 0  # number of prompts skipped in the run because they were too long
    segments: tuple[Segment, ...]  # all rows of --prompt-data when this state was recorded
    places: tuple[SourcePosition, ...] = ()  # with weights, one position per entry of --prompt-data; else empty

    @property
    def num_rows(self) -> int:
        """Number of prompts in an epoch that takes each row once (without --prompt-data-weights)."""
        return sum(segment.rows for segment in self.segments)
