"""Generators of answers, each with spellings of one value and of other values: sets, matrices, notation."""

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


def residue(draw: Random) -> Spellings:
    m = draw.randint(3, 40)
    a = draw.randint(1, m - 1)
    same = [rf"x \equiv {a} \pmod{{{m}}}", rf"x \equiv {a} (mod {m})", rf"x\equiv {a} \mod {m}",
        rf"x ≡ {a} (mod {m})",
        rf"x \equiv {a} \bmod {m}", rf"x\equiv {a}\ (\text{{mod }} {m})", rf"x \equiv {a}\ (\mathrm{{mod}}\ {m})",
        rf"x\equiv {a} \text{{ mod }} {m}", rf"x \equiv {a}\pmod {{{m}}}",
        rf"x\equiv {a} \;(\operatorname{{mod}} {m})",
        rf"x \equiv {a + m} \pmod{{{m}}}", rf"x \equiv {a - m} (\bmod {m})",
        rf"x \equiv {a} \quad (\text{{mod}}\ {m})"]
    return same, [rf"x \equiv {a + 1} \pmod{{{m}}}", rf"x \equiv {a} \pmod{{{m + 1}}}",
        rf"x \equiv {a} (mod {m + 1})",
        f"x = {a}", rf"y \equiv {a + 1} (mod {m})", rf"x \equiv {m - a if 2 * a != m else a + 1} (mod {m})"]


def several_residues(draw: Random) -> Spellings:
    m = draw.randint(7, 30)
    a, b = draw.sample(range(1, m), 2)
    same = [rf"x \equiv {a}, {b} \pmod{{{m}}}", rf"x \equiv {b}, {a} (mod {m})",
        rf"x\equiv {a} \text{{ or }} {b} \pmod{{{m}}}",
        rf"x \equiv {a} \pmod{{{m}}} \text{{ or }} x \equiv {b} \pmod{{{m}}}",
        rf"x \equiv {a} (mod {m}), x \equiv {b} (mod {m})", rf"{a}, {b} \pmod{{{m}}}"]
    c = next(c for c in range(m) if c not in (a, b))
    return same, [rf"x \equiv {a}, {c} \pmod{{{m}}}", rf"x \equiv {a}, {b} \pmod{{{m + 1}}}",
        rf"x \equiv {a} \pmod{{{m}}}",
        rf"x \equiv {a}, {b}, {c} \pmod{{{m}}}"]


def large_money(draw: Random) -> Spellings:
    n, (word, zeros) = draw.randint(11, 99), draw.choice([("thousand", 3), ("million", 6), ("billion", 9)])
    n += n % 10 == 0
    text, value = f"{n // 10}.{n % 10}", n * 10 ** (zeros - 1)
    same = [rf"\${text} \text{{ {word}}}", f"${text} {word}", f"{text} {word} dollars", rf"\${value:,}", f"{value}",
        rf"\$ {text}\text{{ {word}}}", f"{value:,} dollars"]
    return same, [f"{text} dollars", rf"\${text}", f"{n} {word}", f"{n // 10}.{n % 10 + 1} {word}",
        rf"\${value // 10}",
        f"${text} trillion", f"€{text}"]


def approximately(draw: Random) -> Spellings:
    text = f"{draw.randint(1, 99)}.{draw.randint(11, 98)}"
    same = [text, rf"\approx {text}", f"≈ {text}", f"approximately {text}", rf"\text{{approximately }} {text}",
        f"about {text}", rf"\text{{about }}{text}", rf"x \approx {text}", rf"\text{{approx. }} {text}",
        rf"\sim {text}", f"roughly {text}", rf"\text{{Approximately }}{text}", rf"\approx\!{text}"]
    return same, [rf"\approx {text}1", f"approximately {text[::-1]}1", f"about -{text}",
        rf"\approx {text.replace('.', '')}",
        f"not {text}", f"at least {text}"]


