"""Who is at work in a store, and the one decision between a writer that commits and a `gc` that removes what it wrote.

A lease is a small object that its holder renews; it ends when the holder releases it, when its process is known to be dead (same machine),
or when it was not renewed for TTL seconds of the store's own time. Writers hold one beside their attempt (`attempt-<id>.lease`), drivers
one in their run (`runs/<run>/drivers/<id>.lease`).

A lease alone cannot protect a writer that was stopped for longer than TTL. So the decision is one conditional create, of
`attempt-<id>.claim`: a writer creates it with SEALED right before it commits, `gc` with CONDEMNED right before it deletes. Whoever comes second
reads what the first has decided: a condemned writer fails and its stage runs again; a sealed attempt is left alone.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage import disk
from storage.errors import StoreError
from storage.refs import Commit, RunKeys

if TYPE_CHECKING:
    from storage.store import Store

TTL = 600.0  # seconds without a renewal after which a lease has ended
RENEW = 60.0
SEAL_LIMIT = 3600.0  # seconds after which a sealed attempt without a commit is one of a writer that died in between
_LAST_RENEWAL = 5.0  # seconds to wait for a renewal that is under way, perhaps to a store that does not answer
SEALED, CONDEMNED = b"sealed", b""  # empty: a full disk has room for a name, not for a byte
_NUM_SIZES = 16  # asked for at a time
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also counts the time for which the machine was suspended

logger = logging.getLogger(__name__)


# ---- leases -----------------------------------------------------------------------------------------------------------------


class Lease:
    """A lease that a thread of this process renews until `stop` or `release`.

    Raises:
        StoreError, OSError: the store cannot be written.
    """

    def __init__(self, store: Store, key: str) -> None:
        self.store, self.key = store, key
        self._ended = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Renew no more; the lease lasts for TTL seconds from the last renewal."""
        self._ended.set()
        self._thread.join(_LAST_RENEWAL)

    def release(self) -> None:
        """End the lease now."""
        self.stop()
        _forget(self.store, [self.key])

    def _write(self) -> None:
        try:
            self.store.replace(self.key, json.dumps(_this_process()).encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.store.replace(self.key, b"")  # a full disk has room for a name; who it is remains unknown

    def _renew(self) -> None:
        while not self._ended.wait(RENEW):
            try:
                self._write()
            except (StoreError, OSError) as error:
                logger.warning("the lease %s could not be renewed (%s); trying again in %d s", self.key, error, RENEW)


def driver_key(keys: RunKeys) -> str:
    """Return the key of a new lease for a driver of a run."""
    return f"{keys.prefix}/drivers/{uuid.uuid4().hex[:12]}.lease"


def live_drivers(store: Store, keys: RunKeys, *, but: str | None = None) -> list[str]:
    """Return who drives a run now, in words; the holder of the lease `but` does not count."""
    names = [f"{keys.prefix}/drivers/{name}" for name in store.list(f"{keys.prefix}/drivers") if name.endswith(".lease")]
    others = [name for name in names if name != but]
    if not others:
        return []
    now = store_time(store)
    return [text for name in others if (text := holder(store, name, now))]


def holder(store: Store, key: str, now: float) -> str | None:
    """Return who holds a lease at the store's time `now`, in words, or None if nobody does."""
    modified, data = store.modified(key), store.read(key)
    if modified is None or data is None:
        return None
    try:
        process = json.loads(data)
    except ValueError:  # cut by a full disk: its age still counts
        process = None
    process = process if isinstance(process, dict) else {}
    if now - modified > TTL or _is_dead(process):
        return None
    return f"process {process.get('pid', '?')} on {process.get('host', '?')}, {max(0.0, now - modified):.0f} s ago"


def store_time(store: Store) -> float:
    """Return the time by the store's own clock, in seconds since the epoch; by this machine's if the store cannot be written."""
    try:
        if store.is_local:
            os.utime(store.root)  # needs no room; a file server sets its own time
            return os.stat(store.root).st_mtime
        key = f".penstock-probe-{uuid.uuid4().hex[:8]}"
        store.replace(key, b"")
        now = store.modified(key)
        store.delete([key])
        return now or time.time()
    except (StoreError, OSError) as error:
        logger.debug("the store does not tell its time: %s", error)
        return time.time()


def _this_process() -> dict[str, Any]:
    return {**_machine(), "pid": os.getpid(), "started": _started(os.getpid())}


def _machine() -> dict[str, Any]:
    """What must be equal for a process id to mean the same process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"host": platform.node(), "boot": boot, "processes": os.stat("/proc/self/ns/pid").st_ino}
    except OSError:
        return {"host": platform.node(), "boot": "", "processes": 0}


def _started(pid: int) -> str:
    """Return when a process of this machine started, in ticks, or "" if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _is_dead(process: dict[str, Any]) -> bool:
    """Whether a process is known to have ended: it ran on this machine and is not there."""
    here = _machine()
    if not here["boot"] or any(process.get(name) != value for name, value in here.items()):
        return False
    return _started(int(process["pid"])) != process["started"]


# ---- attempts ---------------------------------------------------------------------------------------------------------------


def lease_key(attempt: str) -> str:
    """Return the key of the lease of an attempt's writer."""
    return f"{attempt}.lease"


def claim_key(attempt: str) -> str:
    """Return the key of the decision about an attempt."""
    return f"{attempt}.claim"


def needs_guard(attempt: str) -> bool:
    """Whether `gc` could remove an attempt before its commit. Not in a journal, which stays while its round is unfinished, and not a
    directory that a user has named."""
    return attempt.rpartition("/")[2].startswith("attempt-") and ".journal/" not in attempt


@contextmanager
def writer(store: Store, attempt: str) -> Iterator[None]:
    """Hold the lease of an attempt while the block runs. It lasts on for the commit that follows, but not after an exception."""
    if not needs_guard(attempt):
        yield
        return
    lease = Lease(store, lease_key(attempt))
    try:
        yield
    except BaseException:
        lease.release()
        raise
    lease.stop()


@dataclass(frozen=True)
class Seal:
    """A writer's decision that its attempt is to be committed."""

    store: Store
    attempt: str
    at: float

    def check(self) -> None:
        """Raise StoreError if the seal is so old that `gc` may soon ignore it (this process was stopped for long)."""
        if time.clock_gettime(_CLOCK) - self.at > SEAL_LIMIT / 2:
            raise StoreError(f"{self.attempt} was not committed in time: this process was stopped; the stage must run again")

    def end(self) -> None:
        """Remove the lease and the claim after the commit."""
        _forget(self.store, [lease_key(self.attempt), claim_key(self.attempt)])


def seal(store: Store, commit: Commit) -> Seal:
    """Decide that an attempt is committed, and look at its files for the last time.

    Raises:
        StoreError: `gc` has condemned it, or a file is not there any more; the stage must run again.
    """
    attempt = commit.attempt
    assert attempt is not None
    key, at = claim_key(attempt), time.clock_gettime(_CLOCK)
    while not store.create(key, SEALED):
        decided = store.read(key)
        if decided == SEALED:  # by another process of the same attempt
            break
        if decided is not None:
            raise StoreError(
                f"{attempt} was condemned by `penstock gc` before its commit: the stage must run again "
                "(if that gc was killed, `penstock gc --delete --older-than 0` finishes it)"
            )
    sizes = disk.in_parallel(lambda record: store.size(record.path), commit.files, 1 if store.is_local else _NUM_SIZES)
    for record, size in zip(commit.files, sizes, strict=True):
        if size != record.bytes:
            _forget(store, [key])
            state = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
            raise StoreError(
                f"{record.path} {state} before its commit (`penstock gc` may have removed it): the stage must run again"
            )
    return Seal(store, attempt, at)


def condemn(store: Store, attempt: str, now: float) -> bool:
    """Decide that an attempt without a commit is removed. Whether it may be: not if its writer is alive, or has sealed it.

    The caller must look for the commit afterwards (it may be older than the decision), and call `pardon` if there is one.
    """
    if holder(store, lease_key(attempt), now):
        return False
    key = claim_key(attempt)
    if store.create(key, CONDEMNED) or store.read(key) != SEALED:
        return True
    sealed_at = store.modified(key)
    return sealed_at is not None and now - sealed_at > SEAL_LIMIT


def pardon(store: Store, attempt: str) -> None:
    """Take a condemnation back."""
    _forget(store, [claim_key(attempt)])


def _forget(store: Store, keys: list[str]) -> None:
    """Delete lease and claim objects. What a failure leaves behind is found by `gc`."""
    try:
        store.delete(keys)
    except (StoreError, OSError) as error:
        logger.warning("%s could not be removed (%s); `penstock gc` will", keys[0], error)
