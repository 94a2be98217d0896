"""Extract the answer part of a response: the text after </think>, without end tokens."""

from __future__ import annotations

import re

THINK_END = "</think>"
_MAX_TOKEN_LENGTH = 44
_END_TOKEN = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</s>|<eos>|<end_of_turn>)$")


def strip_end_tokens(text: str) -> str:
    """Remove end tokens such as <|im_end|> or </s>, with the spaces around them, from the end of a response."""
    kept = len(text)
    end = _start_of_spaces_before(text, kept)
    while token := _END_TOKEN.search(text, max(0, end - _MAX_TOKEN_LENGTH), end):
        kept = end = _start_of_spaces_before(text, token.start())
    return text[:kept]


def _start_of_spaces_before(text: str, end: int) -> int:
    """Return the position where the white space before `end` begins."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def answer_text(response: str) -> str:
    """Return the text after the last </think> of a response (without </think>: all of it), without end tokens."""
    return strip_end_tokens(response.rpartition(THINK_END)[2])
