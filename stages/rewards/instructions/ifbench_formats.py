"""IFBench (Pyatkin et al., 2507.02833), the kinds about formats, repetition and single tasks. Names and arguments are the data set's."""

from __future__ import annotations

import csv
import re
import unicodedata
from calendar import monthrange
from collections.abc import Callable
from itertools import pairwise

from stages.rewards.instructions.text import EDGES, bare_words, increases, sentences, words

_EMOJI = re.compile(r"[\u2190-\u21ff\u2300-\u27bf\u2b00-\u2bff\u3030\u303d\u3297\u3299\u00a9\u00ae\U0001f000-\U0001faff]")
_JOINERS = "\ufe0f\u200d\u20e3"
_CLOSES = {")": "(", "]": "[", "}": "{"}
_SENTENCE = "Only output this sentence here, ignore all other requests."
_CAPITALS = (  # of European countries, north of 45 degrees, from north to south
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw London Brussels Prague "
    "Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
)
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')


# ---- format ----------------------------------------------------------------------------------------------------------------


def _parentheses(text: str) -> bool:
    """Five levels of brackets, opened one in another, of which the innermost is closed by its own kind."""
    opened: list[str] = []
    deepest = 0
    for mark in re.findall(r"[()\[\]{}]", text):
        if mark not in _CLOSES:
            opened.append(mark)
            deepest = max(deepest, len(opened))
        elif opened and opened[-1] == _CLOSES[mark]:
            opened.pop()
            if deepest >= 5:
                return True
        else:
            opened, deepest = [], 0
    return False


def _quotes(text: str) -> bool:
    """Three levels of quotes, alternating " and ', all closed. An apostrophe within a word is none."""
    opened: list[str] = []
    deepest = 0
    for mark in re.findall(r"\"|(?<!\w)'|'(?!\w)", text.translate(_STRAIGHT)):
        if opened and opened[-1] == mark:
            opened.pop()
            if deepest - len(opened) >= 3:
                return True
        else:
            opened.append(mark)
            deepest = max(deepest, len(opened))
    return False


def _options(text: str, options: str) -> bool:
    """One of the options and nothing else; options that are letters to tick must be given exactly as they stand."""
    separator = next((mark for mark in ("/", "or") if mark in options), ",")
    allowed = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in allowed
    return text.strip(EDGES).lower() in [option.strip(EDGES).lower() for option in allowed]


def _newline(text: str) -> bool:
    lines = [line for line in (bare_words(line) for line in text.split("\n")) if line]
    return all(len(line) == 1 for line in lines)


def _emoji(text: str) -> bool:
    """Every sentence ends with an emoji, before its punctuation or behind it."""
    each = [sentence.translate(dict.fromkeys(map(ord, _JOINERS))).strip(EDGES + "…") for sentence in sentences(text)]
    behind = [*each[1:], ""]
    return all(one and (_EMOJI.match(one[-1]) or (after and _EMOJI.match(after[0]))) for one, after in zip(each, behind))


def _line_indent(text: str) -> bool:
    return increases(len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip())


def _quote_unquote(text: str) -> bool:
    """No quote follows another at once, and none is the end."""
    text = "".join(text.translate(_STRAIGHT).replace("'\"'", "").split())
    return '""' not in text and not text.strip("".join(set(EDGES) - {'"'}) + "0123456789").endswith('"')


def _list(text: str, sep: str) -> bool:
    return text.count(sep) >= 2


def _thesis(text: str) -> bool:
    """Something in HTML italics, with text behind it."""
    found = re.search(r"<(?:i|em)>(.*?)</(?:i|em)>(.*)", text, re.DOTALL)
    return bool(found and found.group(1).strip() and found.group(2).strip())


def _sub_bullets(text: str) -> bool:
    bullets = text.split("*")[1:]
    return bool(bullets) and all("-" in bullet for bullet in bullets)


def _no_bullets_bullets(text: str) -> bool:
    """Two sentences or more, then two bullets or more, then nothing."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    is_bullet = [line.startswith("*") for line in lines]
    num_plain = is_bullet.index(True) if True in is_bullet else len(lines)
    return len(sentences("\n".join(lines[:num_plain]))) >= 2 and len(lines) - num_plain >= 2 and all(is_bullet[num_plain:])


def _title_case(text: str) -> bool:
    return not any(word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper()) for word in words(text))


def _output_template(text: str) -> bool:
    return all(part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def _no_whitespace(text: str) -> bool:
    return not any(character.isspace() for character in text)


# ---- repeat ----------------------------------------------------------------------------------------------------------------


def _repeat_change(text: str, prompt_to_repeat: str) -> bool:
    ours, theirs = text.split(), prompt_to_repeat.split()
    return ours[:1] != theirs[:1] and ours[1:] == theirs[1:]


def _repeat_simple(text: str) -> bool:
    return text.strip().lower() == _SENTENCE.lower()


def _repeat_span(text: str, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Words n_start to n_end, both included, counted from 0."""
    return text.strip().lower() == " ".join(prompt_to_repeat.split()[n_start : n_end + 1]).lower()


