"""Generators of answers, each with spellings of one value and of other values: expressions and relations."""

from __future__ import annotations

from random import Random

from tests.rewards.answer_kinds import Spellings, nonzero, sign

# fmt: off


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
