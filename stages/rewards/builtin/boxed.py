"""Extract the answer in `\\boxed{...}` from a response."""

from __future__ import annotations

import re

_MARK = re.compile(r"\\boxed\s*(\{)?|[{}]")
_WORD = re.compile(r"[^\s$]+")


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{...}` (braces may nest) or `\\boxed x` in `text`, or None.

    Takes time linear in the length of the text.
    """
    open_braces: list[int] = []  # position where the content of a box begins, or -1 for other braces
    last = (-1, -1)  # begin and end of the content; the end is -1 for `\boxed x`
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
