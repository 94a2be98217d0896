"""The part of a response that is its answer: without the thought before it and the end tokens behind it."""

from __future__ import annotations

import re

THOUGHT_ENDS = "</think>"
_END_TOKENS = re.compile(r"(?:\s*(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</s>|<eos>|<end_of_turn>))+\s*$")


def without_end_tokens(text: str) -> str:
    """The text without end tokens behind it, such as <|im_end|> or </s> (responses keep special tokens by default)."""
    return _END_TOKENS.sub("", text)


def answer_text(response: str) -> str:
    """What follows the last </think>, or everything if nothing was thought; end tokens are dropped."""
    return without_end_tokens(response.rpartition(THOUGHT_ENDS)[2])
