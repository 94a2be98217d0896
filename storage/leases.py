"""Leases of writers and drivers, and the protocol that keeps `penstock gc` from deleting files that are being
committed.

A lease is a small object that its holder renews. It ends when the holder releases it, when the holder's process is
known to be dead (on the same machine), or when it was not renewed for TTL seconds. A driver's lease on this machine
does not expire while the process lives: after a pause of the whole laptop it is renewed up to a minute late. If the
holder runs on this machine, the time is taken from the machine's boot-time clock, which changes of the wall clock do
not affect; otherwise from the store's clock. The lease of a writer is `attempt-<id>.lease`, next to its attempt; that
of a driver is `runs/<run>/drivers/<id>.lease`.

A lease does not protect a writer that was suspended for longer than TTL. Therefore writer and `gc` both try to create
`attempt-<id>.claim`, and only one of them succeeds: the writer with the content SEALED right before it commits, `gc`
with the content CONDEMNED right before it deletes. If the claim is CONDEMNED, the writer fails and the stage is rerun;
if it is SEALED, `gc` keeps the attempt.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from penstock.storage import disk
from penstock.storage.commit import JOURNAL, Commit, RunKeys, split_stage_key
from penstock.storage.errors import StoreError
from penstock.storage.failpoints import failpoint
from penstock.storage.file_store import FileStore

TTL = 600.0  # seconds after the last renewal at which a lease expires
RENEW = 60.0  # seconds between renewals
SEAL_LIMIT = 3600.0  # seconds; if a sealed attempt has no commit after that time, its writer is considered dead
SEALED, CONDEMNED = b"sealed", b""  # CONDEMNED is empty, so that `gc` can create it on a full disk
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also counts the time in which the machine is suspended

logger = logging.getLogger(__name__)


# ---- leases ----------------------------------------------------------------------------------------------------------


class Lease:
    """A file in the store that shows that its creator (a writer or a driver) is alive. A background thread renews the
    file until `stop_renewing` or `release` is called."""

    def __init__(self, store: FileStore, key: str) -> None:
        self.store, self.key = store, key
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def take(self) -> Self:
        """Write the lease, and start the thread that renews it. Return this object."""
        self._write()
        self._thread.start()
        return self

    def stop_renewing(self) -> None:
        """Stop renewing the lease; it expires TTL seconds after its last renewal."""
        self._ended.set()
        self._thread.join(timeout=5.0)  # a renewal in progress may take longer

    def release(self) -> None:
        """Stop renewing the lease and delete it."""
        self.stop_renewing()
        _delete_keys_or_warn(self.store, [self.key])

    def _write(self) -> None:
        try:
            process = {**_machine_identity(), "pid": os.getpid(), "started": process_start_time(os.getpid())}
            process |= {"renewed": time.clock_gettime(_CLOCK)}
            self.store.replace(self.key, json.dumps(process).encode())
        except OSError as error:
            if error.errno not in disk.FULL:
                raise
            self.store.replace(self.key, b"")  # possible on a full disk; the holder is then unknown to others

    def _renew(self) -> None:
        while not self._ended.wait(RENEW):
            try:
                self._write()
            except (StoreError, OSError) as error:
                logger.warning("lease %s was not renewed (%s); retrying in %d s", self.key, error, RENEW)


def new_driver_lease_key(keys: RunKeys) -> str:
    """Return a new, unique lease key for a driver of a run."""
    return f"{keys.prefix}/drivers/{uuid.uuid4().hex[:12]}.lease"


def describe_live_drivers(
    store: FileStore, keys: RunKeys, *, own_lease: str | None = None, is_here: bool = False
) -> list[str]:
    """Return a description (`describe_lease_holder`) of every running driver of a run, except the holder of the
    lease with the key `own_lease`. With `is_here`, only of processes on this machine, which certainly live."""
    directory = f"{keys.prefix}/drivers"
    leases = [f"{directory}/{name}" for name in store.list(directory) if name.endswith(".lease")]
    others = [lease for lease in leases if lease != own_lease]
    if not others:
        return []
    now = store_time(store)
    holders = (describe_lease_holder(store, lease, now, of_driver=True, is_here=is_here) for lease in others)
    return [holder for holder in holders if holder]


def describe_lease_holder(
    store: FileStore, key: str, now: float, *, of_driver: bool = False, is_here: bool = False
) -> str | None:
    """Return a description of a lease's holder (process id, host, last renewal), or None if the lease has ended
    at `now` by the store's clock (`store_time`).

    Args:
        of_driver: the lease of a process on this machine does not expire while the process lives.
        is_here: return None unless the process lives on this machine.
    """
    if (modified := store.modified(key)) is None:
        return None
    process: dict[str, Any] = {}
    try:
        if (data := store.read(key)) is None:
            return None
        process = json.loads(data)
    except ValueError:
        pass  # written incompletely on a full disk; its modification time is still valid
    except StoreError as error:  # so is that of an object with a wrong checksum, whose renewal was stored in part
        if type(error.__cause__).__name__ != "FlexibleChecksumError":
            raise
    here = _machine_identity()
    age = now - modified
    if here["boot"] and process.get("boot") == here["boot"] and "renewed" in process:
        age = time.clock_gettime(_CLOCK) - process["renewed"]
    is_local = here["boot"] and all(process.get(name) == value for name, value in here.items())
    if is_local and process_start_time(int(process["pid"])) != process["started"]:  # the process has ended
        return None
    # The age is negative if the store's clock was set back: a live holder would have renewed the lease since.
    is_expired = abs(age) > TTL and not (is_local and of_driver)
    if is_expired or (is_here and not is_local):
        return None
    renewed = f"lease renewed {max(0.0, age):.0f} s ago"
    return f"process {process.get('pid', '?')} on {process.get('host', '?')} ({renewed})"


def store_time(store: FileStore) -> float:
    """Return the current time by the clock that sets the modification times of files in the store, in seconds since the
    epoch. Falls back to the local clock if the store is not writable."""
    try:
        if store.is_local:
            os.utime(store.root)  # works on a full disk; on a network file system it sets the server's time
            return os.stat(store.root).st_mtime
        key = f".penstock-probe-{uuid.uuid4().hex[:8]}"
        store.replace(key, b"")
        now = store.modified(key)
        store.delete([key])
        return now or time.time()
    except (StoreError, OSError) as error:
        logger.debug("the store's time cannot be determined (%s); using the local clock", error)
        return time.time()


def _machine_identity() -> dict[str, Any]:
    """Return host name, boot id and PID namespace: process ids are comparable only if all three are equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"host": platform.node(), "boot": boot, "processes": os.stat("/proc/self/ns/pid").st_ino}
    except OSError:
        return {"host": platform.node(), "boot": "", "processes": 0}


