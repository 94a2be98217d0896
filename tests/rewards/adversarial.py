"""Texts that are expensive for careless parsers, and every built-in grader as a function of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from penstock.stages.rewards.hub import REWARDS
from penstock.stages.rewards.instructions.text import CHECKS
from penstock.storage.samples.sample import Sample
from tests.rewards.test_instructions import CASES

Grader = Callable[[str], Any]

# fmt: off
_REPEATED = (
    "[", "]", "(", "{", "}", "[{(", "([])", "[a", r"\frac", r"\frac{", r"\left(", r"\boxed{", r"\boxed", r"\boxed ",
    r"\boxed{1}", r"\text{", r"\text{and}", r"\overline{", "$", r"\$", "^", "_{", "mbox", "sqrt", "*", "* ", "*a",
        "*\n",
    "***", "#", "<", "<<", "<<a", "<<a>>", "<<\n", "<i>", "<em>a</i>", "</think>", "<|", "<|x|>", "</s> ", '"', "'",
    "' ", '"a', "“", ",", ", ", '",', '"\n', "\t", '"\t', "\n", "\n\n", " \n", "\r", "\r\n", "\u2028", "\x1c", "\x00",
    "\u00a0", "\u200b", "\u200d", "\u0301", "\u0301\u0316", "①", "⁴", "\ud800", "7", "14 ", "1,", "1,000", "1.",
        "1-", "1:", "-", "- ", " ", "  a",
    "a", "a ", "word ", "the ", "an ", "a.", "a. ", "i. ", "e.g. ", "a.b", "a'", "a-", "a_", "_", "e", "ey", "A",
        "A ",
    "(A)", "A) ", "B is ", ".", ". ", '."', ".\n", "!", "? ", "?!", "…", "。", "。」", "answer", "answer ", "answer:",
    "answer is (", "Question 1", "Question 1. ", "a) b\n", "p. ", "P.S. ", "```", "```json", "|", "&", ";", "猫", "あ ",
    "é", "İ", "ﷺ", "😀", "❤\ufe0f", "я", "ك", "ह", "2024-01-01,", "SECTION ", "SECTION 1", "!?!?", "Zimbabwe\n",
        "bald ",
    "is", "cat", "C++ ", "<<a\n", "**a", "[a\n", "(a [b ", '{"a":', "[1,", "1e5", "\\", "\\\\", "\\begin{pmatrix}",
)
_NESTED = (("[", "]"), ("{", "}"), ('{"a":', "1}"), ("(", ")"), (r"\boxed{", "}"), ("<i>", "</i>"), ("“", "”"),
        ("```", "```"))
_BEFORE_AND_AFTER = (
    ("a", " ", "b"), ("answer is", " ", "!"), ("<i>", "a", "</i>"), ("<<", "a", ">>"), ("```", "\n", "a"), ("[",
        "1,", "]"),
    ('"', "a", '"'), ('"', '"",', "\n"), ("a\n", "\n", "b"), ("Answer: ", "9", ""), (r"\boxed{", "9", "}"),
    (r"\boxed{", "(", "}"), (r"</think>\boxed{", "1+", "}"), ("Question 1", " ", "x"), ('{"a": "', r"\\", '"}'), ("",
        "9", "!"),
    ('{"a": "', "a", '"}'), ("ID,Country,City,Year,Count\n", "1,a,b,1,1\n", ""), ("a) ", "x", "\nb)"), ("*", "a",
        "\n*"), ("-", "9", ""),
)
# fmt: on


def adversarial_texts(size: int) -> dict[str, str]:
    """Return texts of about `size` characters, by name."""
    texts = {f"{piece!r} repeated": piece * (size // len(piece)) for piece in _REPEATED}
    for opening, closing in _NESTED:
        depth = size // len(opening + closing)
        texts[f"{opening!r} nested"] = opening * depth + closing * depth
    for before, piece, after in _BEFORE_AND_AFTER:
        texts[f"{piece!r} between {before!r} and {after!r}"] = before + piece * (size // len(piece)) + after
    for seed in range(4):
        texts[f"random mixture {seed}"] = "".join(Random(seed).choices(_REPEATED, k=size // 3))[:size]
    return texts


def builtin_graders() -> Iterator[tuple[str, Grader]]:
    """Yield (name, grader) of every built-in reward that needs no server, and of every check of an instruction."""
    for name, reward in REWARDS.items():
        if not reward.remote and name != "ifbench":
            yield name, lambda text, grade=reward.function: grade(Sample("0", "g", "0", 0, response=text, label="5"))
    for name, arguments, *_ in CASES:
        yield name, lambda text, name=name, arguments=arguments: CHECKS[name](text, **arguments)
