"""Generators of answers, each with spellings of one value and of other values: expressions and relations."""

from __future__ import annotations

from random import Random

from tests.rewards.answer_kinds import Spellings, frac, nonzero, sign

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


def rational_function(draw: Random) -> Spellings:
    a, b = draw.randint(1, 9), draw.randint(2, 9)
    same = [rf"\frac{{{a}}}{{x+{b}}}", f"{a}/(x+{b})", rf"\frac{{{a}}}{{{b}+x}}", rf"\dfrac{{{2 * a}}}{{2x+{2 * b}}}",
        rf"{a}(x+{b})^{{-1}}", rf"{a}\cdot\frac{{1}}{{x+{b}}}"]
    return same, [rf"\frac{{{a}}}{{x-{b}}}", f"{a}/x+{b}", rf"\frac{{{a + 1}}}{{x+{b}}}", rf"\frac{{x+{b}}}{{{a}}}"]


def greek(draw: Random) -> Spellings:
    (g, u), (h, _) = draw.sample([(r"\alpha", "α"), (r"\beta", "β"), (r"\theta", "θ"), (r"\lambda", "λ"), (r"\mu", "μ"),
        (r"\omega", "ω"), (r"\sigma", "σ")], 2)
    n = draw.randint(2, 9)
    same = [rf"{n}{g}", rf"{n} {g}", rf"{n}\cdot {g}", f"{n}{u}", rf"{g}\cdot {n}", rf"\frac{{{2 * n}{g}}}{{2}}",
        rf"{n}{{{g}}}"]
    return same, [f"{n}{h}", rf"{n + 1}{g}", rf"{g}^{n}", rf"\frac{{{g}}}{{{n}}}"]


def subscript(draw: Random) -> Spellings:
    v, n = draw.choice("axSTv"), draw.randint(1, 9)
    same = [f"{v}_{n}", f"{v}_{{{n}}}", f"{v} _ {n}", f"{{{v}}}_{n}", f"{v}_{{ {n} }}"]
    return same, [f"{v}_{n + 1}", f"{v}{n}", f"{v}^{n}", f"y_{n}", f"{v}"]


def sequence(draw: Random) -> Spellings:
    c = draw.randint(2, 9)
    same = [f"a_n={c}^n", f"a_{{n}} = {c}^{{n}}", f"{c}^n", f"a_n = {c}^{{n}}", rf"{c}\cdot {c}^{{n-1}}"]
    return same, [f"a_n={c + 1}^n", f"{c}n", f"{c}^{{n+1}}", f"n^{c}"]


def complex_number(draw: Random) -> Spellings:
    a, b = draw.randint(1, 19), nonzero(draw, -19, 19)
    same = [f"{a}{sign(b)}i", f"{a} {sign(b)} i".replace("  ", " "), rf"{a} {sign(b)}\cdot i", f"{b}i+{a}",
        rf"{a} {sign(b)}\,i", rf"\left({a}{sign(b)}i\right)",
        rf"{a} {sign(b)}\mathrm{{i}}", f"z={a}{sign(b)}i"]
    return same, [f"{a}{sign(-b)}i", f"{a + 1}{sign(b)}i", f"{a}{sign(b)}", f"{a}i{sign(b)}" if a != b else f"{a}",
        f"{-a}{sign(b)}i"]


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


def logarithm(draw: Random) -> Spellings:
    a, b = draw.sample([2, 3, 5, 6, 7, 10], 2)
    same = [rf"\log_{a} {b}" if a < 10 else rf"\log_{{{a}}} {b}", rf"\log_{{{a}}} {b}", rf"\log_{{{a}}}({b})",
        rf"\log_{{{a}}}{{{b}}}", rf"\frac{{\ln {b}}}{{\ln {a}}}",
        rf"\frac{{\ln({b})}}{{\ln({a})}}", rf"\log_{{{a}}}\left({b}\right)"]
    return same, [rf"\log_{{{b}}} {a}", rf"\log_{{{a}}} {b + 1}", frac(b, a), rf"\ln {b}", rf"\log_{{{a}}} {b}+1"]


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


def chain(draw: Random) -> Spellings:
    a = draw.randint(-9, 9)
    b = a + draw.randint(1, 9)
    same = [rf"{a} \le x < {b}", rf"{a} \leq x < {b}", rf"{a}\leqslant x<{b}", f"{a} ≤ x < {b}", rf"{b} > x \ge {a}",
        f"[{a}, {b})", rf"x \in [{a},{b})", rf"{a}\le x\lt {b}"]
    return same, [rf"{a} < x < {b}", rf"{a} \le x \le {b}", rf"{a} \le x < {b + 1}", rf"x < {b}",
        rf"{a - 1} \le x < {b}", f"({a}, {b}]"]


def other_name(draw: Random) -> Spellings:
    n = draw.randint(2, 99)
    a, b = draw.sample("xyzabkmn", 2)
    return [f"{a}={n}", f"{a} = {n}", f"{a} = {2 * n}/2"], [f"{b}={n}", f"{b} = {n}"]


def line(draw: Random) -> Spellings:
    a, b = draw.randint(2, 9), nonzero(draw, -9, 9)
    same = [f"y={a}x{sign(b)}", f"y = {a}x {sign(b)}", f"y={b}+{a}x", rf"y = {a}\cdot x {sign(b)}",
        f"{a}x-y{sign(b)}=0", f"y-{a}x={b}", f"{a}x {sign(b)} = y"]
    return same, [f"y={a}x{sign(-b)}", f"y={a + 1}x{sign(b)}", f"x={a}y{sign(b)}", f"{a}x+y{sign(b)}=0"]


def equation(draw: Random) -> Spellings:
    r, c = draw.randint(2, 12), draw.randint(1, 9)
    same = [f"x^2+y^2={r * r}", f"x^{{2}}+y^{{2}}={r * r}", f"y^2+x^2={r * r}", f"{r * r} = x^2+y^2",
        f"x^2+y^2-{r * r}=0", f"x^2 + y^2 = {r}^2", f"2x^2+2y^2={2 * r * r}"]
    return same, [f"x^2+y^2={r * r + c}", f"x^2-y^2={r * r}", f"x^2+2y^2={r * r}", f"x^2+y^3={r * r}"]


def angle(draw: Random) -> Spellings:
    a, b, c = draw.sample("ABCDEFGHPQR", 3)
    same = [rf"\angle {a}{b}{c}", rf"\angle{{{a}{b}{c}}}", rf"\angle {a} {b} {c}", rf"$\angle {a}{b}{c}$"]
    return same, [rf"\angle {b}{a}{c}", rf"\triangle {a}{b}{c}", rf"\angle {a}{c}{b}", rf"{a}{b}{c}"]
