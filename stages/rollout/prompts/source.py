"""Serve prompts in a reproducible order, with epochs, shuffling, weighted sources and an exact position.

PromptSource itself has no position. The position is an immutable value, `SourceState`; `take` returns the next prompts
and the state after them. The state after round r is stored in the commit of round r, so a retry of a failed round takes
the same prompts again: no prompt is lost or served twice.

Rows can only be appended. The state lists all rows of --prompt-data as segments (file, first row, number of rows, hash
of the content). Rows or files appended before a resume form new segments with separate permutations, visited at the end
of the epoch; the permutations of existing segments never change.

Without weights, an epoch visits the entries of --prompt-data one after another; with weights, every entry counts its
own epochs. prompt_files.py reads the rows.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import xxhash

from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.prompts.prompt_files import read_prompt_files
from penstock.stages.rollout.prompts.prompt_rows import parse_canonical_row
from penstock.stages.rollout.prompts.spool import SpooledRows
from penstock.stages.rollout.text.templates import Messages
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Frozen
from penstock.storage.errors import DataError

logger = logging.getLogger(__name__)


class Segment(Frozen):
    """Consecutive rows of one entry of --prompt-data that were added together: the rows that the entry had in the run's
    first round, or the rows appended to it before a later round."""

    file: int  # index of the entry in --prompt-data (paths may change, the order of the entries must not)
    start: int  # number of the first row
    rows: int  # number of rows
    digest: str  # xxh3-64 of the rows
    order: Literal["stored", "computed"]  # shuffled by `permutation` (stored) or `permuted_index`


class SourcePosition(Frozen):
    """The data position in one weighted entry of --prompt-data."""

    epoch: int = 0
    cursor: int = 0  # number of prompts of this epoch already visited (issued or skipped)
    credit: int = 0  # credit in the weighted round robin (`select_sources`); WHOLE is one prompt


class SourceState(Frozen):
    """The data position of a run: the epoch, the number of prompts already visited in it, and all rows of --prompt-data
    when the position was recorded."""

    epoch: int = 0  # current epoch without weights; with weights, see `places`
    cursor: int = 0  # number of prompts of this epoch already visited (issued or skipped)
    issued: int = 0  # number of prompts issued in the run
    skipped: int = 0  # number of prompts skipped in the run because they were too long
    segments: tuple[Segment, ...]  # all rows of --prompt-data when this state was recorded
    places: tuple[SourcePosition, ...] = ()  # with weights, one position per entry of --prompt-data; else empty


LARGE = 1 << 22  # maximum rows of a segment whose permutation is kept in memory; above, it is computed row by row


@dataclass(frozen=True)
class Prompt:
    """A row of --prompt-data that the run has issued for generation (every epoch issues each row once)."""

    issue: int  # number of prompts that the run issued before this one
    epoch: int  # epoch in which the row was issued, from 0
    file: int  # index of the entry in --prompt-data
    row: int  # row number in that entry, from 0
    content: str | Messages
    label: str
    metadata: dict[str, Any]  # includes the entry `tools` if the row has tool definitions
    tools: list[dict[str, Any]] | None = None  # tool definitions for the chat template
    images: Sequence[str] = ()  # of the row, in the order of their places (prompt_rows.py)

    @property
    def position(self) -> dict[str, int]:
        """Epoch, file and row of the prompt, for the metadata of its samples."""
        return {"epoch": self.epoch, "file": self.file, "row": self.row}


PromptFilter = Callable[[Sequence[Prompt]], Sequence[bool]]  # whether each prompt is served; must be deterministic
Segments = list[tuple[int, Segment]]  # (index in SourceState.segments, segment), visited in this order


class PromptSource:
    """The rows of all entries of --prompt-data, and their order in every epoch: the order of the files or, with
    `shuffle`, a new random order. With `weights`, entries are mixed; without, they are visited one after another."""

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
        self.shares = weights_to_shares(weights) if weights else []
        self.names = names
        self._digests: dict[tuple[int, int, int], str] = {}
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # segment index -> (latest epoch, its permutation)

    @classmethod
    def open(cls, config: PromptConfig) -> PromptSource:
        """Read all files of --prompt-data. Raises DataError if a file is missing or malformed."""
        entries = list(read_prompt_files(config))
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
        """Return the position to continue from: the start of the data if `saved` is None, else `saved` plus new
        segments for rows appended since `saved` was written."""
        state = SourceState(segments=()) if saved is None else SourceState.model_validate(saved)
        known = [0] * len(self.files)
        for segment in state.segments:
            stop = segment.start + segment.rows
            num_rows = len(self.files[segment.file]) if segment.file < len(self.files) else 0
            problem = ""
            if num_rows < stop:
                problem = (
                    f"file {segment.file + 1} of --prompt-data has {num_rows} rows, but had {stop} in an earlier round"
                )
            elif self._hash_rows(segment.file, segment.start, stop) != segment.digest:
                problem = (
                    f"rows {segment.start} to {stop - 1} of file {segment.file + 1} of --prompt-data have changed "
                    "since an earlier round, but rows may only be appended"
                )
            if problem:
                raise DataError(
                    f"{problem}: restore the rows, or use the new data in a fork (penstock fork ... --prompt-data ...)"
                )
            known[segment.file] = stop
        new = [
            Segment(
                file=file,
                start=start,
                rows=len(rows) - start,
                digest=self._hash_rows(file, start, len(rows)),
                order="computed" if len(rows) - start > LARGE else "stored",
            )
            for file, (start, rows) in enumerate(zip(known, self.files))
            if len(rows) > start
        ]
        return state.model_copy(
            update={"places": self._positions_of_weighted_entries(state), "segments": (*state.segments, *new)}
        )

    def take(
        self, state: SourceState, count: int, prompt_filter: PromptFilter | None = None
    ) -> tuple[list[Prompt], SourceState]:
        """Return the next `count` prompts (across any number of epochs) and the state after them. Prompts that
        `prompt_filter` rejects count as skipped and are replaced by the next ones. Raises DataError if it rejects a
        whole epoch."""
        if not state.places:
            segments = list(enumerate(state.segments))
            prompts, epoch, cursor, skipped = self._take_from_segments(
                segments, state.epoch, state.cursor, count, prompt_filter
            )
            where: dict[str, Any] = {"epoch": epoch, "cursor": cursor}
        else:  # weighted entries; the weights apply to served prompts, not to skipped prompts
            order, credits = select_sources([place.credit for place in state.places], self.shares, count)
            drawn, places, skipped = list[Iterator[Prompt]](), list[SourcePosition](), 0
            for file, place in enumerate(state.places):
                segments = [(index, segment) for index, segment in enumerate(state.segments) if segment.file == file]
                of_file, epoch, cursor, num_skipped = self._take_from_segments(
                    segments, place.epoch, place.cursor, order.count(file), prompt_filter
                )
                drawn.append(iter(of_file))
                places.append(SourcePosition(epoch=epoch, cursor=cursor, credit=credits[file]))
                skipped += num_skipped
            prompts, where = [next(drawn[file]) for file in order], {"places": tuple(places)}
        issued = [replace(prompt, issue=issue) for issue, prompt in enumerate(prompts, start=state.issued)]
        where |= {"issued": state.issued + count, "skipped": state.skipped + skipped}
        return issued, state.model_copy(update=where)

    # ---- order of the rows -------------------------------------------------------------------------------------------

    def _take_from_segments(
        self, segments: Segments, epoch: int, cursor: int, count: int, prompt_filter: PromptFilter | None
    ) -> tuple[list[Prompt], int, int, int]:
        """Return the next `count` accepted prompts of `segments` (without `issue` numbers), the epoch and cursor after
        the last of these prompts, and the number of skipped prompts."""
        num_rows = sum(segment.rows for _, segment in segments)
        prompts: list[Prompt] = []
        skipped = skipped_in_a_row = 0
        while len(prompts) < count:
            batch = []  # never more prompts than are missing, so that every visited prompt is served or skipped
            for _ in range(count - len(prompts)):
                # The epoch ends only when the next prompt is read, so rows appended before that still belong to it.
                if cursor == num_rows:
                    epoch, cursor = epoch + 1, 0
                batch.append(self._read_prompt(segments, epoch, cursor))
                cursor += 1
            kept = batch if prompt_filter is None else [prompt for prompt, ok in zip(batch, prompt_filter(batch)) if ok]
            prompts += kept
            skipped += len(batch) - len(kept)
            skipped_in_a_row = 0 if kept else skipped_in_a_row + len(batch)
            if skipped_in_a_row >= 2 * num_rows:  # these prompts cover at least one whole epoch
                name = self.names[batch[0].file] if batch[0].file < len(self.names) else f"file {batch[0].file + 1}"
                raise DataError(
                    f"none of the {num_rows} prompts of {name} is within the length limit: raise "
                    "--rollout-max-prompt-len or --rollout-max-context-len, or give shorter prompts"
                )
        return prompts, epoch, cursor, skipped

    def _read_prompt(self, segments: Segments, epoch: int, cursor: int) -> Prompt:
        """Return prompt number `cursor` (from 0) of an epoch, without its `issue` number."""
        for index, segment in segments:
            if cursor >= segment.rows:
                cursor -= segment.rows
                continue
            position = cursor
            if self.shuffle and segment.order == "computed":
                position = permuted_index(cursor, self.seed, epoch, index, segment.rows)
            elif self.shuffle:
                cached_epoch, order = self._orders.get(index, (-1, np.empty(0, dtype=np.uint32)))
                if cached_epoch != epoch or len(order) != segment.rows:
                    order = permutation(self.seed, epoch, index, segment.rows)
                    self._orders[index] = (epoch, order)
                position = int(order[cursor])
            row = segment.start + position
            values = parse_canonical_row(self.files[segment.file][row])
            metadata = values.metadata | ({"tools": values.tools} if values.tools else {})
            return Prompt(
                -1, epoch, segment.file, row, values.prompt, values.label, metadata, values.tools, values.images
            )
        raise AssertionError("the cursor is beyond the last row of the epoch")

    # ---- rows of earlier rounds --------------------------------------------------------------------------------------

    def _positions_of_weighted_entries(self, state: SourceState) -> tuple[SourcePosition, ...]:
        """Return the position in each weighted entry of --prompt-data; () without weights. If earlier rounds had no
        weights, compute the positions from the number of rows that these rounds visited."""
        if not self.shares:
            if state.places:
                raise DataError(
                    "earlier rounds of this run used --prompt-data-weights, but the flag is missing: give the flag "
                    "(its values may change), or restart the data in a fork (penstock fork ... --prompt-data ...)"
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
            places = [
                SourcePosition(epoch=state.epoch, cursor=visited[file])
                for file in range(len(self.files))
                if file in seen
            ]
        return (*places, *(SourcePosition() for _ in range(len(self.files) - len(places))))

    def _hash_rows(self, file: int, start: int, stop: int) -> str:
        key = (file, start, stop)
        if key not in self._digests:
            digest = xxhash.xxh3_64()
            rows = self.files[file]
            pieces = (
                rows.read_bytes(start, stop) if isinstance(rows, SpooledRows) else (r + b"\n" for r in rows[start:stop])
            )
            for piece in pieces:
                digest.update(piece)
            self._digests[key] = digest.hexdigest()
        return self._digests[key]


# ---- order of the rows: these pure functions must never change, because a resumed run computes the order again -------


WHOLE = 1 << 32  # sum of the shares of all sources: a share is a sampling weight as an integer fraction of WHOLE
_ROUNDS = 6  # rounds of the Feistel network


def permutation(seed: int, epoch: int, segment: int, rows: int) -> np.ndarray:
    """Return a random permutation of 0 .. rows - 1, seeded with (seed, epoch, segment). [rows], uint32."""
    # RandomState, not Generator: NumPy guarantees that RandomState's stream never changes (NEP 19). Shuffled in place:
    # RandomState.permutation returns the same order, but with 8 bytes per row.
    order = np.arange(rows, dtype=np.uint32)
    np.random.RandomState([seed, epoch, segment]).shuffle(order)
    return order


def permuted_index(position: int, seed: int, epoch: int, segment: int, rows: int) -> int:
    """Return element `position` of a random permutation of 0 .. rows - 1 without computing the whole permutation. It is
    not the permutation that `permutation` returns.

    A Feistel network permutes all numbers of 2 x `half` bits. While the result is `rows` or more, the network is
    applied to the result again (cycle walking: Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
    """
    half = ((rows - 1).bit_length() + 1) // 2 or 1
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for number in range(_ROUNDS):
            key = struct.pack("<5Q", seed, epoch, segment, number, right)
            left, right = right, left ^ (xxhash.xxh3_64_intdigest(key) & mask)
        position = left << half | right
        if position < rows:
            return position


def weights_to_shares(weights: Sequence[float]) -> list[int]:
    """Convert sampling weights to integers (shares) that sum to WHOLE, so that arithmetic with shares is exact."""
    total = sum(weights)
    rounded = [round(weight / total * WHOLE) for weight in weights]
    largest = rounded.index(max(rounded))
    rounded[largest] += WHOLE - sum(rounded)
    return rounded


def select_sources(credits: Sequence[int], shares: Sequence[int], count: int) -> tuple[list[int], list[int]]:
    """Return the source (index of an entry of --prompt-data) for each of the next `count` prompts, and the credit of
    every source after these prompts (smooth weighted round robin).

    For every prompt, the credit of each source grows by its share; the source with the highest credit provides the
    prompt, and its credit falls by WHOLE. So every source provides its share of the prompts as evenly as possible. If
    the shares change in a resumed run, the new shares apply to future prompts only.
    """
    now = list(credits)
    active = [source for source, share in enumerate(shares) if share]
    order = []
    for _ in range(count):
        for source in active:
            now[source] += shares[source]
        chosen = max(active, key=lambda source: (now[source], -source))
        now[chosen] -= WHOLE
        order.append(chosen)
    return order, now


def max_prompt_tokens(config: PromptConfig) -> int | None:
    """Return the maximum number of prompt tokens, which leaves room for at least one response token; None: no limit."""
    context = None if config.rollout_max_context_len is None else config.rollout_max_context_len - 1
    return min((limit for limit in (config.rollout_max_prompt_len, context) if limit is not None), default=None)


class LengthFilter:
    """Prompt filter for `PromptSource.take` that rejects prompts above the length limit. Only the first rejected prompt
    is logged; PromptSource counts all of them."""

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: PromptTokenizer,
        count_image_tokens: Callable[[Sequence[Prompt]], Sequence[int]] | None = None,
    ) -> None:
        self.config = config
        self.count_image_tokens = count_image_tokens  # number of tokens of each prompt that its text does not have
        self.limit = max_prompt_tokens(config)
        self.tokenizer = tokenizer
        self._logged = False

    def __call__(self, prompts: Sequence[Prompt]) -> list[bool]:
        if self.limit is None:
            return [True] * len(prompts)
        texts = self.tokenizer.render([prompt.content for prompt in prompts], [prompt.tools for prompt in prompts])
        lengths = [len(ids) for ids in self.tokenizer.encode(texts)]
        if self.count_image_tokens is not None:
            lengths = [length + extra for length, extra in zip(lengths, self.count_image_tokens(prompts))]
        for prompt, length in zip(prompts, lengths):
            if length > self.limit and not self._logged:
                self._logged = True
                logger.warning(
                    "row %d of %s has %d tokens, more than the prompt limit of %d (--rollout-max-prompt-len, or "
                    "--rollout-max-context-len - 1); skipping all prompts above this limit (counted in "
                    "rollout/num_skipped_prompts)",
                    prompt.row,
                    self.config.prompt_data[prompt.file],
                    length,
                    self.limit,
                )
        return [length <= self.limit for length in lengths]
