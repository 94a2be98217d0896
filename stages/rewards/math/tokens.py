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


def words(text: str) -> set[str]:
    """Return the tokens of words that `text` lists."""
    return {WORD + word for word in text.split()}


def commands(text: str) -> set[str]:
    """Return the tokens of commands that `text` lists without backslashes."""
    return {rf"\{name}" for name in text.split()}


_SYMBOLS = (  # characters, each followed by its command
    r"− - – - × \cdot · \cdot ⋅ \cdot ∗ \cdot ÷ / ≤ \le ≥ \ge ≠ \ne ∞ \infty √ \sqrt ∪ \cup ∩ \cap ∈ \in ∅ \emptyset "
    r"± \pm ℝ \mathbb{R} ℤ \mathbb{Z} ℚ \mathbb{Q} ℕ \mathbb{N} ℂ \mathbb{C} ≈ \approx ∠ \angle … \dots ½ "
    r"\frac{1}{2} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅓ \frac{1}{3} ⅔ \frac{2}{3} π \pi α \alpha β \beta γ \gamma δ \delta ε "
    r"\epsilon θ \theta λ \lambda μ \mu ρ \rho σ \sigma τ \tau φ \phi ω \omega Δ \Delta Σ \Sigma Ω \Omega ≡ \equiv ⟨ "
    r"\langle ⟩ \rangle ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil µ \mu ′ '"
)
_UNICODE = str.maketrans({"\u00a0": " ", **{old: f"{new} " for old, new in re.findall(r"(\S+) (\S+)", _SYMBOLS)}})
_SPELLINGS = (  # groups of a token and its other spellings
    r"\frac \dfrac \tfrac \cfrac \nicefrac \sfrac  \binom \dbinom \tbinom  \le \leq \leqslant \leqq <=  "
    r"\ge \geq \geqslant \geqq >=  \ne \neq !=  < \lt  > \gt  \cdot \times \ast *  / \div  : \colon  "
    r"\{ \lbrace  \} \rbrace  [ \lbrack  ] \rbrack  | \lvert \rvert \vert \mid \| \lVert \rVert  "
    r"\emptyset \varnothing  \infty \infin  \phi \varphi  \epsilon \varepsilon  \theta \vartheta  ° \degree  "
    r"% \%  \overline \bar \dot  \dots \ldots \cdots ...  ^ **  , ;  \lor \vee  \land \wedge  "
    r"\to \rightarrow  € \euro  £ \pounds  \mod \pmod \bmod  i \imath  j \jmath  "
    r"\implies \Rightarrow \Longrightarrow \therefore  \setminus \backslash"
)
_ALIASES = {alias: group.split()[0] for group in _SPELLINGS.split("  ") for alias in group.split()[1:]}
_IGNORED = {
    "$", "~", "`", r"\ ", r"\,", r"\;", r"\:", r"\!", r"\(", r"\)", r"\[", r"\]",
    *commands(
        "left right displaystyle textstyle limits quad qquad mathbf mathit mathsf mathcal boldsymbol bm bf rm boxed "
        "fbox large Large big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr underline mathstrut enspace thinspace "
        "mathop mathbin mathrel mathord vec"
    ),
}  # fmt: skip
_BOXES = (r"\boxed", r"\fbox")
_TEXT = commands("text textbf textit textrm textsf textnormal mathrm mbox hbox operatorname")
_SKIPPED = _IGNORED | _TEXT | {" "}
_FUNCTIONS = (
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch arcsinh arccosh "
    "arctanh log lg ln exp"
)
FUNCTIONS = frozenset(_FUNCTIONS.split())
_PLAIN_NAMES = {command[1:]: command for command in commands(
    _FUNCTIONS + " sqrt pi alpha beta gamma delta theta lambda sigma omega phi infty floor ceil abs"
)} | {"infinity": r"\infty", "inf": r"\infty", "oo": r"\infty", "leq": r"\le", "geq": r"\ge"}  # fmt: skip
_PLAIN_NAMES |= {word[1:]: word for word in words("USD EUR GBP INR JPY")}
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBERS = {word: f"{number}" for number, word in enumerate(_NUMBER_WORDS.split())}
_NUMBERS |= dict(thirty="30", forty="40", fifty="50", sixty="60", seventy="70", eighty="80", ninety="90")
_WORDS = {"and": r"\land", "or": r"\lor", "mod": r"\mod"} | _NUMBERS
_WORDS |= {word[1:]: word for word in words("of to for is if not any most almost first best empty")}
_LARGE = {
    "dozen": 12, "score": 20, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8,
    "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000, "millionth": 10**6,
}  # fmt: skip
_AFTER_NUMBER = {word[1:]: [word] for word in words(
    "sq cm mm km dm nm kg mg lb oz ft in yd mi hr hrs ms mL ml Hz kHz MHz sec min mins kN kJ kW kPa Pa eV deg "
    "Nm Wh kWh am pm AM PM"
)}  # fmt: skip
_AFTER_NUMBER |= {"squared": ["^", "2"], "cubed": ["^", "3"], "factorial": ["!"]}
_AFTER_NUMBER |= {word: [r"\cdot", f"{size}"] for word, size in _LARGE.items()}
_AFTER_NUMBER |= {word: ["/", f"{size}"] for word, size in _PARTS.items()}
_BEFORE_UNIT = words("sq square cubic cu per")
_NEGATIVE = words("minus negative")
_TOKEN = re.compile(
    r"\s+|\\\\(?:\s*\[[^\]]{0,12}\])?|\\(?:begin|end)\s*\{\w+\*?\}(?:\s*\{[clr|\s]*\})?"
    r"|\\(?:mathbb|Bbb)\s*(?:\{\s*\w\s*\}|\w)|\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?[eE][+-]?\d{1,3}(?![\w.])|\d+(?:\.\d*)?|\.\d+|[a-zA-Z]+|\.\.\.|\*\*|!!|[<>!]=|.",
    re.DOTALL,
)
_NAMED = re.compile(r"\\(begin|end|mathbb|Bbb)\s*\{?\s*(\w+)")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\{,\}|,\s?\\!|\\!,|\\[, ]|~|\ )\d{3})+(?![\d,])")
_COMMAS = re.compile(  # but not (1,234), which may be a pair
    r"(?:[(\[]|\\\{)\s*\d{1,3},\d{3}\s*(?:\\right\s*)?(?:[)\]]|\\\})|(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?![\d,])"
)
_NOT_DIGITS = re.compile(r"\D+")
_CIRCLE = re.compile(
    r"\^\s*(?:\{\s*)?(?:\\[,;! ]\s*)*\\circ\b\s*\}?|(?<=\d)\s*\\circ\b|(?<=\d)\^(?:o\b|\{o\})|\\text(?:rm)?\{\s*°\s*\}"
)
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
    (re.compile(r"^\s*(?:\\left\s*\\)?\{\s*(?:\\right\s*\\)?\}\s*$"), r"\\emptyset "),
    (re.compile(r"(?<!\\)\{\s*\}"), ""),
    (re.compile(r"\+\s*/\s*-"), r"\\pm "),
    (re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*x\s*\}|[xX])\s*(?=10\s*\^)"), r"\\cdot "),
    (
        re.compile(r"(^|\\in)\s*([][])([^][]*,[^][]*)([][])\s*$"),
        lambda match: f"{match[1]} {'[('[match[2] == ']']}{match[3]}{'])'[match[4] == '[']}",
    ),
    (re.compile(r"\\hat\s*\{?\s*(?:\\math(?:bf|rm)\s*\{?\s*)?(?:\\([ij])math\b|([ijk])\b)\s*\}{0,2}"), r"\1\2 "),
    (re.compile(r"(?:\s+and)?\s+(?:a|one)[\s-]half\b"), " 1/2"),
    (re.compile(r"\ba\s(?=(?:half|third|quarter)\s*(?:\}|$|of\b))"), "1 "),
    (
        re.compile(r"\b([a-z]{3,5}ty)[ -](one|two|three|four|five|six|seven|eight|nine)\b", re.IGNORECASE),
        lambda match: f"{_NUMBERS.get(match[1].lower(), match[1])[0]}{_NUMBERS[match[2].lower()]}",
    ),
    (re.compile(r"\\(?:mathrm|text|rm)\s*\{\s*d\s*\}\s*(?=[a-z]\b)"), "d"),
    (re.compile(r"\\[dt]?frac\s*\{\s*d\s*([a-z])\s*\}\s*\{\s*d\s*([a-z])\s*\}|\bd([a-z])/d([a-z])\b"), r"\1\3'_{\2\4}"),
    (re.compile(r"(?<=[\w)}])\s*(?:\\[,;:!]\s*|\s)d([a-z])\s*$"), r" d_{\1}"),
    (re.compile(r"[_^]\s*\{?(\d{1,4})\}?\s*C\s*_\s*\{?(\d{1,4})\}?"), r"\\binom{\1}{\2}"),
    (re.compile(r"\^\s*(?:\{\s*(?:\\prime\s*)+\}|\\prime)"), lambda match: "'" * match[0].count("p")),
    (re.compile(r"(\d\.\d*)\((\d+)\)"), r"\1\\overline{\2}"),
    (re.compile(r"\b([ap])\.\s?m\.?(?!\w)", re.IGNORECASE), lambda match: f"{match[1].lower()}m"),
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
_REWRITABLE = re.compile(  # matches every text in which one of the patterns above can match
    r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉₋<$]|\*\*|\[\s*$|(?:^|\\in)\s*\]|/\s*-|[xX]\s*\}?\s*10|half|third|quarter|ty[ -]"
    r"|d(?:\}?\s*[a-z])?\s*(?:\}|$)|/d[a-z]|\\(?:textcolor|color|hat|[hv]?phantom|[hv]space|SI|qty|ce|prime|overline|lt)"
    r"|\{\s*(?:\\right\s*\\?)?[:}]|C\s*_|\.\d*\(|[apAP]\.|per cent|\b(?:th|st|nd|rd|US)|\d(?:th|st|nd|rd)|sq\."
)


