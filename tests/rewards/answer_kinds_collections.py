"""Generators of answers, each with spellings of one value and of other values: lists, sets, points, matrices."""

from __future__ import annotations

from random import Random

from tests.rewards.answer_kinds import Spellings

# fmt: off


def numbers(draw: Random, count: int) -> list[int]:
    return draw.sample([number for number in range(-30, 31)], count)


def interval(draw: Random) -> Spellings:
    a = draw.randint(-20, 10)
    b = a + draw.randint(1, 15)
    opening, closing = draw.choice("(["), draw.choice(")]")
    low, high = (r"\le" if opening == "[" else "<"), (r"\le" if closing == "]" else "<")
    same = [f"{opening}{a},{b}{closing}", f"{opening}{a}, {b}{closing}", rf"\left{opening}{a},{b}\right{closing}",
        rf"x\in{opening}{a},{b}{closing}",
        rf"x \in \left{opening} {a}, {b} \right{closing}"]
    if (opening, closing) != ("(", ")"):
        same += [f"{a} {low} x {high} {b}", f"{a}{low.replace('le', 'leq')} x{high.replace('le', 'leq')} {b}"]
    flip = {"(": "[", "[": "(", ")": "]", "]": ")"}
    others = [f"{flip[opening]}{a},{b}{closing}", f"{opening}{a},{b}{flip[closing]}", f"{opening}{a},{b + 1}{closing}",
        f"{opening}{a - 1}, {b}{closing}"]
    return same, others


def union(draw: Random) -> Spellings:
    a = draw.randint(-9, 5)
    b = a + draw.randint(1, 9)
    same = [
        rf"(-\infty,{a})\cup({b},\infty)", rf"(-\infty, {a}) \cup ({b}, \infty)",
        rf"\left(-\infty,{a}\right)\cup\left({b},\infty\right)", rf"({b},\infty)\cup(-\infty,{a})",
        rf"x\in(-\infty,{a})\cup({b},+\infty)", f"(-∞,{a})∪({b},∞)", rf"x < {a} \text{{ or }} x > {b}",
    ]
    return same, [rf"(-\infty,{a}]\cup({b},\infty)", rf"(-\infty,{a})\cup[{b},\infty)",
        rf"(-\infty,{a - 1})\cup({b},\infty)", rf"({a},{b})",
        rf"(-\infty,{a})\cap({b},\infty)"]


def listed(draw: Random) -> Spellings:
    a, b = numbers(draw, 2)
    same = [f"{a},{b}", f"{a}, {b}", f"{a} and {b}", rf"{a} \text{{ and }} {b}", rf"{a}\text{{ or }}{b}",
        f"x={a}, x={b}", f"x = {a} or x = {b}", rf"{a},\; {b}", rf"x={a}\text{{ or }}x={b}", f"{a}, {b}.", f"{a}; {b}"]
    return same, [f"{a}, {b + 1}", f"{a}", f"{a}, {b}, 77", f"x={a}, x={b + 2}", f"{b}"]


def plus_minus(draw: Random) -> Spellings:
    a, b = draw.randint(1, 20), draw.choice([2, 3, 5, 6, 7])
    same = [
        rf"{a}\pm\sqrt{{{b}}}",
        rf"{a} \pm \sqrt{{{b}}}",
        rf"x={a}\pm\sqrt{b}",
        rf"{a}+\sqrt{{{b}}}, {a}-\sqrt{{{b}}}",
        rf"{a}+\sqrt{{{b}}} \text{{ and }} {a}-\sqrt{{{b}}}",
        f"{a} ± √{b}",
    ]
    return same, [rf"{a}+\sqrt{{{b}}}", rf"{a}\pm\sqrt{{{b + 1}}}", rf"{a + 1}\pm\sqrt{{{b}}}", rf"\pm\sqrt{{{b}}}"]


def vector(draw: Random) -> Spellings:
    a, b = numbers(draw, 2)
    rows = [rf"{a} \\ {b}", rf"{a}\\{b}", rf" {a} \\  {b} ", rf"{a} \\ {b} \\", f"{a}\\\\\n{b}"]
    same = [rf"\begin{{pmatrix}}{row}\end{{pmatrix}}" for row in rows]
    same += [rf"\begin{{bmatrix}} {a} \\ {b} \end{{bmatrix}}",
        rf"\left(\begin{{array}}{{c}} {a} \\ {b} \end{{array}}\right)",
        rf"\begin{{pmatrix}} {a}.0 \\ {b} \end{{pmatrix}}"]
    return same, [rf"\begin{{pmatrix}} {b} \\ {a} \end{{pmatrix}}", rf"\begin{{pmatrix}} {a} & {b} \end{{pmatrix}}",
        rf"\begin{{pmatrix}} {a} \\ {b + 1} \end{{pmatrix}}", rf"\begin{{pmatrix}} {a}{b} \end{{pmatrix}}"]


def number_sets(draw: Random) -> Spellings:
    sets = {"R": "ℝ", "Z": "ℤ", "Q": "ℚ", "N": "ℕ"}
    name = draw.choice(list(sets))
    others = [rf"\mathbb{{{other}}}" for other in sets if other != name]
    return [rf"\mathbb{{{name}}}", rf"\mathbb {name}", sets[name], rf"x\in\mathbb{{{name}}}"], [*others, r"\emptyset"]