def system(draw: Random) -> Spellings:
    a, b = numbers(draw, 2)
    same = [rf"\begin{{cases}} x={a} \\ y={b} \end{{cases}}", f"x={a}, y={b}", f"(x,y)=({a},{b})",
        f"(x, y) = ({a}, {b})",
        rf"\begin{{cases}} x = {a}, \\ y = {b}. \end{{cases}}", rf"x={a} \text{{ and }} y={b}", f"y={b}, x={a}",
        rf"\left\{{\begin{{array}}{{l}} x={a} \\ y={b} \end{{array}}\right.", rf"x = {a},\quad y = {b}",
        f"({a}, {b})",
        rf"\begin{{cases}} y={b} \\ x={a} \end{{cases}}", rf"\begin{{aligned}} x&={a} \\ y&={b} \end{{aligned}}",
        f"(y,x)=({b},{a})"]
    return same, [f"x={b}, y={a}", f"({b},{a})", f"(x,y)=({b},{a})",
        rf"\begin{{cases}} x={a} \\ y={b + 1} \end{{cases}}",
        rf"\begin{{cases}} y={a} \\ x={b} \end{{cases}}", f"x={a}", f"x={a}, y={b}, z=0"]


def several_points(draw: Random) -> Spellings:
    a, b, c, d = numbers(draw, 4)
    same = [f"({a},{b}), ({c},{d})", f"({c},{d}),({a},{b})", rf"({a},{b}) \text{{ and }} ({c},{d})",
        rf"\{{({a},{b}),({c},{d})\}}",
        rf"(x,y)=({a},{b}), ({c},{d})", rf"({a},{b})\text{{ or }}({c},{d})", rf"(x,y) \in \{{({a},{b}),({c},{d})\}}",
        rf"(x, y) = ({a}, {b}) \text{{ or }} (x, y) = ({c}, {d})", rf"({a},{b}); ({c},{d})"]
    return same, [f"({a},{c}), ({b},{d})", f"({a},{b})", f"({b},{a}), ({c},{d})", f"({a},{b}), ({c},{d}), (0,99)",
        f"{a},{b},{c},{d}"]


def scaled_matrix(draw: Random) -> Spellings:
    k, (a, b, c, d) = draw.randint(2, 9), numbers(draw, 4)
    inner, outer = rf"{a} & {b} \\ {c} & {d}", rf"{k * a} & {k * b} \\ {k * c} & {k * d}"
    same = [rf"{k}\begin{{pmatrix}} {inner} \end{{pmatrix}}", rf"\begin{{pmatrix}} {outer} \end{{pmatrix}}",
        rf"{k} \begin{{bmatrix}} {inner} \end{{bmatrix}}", rf"{k}\cdot\begin{{pmatrix}} {inner} \end{{pmatrix}}",
        rf"A = {k}\begin{{pmatrix}} {inner} \end{{pmatrix}}", rf"\begin{{pmatrix}} {inner} \end{{pmatrix}} \cdot {k}"]
    return same, [rf"\begin{{pmatrix}} {inner} \end{{pmatrix}}", rf"{k + 1}\begin{{pmatrix}} {inner} \end{{pmatrix}}",
        rf"-{k}\begin{{pmatrix}} {inner} \end{{pmatrix}}",
        rf"{k}\begin{{pmatrix}} {b} & {a} \\ {c} & {d} \end{{pmatrix}}",
        rf"{k}+\begin{{pmatrix}} {inner} \end{{pmatrix}}"]


def nested_list_matrix(draw: Random) -> Spellings:
    a, b, c, d = numbers(draw, 4)
    same = [f"[[{a},{b}],[{c},{d}]]", f"[[{a}, {b}], [{c}, {d}]]",
        rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}",
        rf"\begin{{bmatrix}} {a} & {b} \\ {c} & {d} \end{{bmatrix}}",
        rf"\begin{{Bmatrix}} {a} & {b} \\ {c} & {d} \end{{Bmatrix}}"]
    return same, [f"[[{a},{c}],[{b},{d}]]", f"[{a},{b},{c},{d}]",
        rf"\begin{{vmatrix}}{a}&{b}\\{c}&{d}\end{{vmatrix}}",
        f"[[{a}, {b}], [{c}, {d + 1}]]"]