def possible_tokenizations(text: str) -> list[list[str]]:
    """Return the possible tokenizations of `text`: with 1,234 as one number and, if `text` contains such a comma, also
    with 1 and 234 as two numbers."""
    if _REWRITABLE.search(text):
        for pattern, replacement in _REWRITES:
            text = pattern.sub(replacement, text)
    text = _GROUPED.sub(lambda match: _NOT_DIGITS.sub("", match.group()), text)
    joined = _COMMAS.sub(lambda match: match[1].replace(",", "") if match[1] else match[0], text)
    return [tokenize(joined)] + ([tokenize(text)] if joined != text else [])


def tokenize(text: str) -> list[str]:
    """Return the canonical tokens of `text`, in linear time."""
    text = _CIRCLE.sub(DEGREE, text.translate(_UNICODE))
    tokens: list[str] = []
    groups: list[str] = []  # for each open brace, the command of the group if it is \text or \boxed
    before = ""
    for token in _TOKEN.findall(text):
        previous, before = before, before if token.isspace() else token
        if token in _SKIPPED or token.isspace() or (token == "." and previous in (r"\left", r"\right")):
            continue
        if token == "{":
            groups.append(previous if previous in _TEXT or previous in _BOXES else "")
            tokens += [] if groups[-1] else ["{"]
        elif token == "}":
            tokens += [] if groups and groups.pop() else ["}"]
        elif token.isascii() and token.isalpha():
            tokens += _tokenize_letters(
                token,
                in_text=previous in _TEXT or not _TEXT.isdisjoint(groups),
                before=tokens[-1] if tokens else "",
            )
        elif named := _NAMED.match(token):
            tokens.append(rf"\{named[1].replace('Bbb', 'mathbb')}{named[2]}")
        else:
            tokens.append(r"\\" if token.startswith(r"\\") else _ALIASES.get(token, token))
    return _merge_tokens(tokens)


def _tokenize_letters(letters: str, in_text: bool, before: str) -> list[str]:
    """Return the tokens of a run of letters: a word, a command, capitals, or the letters of a product.

    A run of more than two letters counts as a product only if the letters are in alphabetical order; otherwise it is a
    word, because as products "stop" and "pots" would be equal.
    """
    word = letters.lower()
    singular = word.removesuffix("s")
    if word in _WORDS:
        return [_WORDS[word]]
    follows = before[:1].isdigit() or before in _BEFORE_UNIT or (before in ("}", ")") and singular in _LARGE)
    if follows and (tokens := _AFTER_NUMBER.get(letters if len(letters) < 4 else singular)):
        return tokens
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
        if merged and merged[-1].lower() in _NEGATIVE and (len(token) == 1 or token[0] in "\\0123456789"):
            merged[-1:] = ["-", token]
        elif merged and merged[-1] == r"\not":
            merged[-1] = r"\ne" if token == "=" else rf"\not{token}"
        elif len(merged) > 1 and merged[-2] in (r"\angle", r"\triangle") and token.isupper() and merged[-1].isupper():
            merged[-1] += token
        else:
            merged.append(token)
    while merged and merged[-1] in (".", ","):
        merged.pop()
    return merged
