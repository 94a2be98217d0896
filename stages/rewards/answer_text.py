"""The part of a response that is its answer: without the thought before it and the end tokens behind it."""

from __future__ import annotations

import re

THOUGHT_ENDS = "</think>"
_LONGEST_TOKEN = 44
_END_TOKEN = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</s>|<eos>|<end_of_turn>)$")


def without_end_tokens(text: str) -> str:
    """The text without end tokens behind it, such as <|im_end|> or </s> (responses keep special tokens by default)."""
    kept = len(text)
    end = _end_of_text(text, kept)
    while token := _END_TOKEN.search(text, max(0, end - _LONGEST_TOKEN), end):
        kept = end = _end_of_text(text, token.start())
    return text[:kept]


def _end_of_text(text: str, end: int) -> int:
    """Where white space before `end` begins."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def answer_text(response: str) -> str:
    """What follows the last </think>, or everything if nothing was thought; end tokens are dropped."""
    return without_end_tokens(response.rpartition(THOUGHT_ENDS)[2])
