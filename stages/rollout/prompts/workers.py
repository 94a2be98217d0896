"""Parse prompt rows in several processes (`--num-data-workers`). The rows and their order do not depend on the number
of processes.

Workers are plain subprocesses, because `multiprocessing` would run the user's main script again in each of them. A
worker gets its next block of rows only after it has returned the previous block, so the pipes never deadlock. Blocks
are distributed round robin, so the results arrive in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from penstock.stages.rollout.prompts.rows import Block, Columns, Rows, to_canonical_rows
from penstock.storage.errors import DataError


def parse_blocks(blocks: Iterable[Block], columns: Columns, num_workers: int) -> Iterator[Rows]:
    """Parse blocks of rows, and yield the canonical rows of every block in order. With one worker or one block, parse
    in this process.

    Raises:
        DataError: a row is invalid; the message names the first such row.
    """
    if num_workers > 1:
        rest = iter(blocks)
        first = list(islice(rest, 2))
        blocks = chain(first, rest)
        if len(first) == 2:
            yield from _parse_in_workers(blocks, columns, num_workers)
            return
    for block in blocks:
        yield to_canonical_rows(block, columns)


def _parse_in_workers(blocks: Iterable[Block], columns: Columns, num_workers: int) -> Iterator[Rows]:
    with ExitStack() as stack:
        workers: list[Connection] = []
        sent = received = 0
        for block in blocks:
            if len(workers) < num_workers:
                workers.append(_start_worker(stack, columns))
            else:
                yield _receive_rows(workers[received % num_workers])
                received += 1
            with _report_dead_worker():
                workers[sent % num_workers].send(block)
            sent += 1
        while received < sent:
            yield _receive_rows(workers[received % num_workers])
            received += 1


def _start_worker(stack: ExitStack, columns: Columns) -> Connection:
    connection, child = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.stages.rollout.prompts.workers", str(child.fileno())],
        pass_fds=[child.fileno()],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
            "OMP_NUM_THREADS": "1",
        },
    )
    child.close()
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.callback(connection.close)
    with _report_dead_worker():
        connection.send(columns)
    return connection


def _receive_rows(worker: Connection) -> Rows:
    with _report_dead_worker():
        answer: Rows | str = worker.recv()
    if isinstance(answer, str):
        raise DataError(answer)
    return answer


@contextmanager
def _report_dead_worker() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise RuntimeError(
            "a parsing process (--num-data-workers) died: resume the run, with fewer workers if memory is short"
        ) from None


def main(descriptor: int) -> None:
    """Parse blocks of rows from the pipe with this file descriptor, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C; this process ends when the parent exits
    with Connection(descriptor) as parent:
        try:
            columns: Columns = parent.recv()
            while True:
                block: Block = parent.recv()
                try:
                    answer: Rows | str = to_canonical_rows(block, columns)
                except ValueError as error:
                    answer = str(error)
                parent.send(answer)
        except (EOFError, OSError):  # the parent has ended
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
