"""What may be a key of the store: a relative path that cannot name anything outside the store's root."""

from __future__ import annotations

import re

MOST_BYTES_OF_PART, MOST_BYTES = 255, 1024  # of a file name on common disks; of a key on S3

RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
MAX_RUN_NAME = 200  # characters; leaves room for suffixes within the 255 bytes of a file name


def key_problem(key: str) -> str | None:
    """Return why `key` cannot be a key of the store, or None if it can. The empty key is the root itself."""
    if not key:
        return None
    parts = key.split("/")
    if "\0" in key:
        return "has a NUL character"
    if key.startswith("/"):
        return "is absolute"
    if "" in parts:
        return "has an empty part"
    if "." in parts or ".." in parts:
        return "has the part '.' or '..'"
    sizes = [len(part.encode(errors="surrogatepass")) for part in parts]
    if max(sizes) > MOST_BYTES_OF_PART:
        return f"has a part of {max(sizes)} bytes; {MOST_BYTES_OF_PART} are allowed"
    if (size := sum(sizes) + len(parts) - 1) > MOST_BYTES:
        return f"has {size} bytes; {MOST_BYTES} are allowed"
    return None


def valid_key(key: str) -> str:
    """Return `key`. For validators of records.

    Raises:
        ValueError: it cannot be a key of the store.
    """
    if problem := key_problem(key):
        raise ValueError(f"the key {key[:100]!r} {problem}: keys lie in the store")
    return key


def is_run_name(name: str) -> bool:
    """Whether a run may have this name: letters, digits, dot, dash, underscore, at most 200 of them, the first a letter or digit."""
    return re.fullmatch(RUN_NAME, name) is not None and len(name) <= MAX_RUN_NAME
