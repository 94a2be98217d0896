"""Which prompt comes next: epochs, shuffling, weighted sources, and a position that can be written down and taken up again exactly.

The source itself holds no position. A position is a small frozen value, `SourceState`, and `take` is a function from one to the
next, so a rollout that failed half-way is simply taken again from the same state: no prompt is lost and none is served twice.
The state after rollout r lies in r's commit, and nowhere else.

Data only grows. What a run has seen is a list of segments (file, first row, number of rows, hash of their content). Rows or files
appended later form new segments with permutations of their own, visited at the end of the epoch; old permutations never change.

The files of --prompt-data are visited one after another, or, with weights, each in epochs of its own. How rows are read and where they
lie is files.py's, the orders themselves are order.py's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from stages.rollout.config import RolloutConfig
from stages.rollout.prompts.files import Entry, column_names, read_entry
from stages.rollout.prompts.order import permutation, scattered, shares, turns
from stages.rollout.prompts.rows import FIRST
from stages.rollout.prompts.spool import SpooledRows
from stages.rollout.prompts.state import Place, Segment, SourceState
from storage.errors import DataError, OptionError

if TYPE_CHECKING:
    from stages.rollout.tokenizer import PromptTokenizer

Messages = list[dict[str, Any]]

LARGE = 1 << 22  # rows of a segment from which on its order is computed and not stored


@dataclass(frozen=True)
class Prompt:
    """One issue of one row."""

    issue: int  # how many prompts the run had issued before
    epoch: int
    file: int  # index in --prompt-data
    row: int  # of that entry
    content: str | Messages
    label: str
    metadata: dict[str, Any]  # with the tools, if the row has any
    tools: list[dict[str, Any]] | None = None  # for the chat template


Admits = Callable[[Sequence[Prompt]], Sequence[bool]]  # which of these prompts are served; of each prompt it says always the same


Lane = list[tuple[int, Segment]]  # what is visited in turn in every epoch: segments and their numbers


class PromptSource:
    """The rows of all files, and their order in every epoch.

    Args:
        files: rows of each entry of --prompt-data.
        shuffle: a new random order each epoch; else the order of the files.
        seed: of that order.
        weights: share of each entry; without them the files follow each other.
        names: of the entries, for messages.
    """

    def __init__(
        self,
        files: Sequence[Sequence[bytes]],
        *,
        shuffle: bool,
        seed: int,
        weights: Sequence[float] = (),
        names: Sequence[str] = (),
    ) -> None:
        self.files = files
        self.shuffle = shuffle
        self.seed = seed
        self.shares = shares(weights) if weights else []
        self.names = names
        self._digests: dict[tuple[int, int, int], str] = {}
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # segment -> epoch, permutation: only the latest epoch's

    @classmethod
    def open(cls, config: RolloutConfig) -> PromptSource:
        """Read all prompt files. Raises DataError for whatever is wrong with them."""
        entries = [read_entry(path, config) for path in _paths(config)]
        return cls(
            [entry.rows for entry in entries],
            shuffle=config.rollout_shuffle,
            seed=config.rollout_seed,
            weights=config.prompt_data_weights if len(entries) > 1 else (),
            names=[entry.name for entry in entries],
        )

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.files)

    def restore(self, saved: dict[str, Any] | None) -> SourceState:
        """The state to go on from: the beginning, or `saved` with whatever was appended since.

        Raises:
            DataError: rows that the run has seen are gone or have changed, or its weights are.
        """
        state = SourceState(segments=()) if saved is None else SourceState.model_validate(saved)
        known = [0] * len(self.files)
        for segment in state.segments:
            self._check_unchanged(segment)
            known[segment.file] = segment.start + segment.rows
        new = [
            Segment(
                file=file,
                start=start,
                rows=len(rows) - start,
                digest=self._digest(file, start, len(rows)),
                order="computed" if len(rows) - start > LARGE else "stored",
            )
            for file, (start, rows) in enumerate(zip(known, self.files))
            if len(rows) > start
        ]
        return state.model_copy(update={"places": self._places(state), "segments": (*state.segments, *new)})

    def take(self, state: SourceState, count: int, admits: Admits | None = None) -> tuple[list[Prompt], SourceState]:
        """The next `count` prompts (over any number of epochs) and the state after them. Changes nothing.

        Args:
            state: as `restore` gives it.
            count: how many.
            admits: judges prompts; those that it refuses are visited, counted as skipped, and others come in their stead.

        Raises:
            DataError: no prompt of a whole epoch is admitted.
        """
        assert state.num_rows > 0, "a source is never empty"
        if not state.places:
            lane = list(enumerate(state.segments))
            prompts, epoch, cursor, skipped = self._draw(lane, state.epoch, state.cursor, count, admits)
            where: dict[str, Any] = {"epoch": epoch, "cursor": cursor}
        else:
            prompts, places, skipped = self._draw_mixed(state, count, admits)
            where = {"places": places}
        issued = [replace(prompt, issue=issue) for issue, prompt in enumerate(prompts, start=state.issued)]
        where |= {"issued": state.issued + count, "skipped": state.skipped + skipped}
        return issued, state.model_copy(update=where)

    # ---- the order ------------------------------------------------------------------------------------------------------

    def _draw(self, lane: Lane, epoch: int, cursor: int, count: int, admits: Admits | None) -> tuple[list[Prompt], int, int, int]:
        """The next admitted prompts of a lane (their issue is not known yet), epoch and cursor behind the last one, and how many were skipped."""
        num_rows = sum(segment.rows for _, segment in lane)
        found: list[Prompt] = []
        skipped = in_vain = 0
        while len(found) < count:
            batch = []  # never more than are missing: so the last one visited is one that is served
            for _ in range(count - len(found)):
                if cursor == num_rows:  # only now: rows appended at the very end still belong to the epoch
                    epoch, cursor = epoch + 1, 0
                batch.append(self._read(lane, epoch, cursor))
                cursor += 1
            kept = batch if admits is None else [prompt for prompt, admitted in zip(batch, admits(batch)) if admitted]
            found += kept
            skipped += len(batch) - len(kept)
            in_vain = 0 if kept else in_vain + len(batch)
            if in_vain >= 2 * num_rows:  # a whole epoch is among them, wherever they began
                name = self.names[batch[0].file] if batch[0].file < len(self.names) else f"file {batch[0].file + 1}"
                raise DataError(
                    f"none of the {num_rows} prompts of {name} is short enough: raise --rollout-max-prompt-len or "
                    "--rollout-max-context-len, or give other prompts"
                )
        return found, epoch, cursor, skipped

    def _draw_mixed(self, state: SourceState, count: int, admits: Admits | None) -> tuple[list[Prompt], tuple[Place, ...], int]:
        """The same for weighted sources: who is asked does not depend on what is skipped, so the shares are those of the prompts served."""
        asked, credits = turns([place.credit for place in state.places], self.shares, count)
        drawn: list[Iterator[Prompt]] = []
        places = []
        num_skipped = 0
        for file, place in enumerate(state.places):
            lane = [(index, segment) for index, segment in enumerate(state.segments) if segment.file == file]
            prompts, epoch, cursor, skipped = self._draw(lane, place.epoch, place.cursor, asked.count(file), admits)
            drawn.append(iter(prompts))
            places.append(Place(epoch=epoch, cursor=cursor, credit=credits[file]))
            num_skipped += skipped
        return [next(drawn[file]) for file in asked], tuple(places), num_skipped

    def _read(self, lane: Lane, epoch: int, cursor: int) -> Prompt:
        """An epoch's prompt number `cursor`."""
        for index, segment in lane:
            if cursor < segment.rows:
                row = segment.start + self._position(index, segment, epoch, cursor)
                content, label, metadata, *rest = json.loads(self.files[segment.file][row])
                tools = rest[0] if rest else None
                return Prompt(-1, epoch, segment.file, row, content, label, metadata | ({"tools": tools} if tools else {}), tools)
            cursor -= segment.rows
        raise AssertionError("cursor lies beyond the epoch")

    def _position(self, index: int, segment: Segment, epoch: int, cursor: int) -> int:
        if not self.shuffle:
            return cursor
        if segment.order == "computed":
            return scattered(cursor, self.seed, epoch, index, segment.rows)
        cached_epoch, order = self._orders.get(index, (-1, np.empty(0, dtype=np.uint32)))
        if cached_epoch != epoch or len(order) != segment.rows:
            order = permutation(self.seed, epoch, index, segment.rows)
            self._orders[index] = (epoch, order)
        return int(order[cursor])

    # ---- what a run has seen --------------------------------------------------------------------------------------------

    def _places(self, state: SourceState) -> tuple[Place, ...]:
        """Where the run stands in each source. A run that gets weights later goes on in each file where it stands."""
        if not self.shares:
            if state.places:
                raise DataError(
                    "this run mixes its sources and this command gives no --prompt-data-weights: give them (they may be others), "
                    "or fork the run"
                )
            return ()
        places = list(state.places)
        if not places and state.segments:
            visited = [0] * len(self.files)
            before = 0
            for segment in state.segments:
                visited[segment.file] += min(max(state.cursor - before, 0), segment.rows)
                before += segment.rows
            seen = {segment.file for segment in state.segments}
            places = [Place(epoch=state.epoch, cursor=visited[file]) for file in range(len(self.files)) if file in seen]
        return (*places, *(Place() for _ in range(len(self.files) - len(places))))

    def _digest(self, file: int, start: int, stop: int) -> str:
        key = (file, start, stop)
        if key not in self._digests:
            digest = xxhash.xxh3_64()
            for piece in _content(self.files[file], start, stop):
                digest.update(piece)
            self._digests[key] = digest.hexdigest()
        return self._digests[key]

    def _check_unchanged(self, segment: Segment) -> None:
        stop = segment.start + segment.rows
        found = len(self.files[segment.file]) if segment.file < len(self.files) else 0
        if found < stop:
            raise DataError(
                f"file {segment.file + 1} of --prompt-data has {found} rows; this run has seen {stop} of it: "
                "restore the rows, or fork the run"
            )
        if self._digest(segment.file, segment.start, stop) != segment.digest:
            raise DataError(
                f"rows {segment.start} to {stop - 1} of file {segment.file + 1} of --prompt-data have changed "
                "since this run saw them: rows may only be appended; restore them, or fork the run"
            )