def angle_brackets(draw: Random) -> Spellings:
    a, b = numbers(draw, 2)
    same = [rf"\left<{a},{b}\right>", f"<{a}, {b}>", rf"\langle {a}, {b} \rangle",
        rf"\left\langle {a},{b}\right\rangle",
        f"⟨{a}, {b}⟩", rf"\left< {a} , {b} \right>", rf"\vec{{v}} = \langle {a}, {b}\rangle",
        rf"\mathbf{{v}}=\left<{a},{b}\right>",
        rf"\lt {a}, {b} \gt"]
    return same, [rf"\left<{b},{a}\right>", f"<{a}, {b}, 0>", rf"\langle {a + 1}, {b} \rangle", f"{a} < {b}"]


def empty_and_nested_sets(draw: Random) -> Spellings:
    a, b = draw.sample(range(1, 20), 2)
    return draw.choice([
        ([r"\emptyset", r"\varnothing", r"\{\}", "∅", r"\left\{ \right\}", r"x \in \emptyset"],
            [r"\{\emptyset\}", r"\{\varnothing\}", r"\{\{\}\}", r"\{0\}", "0", r"\{\emptyset, \{\emptyset\}\}"]),
        ([r"\{\emptyset\}", r"\{\varnothing\}", r"\{\{\}\}", r"\left\{\emptyset\right\}"],
            [r"\emptyset", r"\{\}", r"\{\{\emptyset\}\}", r"\{0\}"]),
        ([rf"\{{\{{{a}\}}, {b}\}}", rf"\{{{b}, \{{{a}\}}\}}", rf"\left\{{\left\{{{a}\right\}},{b}\right\}}"],
            [rf"\{{{a}, {b}\}}", rf"\{{\{{{b}\}}, {a}\}}", rf"\{{\{{{a}, {b}\}}\}}", f"{a}, {b}"]),
        ([rf"\{{\{{{a}\}},\{{{b}\}}\}}", rf"\{{\{{{b}\}}, \{{{a}\}}\}}"],
            [rf"\{{\{{{a}, {b}\}}\}}", rf"\{{{a}, {b}\}}", rf"\{{\{{{a}\}}, {b}\}}", rf"\{{\{{{a}\}}\}}"])])


def set_builder(draw: Random) -> Spellings:
    a = draw.randint(-20, 20)
    op, opening = draw.choice([(">", "("), (r"\ge", "[")])
    same = [rf"\{{x \mid x {op} {a}\}}", rf"\{{x : x {op} {a}\}}", rf"\{{x \in \mathbb{{R}} \mid x {op} {a}\}}",
        rf"{opening}{a}, \infty)",
        rf"\left\{{ x \in \mathbb{{R}} : x {op} {a} \right\}}", f"x {op} {a}", rf"\{{x | x {op} {a}\}}",
        rf"x {op} {a}, x \in \mathbb{{R}}"]
    flipped = {">": r"\ge", r"\ge": ">"}[op]
    return same, [rf"\{{x \mid x {flipped} {a}\}}", rf"\{{x : x {op} {a + 1}\}}",
        rf"\{{x \in \mathbb{{Z}} : x {op} {a}\}}", f"x < {a}"]


def two_inequalities(draw: Random) -> Spellings:
    a = draw.randint(-20, 20)
    b = a + draw.randint(1, 20)
    same = [f"({a}, {b})", f"{a} < x < {b}", f"x > {a} and x < {b}", rf"x > {a} \text{{ and }} x < {b}",
        f"x < {b}, x > {a}",
        rf"x \in ({a}, {b})", rf"x>{a} \land x<{b}", rf"({a}, \infty) \cap (-\infty, {b})", rf"{b} > x > {a}"]
    return same, [rf"x < {a} \text{{ or }} x > {b}", f"[{a}, {b}]", f"{a} < x < {b + 1}",
        rf"x \ge {a} \text{{ and }} x < {b}",
        f"x > {a}"]


