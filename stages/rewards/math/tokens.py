"""Tokenize mathematical answers in LaTeX or plain text, with one canonical spelling per symbol.

A token is a number (`12.5`), a letter (`x`), a run of capitals (`ABC`), a command (`\\pi`), a symbol (`+`), or a word.
Words have the prefix `"`, as do letters inside `\\text{}`: `12\\,\\text{cm}` is `12`, `"cm`. Spaces, math delimiters
and commands for size or font are removed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

WORD = '"'  # prefix of words
DEGREE = "°"
_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": r"\cdot ", "÷": "/", "≤": r"\le ",
    "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "√": r"\sqrt ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}",
    "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "≈": r"\approx ", "∠": r"\angle ", "…": r"\dots ", "½": r"\frac{1}{2}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}", "π": r"\pi ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ",
    "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ",
    "τ": r"\tau ", "φ": r"\phi ", "ω": r"\omega ", "Δ": r"\Delta ", "Σ": r"\Sigma ", "Ω": r"\Omega ", "\u00a0": " ",
    "≡": r"\equiv ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "µ": r"\mu ", "′": "'",
}  # fmt: skip
_UNICODE = str.maketrans(_SYMBOLS)
_ALIASES = {
    **dict.fromkeys((r"\dfrac", r"\tfrac", r"\cfrac"), r"\frac"), **dict.fromkeys((r"\dbinom", r"\tbinom"), r"\binom"),
    **dict.fromkeys((r"\leq", r"\leqslant", r"\leqq", "<="), r"\le"),
    **dict.fromkeys((r"\geq", r"\geqslant", r"\geqq", ">="), r"\ge"), **dict.fromkeys((r"\neq", "!="), r"\ne"),
    r"\lt": "<", r"\gt": ">", **dict.fromkeys((r"\times", r"\ast", "*"), r"\cdot"), r"\div": "/", r"\colon": ":",
    **dict.fromkeys((r"\lbrace",), r"\{"), r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]",
    **dict.fromkeys((r"\lvert", r"\rvert", r"\vert", r"\mid"), "|"), r"\varnothing": r"\emptyset", r"\infin": r"\infty",
    r"\varphi": r"\phi", r"\varepsilon": r"\epsilon", r"\vartheta": r"\theta", r"\degree": DEGREE, r"\%": "%",
    r"\bar": r"\overline", **dict.fromkeys((r"\ldots", r"\cdots", "..."), r"\dots"), "**": "^", ";": ",",
    r"\vee": r"\lor", r"\wedge": r"\land", r"\rightarrow": r"\to", r"\euro": "€", r"\pounds": "£",
    **dict.fromkeys((r"\pmod", r"\bmod"), r"\mod"), r"\dot": r"\overline", r"\imath": "i", r"\jmath": "j",
    **dict.fromkeys((r"\Rightarrow", r"\Longrightarrow", r"\therefore"), r"\implies"), r"\backslash": r"\setminus",
    **dict.fromkeys((r"\nicefrac", r"\sfrac"), r"\frac"), r"\|": "|", r"\lVert": "|", r"\rVert": "|",
}  # fmt: skip
_IGNORED = {
    r"\left", r"\right", r"\displaystyle", r"\textstyle", r"\limits", r"\quad", r"\qquad", r"\,", r"\;", r"\:", r"\!",
    r"\ ", "~", "$", r"\(", r"\)", r"\[", r"\]", r"\mathbf", r"\mathit", r"\mathsf", r"\mathcal", r"\boldsymbol",
    r"\bm", r"\bf", r"\rm", r"\boxed", r"\fbox", r"\large", r"\Large", r"\big", r"\Big", r"\bigg",
    r"\Bigg", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\biggl", r"\biggr", r"\underline", "`",
    r"\mathstrut", r"\enspace", r"\thinspace", r"\mathop", r"\mathbin", r"\mathrel", r"\mathord", r"\hat", r"\vec",
}  # fmt: skip
_TEXT = {
    r"\text", r"\textbf", r"\textit", r"\textrm", r"\textsf", r"\textnormal", r"\mathrm", r"\mbox", r"\hbox",
    r"\operatorname",
}  # fmt: skip
_NAMES = (
    "sqrt", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log",
    "ln", "exp", "alpha", "beta", "gamma", "delta", "theta", "lambda", "sigma", "omega", "phi", "infty",
)  # fmt: skip
_PLAIN_NAMES = (
    {name: rf"\{name}" for name in _NAMES}
    | dict.fromkeys(("infinity", "inf", "oo"), r"\infty")
    | {"leq": r"\le", "geq": r"\ge", "floor": r"\floor", "ceil": r"\ceil"}
)
_SHORT_UNITS = {
    "sq", "cm", "mm", "km", "dm", "nm", "kg", "mg", "lb", "oz", "ft", "in", "yd", "mi", "hr", "hrs", "ms", "mL", "ml",
    "Hz", "kHz", "MHz", "sec", "min", "mins", "kN", "kJ", "kW", "kPa", "Pa", "eV",
}  # fmt: skip
_WORDS = {"and": r"\land", "or": r"\lor", "mod": r"\mod", "of": WORD + "of", "to": WORD + "to"}
_CURRENCY_CODES = ("USD", "EUR", "GBP", "INR", "JPY")
_NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TOKEN = re.compile(
    r"\s+|\\\\(?:\s*\[[^\]]{0,12}\])?|\\(?:begin|end)\s*\{\w+\*?\}(?:\s*\{[clr|\s]*\})?"
    r"|\\(?:mathbb|Bbb)\s*(?:\{\s*\w\s*\}|\w)|\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\w.])|\d+(?:\.\d*)?|\.\d+|[a-zA-Z]+|\.\.\.|\*\*|[<>!]=|.",
    re.DOTALL,
)
_NAMED = re.compile(r"\\(begin|end|mathbb|Bbb)\s*\{?\s*(\w+)")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,\s?\\!|\\!,|\\[, ]|~|\ )\d{3})+(?![\d,])")
_COMMAS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_NOT_DIGITS = re.compile(r"\D+")
_CIRCLE = re.compile(r"\^\s*(?:\{\s*)?(?:\\[,;! ]\s*)*\\circ\b\s*\}?|\\circ\b|\\text(?:rm)?\{\s*°\s*\}")
_SUPERSCRIPTS, _SUBSCRIPTS = (str.maketrans(digits, "0123456789-") for digits in ("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "₀₁₂₃₄₅₆₇₈₉₋"))
_ORDINAL = r"(?:\\(?:text|mathrm)\{\s?(?:th|st|nd|rd)\}|(?:th|st|nd|rd)\b)"
# Rewrite notations that are easier to read as text than as tokens.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]{1,20}"), lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
    (re.compile(r"[₀₁₂₃₄₅₆₇₈₉₋]{1,20}"), lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}"),
    (re.compile(r"^\s*\*\*(.*)\*\*\s*$"), r"\1"),
    (re.compile(r"\\(?:textcolor|color|[hv]?phantom|[hv]space\*?)\s*\{[^{}]{0,40}\}"), " "),
    (
        re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{([^{}]*)\}"),
        lambda match: rf"{match[1]}\text{{ {match[2].replace(chr(92), ' ')}}}",
    ),
    (re.compile(r"\\ce\s*\{([^{}]*)\}"), lambda match: re.sub(r"(?<=[A-Za-z)])(\d+)", r"_{\1}", match[1])),
    (re.compile(r"(?<!\\)\{\s*\}"), ""),
    (re.compile(r"[_^]\s*\{?(\d{1,4})\}?\s*C\s*_\s*\{?(\d{1,4})\}?"), r"\\binom{\1}{\2}"),
    (re.compile(r"\^\s*(?:\{\s*\\prime\s*\}|\\prime)"), "'"),
    (re.compile(r"(\d\.\d*)\((\d+)\)"), r"\1\\overline{\2}"),
    (re.compile(r"\b([ap])\.\s?m\.?(?!\w)", re.IGNORECASE), r"\1m"),
    (re.compile(r"\bper cent\b"), "percent"),
    (re.compile(rf"(?<=\d)(?:\^\{{{_ORDINAL}\}}|\^?{_ORDINAL})"), ""),
    (re.compile(r"\\left\s*<"), r"\\langle "),
    (re.compile(r"\\right\s*>"), r"\\rangle "),
    (re.compile(r"(^|=)\s*(?:<|\\lt\b)([^<>=]*,[^<>=]*?)(?:>|\\gt)\s*$"), r"\1\\langle \2\\rangle "),
    (re.compile(r"(?<!\\)\{\s*:\s*\}"), ":"),
    (re.compile(r"\bsq\.\s?"), "sq "),
    (re.compile(r"\bUS(?=\\?\$)"), ""),
    (re.compile(r"\\overline\s*\{\s*([A-Z](?:\s*[A-Z])+)\s*\}"), lambda match: "".join(match[1].split())),
    (re.compile(r"^([^$]*)(?<!\\)\$([^$]*)$"), r"\1\\$\2"),  # a single dollar
)
_REWRITABLE = re.compile(  # what a text must contain for one of the patterns to match
    r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉₋<$]|\*\*|\\(?:textcolor|color|[hv]?phantom|[hv]space|SI|qty|ce|prime|overline|lt)"
    r"|\{\s*[:}]|C\s*_|\.\d*\(|[apAP]\.|per cent|\b(?:th|st|nd|rd|US)|\d(?:th|st|nd|rd)|sq\."
)


def possible_tokenizations(text: str) -> list[list[str]]:
    """Return the possible tokenizations of `text`: with 1,234 as one number and, if `text` contains such a comma, also
    with 1 and 234 as two numbers."""
    if _REWRITABLE.search(text):
        for pattern, replacement in _REWRITES:
            text = pattern.sub(replacement, text)
    text = _GROUPED.sub(lambda match: _NOT_DIGITS.sub("", match.group()), text)
    joined = _COMMAS.sub(lambda match: match.group().replace(",", ""), text)
    return [tokenize(joined)] + ([tokenize(text)] if joined != text else [])


def tokenize(text: str) -> list[str]:
    """Return the canonical tokens of `text`, in linear time."""
    text = _CIRCLE.sub(DEGREE, text.translate(_UNICODE))
    tokens: list[str] = []
    groups: list[bool] = []  # for each open brace, whether it belongs to \text
    before = ""
    for token in _TOKEN.findall(text):
        previous, before = before, before if token.isspace() else token
        if (
            token.isspace()
            or token in _TEXT
            or token in _IGNORED
            or (token == "." and previous in (r"\left", r"\right"))
        ):
            continue
        if token == "{":
            groups.append(previous in _TEXT)
            tokens += [] if groups[-1] else ["{"]
        elif token == "}":
            tokens += [] if groups and groups.pop() else ["}"]
        elif token.isascii() and token.isalpha():
            tokens += _tokenize_letters(
                token,
                in_text=any(groups) or previous in _TEXT,
                after_number=bool(tokens) and (tokens[-1][0].isdigit() or tokens[-1] == f"{WORD}sq"),
            )
        elif named := _NAMED.match(token):
            tokens.append(rf"\{named[1].replace('Bbb', 'mathbb')}{named[2]}")
        else:
            tokens.append(r"\\" if token.startswith(r"\\") else _ALIASES.get(token, token))
    return _merge_tokens(tokens)


def _tokenize_letters(letters: str, in_text: bool, after_number: bool) -> list[str]:
    """Return the tokens of a run of letters: a word, a command, capitals, or the letters of a product.

    A run of more than two letters counts as a product only if the letters are in alphabetical order; otherwise it is a
    word, because as products "stop" and "pots" would be equal.
    """
    word = letters.lower()
    if word in _WORDS:
        return [_WORDS[word]]
    if word in _NUMBERS:
        return [f"{_NUMBERS.index(word)}"]
    if after_number and word in _LARGE:
        return [r"\cdot", f"{_LARGE[word]}"]
    if word in ("am", "pm") and (after_number or in_text):
        return [WORD + word]
    if letters in _CURRENCY_CODES or (after_number and letters in _SHORT_UNITS):
        return [WORD + letters]
    if letters in _PLAIN_NAMES and not (in_text and letters in ("pi", "oo")):
        return [_PLAIN_NAMES[letters]]
    if in_text and letters not in ("e", "i"):
        return [WORD + letters]
    if letters.isupper():
        return [letters]
    if len(letters) > 2 and any(left >= right for left, right in itertools.pairwise(letters)):
        return [WORD + letters]
    return list(letters)


def _merge_tokens(tokens: list[str]) -> list[str]:
    """Merge `\\not =` into `\\ne`, and the letters after \\angle or \\triangle into one token; remove punctuation at
    the end."""
    merged: list[str] = []
    for token in tokens:
        if merged and merged[-1] == r"\not":
            merged[-1] = r"\ne" if token == "=" else rf"\not{token}"
        elif len(merged) > 1 and merged[-2] in (r"\angle", r"\triangle") and token.isupper() and merged[-1].isupper():
            merged[-1] += token
        else:
            merged.append(token)
    while merged and merged[-1] in (".", ","):
        merged.pop()
    return merged
