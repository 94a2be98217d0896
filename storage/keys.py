"""Validation of store keys (relative paths that cannot leave the store's root) and of run names."""

from __future__ import annotations

import re

MAX_PART_BYTES, MAX_KEY_BYTES = 255, 1024  # limit of a file name on common file systems; limit of a key on S3

RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
MAX_RUN_NAME = 200  # characters; leaves room for suffixes within the 255 bytes of a file name


def describe_key_problem(key: str) -> str | None:
    """Return why a store key is invalid, e.g. "is absolute", or None if it is valid. "", the root, is valid."""
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
    if max(sizes) > MAX_PART_BYTES:
        return f"has a part of {max(sizes)} bytes; {MAX_PART_BYTES} are allowed"
    if (size := sum(sizes) + len(parts) - 1) > MAX_KEY_BYTES:
        return f"has {size} bytes; {MAX_KEY_BYTES} are allowed"
    return None


def validate_key(key: str) -> str:
    """Return a store key unchanged if it is valid (a validator for pydantic fields).

    Raises:
        ValueError: `key` is invalid.
    """
    if problem := describe_key_problem(key):
        raise ValueError(f"the key {key[:100]!r} {problem}: keys are relative paths inside the store")
    return key


def is_run_name(name: str) -> bool:
    """Return whether `name` is a valid run name: at most 200 letters, digits, dots, dashes and underscores, beginning
    with a letter or digit."""
    return re.fullmatch(RUN_NAME, name) is not None and len(name) <= MAX_RUN_NAME