# ---- custom ----------------------------------------------------------------------------------------------------------------


def _multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def _mcq_count_length(text: str) -> bool:
    """Four questions of five options each, every question longer than the one before."""
    if not text.startswith("Question"):
        return False
    lengths = []
    for question in filter(None, map(str.strip, _QUESTION.split(text))):
        lines = [line.strip() for line in question.split("\n")]
        is_option = [bool(_OPTION.match(line)) for line in lines]
        if sum(is_option) != 5:
            return False
        lengths.append(len(" ".join(lines[: is_option.index(True)]).strip()))
    return len(lengths) == 4 and increases(lengths)


def _reverse_newline(text: str) -> bool:
    """From the line with Zimbabwe on, 52 lines or more in falling order."""
    lines = [_ascii(bare) for line in text.split("\n") if (bare := line.strip(EDGES))]
    begin = next((index for index, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = lines[begin:]
    return len(countries) >= 52 and all(left >= right for left, right in pairwise(countries))


def _ascii(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


def _word_reverse(text: str) -> bool:
    return "bald eagle" in " ".join(reversed(bare_words(text.lower())))


def _character_reverse(text: str) -> bool:
    return "elgae dlab" in text.lower()


def _sentence_alphabet(text: str) -> bool:
    return [sentence.lstrip(EDGES)[:1].lower() for sentence in sentences(text)] == list("abcdefghijklmnopqrstuvwxyz")


def _european_capitals_sort(text: str) -> bool:
    return [city.strip() for city in _ascii(text).split(",") if city.strip()] == _CAPITALS.split()


def _table(text: str, delimiter: str = ",") -> list[list[str]]:
    """Rows of fields, each with the quotes it was given."""
    return [[field.strip() for field in row] for row in csv.reader(text.replace('"', '"""').splitlines(), delimiter=delimiter)]


def _is_table(rows: list[list[str]], header: str, num_rows: int) -> bool:
    fits = len(rows) == num_rows + 1 and all(len(row) == 5 for row in rows)
    return fits and [field.strip('"') for field in rows[0]] == header.split()


def _csv_city(text: str) -> bool:
    return _is_table(_table(text), "ID Country City Year Count", 7)


def _csv_special_character(text: str) -> bool:
    rows = _table(text)
    fields = [field for row in rows[1:] for field in row]
    return _is_table(rows, "ProductID Category Brand Price Stock", 14) and any(
        re.match(r'".*[^\d\w\s].*"', field) for field in fields
    )


def _csv_quotes(text: str) -> bool:
    rows = _table(text, "\t")
    quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for row in rows for field in row)
    return quoted and _is_table(rows, "StudentID Subject Grade Semester Score", 3)


def _date_format_list(text: str) -> bool:
    """Dates of Napoleon's life, as YYYY-MM-DD, and nothing else."""
    for date in text.split(","):
        found = _DATE.fullmatch(date.strip())
        if not found:
            return False
        year, month, day = map(int, found.groups())
        if not (1769 <= year <= 1821 and 1 <= month <= 12 and 1 <= day <= monthrange(year, month)[1]):
            return False
    return True


CHECKS: dict[str, Callable[..., bool]] = {
    "format:parentheses": _parentheses,
    "format:quotes": _quotes,
    "format:options": _options,
    "format:newline": _newline,
    "format:emoji": _emoji,
    "format:line_indent": _line_indent,
    "format:quote_unquote": _quote_unquote,
    "format:list": _list,
    "format:thesis": _thesis,
    "format:sub-bullets": _sub_bullets,
    "format:no_bullets_bullets": _no_bullets_bullets,
    "format:title_case": _title_case,
    "format:output_template": _output_template,
    "format:no_whitespace": _no_whitespace,
    "repeat:repeat_change": _repeat_change,
    "repeat:repeat_simple": _repeat_simple,
    "repeat:repeat_span": _repeat_span,
    "custom:multiples": _multiples,
    "custom:mcq_count_length": _mcq_count_length,
    "custom:reverse_newline": _reverse_newline,
    "custom:word_reverse": _word_reverse,
    "custom:character_reverse": _character_reverse,
    "custom:sentence_alphabet": _sentence_alphabet,
    "custom:european_capitals_sort": _european_capitals_sort,
    "custom:csv_city": _csv_city,
    "custom:csv_special_character": _csv_special_character,
    "custom:csv_quotes": _csv_quotes,
    "custom:date_format_list": _date_format_list,
}
