"""A commit's files on many ranks: one rank of each machine fetches and checks them for the others there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from storage.refs import Commit
from storage.store import Store


@contextmanager
def opened(store: Store, commit: Commit, machine: str) -> Iterator[Path]:
    """A local directory with a commit's files, checked. Collective: the first rank of every machine opens it for the others there.

    If that fails, the other ranks wait for a word that does not come, until the group is killed (as in any collective).
    """
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, machine)
    opener = machines.index(machine)
    with ExitStack() as reading:
        mine = str(reading.enter_context(store.reading(commit))) if dist.get_rank() == opener else ""
        paths: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(paths, mine)
        yield Path(paths[opener])
        dist.barrier()  # nobody reads any more: a downloaded copy goes now
