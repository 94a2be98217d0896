"""Generators of answers, each with spellings of one value and of other values: numbers, quantities, text.

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


def decimal(draw: Random) -> Spellings:
    value = Fraction(nonzero(draw, -4000, 4000), draw.choice([2, 4, 5, 8, 20, 25, 40]))
    value = value if value.denominator > 1 else value + Fraction(1, 2)
    text = f"{float(value)!r}"
    a, b = value.numerator, value.denominator
    same = [text, f"{text}0", f"{text}00", f"${text}$", frac(a, b), f"{a}/{b}", rf"\text{{{text}}}"]
    if abs(value) < 1:
        same.append(text.replace("0.", ".", 1))
    return same, [f"{text}1", f"{float(value * 10)!r}", f"{float(value + 1)!r}", f"{float(-value)!r}", frac(a + b, b)]


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


def negative_fraction(draw: Random) -> Spellings:
    a, b = coprime(draw)
    same = [rf"-\frac{{{a}}}{{{b}}}", frac(-a, b), frac(a, -b), f"-{a}/{b}", f"({-a})/{b}", rf"-\dfrac{{{a}}}{{{b}}}",
        f"−{a}/{b}", rf"- \frac{{{a}}}{{{b}}}"]
    return same, [frac(a, b), frac(-b, a), frac(-a - 1, b), f"{-a}", frac(-a, -b)]


def mixed_number(draw: Random) -> Spellings:
    w = draw.randint(1, 9)
    a, b = coprime(draw, 9)
    a = a % b or 1
    same = [rf"{w}\frac{{{a}}}{{{b}}}", rf"{w} \frac{{{a}}}{{{b}}}", rf"{w}\dfrac{{{a}}}{{{b}}}", f"{w} {a}/{b}",
        frac(w * b + a, b), rf"{w}\tfrac{a}{b}", rf"{w}+\frac{{{a}}}{{{b}}}", f"{w * b + a}/{b}"]
    return same, [frac(w * b + a + 1, b), rf"{w + 1}\frac{{{a}}}{{{b}}}", rf"-{w}\frac{{{a}}}{{{b}}}", f"{w}{a}/{b}",
        f"{w}"]


def repeating(draw: Random) -> Spellings:
    digits = draw.choice(["3", "6", "7", "27", "18", "142857", "09"])
    whole = draw.randint(0, 3)
    value = whole + Fraction(int(digits), 10 ** len(digits) - 1)
    same = [rf"{whole}.\overline{{{digits}}}", rf"{whole}.\bar{{{digits}}}", frac(value.numerator, value.denominator),
        f"{value}"]
    return same, [f"{whole}.{digits}", f"{whole}.{digits * 2}", rf"{whole + 1}.\overline{{{digits}}}",
        frac(value.numerator + 1, value.denominator)]


def scientific(draw: Random) -> Spellings:
    m, n = draw.randint(11, 99), draw.randint(3, 9)
    if m % 10 == 0:
        m += 1
    t = f"{m // 10}.{m % 10}"
    same = [rf"{t}\times 10^{n}", rf"{t} \times 10^{{{n}}}", rf"{t}\cdot 10^{{{n}}}", rf"{t}\cdot10^{n}",
        f"{m * 10 ** (n - 1)}", f"{t}*10^{n}", f"{t}×10^{n}", f"{t}e{n}"]
    return same, [rf"{t}\times 10^{n + 1}", rf"{t}\times 10^{{-{n}}}", f"{t}", rf"{m}\times 10^{n}",
        rf"{t}\times 11^{n}"]


def power(draw: Random) -> Spellings:
    b, n = draw.randint(2, 9), draw.randint(2, 12)
    same = [f"{b}^{n}", f"{b}^{{{n}}}", f"{b**n}", f"{b}**{n}", rf"{b}^{{{n - 1}}}\cdot {b}",
        rf"{b}\times {b}^{{{n - 1}}}", f"({b})^{n}"]
    others = [f"{b}^{{{n + 1}}}", f"{b**n + 1}", f"{b}^{{-{n}}}", f"{b * n}" if b * n != b**n else f"{b * n + 1}",
        f"{b + 1}^{n}"]
    return same, others


def negative_power(draw: Random) -> Spellings:
    b, n = draw.randint(2, 10), draw.randint(1, 5)
    same = [f"{b}^{{-{n}}}", frac(1, b**n), rf"\frac{{1}}{{{b}^{{{n}}}}}", rf"\frac{{1}}{{{b}^{n}}}", f"1/{b}^{n}",
        f"1/{b**n}"]
    return same, [f"{b}^{n}", f"-{b}^{n}", frac(1, b**n + 1), frac(1, b ** (n + 1))]


def root(draw: Random) -> Spellings:
    a, b = draw.randint(2, 9), draw.choice([2, 3, 5, 6, 7])
    same = [rf"{a}\sqrt{{{b}}}", rf"{a}\sqrt{b}", rf"{a} \sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}",
        rf"{a}\cdot\sqrt{{{b}}}", rf"\sqrt{{{b}}}\cdot {a}",
        rf"{a}\cdot {b}^{{1/2}}", rf"{a} \cdot {b}^{{\frac{{1}}{{2}}}}", rf"\frac{{{a * b}}}{{\sqrt{{{b}}}}}",
        f"{a}sqrt({b})", f"{a}*sqrt({b})", rf"{a}\sqrt{{{b}\,}}",
        rf"\sqrt{{{a}^2\cdot {b}}}", f"{a}√{b}"]
    return same, [rf"{a + 1}\sqrt{{{b}}}", rf"{a}\sqrt{{{b + 1}}}", rf"\sqrt{{{a * b}}}", f"{a * b}",
        rf"-{a}\sqrt{{{b}}}", f"{a * b**0.5:.3f}", rf"{a}+\sqrt{{{b}}}"]


def cube_root(draw: Random) -> Spellings:
    a, n = draw.randint(2, 30), draw.choice([3, 4, 5])
    same = [
        rf"\sqrt[{n}]{{{a}}}",
        rf"\sqrt[ {n} ]{{{a}}}",
        f"{a}^{{1/{n}}}",
        rf"{a}^{{\frac{{1}}{{{n}}}}}",
        rf"{a}^{{\frac1{n}}}",
        f"{a}^(1/{n})",
    ]
    return same, [rf"\sqrt{{{a}}}", rf"\sqrt[{n + 1}]{{{a}}}", frac(a, n), rf"\sqrt[{n}]{{{a + 1}}}"]


def base_n(draw: Random) -> Spellings:
    b = draw.randint(3, 9)
    digits = str(draw.randint(1, b - 1)) + "".join(str(draw.randint(0, b - 1)) for _ in range(draw.randint(2, 5)))
    other = digits[:-1] + str((int(digits[-1]) + 1) % b)
    same = [f"{digits}_{b}", f"{digits}_{{{b}}}", f"({digits})_{b}", f"({digits})_{{{b}}}",
        rf"{digits}_{{\text{{{b}}}}}", f"{digits} _ {b}", f"${digits}_{{{b}}}$", rf"{{{digits}}}_{{{b}}}"]
    return same, [f"{digits}_{b + 1}", f"{other}_{b}", f"{digits}0_{{{b}}}", f"{digits}{b}", f"{other}_{{{b}}}"]


def hexadecimal(draw: Random) -> Spellings:
    digits = f"{draw.randint(0xA0, 0xFFFF):X}"
    if digits.isdigit():
        digits = f"A{digits}"
    same = [f"{digits}_{{16}}", rf"\text{{{digits}}}_{{16}}", rf"\mathrm{{{digits}}}_{{16}}", f"({digits})_{{16}}"]
    return same, [f"{digits}_{{17}}", f"{digits}1_{{16}}", f"B{digits}_{{16}}"]


def percent(draw: Random) -> Spellings:
    n = draw.choice([5, 12, 15, 20, 25, 30, 40, 60, 75, 80, 120])
    value = Fraction(n, 100)
    same = [
        rf"{n}\%",
        f"{n}%",
        rf"{n} \%",
        f"{n} percent",
        rf"{n}\text{{ percent}}",
        rf"{n}\text{{\%}}",
        rf"${n}\%$",
        rf"{n}.0\%",
        rf"{n}\,\%",
    ]
    others = [rf"{n + 1}\%", rf"{n}0\%", rf"0.{n:02d}\%", rf"-{n}\%", frac(value.numerator + 1, value.denominator),
        f"{n / 1000}"]
    return same, others


def percent_as_number(draw: Random) -> Spellings:
    """Return a percentage and the same value as a plain number."""
    n = draw.choice([5, 12, 15, 20, 25, 30, 40, 60, 75, 80])
    value = Fraction(n, 100)
    with_sign = [rf"{n}\%", f"{n}%", rf"{n}\text{{ percent}}"]
    plain = draw.choice([f"{float(value)}", frac(value.numerator, value.denominator)])
    return [draw.choice(with_sign), plain], [rf"{n + 5}\%", f"{n + 1}", f"{float(value) / 10}"]


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


def unit_pair(draw: Random) -> Spellings:
    """Return answers that all have a unit."""
    n, (short, long) = draw.randint(1, 99), draw.choice(UNITS)
    other = draw.choice([name for name, _ in UNITS if name != short])
    same = [
        rf"{n}\text{{ {short}}}",
        f"{n} {long}",
        rf"{n}\,\mathrm{{{short}}}",
        rf"{n}\text{{ {long}}}",
        rf"{n} \text{{{short}}}",
    ]
    return same, [rf"{n}\text{{ {other}}}", rf"{n}\,\mathrm{{{other}}}", rf"{n}\text{{ {short}}}^2",
        rf"{n + 1}\text{{ {short}}}"]


def square_unit(draw: Random) -> Spellings:
    n, short, p = draw.randint(4, 99), draw.choice(["cm", "m", "km", "mm", "ft", "in"]), draw.choice([2, 3])
    word = "square" if p == 2 else "cubic"
    same = [
        rf"{n}\text{{ {short}}}^{p}", rf"{n}\text{{ {short}}}^{{{p}}}", rf"{n}\,\text{{{short}}}^{p}",
        rf"{n} \mathrm{{~{short}}}^{{{p}}}", rf"{n}\,\mathrm{{{short}}}^{p}",
        f"{n}", rf"{n}\text{{ {short}$^{p}$}}", rf"{n}\ \text{{{short}}}^{p}", rf"{n}\text{{ {word} {short}}}",
    ]
    return same, [
        f"{n**p}",
        rf"{n + 1}\text{{ {short}}}^{p}",
        f"{n**p}\\text{{ {short}}}",
        f"{n}^{p}",
        rf"{n * 10}\,\mathrm{{{short}}}^{p}",
    ]


def rate(draw: Random) -> Spellings:
    n = draw.randint(2, 120)
    a, b = draw.choice([("m", "s"), ("km", "h"), ("g", "mL"), ("mi", "h")])
    same = [
        rf"{n}\text{{ {a}/{b}}}",
        rf"{n}\,\text{{{a}/{b}}}",
        rf"{n}\,\mathrm{{{a}/{b}}}",
        rf"{n} \mathrm{{~{a} / {b}}}",
        f"{n} {a}/{b}" if len(a) > 1 else f"{n}",
        f"{n}",
    ]
    return same, [rf"{n + 1}\text{{ {a}/{b}}}", rf"{n}0\,\mathrm{{{a}/{b}}}", rf"-{n}\text{{ {a}/{b}}}"]


def counted(draw: Random) -> Spellings:
    n, noun = (draw.randint(2, 500),
        draw.choice(["apples", "students", "ways", "hours", "minutes", "points", "triangles", "edges", "miles", "years",
        "square units",
        "units"] ))
    same = [
        f"{n}",
        f"{n} {noun}",
        rf"{n}\text{{ {noun}}}",
        rf"{n} \text{{ {noun}}}",
        rf"{n}\,\text{{{noun}}}",
        rf"{n}\ \text{{{noun}}}",
        rf"\text{{{n} {noun}}}",
        rf"{n}~\text{{{noun}}}",
    ]
    return same, [f"{n + 1} {noun}", rf"{n}0\text{{ {noun}}}", f"{n - 1}", rf"-{n}\text{{ {noun}}}"]


def degrees(draw: Random) -> Spellings:
    n = draw.randint(1, 359)
    same = [
        rf"{n}^\circ",
        rf"{n}^{{\circ}}",
        f"{n}°",
        rf"{n}\degree",
        f"{n} degrees",
        rf"{n}\text{{ degrees}}",
        f"{n}",
        rf"{n} ^ \circ",
        rf"{n}^{{\,\circ}}",
        rf"{n}\,^\circ",
    ]
    return same, [rf"{n + 1}^\circ", rf"-{n}^\circ", rf"{n}0^{{\circ}}", f"{n - 1} degrees", f"{n + 180}°"]


def currency(draw: Random) -> Spellings:
    n, c = draw.randint(1, 2999), draw.choice([50, 25, 10, 75])
    text = f"{n}.{c}"
    same = [
        rf"\${text}",
        f"${text}",
        text,
        f"{text} dollars",
        rf"\text{{\${text}}}",
        rf"\$ {text}",
        rf"\$\,{text}",
        rf"{text}\text{{ dollars}}",
        text.rstrip("0"),
        rf"\${n:,}.{c}",
    ]
    return same, [rf"\${n + 1}.{c}", rf"\${n}.{c + 1}", rf"\${n}", f"{n}{c}", rf"-\${text}"]


# ---- text ------------------------------------------------------------------------------------------------------------

WORDS = (
    "East", "West", "Tuesday", "Friday", "even", "odd", "Alice", "Bob", "ellipse", "hyperbola", "parabola", "isosceles",
    "infinitely many", "no solution", "increasing", "decreasing",
    "blue", "green", "March", "yes", "no", "true", "false", "rectangle", "point of inflection",
)


def text(draw: Random) -> Spellings:
    word = draw.choice(WORDS)
    others = [other for other in WORDS if other != word]
    joined = word.replace(" ", r"\ ")
    same = [
        word,
        rf"\text{{{word}}}",
        rf"\textbf{{{word}}}",
        rf"\mathrm{{{joined}}}",
        word.lower(),
        rf"\text{{ {word} }}",
        f"{word}.",
        rf"\mbox{{{word}}}",
        rf"\text{{{word}.}}",
        rf"\textit{{{word}}}",
    ]
    scrambled = word[::-1] if word[::-1].lower() != word.lower() else f"{word}s"
    return same, [draw.choice(others), rf"\text{{{draw.choice(others)}}}", f"not {word}", scrambled]


def choice(draw: Random) -> Spellings:
    letter = draw.choice("ABCDE")
    other = draw.choice([name for name in "ABCDE" if name != letter])
    same = [letter, f"({letter})", rf"\text{{{letter}}}", rf"\text{{({letter})}}", rf"\textbf{{({letter})}}",
        rf"\mathrm{{{letter}}}", f"{letter}.", f"${letter}$", rf"\mathbf{{{letter}}}", f"{letter})",
        rf"(\text{{{letter}}})", rf"\textbf{{{letter}}}"]
    return same, [other, f"({other})", rf"\text{{({other})}}", f"{letter}{other}", rf"\textbf{{{other}}}"]


def clock(draw: Random) -> Spellings:
    h, m = draw.randint(1, 12), draw.randint(10, 59)
    same = [f"{h}:{m}", f"{h} : {m}", rf"{h}\!:\!{m}", rf"\text{{{h}:{m}}}", rf"{h}{{:}}{m}"]
    return same, [f"{h}:{(m + 7) % 49 + 10}" if (m + 7) % 49 + 10 != m else f"{h}:00", f"{h % 12 + 1}:{m}", f"{h}{m}"]


def ratio(draw: Random) -> Spellings:
    a, b = coprime(draw)
    same = [f"{a}:{b}", f"{a} : {b}", rf"{a}\colon {b}", rf"{a}\text{{:}}{b}", f"${a}:{b}$", rf"{a} \colon {b}"]
    return same, [f"{b}:{a}", f"{a + 1}:{b}", f"{a}:{b}:1", f"{a}"]