def process_start_time(pid: int) -> str:
    """Return the start time of a local process, in clock ticks since boot, or "" if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


# ---- attempts --------------------------------------------------------------------------------------------------------


def lease_key(attempt: str) -> str:
    """Return the key of the lease file that shows that the writer of an attempt is alive."""
    return f"{attempt}.lease"


def claim_key(attempt: str) -> str:
    """Return the key of an attempt's claim: the file that its writer creates before the commit, or `penstock gc` before
    deleting the attempt; only one of the two can create it."""
    return f"{attempt}.claim"


def needs_lease(attempt: str) -> bool:
    """Return whether a writer must protect the directory `attempt` with a lease and a claim, since `penstock gc`
    deletes such directories if they have no commit. False for journals, and for directories not named `attempt-*`."""
    prefix, names = split_stage_key(attempt)
    return bool(prefix) and not prefix.endswith(JOURNAL) and len(names) == 1 and names[0].startswith("attempt-")


@contextmanager
def writer_lease(store: FileStore, attempt: str) -> Iterator[None]:
    """Hold the lease of an attempt during the block, so that `penstock gc` keeps its files. After the block the lease
    is not renewed, but protects the files for TTL seconds more, until the commit. An exception deletes the lease."""
    if not needs_lease(attempt):
        yield
        return
    lease = Lease(store, lease_key(attempt)).take()
    try:
        yield
    except BaseException:
        lease.release()
        raise
    lease.stop_renewing()


@contextmanager
def sealed_against_deletion(store: FileStore, commit: Commit) -> Iterator[None]:
    """Claim the commit's attempt (claim file with the content SEALED), so that `penstock gc` keeps it, and check that
    its files still exist; the block then commits it. After the block, delete the attempt's lease and claim. Raises
    StoreError if the stage must be rerun."""
    failpoint("commit-before-seal")
    attempt = commit.attempt
    assert attempt is not None
    key, at = claim_key(attempt), time.clock_gettime(_CLOCK)
    while not store.create(key, SEALED):
        claim = store.read(key)
        if claim == SEALED:  # another process that writes to the same attempt has sealed it
            break
        if claim is not None:
            raise StoreError(
                f"`penstock gc` claimed {attempt} for deletion before it was committed: rerun the stage (if "
                "that gc was killed, `penstock gc --delete --older-than 0` deletes the remaining files)"
            )
    sizes = store.map_requests(lambda record: store.size(record.path), commit.files)
    for record, size in zip(commit.files, sizes, strict=True):
        if size != record.bytes:
            _delete_keys_or_warn(store, [key])
            state = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
            raise StoreError(
                f"{record.path} {state}, so it cannot be committed (`penstock gc` may have deleted it): rerun the stage"
            )
    failpoint("commit-sealed")
    if time.clock_gettime(_CLOCK) - at > SEAL_LIMIT / 2:  # `penstock gc` ignores the seal after SEAL_LIMIT
        raise StoreError(
            f"{attempt} was not committed within {SEAL_LIMIT / 2:.0f} s after its claim was created (this process may "
            "have been suspended): rerun the stage"
        )
    yield
    _delete_keys_or_warn(store, [lease_key(attempt), key])


def try_claim_for_deletion(store: FileStore, attempt: str, now: float) -> bool:
    """Claim an attempt for deletion by `penstock gc`. Return False if its writer holds a lease, or sealed it
    (`sealed_against_deletion`) less than SEAL_LIMIT seconds ago.

    The attempt may have been committed before the claim. So the caller must then look for the commit and, if it exists,
    call `withdraw_deletion_claim` instead of deleting.
    """
    if describe_lease_holder(store, lease_key(attempt), now):
        return False
    key = claim_key(attempt)
    if store.create(key, CONDEMNED) or store.read(key) != SEALED:
        return True
    sealed_at = store.modified(key)
    return sealed_at is not None and now - sealed_at > SEAL_LIMIT


def withdraw_deletion_claim(store: FileStore, attempt: str) -> None:
    """Delete the claim that `try_claim_for_deletion` created."""
    _delete_keys_or_warn(store, [claim_key(attempt)])


def _delete_keys_or_warn(store: FileStore, keys: list[str]) -> None:
    """Delete lease and claim files. A failure is only logged, since `penstock gc` deletes the files later."""
    try:
        store.delete(keys)
    except (StoreError, OSError) as error:
        logger.warning("%s could not be deleted (%s); `penstock gc` will delete it", keys[0], error)
