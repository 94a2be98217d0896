"""Suggest a known name for an unknown one, if one is near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NEAR = 0.8  # similarity (difflib's ratio) from which on a name is suggested


def nearest_name(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that differs from a word by a few letters, or the only one that continues it after a dash
    or underscore, or None."""
    names, text = list(known), word[:64]
    near = difflib.get_close_matches(text, names, n=1, cutoff=NEAR)
    longer = [name for name in names if name.startswith((f"{text}-", f"{text}_"))]
    if near:
        return near[0]
    return longer[0] if len(longer) == 1 else None
