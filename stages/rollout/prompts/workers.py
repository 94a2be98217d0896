"""Reading rows with several processes: the same rows, in the same order, whatever their number.

Plain subprocesses and not `multiprocessing`, which would run the user's main script again in each of them. A worker gets a block only
when it has given back the one before, so neither side ever waits for the other to read; blocks go round, so the results come in order.
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

from stages.rollout.prompts.rows import Block, Columns, Rows, canonical
from storage.errors import DataError


def canonical_blocks(blocks: Iterable[Block], columns: Columns, num_workers: int) -> Iterator[Rows]:
    """`canonical` of every block, in order. One worker is this process, and so it is where there is only one block.

    Raises:
        DataError: the first row that is wrong.
    """
    if num_workers > 1:
        rest = iter(blocks)
        first = list(islice(rest, 2))
        blocks = chain(first, rest)
        if len(first) == 2:
            yield from _by_workers(blocks, columns, num_workers)
            return
    for block in blocks:
        yield canonical(block, columns)


def _by_workers(blocks: Iterable[Block], columns: Columns, num_workers: int) -> Iterator[Rows]:
    with ExitStack() as stack:
        workers: list[Connection] = []
        sent = received = 0
        for block in blocks:
            if len(workers) < num_workers:
                workers.append(_start(stack, columns))
            else:
                yield _answer(workers[received % num_workers])
                received += 1
            with _alive():
                workers[sent % num_workers].send(block)
            sent += 1
        while received < sent:
            yield _answer(workers[received % num_workers])
            received += 1


def _start(stack: ExitStack, columns: Columns) -> Connection:
    connection, child = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "stages.rollout.prompts.workers", str(child.fileno())],
        pass_fds=[child.fileno()],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path), "OMP_NUM_THREADS": "1"},
    )
    child.close()
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.callback(connection.close)
    with _alive():
        connection.send(columns)
    return connection


def _answer(worker: Connection) -> Rows:
    with _alive():
        answer: Rows | str = worker.recv()
    if isinstance(answer, str):
        raise DataError(answer)
    return answer


@contextmanager
def _alive() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError):
        raise RuntimeError("a process of --num-data-workers has died: give fewer of them if memory is short") from None


def main(descriptor: int) -> None:
    """What a worker does until its parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is the end of this process
    with Connection(descriptor) as parent:
        try:
            columns: Columns = parent.recv()
            while True:
                block: Block = parent.recv()
                try:
                    answer: Rows | str = canonical(block, columns)
                except ValueError as error:
                    answer = str(error)
                parent.send(answer)
        except (EOFError, BrokenPipeError):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
