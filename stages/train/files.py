"""Read the files of a commit on many ranks: one rank per machine downloads and verifies them for all ranks there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from penstock.storage.commit import Commit
from penstock.storage.store import Store


@contextmanager
def open_commit_files(store: Store, commit: Commit, machine: str) -> Iterator[Path]:
    """Yield a local directory with the verified files of `commit`. Collective over all ranks: the first rank of each
    machine (`machine` is an id of this rank's machine) downloads the files.

    If the download fails, the other ranks wait in the collective until the driver kills all ranks.
    """
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, machine)
    fetcher = machines.index(machine)
    with ExitStack() as reading:
        own_path = str(reading.enter_context(store.reading(commit))) if dist.get_rank() == fetcher else ""
        paths: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(paths, own_path)
        yield Path(paths[fetcher])
        dist.barrier()  # wait until all ranks have read the files: the end of the block removes a downloaded copy
