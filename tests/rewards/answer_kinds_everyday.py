"""Generators of answers, each with spellings of one value and of other values: time, money, physics and words."""

from __future__ import annotations

from random import Random

from tests.rewards.answer_kinds import Spellings

# fmt: off


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


def length_conversion(draw: Random) -> Spellings:
    n, (big, small, factor) = draw.randint(1, 90), draw.choice([("m", "cm", 100), ("km", "m", 1000), ("cm", "mm",
        10), ("kg", "g", 1000), ("L", "mL", 1000), ("ft", "in", 12), ("yd", "ft", 3)])
    same = [rf"{n}\text{{ {big}}}", rf"{n * factor}\text{{ {small}}}", rf"{n}\,\mathrm{{{big}}}",
        f"{n * factor} {small}", rf"{n}.0\,\text{{{big}}}"]
    return same, [rf"{n}\text{{ {small}}}", rf"{n * factor}\text{{ {big}}}", rf"{n * factor + 1}\text{{ {small}}}",
        rf"{n * factor * 10}\,\mathrm{{{small}}}",
        rf"{n}\text{{ {big}}}^2"]


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


def counted_noun(draw: Random) -> Spellings:
    n, noun = draw.randint(2, 99), draw.choice(["different ways", "red balls", "more students",
        "distinct real roots", "ordered pairs", "sides", "people"])
    same = [f"{n}", f"{n} {noun}", rf"{n}\text{{ {noun}}}", rf"\text{{{n} {noun}}}", rf"{n} \ \text{{{noun}}}"]
    return same, [f"{n + 1} {noun}", f"-{n}", rf"{n}0\text{{ {noun}}}", f"{n - 1}"]


def date(draw: Random) -> Spellings:
    day, month = draw.randint(4, 20), draw.choice(["January", "March", "June", "October"])
    same = [f"{month} {day}", rf"\text{{{month} {day}}}", f"{month} {day}th", f"{day} {month}",
        rf"\text{{{month} {day}th}}", f"{month.lower()} {day}", rf"{day}\text{{ {month}}}"]
    return same, [f"{month} {day + 1}", f"April {day}", f"{month} {day}1", f"{day} May", f"{month}"]


def quantity_command(draw: Random) -> Spellings:
    n = draw.randint(2, 90)
    same = [rf"\SI{{{n}}}{{m/s}}", rf"{n}\text{{ m/s}}", rf"\qty{{{n}}}{{m/s}}", rf"\SI{{{n}}}{{\meter\per\second}}",
        rf"\qty{{{n}}}{{\metre\per\second}}"]
    return same, [rf"\SI{{{n + 1}}}{{m/s}}", rf"\SI{{{n}}}{{kg}}", rf"{n}\text{{ s/m}}", rf"\qty{{{n}}}{{\second}}"]
