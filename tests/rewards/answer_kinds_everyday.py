"""Generators of answers, each with spellings of one value and of other values: time, money, physics and words."""

from __future__ import annotations

from random import Random

from tests.rewards.answer_kinds import Spellings

# fmt: off

NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)


def duration(draw: Random) -> Spellings:
    h, m = draw.randint(1, 12), draw.choice([15, 30, 45, 12, 6, 24, 36])
    same = [f"{h} hours {m} minutes", rf"{h}\text{{ hours }}{m}\text{{ minutes}}", f"{h} hours and {m} minutes",
        f"{60 * h + m} minutes",
        f"{h} h {m} min", rf"{h}\,\text{{h}}\,{m}\,\text{{min}}", rf"{60 * h + m}\text{{ min}}",
        rf"{h} \text{{ hr }} {m} \text{{ min}}",
        rf"\text{{{h} hours and {m} minutes}}", rf"{h}\text{{ hours and }}{m}\text{{ minutes}}", f"{h} hrs {m} mins",
        f"{(60 * h + m) / 60:g} hours"]
    return same, [f"{h} hours {m + 1} minutes", f"{h + 1} hours {m} minutes", f"{h} hours",
        f"{h}.{m} hours" if m * 100 != m * 60 else "0",
        f"{h}{m} minutes", f"{m} hours {h} minutes" if h != m else "0", f"{h} minutes {m} seconds"]


def time_of_day(draw: Random) -> Spellings:
    h, m, half = draw.randint(1, 11), draw.randint(10, 59), draw.choice("ap")
    other = {"a": "p", "p": "a"}[half]
    same = [rf"{h}:{m}\text{{ {half}.m.}}", f"{h}:{m} {half}.m.", f"{h}:{m} {half.upper()}M", f"{h}:{m}{half}m",
        rf"{h}:{m}\,\text{{{half.upper()}M}}",
        rf"{h}:{m} \mathrm{{~{half.upper()}M}}", rf"\text{{{h}:{m} {half}.m.}}", f"{h}:{m} {half.upper()}.M.",
        rf"{h}\!:\!{m} \text{{ {half}m}}"]
    others = [f"{h}:{m} {other}.m." , f"{h}:{m - 1} {half}m", rf"{h + 1}:{m}\text{{ {half.upper()}M}}",
        f"{h}:{m} {other.upper()}M", f"{h}{m}"]
    return same, others


def feet_and_inches(draw: Random) -> Spellings:
    f, i = draw.randint(2, 20), draw.randint(1, 11)
    same = [f"{f} feet {i} inches", f"{12 * f + i} inches", rf"{f}\text{{ ft }}{i}\text{{ in}}", f"{f} ft {i} in",
        rf"{f}\text{{ feet, }}{i}\text{{ inches}}",
        rf"{12 * f + i}\text{{ in}}", f"{f} feet and {i} inches"]
    return same, [f"{f} feet {i + 1} inches", f"{f} feet", f"{12 * f + i} feet",
        f"{f}.{i} feet" if i != 12 * i / 10 else "0", f"{f} meters {i} inches"]


def length_conversion(draw: Random) -> Spellings:
    n, (big, small, factor) = draw.randint(1, 90), draw.choice([("m", "cm", 100), ("km", "m", 1000), ("cm", "mm",
        10), ("kg", "g", 1000), ("L", "mL", 1000), ("ft", "in", 12), ("yd", "ft", 3)])
    same = [rf"{n}\text{{ {big}}}", rf"{n * factor}\text{{ {small}}}", rf"{n}\,\mathrm{{{big}}}",
        f"{n * factor} {small}", rf"{n}.0\,\text{{{big}}}"]
    return same, [rf"{n}\text{{ {small}}}", rf"{n * factor}\text{{ {big}}}", rf"{n * factor + 1}\text{{ {small}}}",
        rf"{n * factor * 10}\,\mathrm{{{small}}}",
        rf"{n}\text{{ {big}}}^2"]