def antiderivative(draw: Random) -> Spellings:
    a, n = draw.randint(2, 9), draw.randint(2, 5)
    same = [f"{a}x^{n}+C", f"{a}x^{{{n}}} + C", f"C + {a}x^{n}", rf"{a} x^{n} + \text{{C}}", rf"{a}x^{n}+C.",
        f"{a}x^{n} + c",
        f"y = {a}x^{n} + C", rf"{a}x^{n} + \mathrm{{C}}"]
    return same, [f"{a}x^{n}-{a}", f"{a + 1}x^{n}+C", f"{a}x^{n + 1}+C", f"{a}x^{n}+Cx", f"-{a}x^{n}+C"]


def piecewise(draw: Random) -> Spellings:
    a, b, c = draw.randint(2, 9), draw.randint(2, 9), draw.randint(-5, 5)
    same = [rf"\begin{{cases}} {a}x & x < {c} \\ x+{b} & x \ge {c} \end{{cases}}",
        rf"f(x)=\begin{{cases}} {a}x, & x < {c} \\ x+{b}, & x \geq {c} \end{{cases}}",
        rf"\begin{{cases}} {a}x & \text{{if }} x < {c}, \\ {b}+x & \text{{if }} x \ge {c}. \end{{cases}}",
        rf"\begin{{cases}} x+{b} & x \ge {c} \\ {a}x & x < {c} \end{{cases}}",
        rf"\begin{{cases}} {a} x, & \text{{when }} x < {c} \\ x + {b}, & \text{{when }} {c} \le x \end{{cases}}"]
    return same, [rf"\begin{{cases}} x+{b} & x < {c} \\ {a}x & x \ge {c} \end{{cases}}",
        rf"\begin{{cases}} {a}x & x < {c + 1} \\ x+{b} & x \ge {c + 1} \end{{cases}}", f"{a}x",
        rf"\begin{{cases}} {a}x & x \le {c} \\ x+{b} & x > {c} \end{{cases}}",
        rf"\begin{{cases}} {a + 1}x & x < {c} \\ x+{b} & x \ge {c} \end{{cases}}"]


def combinations(draw: Random) -> Spellings:
    n = draw.randint(4, 15)
    k = draw.randint(2, n - 2)
    value = 1
    for i in range(k):
        value = value * (n - i) // (i + 1)
    same = [rf"\binom{{{n}}}{{{k}}}", f"C({n},{k})", rf"{{}}_{{{n}}}C_{{{k}}}", f"C({n}, {k})",
        rf"_{{{n}}}C_{{{k}}}", rf"^{{{n}}}C_{{{k}}}",
        rf"{{}}^{{{n}}}C_{{{k}}}", f"{value}", rf"\binom {{{n}}} {{{k}}}"]
    return same, [f"C({n + 1},{k})", f"{value + 1}", rf"{{}}_{{{n}}}C_{{{k - 1}}}" if 2 * k - 1 != n else "0",
        f"P({n},{k})", f"C({k},{n})"]


def unicode_powers(draw: Random) -> Spellings:
    v, n = draw.choice("xyn"), draw.randint(2, 9)
    up, down = "⁰¹²³⁴⁵⁶⁷⁸⁹"[n], "₀₁₂₃₄₅₆₇₈₉"[n]
    if draw.random() < 0.5:
        return [f"3{v}{up}", f"3{v}^{n}", f"3{v}^{{{n}}}", rf"3 \cdot {v}{up}"], [f"3{v}^{n + 1}", f"3{v}{n}",
        f"3{v}", f"3{v}_{n}"]
    return [f"{v}{down}", f"{v}_{n}", f"{v}_{{{n}}}"], [f"{v}^{n}", f"{v}{n}", f"{v}_{n + 1}", f"{v}"]


def chain_of_equations(draw: Random) -> Spellings:
    a, b = draw.randint(2, 30), draw.randint(2, 30)
    n = a + b
    same = [f"{n}", f"x = {a} + {b} = {n}", f"x={n}", rf"x - {a} = {b} \implies x = {n}",
        rf"x-{a}={b} \Rightarrow x={n}",
        rf"x = {n} \approx {n}.0", rf"x - {a} = {b} \Longrightarrow x = {n}"]
    return same, [f"{n + 1}", f"x = {a} + {b} = {n - 1}", rf"x-{a}={b} \Rightarrow x={b}", f"{-n}"]
