"""Parse prompt rows in several processes (`--num-data-workers`). The rows and their order do not depend on the number
of processes: blocks are distributed round robin, and results are returned in order. A worker has one block at a time,
so that the memory is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice

from penstock.stages.rollout.prompts.rows import Block, Columns, Rows, to_canonical_rows
from penstock.stages.worker_process import WorkerLost, WorkerProcess


def parse_blocks(blocks: Iterable[Block], columns: Columns, num_workers: int) -> Iterator[Rows]:
    """Parse blocks of rows, and yield the canonical rows of every block in order. With one worker or one block, parse
    in this process.

    Raises:
        DataError: a row is invalid; the message names the first such row.
    """
    rest = iter(blocks)
    first = list(islice(rest, 2 if num_workers > 1 else 0))
    blocks = chain(first, rest)
    if len(first) < 2:
        yield from (to_canonical_rows(block, columns) for block in blocks)
        return
    with ExitStack() as stack:
        workers: list[WorkerProcess] = []
        running: deque[Future[Rows]] = deque()
        for number, block in enumerate(blocks):
            if len(workers) < num_workers:
                workers.append(WorkerProcess(prepare_parsing, columns))
                stack.callback(workers[-1].close)
            else:
                yield _rows_of(running.popleft())
            running.append(workers[number % num_workers].submit(block, math.inf))
        while running:
            yield _rows_of(running.popleft())


def prepare_parsing(columns: Columns) -> Callable[[Block], Rows]:
    """Return the function that parses a block in a worker process."""
    return partial(to_canonical_rows, columns=columns)


def _rows_of(job: Future[Rows]) -> Rows:
    try:
        return job.result()
    except WorkerLost:
        raise RuntimeError(
            "a parsing process (--num-data-workers) died: resume the run, with fewer workers if memory is short"
        ) from None
