"""Check that the driver and the ranks, which may be on other nodes, see the same store."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.storage.errors import OptionError
from penstock.storage.store import Store


def check_store_is_shared(store: Store, exists: Callable[[str], Sequence[bool]], nodes: Sequence[str]) -> None:
    """Check that a store in a directory is visible at the same path on every rank's node; skip object stores.

    Args:
        store: the run's store.
        exists: returns for each rank whether a path exists on its machine.
        nodes: Ray's id of each rank's node, for the error message.

    Raises:
        OptionError: a rank does not see the directory of the store.
    """
    if not store.is_local:
        return
    probe = Path(store.root) / f".shared-{uuid.uuid4().hex}"
    probe.touch()
    try:
        missing = sorted({node for node, seen in zip(nodes, exists(str(probe)), strict=True) if not seen})
    finally:
        probe.unlink()
    if missing:
        raise OptionError(
            f"--store {store.root} is a directory that {len(missing)} of {len(set(nodes))} nodes do not see (Ray's "
            f"node {missing[0]}): a run on several nodes needs an object store, or a file system that all nodes mount "
            "at this path"
        )
