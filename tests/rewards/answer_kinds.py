"""Generators of answers, each with spellings of one value and of other values: numbers and quantities.

They do not use the grader.
"""

from __future__ import annotations

from fractions import Fraction
from random import Random

# fmt: off

Spellings = tuple[list[str], list[str]]  # of one value; of other values


def frac(top: object, bottom: object) -> str:
    return rf"\frac{{{top}}}{{{bottom}}}"


def sign(number: int) -> str:
    """Return `+ 3` or `- 3`, to append to another term."""
    return f"+ {number}" if number >= 0 else f"- {-number}"


def nonzero(draw: Random, low: int, high: int) -> int:
    return draw.choice([number for number in range(low, high + 1) if number])


def coprime(draw: Random, high: int = 19) -> tuple[int, int]:
    """Return numerator and denominator of a fraction in lowest terms that is not an integer."""
    while True:
        value = Fraction(draw.randint(1, high), draw.randint(2, high))
        if value.denominator > 1:
            return value.numerator, value.denominator


def integer(draw: Random) -> Spellings:
    n = nonzero(draw, -999, 999)
    same = [f"{n}", f"{n}.0", f"${n}$", rf"\({n}\)", f"{{{n}}}", rf"\text{{{n}}}", rf"\mathbf{{{n}}}", f" {n} ",
        f"{n}.", rf"\boxed{{{n}}}"]
    return same, [f"{n + 1}", f"{-n}", f"{n}0", f"{n}.5", f"{n - 1}.0"]


def thousands(draw: Random) -> Spellings:
    n = draw.randint(10_000, 99_999_999)
    text = f"{n:,}"
    same = [f"{n}", text, text.replace(",", "{,}"), text.replace(",", r"\,"), text.replace(",", r",\!"),
        text.replace(",", " "), f"{text}.00"]
    return same, [f"{n + 1000:,}", f"{n + 1}", f"{n * 10:,}", text.replace(",", ".", 1), f"{n // 10}"]


def fraction(draw: Random) -> Spellings:
    a, b = coprime(draw)
    k = draw.randint(2, 5)
    same = [frac(a, b), rf"\dfrac{{{a}}}{{{b}}}", rf"\tfrac{{{a}}}{{{b}}}", rf"\cfrac{{{a}}}{{{b}}}", f"{a}/{b}",
        f"{a} / {b}", rf"\frac {{{a}}} {{{b}}}",
        rf"{{{a} \over {b}}}", frac(k * a, k * b), rf"{a} \div {b}", rf"\left(\frac{{{a}}}{{{b}}}\right)",
        rf"\displaystyle\frac{{{a}}}{{{b}}}", rf"\frac{{\,{a}\,}}{{{b}}}"]
    if a < 10 and b < 10:
        same += [rf"\frac{a}{b}", rf"\frac{a}{{{b}}}", rf"\frac{{{a}}}{b}", rf"\frac {a} {b}"]
    return same, [frac(b, a), frac(a + 1, b), frac(-a, b), f"{a}/{b + 1}", f"{a / b:.3f}1", frac(a, 10 * b)]


def mixed_number(draw: Random) -> Spellings:
    w = draw.randint(1, 9)
    a, b = coprime(draw, 9)
    a = a % b or 1
    same = [rf"{w}\frac{{{a}}}{{{b}}}", rf"{w} \frac{{{a}}}{{{b}}}", rf"{w}\dfrac{{{a}}}{{{b}}}", f"{w} {a}/{b}",
        frac(w * b + a, b), rf"{w}\tfrac{a}{b}", rf"{w}+\frac{{{a}}}{{{b}}}", f"{w * b + a}/{b}"]
    return same, [frac(w * b + a + 1, b), rf"{w + 1}\frac{{{a}}}{{{b}}}", rf"-{w}\frac{{{a}}}{{{b}}}", f"{w}{a}/{b}",
        f"{w}"]


def scientific(draw: Random) -> Spellings:
    m, n = draw.randint(11, 99), draw.randint(3, 9)
    if m % 10 == 0:
        m += 1
    t = f"{m // 10}.{m % 10}"
    same = [rf"{t}\times 10^{n}", rf"{t} \times 10^{{{n}}}", rf"{t}\cdot 10^{{{n}}}", rf"{t}\cdot10^{n}",
        f"{m * 10 ** (n - 1)}", f"{t}*10^{n}", f"{t}×10^{n}", f"{t}e{n}"]
    return same, [rf"{t}\times 10^{n + 1}", rf"{t}\times 10^{{-{n}}}", f"{t}", rf"{m}\times 10^{n}",
        rf"{t}\times 11^{n}"]


def root(draw: Random) -> Spellings:
    a, b = draw.randint(2, 9), draw.choice([2, 3, 5, 6, 7])
    same = [rf"{a}\sqrt{{{b}}}", rf"{a}\sqrt{b}", rf"{a} \sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}",
        rf"{a}\cdot\sqrt{{{b}}}", rf"\sqrt{{{b}}}\cdot {a}",
        rf"{a}\cdot {b}^{{1/2}}", rf"{a} \cdot {b}^{{\frac{{1}}{{2}}}}", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}",
        f"{a}sqrt({b})", f"{a}*sqrt({b})", rf"{a}\sqrt{{{b}\,}}",
        rf"\sqrt{{{a}^2\cdot {b}}}", f"{a}√{b}"]
    return same, [rf"{a + 1}\sqrt{{{b}}}", rf"{a}\sqrt{{{b + 1}}}", rf"\sqrt{{{a * b}}}", f"{a * b}",
        rf"-{a}\sqrt{{{b}}}", f"{a * b**0.5:.3f}", rf"{a}+\sqrt{{{b}}}"]


# ---- quantities ------------------------------------------------------------------------------------------------------

UNITS = (("cm", "centimeters"), ("km", "kilometers"), ("kg", "kilograms"), ("m", "meters"), ("g", "grams"), ("mm",
    "millimeters"))


def unit(draw: Random) -> Spellings:
    n, (short, long) = draw.choice([draw.randint(1, 99), f"{draw.randint(1, 9)}.5"]), draw.choice(UNITS)
    same = [
        rf"{n}\text{{ {short}}}", rf"{n}\,\text{{{short}}}", rf"{n} \text{{ {short}}}", rf"{n}\ \text{{{short}}}",
        rf"{n}~\text{{{short}}}", rf"{n}\mathrm{{~{short}}}",
        rf"{n}\,\mathrm{{{short}}}", rf"{n}\;\mathrm{{{short}}}", f"{n}", f"{n} {long}", rf"{n}\text{{ {long}}}",
        rf"{n}\mbox{{ {short}}}", rf"\text{{{n} {short}}}",
        rf"{n}\ \mathrm{{{short}}}", rf"x = {n}\text{{ {short}}}", rf"{n}\textrm{{ {short}}}",
    ]
    return same, [rf"{n}1\text{{ {short}}}", f"1{n}", rf"-{n}\text{{ {short}}}", rf"\frac{{{n}}}{{7}}\text{{ {short}}}"]