def speed(draw: Random) -> Spellings:
    n = draw.randint(2, 200)
    a, b, long = draw.choice([("m", "s", "meters per second"), ("km", "h", "kilometers per hour"), ("mi", "h",
        "miles per hour"), ("cm", "s", "centimeters per second")])
    same = [rf"{n}\text{{ {a}/{b}}}", f"{n} {long}", rf"{n}\ \frac{{\text{{{a}}}}}{{\text{{{b}}}}}",
        rf"{n}\,\mathrm{{\frac{{{a}}}{{{b}}}}}",
        rf"{n}\,\mathrm{{{a}\,{b}^{{-1}}}}", rf"{n}\,\mathrm{{{a}}}\,\mathrm{{{b}}}^{{-1}}",
        rf"{n}\,\mathrm{{{a}\cdot {b}^{{-1}}}}", rf"{n}\ \mathrm{{{a}/{b}}}",
        rf"{n}\text{{ {long}}}", f"{n} {a}/{b}", rf"{n}\,\mathrm{{{a}}}/\mathrm{{{b}}}",
        rf"{n} \frac{{\mathrm{{{a}}}}}{{\mathrm{{{b}}}}}"]
    return same, [rf"{n}\text{{ {b}/{a}}}", rf"{n}\,\mathrm{{{a}\,{b}^{{-2}}}}", rf"{n + 1}\text{{ {a}/{b}}}",
        rf"{n}\ \frac{{\text{{{b}}}}}{{\text{{{a}}}}}",
        rf"{n}\text{{ {a}}}", rf"{n}\,\mathrm{{{a}\,{b}}}"]


def acceleration(draw: Random) -> Spellings:
    n = f"{draw.randint(1, 30)}.{draw.randint(1, 9)}"
    same = [rf"{n}\,\mathrm{{m/s^2}}", rf"{n}\text{{ m/s}}^2", rf"{n}\ \mathrm{{m\,s^{{-2}}}}", f"{n} m/s²",
        rf"{n}\ \frac{{\mathrm{{m}}}}{{\mathrm{{s}}^2}}",
        rf"{n}\,\text{{m}}/\text{{s}}^2", rf"{n}\,\mathrm{{m\cdot s^{{-2}}}}", rf"{n} \mathrm{{~m/s^{{2}}}}",
        rf"{n} \mathrm{{~m}} / \mathrm{{s}}^{{2}}",
        rf"{n}\ \text{{m s}}^{{-2}}", f"{n} m/s^2", rf"{n}\text{{ meters per second squared}}"]
    return same, [rf"{n}\,\mathrm{{m/s}}", rf"{n}1\,\mathrm{{m/s^2}}", rf"{n}\,\mathrm{{m^2/s}}",
        rf"-{n}\,\mathrm{{m/s^2}}", rf"{n}\,\mathrm{{m\,s^2}}"]


def si_product(draw: Random) -> Spellings:
    n, (base, name, word) = draw.randint(2, 90), draw.choice([(r"kg\cdot m/s^2", "N", "newtons"), (r"N\cdot m", "J",
        "joules"), ("J/s", "W", "watts"), (r"N/m^2", "Pa", "pascals"),
        (r"kg\,m^2/s^2", "J", "joules"), ("1/s", "Hz", "hertz"), (r"A\cdot s", "C", "coulombs"), (r"V\cdot A", "W",
        "watts")])
    same = [rf"{n}\,\mathrm{{{name}}}", rf"{n}\,\mathrm{{{base}}}", f"{n} {word}", rf"{n}\text{{ {name}}}",
        rf"{n} \mathrm{{~{name}}}", rf"{n}\text{{ {word}}}"]
    if base == "1/s":
        del same[1]
    return same, [rf"{n + 1}\,\mathrm{{{name}}}", rf"{n}\,\mathrm{{{name}^2}}", rf"{n}\,\mathrm{{kg}}",
        rf"{n}0\,\mathrm{{{name}}}", rf"{n}\,\mathrm{{K}}"]


def small_prefix(draw: Random) -> Spellings:
    n, name = draw.randint(2, 90), draw.choice(["m", "s", "A", "F", "V"])
    prefix, power = draw.choice([(r"\mu ", 6), ("n", 9), ("m", 3)])
    same = [rf"{n}\,\mathrm{{{prefix}{name}}}", rf"{n}\times 10^{{-{power}}}\,\mathrm{{{name}}}",
        rf"{n}\times10^{{-{power}}}\text{{ {name}}}", rf"{n}e-{power} \text{{ {name}}}"]
    if prefix == r"\mu ":
        same += [rf"{n}\,\mu\mathrm{{{name}}}", rf"{n}\,\text{{μ{name}}}", rf"{n}\ \mu \text{{{name}}}"]
    return same, [rf"{n}\,\mathrm{{{name}}}", rf"{n}\times 10^{{-{power + 1}}}\,\mathrm{{{name}}}",
        rf"{n + 1}\,\mathrm{{{prefix}{name}}}", rf"{n}\times 10^{{{power}}}\,\mathrm{{{name}}}"]


def temperature(draw: Random) -> Spellings:
    n = draw.randint(1, 120)
    same = [f"{n} °C", rf"{n}^\circ\text{{C}}", rf"{n}^{{\circ}} C", rf"{n}\,^\circ\mathrm{{C}}",
        f"{n} degrees Celsius", rf"{n}^\circ C", rf"{n}\text{{ degrees Celsius}}",
        rf"{n}{{ }}^{{\circ}} \mathrm{{C}}", f"{n}°C", rf"{n}\,^{{\circ}}\text{{C}}"]
    return same, [f"{n} °F", rf"{n + 1}^\circ\text{{C}}", rf"-{n}^\circ C", f"{n} degrees Fahrenheit",
        rf"{n}\text{{ K}}"]