def _content(rows: Sequence[bytes], start: int, stop: int) -> Iterator[bytes]:
    """The bytes of some rows, a line break behind each."""
    if isinstance(rows, SpooledRows):
        yield from rows.content(start, stop)
    else:
        for row in rows[start:stop]:
            yield row
            yield b"\n"


def _paths(config: RolloutConfig) -> list[str]:
    if not config.prompt_data:
        raise OptionError("--prompt-data is missing: give JSONL or Parquet files with prompts")
    return config.prompt_data


def check_prompt_data(
    config: RolloutConfig,
    *,
    demonstrations: bool = False,
    labels: bool = False,
    tokenizer: PromptTokenizer | None = None,
    num_positions: int | None = None,
) -> int:
    """Read everything, look at every prompt, and render a sample of the rows. Returns the number of rows.

    Args:
        config: names the files and columns.
        demonstrations: rows are conversations to train on (SFT), not prompts to answer.
        labels: the reward compares responses to labels, so every row needs one.
        tokenizer: renders up to 64 rows of each entry; None renders none.
        num_positions: of the model: a rendered prompt and the longest response must fit. None: not checked.

    Raises:
        OptionError: options that contradict each other or the rows.
        DataError: the first thing wrong with a row.
        TemplateError: the chat template fails for a row.
    """
    if config.tool_key and not (config.apply_chat_template or demonstrations):
        raise OptionError(f"--tool-key {config.tool_key} has no effect without a chat template: give --apply-chat-template")
    num_rows = 0
    for path in _paths(config):
        entry = read_entry(path, config)
        _check_entry(entry, config, demonstrations=demonstrations, labels=labels)
        if tokenizer is not None:
            from stages.rollout.check import check_rows  # imports this module

            check_rows(path, entry.rows, config, tokenizer, demonstrations=demonstrations, num_positions=num_positions)
        num_rows += len(entry.rows)
    return num_rows


def _check_entry(entry: Entry, config: RolloutConfig, *, demonstrations: bool, labels: bool) -> None:
    chat, unanswered, unlabelled = (entry.first[key] for key in FIRST)
    if demonstrations and unanswered is not None:
        raise DataError(
            f"{entry.name} row {unanswered}: column {config.input_key!r} is not a conversation with an assistant message, and SFT trains "
            "on nothing else: name the column of messages with --input-key"
        )
    if not demonstrations and chat is not None and not config.apply_chat_template:
        raise DataError(
            f"{entry.name} row {chat}: column {config.input_key!r} holds chat messages, and plain text is needed "
            "without a chat template: give --apply-chat-template"
        )
    if labels and config.label_key is None:
        columns = ", ".join(map(repr, column_names(entry.name)))[:120]
        raise DataError(
            f"{entry.name} is read without labels, and the reward needs them: name their column with --label-key; it has {columns}"
        )
    if labels and unlabelled is not None:
        raise DataError(
            f"{entry.name} row {unlabelled}: column {config.label_key!r} is empty, and the reward needs a label: fill it in, remove the "
            "row, or name another column with --label-key"
        )
