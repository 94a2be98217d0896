"""The answer that a response puts into `\\boxed{...}`."""

from __future__ import annotations

_BOX = "\\boxed"


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}` (braces may nest) or `\\boxed x`; None if there is none."""
    start = text.rfind(_BOX)
    while start >= 0:
        rest = text[start + len(_BOX) :].lstrip()
        content = _braced(rest) if rest.startswith("{") else _first_word(rest)
        if content is not None:
            return content
        start = text.rfind(_BOX, 0, start)
    return None


def _first_word(text: str) -> str | None:
    word = text.split("$")[0].split()
    return word[0].rstrip(".,") if word else None


def _braced(text: str) -> str | None:
    """Content of the group that `text` begins with, or None if it is not closed."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[1:index]
    return None