def angle_with_minutes(draw: Random) -> Spellings:
    d, m = draw.randint(1, 89), draw.choice([15, 30, 45, 12])
    same = [rf"{d}^\circ {m}'", f"{d}°{m}'", rf"{d}^{{\circ}}{m}^{{\prime}}", rf"{d + m / 60:g}^\circ",
        f"{d + m / 60:g} degrees", f"{d}° {m}′"]
    return same, [rf"{d}^\circ {m + 1}'", rf"{d}^\circ", rf"{d}.{m}^\circ" if m * 10 != m * 6 else "0",
        rf"{d + 1}^\circ {m}'", f"{d}{m}°"]


def squared_unit(draw: Random) -> Spellings:
    n, (short, long) = draw.randint(2, 99), draw.choice([("cm", "centimeters"), ("m", "meters"), ("ft", "feet"),
        ("in", "inches")])
    same = [rf"{n}\text{{ {short}}}^2", f"{n} square {long}", rf"{n}\text{{ sq. {short}}}", f"{n} {short}²",
        f"{n} {short}^2", rf"{n}\text{{ square {long}}}", rf"{n}\,\mathrm{{{short}}}^{{2}}",
        f"{n} sq {short}", rf"{n}\ \mathrm{{{short}^2}}", rf"{n}\text{{ {short}$^2$}}", f"{n} sq. {short}",
        rf"{n} \text{{ {long} squared}}"]
    return same, [rf"{n}\text{{ {short}}}", rf"{n}\text{{ {short}}}^3", f"{n} cubic {long}",
        rf"{n + 1}\text{{ {short}}}^2", f"{n * n} {short}", f"{n}^2 {short}"]


def dollars(draw: Random) -> Spellings:
    n = draw.randint(2, 999)
    same = [rf"\${n}", f"{n} dollars", f"{n} USD", f"USD {n}", rf"\${n}.00", rf"{n}\text{{ dollars}}",
        rf"\text{{\${n}}}", rf"\text{{USD }}{n}", f"${n}", rf"\${n}\text{{ dollars}}", f"US${n}"]
    return same, [rf"\${n + 1}", f"{n} cents", f"€{n}", rf"\${n}.50", f"{n} pounds", rf"-\${n}"]


def euros(draw: Random) -> Spellings:
    n, (mark, name, code) = draw.randint(2, 999), draw.choice([("€", "euros", "EUR"), ("£", "pounds", "GBP"), ("₹",
        "rupees", "INR"), ("¥", "yen", "JPY")])
    same = [f"{mark}{n}", f"{n}{mark}", f"{n} {name}", f"{n} {code}", rf"{n}\text{{ {name}}}",
        rf"\text{{{mark}}}{n}", f"{code} {n}"]
    return same, [rf"\${n}", f"{mark}{n + 1}", f"{n} dollars", f"{n}0 {name}"]


def money_rate(draw: Random) -> Spellings:
    n = draw.randint(2, 99)
    unit = draw.choice(["hour", "day", "mile"])
    same = [rf"\${n} per {unit}", rf"\${n}/\text{{{unit}}}", f"{n} dollars per {unit}",
        rf"\${n}\text{{ per {unit}}}", rf"{n}\text{{ dollars per {unit}}}"]
    return same, [rf"\${n + 1} per {unit}", f"€{n} per {unit}", rf"\${n}0 per {unit}", rf"\${n} per month"]


def percent_word(draw: Random) -> Spellings:
    n = draw.randint(2, 98)
    same = [rf"{n}\%", f"{n} percent", f"{n} per cent", rf"{n}\text{{ percent}}", f"{n} pct",
        rf"{n}\text{{ per cent}}", f"{n}.0 %", rf"\text{{{n}\%}}", f"0.{n:02d}"]
    return same, [rf"{n + 1}\%", f"{n} per mille", f"0.0{n:02d}", f"{n}0 percent", rf"-{n}\%"]


def number_word(draw: Random) -> Spellings:
    names = NUMBER_WORDS.split()
    n = draw.randint(1, 20)
    same = [f"{n}", names[n], rf"\text{{{names[n]}}}", names[n].title(), rf"\text{{{names[n].title()}}}"]
    return same, [names[n - 1], f"{n + 1}", rf"\text{{{names[n % 20 + 1] if n < 20 else names[3]}}}",
        f"{names[n]} hundred", f"{-n}"]


