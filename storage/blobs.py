"""Blobs: files that samples refer to by the hash of their content, such as the images of a prompt.

A blob is `blobs/<sha256>` and holds the original bytes. It is written once for all runs of a store, before the shard
that refers to it; the commit of the shard lists it (`Commit.blobs`). deletion.py says when `penstock gc` deletes blobs.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable

from penstock.storage.disk import map_in_threads
from penstock.storage.errors import StoreError
from penstock.storage.file_store import NUM_REQUESTS, FileStore
from penstock.storage.leases import describe_lease_holder, store_time

DIRECTORY = "blobs"
COLLECTION_LEASE = f"{DIRECTORY}/collecting.lease"  # lease of a process that deletes blobs
_PAUSE = 1.0  # seconds between two looks at COLLECTION_LEASE


def blob_key(digest: str) -> str:
    """Return the store key of the blob whose content has the SHA-256 `digest` (hex)."""
    return f"{DIRECTORY}/{digest}"


def digest_of(content: bytes) -> str:
    """Return the name of a blob: the SHA-256 of its content, in hex."""
    return hashlib.sha256(content).hexdigest()


def write_blobs(store: FileStore, contents: Iterable[bytes]) -> list[str]:
    """Write blobs that the store does not have yet. Return the digest of each content, in order. Waits while another
    process deletes blobs."""
    named = [(digest_of(content), content) for content in contents]
    blobs = dict(named)

    def write(digest: str) -> None:
        key, content = blob_key(digest), blobs[digest]
        if store.size(key) != len(content) and not store.create(key, content):
            store.replace(key, content)  # a damaged blob, since the content is not the one that the name says

    while blobs and store.exists(COLLECTION_LEASE):
        if not describe_lease_holder(store, COLLECTION_LEASE, store_time(store)):
            break  # left by a process that has died
        time.sleep(_PAUSE)
    map_in_threads(write, list(blobs), NUM_REQUESTS)
    return [digest for digest, _ in named]


def blob_sizes(store: FileStore, digests: Iterable[str]) -> dict[str, int]:
    """Return digest -> bytes of blobs that the store must have. Raises StoreError if one is missing."""
    names = sorted(set(digests))
    sizes = {}
    for digest, size in zip(names, store.map_requests(lambda name: store.size(blob_key(name)), names)):
        if size is None:
            raise StoreError(
                f"{store.path(blob_key(digest))}, an image of a sample, is missing (`penstock gc` may have deleted "
                "it): rerun the stage, which writes the images of its prompts again"
            )
        sizes[digest] = size
    return sizes


def read_blob(store: FileStore, digest: str) -> bytes:
    """Return the content of a blob. Raises StoreError if it is missing or damaged."""
    content = store.read(blob_key(digest))
    if content is None or digest_of(content) != digest:
        state = "is missing" if content is None else "is damaged (its SHA-256 is not its name)"
        raise StoreError(f"{store.path(blob_key(digest))} {state}: restore it from a backup, or from the original data")
    return content
