"""Generators of answers, each with spellings of one value and of other values: numbers, units, expressions.

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


# ---- expressions -----------------------------------------------------------------------------------------------------


def linear(draw: Random) -> Spellings:
    a, b, v = draw.randint(2, 12), nonzero(draw, -12, 12), draw.choice("xynt")
    same = [f"{a}{v}{sign(b)}", f"{a}{v} {sign(b)}", rf"{a}\cdot {v} {sign(b)}", f"{a}*{v} {sign(b)}", f"{b}+{a}{v}",
        rf"{a} \times {v} {sign(b)}", rf"\left({a}{v} {sign(b)}\right)", f"{a} {v} {sign(b)}", rf"{a}\,{v} {sign(b)}"]
    other = "z" if v != "z" else "x"
    return same, [f"{a}{v} {sign(-b)}", f"{a + 1}{v} {sign(b)}", f"{a}{other} {sign(b)}", f"{a}{v}^2 {sign(b)}",
        f"{a}({v} {sign(b)})"]


def quadratic(draw: Random) -> Spellings:
    p, q = nonzero(draw, -9, 9), nonzero(draw, -9, 9)
    s, m = p + q, p * q
    middle = "" if s == 0 else f"{sign(s)}x"
    same = [f"x^2{middle}{sign(m)}", f"x^{{2}} {middle} {sign(m)}", f"(x{sign(p)})(x{sign(q)})",
        rf"(x {sign(q)}) \cdot (x {sign(p)})", rf"\left(x{sign(p)}\right)\left(x{sign(q)}\right)", f"{m}{middle}+x^2",
        f"x*x {middle} {sign(m)}"]
    return same, [f"x^2{middle}{sign(m + 1)}", f"x^2{sign(s + 1)}x{sign(m)}", f"x^3{middle}{sign(m)}",
        f"y^2{middle.replace('x', 'y')}{sign(m)}", f"-(x{sign(p)})(x{sign(q)})"]


def sequence(draw: Random) -> Spellings:
    c = draw.randint(2, 9)
    same = [f"a_n={c}^n", f"a_{{n}} = {c}^{{n}}", f"{c}^n", f"a_n = {c}^{{n}}", rf"{c}\cdot {c}^{{n-1}}"]
    return same, [f"a_n={c + 1}^n", f"{c}n", f"{c}^{{n+1}}", f"n^{c}"]


def polar(draw: Random) -> Spellings:
    n = draw.choice([3, 4, 5, 6, 7])
    same = [rf"e^{{i\pi/{n}}}", rf"e^{{\frac{{i\pi}}{{{n}}}}}", rf"e^{{\pi i/{n}}}", rf"e^{{\frac{{\pi}}{{{n}}}i}}",
        rf"\cos\frac{{\pi}}{{{n}}}+i\sin\frac{{\pi}}{{{n}}}", rf"\exp\left(\frac{{i\pi}}{{{n}}}\right)",
        rf"\cos(\pi/{n})+i\sin(\pi/{n})"]
    return same, [rf"e^{{-i\pi/{n}}}", rf"e^{{\pi/{n}}}", rf"e^{{i\pi/{n + 1}}}",
        rf"\cos\frac{{\pi}}{{{n}}}-i\sin\frac{{\pi}}{{{n}}}"]


def exponential(draw: Random) -> Spellings:
    k = draw.randint(2, 9)
    same = [f"e^{{{k}x}}", rf"e^{{{k} x}}", rf"\exp({k}x)", f"(e^x)^{k}", rf"e^x\cdot e^{{{k - 1}x}}",
        rf"\mathrm{{e}}^{{{k}x}}", f"e^({k}x)"]
    return same, [f"e^{{{k + 1}x}}", f"e^{{-{k}x}}", f"{k}e^x", f"e^{k}x", f"e^x+{k}"]


def trigonometry(draw: Random) -> Spellings:
    v = draw.choice([r"x", r"\theta", "t"])
    return draw.choice([([rf"\sin^2 {v}", rf"\sin^{{2}}({v})", rf"(\sin {v})^2", rf"1-\cos^2 {v}", rf"\sin^2{{{v}}}",
        rf"\left(\sin {v}\right)^{{2}}"], [rf"\cos^2 {v}",
        rf"\sin {v}", rf"\sin {v}^2", rf"2\sin {v}"]),
        ([rf"\tan {v}", rf"\tan({v})", rf"\frac{{\sin {v}}}{{\cos {v}}}", rf"\tan{{{v}}}",
        rf"\tan\left({v}\right)"], [rf"\cot {v}", rf"-\tan {v}", rf"\frac{{\cos {v}}}{{\sin {v}}}", rf"\tan 2{v}"]),
        ([rf"\sin 2{v}", rf"\sin(2{v})", rf"2\sin {v}\cos {v}",
        rf"2 \sin({v}) \cos({v})", rf"2\cos {v} \sin {v}"], [rf"2\sin {v}", rf"\sin {v}", rf"\cos 2{v}",
        rf"\sin {v}\cos {v}"]), ([rf"\cos 2{v}", rf"\cos(2{v})",
        rf"2\cos^2 {v}-1", rf"1 - 2\sin^2 {v}", rf"\cos^2 {v} - \sin^2 {v}"], [rf"\sin 2{v}", rf"2\cos {v}",
        rf"\cos^2 {v}", rf"1-2\cos^2 {v}"])] )


def factorial(draw: Random) -> Spellings:
    n = draw.randint(3, 12)
    value = 1
    for i in range(2, n + 1):
        value *= i
    same = [f"{n}!", f"{value}", rf"{n}\cdot {n - 1}!", f"{n} !", rf"{n} \times {n - 1}!", f"({n})!"]
    return same, [f"{n + 1}!", f"{value + 1}", f"{n}", f"{value * 10}", f"{n}!+1"]


# ---- relations -------------------------------------------------------------------------------------------------------


def inequality(draw: Random) -> Spellings:
    a, v = draw.randint(-20, 20), draw.choice("xynkt")
    ops, flipped, other = draw.choice([((r"\le", r"\leq", "≤", r"\leqslant", "<="), (r"\ge", r"\geq", "≥", ">="), "<"),
        (("<", r"\lt"), (">", r"\gt"), r"\le"), ((r"\ge",
        r"\geq", "≥", r"\geqslant"), (r"\le", r"\leq", "≤"), ">")] )
    same = ([f"{v} {op} {a}" for op in ops] + [f"{a} {op} {v}" for op in flipped] + [f"{v}{ops[0]} {a}",
        rf"2{v} {ops[0]} {2 * a}" if a else f"{v} {ops[-1]} 0"] )
    return same, [f"{v} {other} {a}", f"{v} {ops[0]} {a + 1}", f"{v} {flipped[0]} {a}", f"{v} = {a}",
        f"{a} {ops[0]} {v}"]


def equation(draw: Random) -> Spellings:
    r, c = draw.randint(2, 12), draw.randint(1, 9)
    same = [f"x^2+y^2={r * r}", f"x^{{2}}+y^{{2}}={r * r}", f"y^2+x^2={r * r}", f"{r * r} = x^2+y^2",
        f"x^2+y^2-{r * r}=0", f"x^2 + y^2 = {r}^2", f"2x^2+2y^2={2 * r * r}"]
    return same, [f"x^2+y^2={r * r + c}", f"x^2-y^2={r * r}", f"x^2+2y^2={r * r}", f"x^2+y^3={r * r}"]


def angle(draw: Random) -> Spellings:
    a, b, c = draw.sample("ABCDEFGHPQR", 3)
    same = [rf"\angle {a}{b}{c}", rf"\angle{{{a}{b}{c}}}", rf"\angle {a} {b} {c}", rf"$\angle {a}{b}{c}$"]
    return same, [rf"\angle {b}{a}{c}", rf"\triangle {a}{b}{c}", rf"\angle {a}{c}{b}", rf"{a}{b}{c}"]