def counted_noun(draw: Random) -> Spellings:
    n, noun = draw.randint(2, 99), draw.choice(["different ways", "red balls", "more students",
        "distinct real roots", "ordered pairs", "sides", "people"])
    same = [f"{n}", f"{n} {noun}", rf"{n}\text{{ {noun}}}", rf"\text{{{n} {noun}}}", rf"{n} \ \text{{{noun}}}"]
    return same, [f"{n + 1} {noun}", f"-{n}", rf"{n}0\text{{ {noun}}}", f"{n - 1}"]


def ordinal(draw: Random) -> Spellings:
    n = draw.randint(4, 20)
    same = [f"{n}", f"{n}th", rf"{n}^{{\text{{th}}}}", rf"{n}\text{{th}}", rf"{n}^{{th}}", rf"{n}^\text{{th}}",
        rf"{n}^{{\mathrm{{th}}}}", rf"\text{{{n}th}}"]
    return same, [f"{n + 1}th", rf"{n}0^{{\text{{th}}}}", f"{n - 1}", f"-{n}"]


def option(draw: Random) -> Spellings:
    letter = draw.choice("ABCDE")
    other = draw.choice([name for name in "ABCDE" if name != letter])
    same = [letter, f"({letter})", f"Option {letter}", rf"\text{{Option {letter}}}", f"choice {letter}",
        rf"\text{{choice ({letter})}}", f"**{letter}**", rf"\text{{{letter}}}.", rf"\textbf{{({letter})}}",
        f"Answer: {letter}"]
    return same, [other, f"Option {other}", rf"\text{{choice ({other})}}", f"{letter}{other}", f"not {letter}",
        f"{letter} and {other}"]


def phrase(draw: Random) -> Spellings:
    words = ["circle", "right triangle", "straight line", "blue car", "third quadrant", "prime number"]
    word = draw.choice(words)
    others = [other for other in words if other != word]
    same = [word, f"a {word}", rf"\text{{the {word}}}", f"The {word}.", rf"\text{{A {word}}}", word.upper(),
        rf"\text{{{word}}}"]
    return same, [draw.choice(others), f"not a {word}", f"two {word}s", rf"\text{{the {draw.choice(others)}}}",
        f"{word} and {others[0]}"]


def does_not_exist(draw: Random) -> Spellings:
    same = ["DNE", r"\text{DNE}", "does not exist", r"\text{does not exist}", r"\text{Does not exist.}",
        r"\mathrm{DNE}", r"\text{DNE.}"]
    return same, ["0", r"\infty", "exists", r"\text{does exist}", f"{draw.randint(1, 9)}"]


def date(draw: Random) -> Spellings:
    day, month = draw.randint(4, 20), draw.choice(["January", "March", "June", "October"])
    same = [f"{month} {day}", rf"\text{{{month} {day}}}", f"{month} {day}th", f"{day} {month}",
        rf"\text{{{month} {day}th}}", f"{month.lower()} {day}", rf"{day}\text{{ {month}}}"]
    return same, [f"{month} {day + 1}", f"April {day}", f"{month} {day}1", f"{day} May", f"{month}"]


def formula(draw: Random) -> Spellings:
    a, b = draw.choice([("H", "O"), ("C", "O"), ("N", "O"), ("C", "H"), ("Fe", "O")])
    n, m = draw.randint(2, 4), draw.randint(5, 7)
    same = [f"{a}_{n}{b}_{m}", rf"\text{{{a}}}_{n}\text{{{b}}}_{m}", rf"\mathrm{{{a}_{n}{b}_{m}}}",
        rf"\ce{{{a}{n}{b}{m}}}", rf"\mathrm{{{a}}}_{{{n}}}\mathrm{{{b}}}_{{{m}}}",
        f"{a}{'₀₁₂₃₄₅₆₇'[n]}{b}{'₀₁₂₃₄₅₆₇'[m]}"]
    return same, [f"{a}_{m}{b}_{n}", f"{a}_{n}{b}_{m + 1}", rf"\ce{{{a}{n}{b}{m + 2}}}",
        rf"\mathrm{{{b}_{n}{a}_{m}}}"]


def quantity_command(draw: Random) -> Spellings:
    n = draw.randint(2, 90)
    same = [rf"\SI{{{n}}}{{m/s}}", rf"{n}\text{{ m/s}}", rf"\qty{{{n}}}{{m/s}}", rf"\SI{{{n}}}{{\meter\per\second}}",
        rf"\qty{{{n}}}{{\metre\per\second}}"]
    return same, [rf"\SI{{{n + 1}}}{{m/s}}", rf"\SI{{{n}}}{{kg}}", rf"{n}\text{{ s/m}}", rf"\qty{{{n}}}{{\second}}"]
