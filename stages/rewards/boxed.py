"""The answer that a response puts into `\\boxed{...}`."""

from __future__ import annotations

import re

_MARK = re.compile(r"\\boxed\s*(\{)?|[{}]")
_WORD = re.compile(r"[^\s$]+")


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}` (braces may nest) or `\\boxed x`; None if there is none. One pass over the text."""
    open_braces: list[int] = []  # where the content of a box begins; -1 for other braces
    last = (-1, -1)  # begin and end of the content; an end of -1 for a word
    for mark in _MARK.finditer(text):
        if mark[0] == "}":
            begin = open_braces.pop() if open_braces else -1
            last = max(last, (begin, mark.start()))
        elif mark[0] == "{":
            open_braces.append(-1)
        elif mark[1]:
            open_braces.append(mark.end())
        elif text[mark.end() : mark.end() + 1] not in ("", "$"):
            last = max(last, (mark.end(), -1))
    begin, end = last
    if begin < 0:
        return None
    return text[begin:end] if end >= 0 else _WORD.match(text, begin)[0].rstrip(".,")  # type: ignore[index]
