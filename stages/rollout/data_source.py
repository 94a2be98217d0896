"""Which prompt comes next: epochs, shuffling, and a position that can be written down and taken up again exactly.

The source itself holds no position. A position is a small frozen value, `SourceState`, and `take` is a function from one to the
next, so a rollout that failed half-way is simply taken again from the same state: no prompt is lost and none is served twice.
The state after rollout r lies in r's commit, and nowhere else.

Data only grows. What a run has seen is a list of segments (file, first row, number of rows, hash of their content). Rows or files
appended later form new segments with permutations of their own, visited at the end of the epoch; old permutations never change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from stages.rollout.config import RolloutConfig
from stages.rollout.prompt_files import read_rows
from storage.refs import Frozen

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """One issue of one row."""

    issue: int  # how many prompts the run had issued before
    epoch: int
    file: int  # index in --prompt-data
    row: int  # in that file
    content: str | Messages
    label: str
    metadata: dict[str, Any]


class Segment(Frozen):
    """A block of rows of one file that entered the run together."""

    file: int  # index in --prompt-data (paths may move, the order of the files may not)
    start: int
    rows: int
    digest: str  # xxh3-64 of the rows


class SourceState(Frozen):
    """Where a run stands in its data."""

    epoch: int = 0
    cursor: int = 0  # prompts of this epoch already issued
    issued: int = 0  # prompts issued in all
    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """Prompts in an epoch."""
        return sum(segment.rows for segment in self.segments)


class PromptSource:
    """The rows of all files, and their order in every epoch.

    Args:
        files: rows of each file, as `read_rows` gives them.
        shuffle: a new random order each epoch; else the order of the files.
        seed: of that order.
    """

    def __init__(self, files: Sequence[list[bytes]], *, shuffle: bool, seed: int) -> None:
        self.files = files
        self.shuffle = shuffle
        self.seed = seed
        self._digests: dict[tuple[int, int, int], str] = {}
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # segment -> epoch, permutation: only the latest epoch's

    @classmethod
    def open(cls, config: RolloutConfig) -> PromptSource:
        """Read all prompt files. Raises ValueError for whatever is wrong with them."""
        if not config.prompt_data:
            raise ValueError("--prompt-data is missing: give JSONL or Parquet files with prompts")
        files = [read_rows(path, config) for path in config.prompt_data]
        return cls(files, shuffle=config.rollout_shuffle, seed=config.rollout_seed)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.files)

    def restore(self, saved: dict[str, Any] | None) -> SourceState:
        """The state to go on from: the beginning, or `saved` with whatever was appended since.

        Raises:
            ValueError: rows that the run has seen are gone or have changed.
        """
        state = SourceState(segments=()) if saved is None else SourceState.model_validate(saved)
        known = [0] * len(self.files)
        for segment in state.segments:
            self._check_unchanged(segment)
            known[segment.file] = segment.start + segment.rows
        new = [
            Segment(file=file, start=start, rows=len(rows) - start, digest=self._digest(file, start, len(rows)))
            for file, (start, rows) in enumerate(zip(known, self.files))
            if len(rows) > start
        ]
        return state.model_copy(update={"segments": (*state.segments, *new)})

    def take(self, state: SourceState, count: int) -> tuple[list[Prompt], SourceState]:
        """The next `count` prompts (over any number of epochs) and the state after them. Changes nothing."""
        assert state.num_rows > 0, "a source is never empty"
        prompts = []
        epoch, cursor = state.epoch, state.cursor
        for issue in range(state.issued, state.issued + count):
            if cursor == state.num_rows:  # only now: rows appended at the very end still belong to the epoch
                epoch, cursor = epoch + 1, 0
            file, row = self._locate(state.segments, epoch, cursor)
            content, label, metadata = json.loads(self.files[file][row])
            prompts.append(Prompt(issue, epoch, file, row, content, label, metadata))
            cursor += 1
        return prompts, state.model_copy(update={"epoch": epoch, "cursor": cursor, "issued": state.issued + count})

    def _locate(self, segments: Sequence[Segment], epoch: int, cursor: int) -> tuple[int, int]:
        """File and row of an epoch's prompt number `cursor`."""
        for index, segment in enumerate(segments):
            if cursor < segment.rows:
                return segment.file, segment.start + self._position(index, segment.rows, epoch, cursor)
            cursor -= segment.rows
        raise AssertionError("cursor lies beyond the epoch")

    def _position(self, index: int, rows: int, epoch: int, cursor: int) -> int:
        if not self.shuffle:
            return cursor
        cached_epoch, order = self._orders.get(index, (-1, np.empty(0, dtype=np.int64)))
        if cached_epoch != epoch or len(order) != rows:
            # RandomState, not Generator: NumPy promises that its stream never changes (NEP 19), and resumed runs live on that.
            order = np.random.RandomState([self.seed, epoch, index]).permutation(rows)
            self._orders[index] = (epoch, order)
        return int(order[cursor])

    def _digest(self, file: int, start: int, stop: int) -> str:
        key = (file, start, stop)
        if key not in self._digests:
            digest = xxhash.xxh3_64()
            for row in self.files[file][start:stop]:
                digest.update(row)
                digest.update(b"\n")
            self._digests[key] = digest.hexdigest()
        return self._digests[key]

    def _check_unchanged(self, segment: Segment) -> None:
        stop = segment.start + segment.rows
        found = len(self.files[segment.file]) if segment.file < len(self.files) else 0
        if found < stop:
            raise ValueError(
                f"file {segment.file + 1} of --prompt-data has {found} rows; this run has seen {stop} of it: "
                "restore the rows, or fork the run"
            )
        if self._digest(segment.file, segment.start, stop) != segment.digest:
            raise ValueError(
                f"rows {segment.start} to {stop - 1} of file {segment.file + 1} of --prompt-data have changed "
                "since this run saw them: rows may only be appended; restore them, or fork the run"
            )


def check_prompt_data(config: RolloutConfig, *, demonstrations: bool = False) -> int:
    """Preflight: read everything and look at every prompt. Returns the number of rows.

    Args:
        config: names the files and columns.
        demonstrations: rows are conversations to learn from (SFT), not prompts to answer.

    Raises:
        ValueError: the first thing wrong.
    """
    source = PromptSource.open(config)
    for path, rows in zip(config.prompt_data, source.files):
        for number, row in enumerate(rows):
            content = json.loads(row)[0]
            if demonstrations and not (isinstance(content, list) and any(m["role"] == "assistant" for m in content)):
                raise ValueError(
                    f"{path} row {number}: column {config.input_key!r} is no conversation with an assistant's turn, "
                    "and SFT learns from nothing else: name the column of messages with --input-key"
                )
            if not demonstrations and isinstance(content, list) and not config.apply_chat_template:
                raise ValueError(
                    f"{path} row {number}: column {config.input_key!r} holds chat messages, and plain text is needed "
                    "without a chat template: give --apply-chat-template"
                )
    return len(source)
