"""Check the instructions of IFEval, with the rules that ifbench.py shares: split texts into sentences, words and
syllables, and detect their language, without a model or a download.

To add an instruction, write a function with the decorator `register_check`, or a row of CHECKS, here or in ifbench.py.
The published checkers use NLTK's trained splitter, a syllable dictionary and an n-gram model (langdetect); the rules
here give other results for unusual punctuation and rare words, and detect only the languages that IFEval uses, in texts
of at least one sentence: by script, and by common words and letters for scripts that several languages share (Latin,
Cyrillic, Arabic and Devanagari).
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

from penstock.storage.errors import RewardError

Check = Callable[..., bool]
CHECKS: dict[str, Check] = {}  # instruction id in the data set -> function that checks an answer


def register_check(instruction_id: str) -> Callable[[Check], Check]:
    """Return a decorator that registers a function as the check of an instruction. The function takes the answer's text
    and, under their names in the data set, the arguments of the instruction; it returns whether the answer follows it.
    """
    return lambda function: CHECKS.setdefault(instruction_id, function)


# ---- sentences, words and syllables ----------------------------------------------------------------------------------


EDGES = string.punctuation + string.whitespace
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Possessive (*+) and begun only at the first mark of a run, so that a long run of marks takes linear time.
_END = re.compile(r"(?<![.!?…])[.!?…]++[\"'”’)\]*_]*+(?=\s)|[。！？]+[」』”]*|\n\s*\n")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'])(?:mr|mrs|ms|dr|prof|st|sr|jr|vs|cf|no|inc|ltd|co|corp|fig|approx|e\.g|i\.e"
    r"|[a-z]|[a-z]\.[a-z])\.$",
    re.IGNORECASE,
)
_MAX_ABBREVIATION = 12  # characters, including the one in front of the abbreviation
_NEXT_CHARACTER = re.compile(r"\s*(.)", re.DOTALL)
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")
_VOWELS = re.compile(r"[aeiouy]+")


def sentences(text: str) -> list[str]:
    """Return the sentences of a text with their punctuation; an empty line also ends a sentence."""
    parts, begin = [], 0
    for end in _END.finditer(text):
        if not _ends_with_abbreviation(text, begin, end.end()):
            parts.append(text[begin : end.end()].strip())
            begin = end.end()
    return [sentence for sentence in [*parts, text[begin:].strip()] if sentence]


def _ends_with_abbreviation(text: str, begin: int, end: int) -> bool:
    """Return whether the period at the end of the sentence `text[begin:end]` ends an abbreviation ("Dr. Who",
    "J. Smith") and not a sentence ("it was I. Then")."""
    match = _ABBREVIATION.search(text[max(begin, end - _MAX_ABBREVIATION) : end])
    if match is None or match.group().strip(" (\"'") != "I.":
        return match is not None
    following = _NEXT_CHARACTER.match(text, end)
    return following is None or not following[1].isupper()


def words(text: str) -> list[str]:
    """Return the words of a text, with hyphens and apostrophes inside words but no other punctuation."""
    return _WORD.findall(text)


def count_words(text: str) -> int:
    """Return the number of words: runs of letters and digits, so "it's" counts as two, as in the published checkers."""
    return len(re.findall(r"\w+", text))


def words_without_punctuation(text: str) -> list[str]:
    """Split a text at white space after deleting ASCII punctuation ("it's" becomes "its")."""
    return text.translate(_NO_PUNCTUATION).split()


def words_stripped_at_edges(text: str) -> list[str]:
    """Split a text at white space, strip punctuation from both ends of each word, and omit empty words."""
    return [bare for word in text.split() if (bare := word.strip(EDGES))]


def count_occurrences(word: str, text: str) -> int:
    """Return how often `word` occurs as a whole word, ignoring case; `word` may contain spaces, or end in symbols."""
    return len(re.findall(rf"(?<!\w){re.escape(word.strip())}(?!\w)", text, re.IGNORECASE))


def count_syllables(word: str) -> int:
    """Estimate the number of syllables: groups of vowels, except for a final silent e, ed or es."""
    word = word.lower()
    count = len(_VOWELS.findall(word))
    silent = re.search(r"(?:[^aeiouyl]e|[aeiouy]le|[^aeiouytd]ed|[^aeiouysxzhcg]es)$", word)
    return max(1, count - bool(silent))


def is_increasing(numbers: Iterable[int]) -> bool:
    """Return whether every number is greater than the previous number."""
    numbers = list(numbers)
    return all(left < right for left, right in itertools.pairwise(numbers))


# ---- languages -------------------------------------------------------------------------------------------------------


LANGUAGES = (
    "ar", "bg", "bn", "de", "en", "es", "fa", "fi", "fr", "gu", "he", "hi", "it", "ja", "kn", "ko", "ml", "mr", "ne",
    "pa", "pl", "pt", "ru", "sw", "ta", "te", "th", "uk", "ur", "vi", "zh", "el",
)  # fmt: skip

_SCRIPTS = {
    "hiragana": r"[\u3040-\u30ff]", "han": r"[\u4e00-\u9fff]", "hangul": r"[\uac00-\ud7af\u1100-\u11ff]",
    "thai": r"[\u0e00-\u0e7f]", "bengali": r"[\u0980-\u09ff]", "tamil": r"[\u0b80-\u0bff]",
    "telugu": r"[\u0c00-\u0c7f]", "kannada": r"[\u0c80-\u0cff]", "gujarati": r"[\u0a80-\u0aff]",
    "gurmukhi": r"[\u0a00-\u0a7f]", "malayalam": r"[\u0d00-\u0d7f]", "hebrew": r"[\u0590-\u05ff]",
    "greek": r"[\u0370-\u03ff]", "devanagari": r"[\u0900-\u097f]", "arabic": r"[\u0600-\u06ff]",
    "cyrillic": r"[\u0400-\u04ff]", "latin": r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff]",
}  # fmt: skip
_LANGUAGE_OF_SCRIPT = {
    "hangul": "ko", "thai": "th", "bengali": "bn", "tamil": "ta", "telugu": "te", "kannada": "kn", "gujarati": "gu",
    "gurmukhi": "pa", "malayalam": "ml", "hebrew": "he", "greek": "el",
}  # fmt: skip
# Language code -> words that are in nearly every sentence of the language, and rare in similar languages.
_COMMON_TEXT = {
    "en": (
        "the and of to in is that it for was with as are this be have from not you by an at which or but will can "
        "his her they we my"
    ),
    "de": (
        "der die das und ist nicht ein eine zu den mit sich auf für von dem im es ich sie wir auch als aus bei "
        "nach wird sind"
    ),
    "fr": (
        "le la les et est des une dans que qui pour pas sur avec ce il elle au du en je nous vous sont plus par "
        "mais ou"
    ),
    "es": "el la los las y es de que en un una por con para no se del al lo su como más pero está son muy mi yo",
    "it": "il la le e è di che un una per con non si del della nel sono gli lo come più ma anche questo ho alla i da",
    "pt": "o a os as e é de que em um uma por com para não se do da no na ao dos das mais mas como são muito eu seu",
    "pl": "i w na z się nie jest do to że o jak ale po co tak za od są przez był czy dla tym już jego może",
    "fi": "ja on ei se että hän oli mutta kun niin olen ovat tai myös joka kuin jos minä sen tämä ole voi hyvin",
    "vi": "và là của có không cho một trong được với các những người này đã để khi tôi bạn đó ở như thì",
    "sw": "na ya wa ni kwa katika za la cha hii kama si hiyo kuwa watu yake mimi au lakini huo pia sana kila",
    "hi": "है हैं का की के में और को से यह नहीं था कि पर हो एक मैं ने भी लिए",
    "mr": "आहे आहेत आणि च्या मध्ये हा ही हे नाही होते तर मी एक ला ते या साठी",
    "ru": "и в не на что с по это как но из для есть был так мы вы она они его все уже или когда бы",
    "bg": "и в не на че с по това как но от за е да се са беше той тя те като ще или когато си му",
    "uk": "і в не на що з по це як але від для є був так ми ви вона вони його та вже або коли щоб у й",
    "ne": "छ छन् र को मा हो भने गर्न लागि यो पनि थियो हुन्छ म तपाईं गर्छ एक",
}  # fmt: skip
_LETTERS = {
    "de": "äöüß", "fr": "éèêàçùœ", "es": "ñ¿¡áíóú", "it": "èòàù", "pt": "ãõçáê", "pl": "ąęłńśźżć", "fi": "äö",
    "vi": "ăđơưạảấầậếềệọồộớờợụủứừựị", "uk": "іїєґ", "ru": "ыэё", "bg": "ъ", "ur": "ٹڈڑںھہے", "fa": "پچژگکی", "mr": "ळ",
}  # fmt: skip
_LANGUAGES_OF_SCRIPT = {
    "latin": ("en", "de", "fr", "es", "it", "pt", "pl", "fi", "vi", "sw"),
    "devanagari": ("hi", "mr", "ne"),
    "cyrillic": ("ru", "uk", "bg"),
}


def language_of(text: str) -> str | None:
    """Return the ISO 639-1 code of the text's language, or None if the language cannot be determined."""
    counts = {script: len(re.findall(pattern, text)) for script, pattern in _SCRIPTS.items()}
    if not any(counts.values()):
        return None
    if counts["hiragana"] + counts["han"] >= sum(counts.values()) / 2:
        return "ja" if counts["hiragana"] * 10 >= counts["han"] else "zh"
    script = max(counts, key=lambda name: counts[name])
    if script in _LANGUAGE_OF_SCRIPT:
        return _LANGUAGE_OF_SCRIPT[script]
    letters = Counter(text.lower())
    if script == "arabic":
        urdu, persian = (sum(letters[letter] for letter in _LETTERS[code]) for code in ("ur", "fa"))
        return "ar" if not urdu and not persian else "ur" if 4 * urdu >= persian else "fa"
    found = Counter(re.findall(r"[^\s\d.,;:!?\"'’()\[\]*|।-]+", text.lower()))
    scores = {
        code: sum(found[word] for word in _COMMON_TEXT[code].split())
        + 0.5 * sum(letters[letter] for letter in _LETTERS.get(code, ""))
        for code in _LANGUAGES_OF_SCRIPT.get(script, ())
    }
    best = max(scores.values(), default=0)
    languages = [code for code, score in scores.items() if score == best > 0]
    return languages[0] if len(languages) == 1 else None


# ---- IFEval (Zhou et al., arXiv 2311.07911) --------------------------------------------------------------------------

# The 25 instructions. Ids and arguments are named as in the data set. A keyword is matched literally, not as a regular
# expression.

_ALLOWED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_FENCE = re.compile(r"^```(?:json)?(.*?)(?:```)?$", re.IGNORECASE | re.DOTALL)


def _satisfies_relation(number: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise RewardError(f"relation {relation!r} in the row's `kwargs` is unknown: write 'less than' or 'at least'")
    return number < limit if relation == "less than" else number >= limit


def _may_be_english(text: str) -> bool:
    """Return whether a text is in English, or in Latin letters and a language that could not be detected, such as
    `HELLO WORLD`."""
    language = language_of(text)
    is_latin = all(bool(re.search(pattern, text)) == (name == "latin") for name, pattern in _SCRIPTS.items())
    return language == "en" or (language is None and is_latin)


@register_check("language:response_language")
def _is_in_language(text: str, language: str) -> bool:
    if language not in LANGUAGES:
        raise RewardError(
            f"language {language!r} cannot be detected (only {', '.join(LANGUAGES)}): remove rows with this language"
        )
    return language_of(text) == language


@register_check("length_constraints:number_paragraphs")
def _has_number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Check the number of paragraphs, which are separated by ***. An empty first or last paragraph does not count; any
    other empty paragraph fails the check."""
    paragraphs = [part.strip() for part in text.split("***")]
    if not all(paragraphs[1:-1]):
        return False
    return sum(map(bool, paragraphs)) == num_paragraphs


@register_check("length_constraints:nth_paragraph_first_word")
def _starts_nth_paragraph_with_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    num_nonempty = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if not 1 <= nth_paragraph <= num_nonempty or num_nonempty != num_paragraphs:
        return False
    first = paragraphs[nth_paragraph - 1].split()[:1]
    return bool(first) and re.split(r"[.,?!'\"]", first[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


@register_check("detectable_content:number_placeholders")
def _has_placeholders(text: str, num_placeholders: int) -> bool:
    closed = [part for line in text.split("\n") for part in line.split("]")[:-1]]
    return sum("[" in part for part in closed) >= num_placeholders


@register_check("detectable_content:postscript")
def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return bool(re.search(_POSTSCRIPTS.get(marker) or re.escape(marker), text, re.IGNORECASE))


@register_check("detectable_format:number_bullet_lists")
def _has_number_of_bullets(text: str, num_bullets: int) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    return sum(line.startswith("-") or bool(re.match(r"\*[^*]", line)) for line in lines) == num_bullets


@register_check("detectable_format:number_highlighted_sections")
def _has_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Check that the text has at least `num_highlights` nonempty highlights; *single* and **double** count as one."""
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n*]*\*\*", text) if part[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


@register_check("detectable_format:json_format")
def _is_json(text: str) -> bool:
    fenced = _FENCE.match(text.strip())
    try:
        json.loads(fenced.group(1) if fenced else text, parse_int=str)  # int refuses more than 4300 digits
    except (ValueError, RecursionError):
        return False
    return True


@register_check("combination:two_responses")
def _has_two_different_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


@register_check("startend:quotation")
def _is_in_quotation_marks(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS |= {
    "keywords:existence": lambda text, keywords: all(keyword.lower() in text.lower() for keyword in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _satisfies_relation(
        text.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(count_occurrences(word, text) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _satisfies_relation(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _satisfies_relation(
        len(sentences(text)), relation, num_sentences
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _satisfies_relation(
        count_words(text), relation, num_words
    ),
    "detectable_format:constrained_response": lambda text: any(answer in text for answer in _ALLOWED_ANSWERS),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:title": lambda text: any(
        line.partition("<<")[2].rpartition(">>")[0].strip("<> ") for line in text.split("\n")
    ),
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _satisfies_relation(
        sum(word.isupper() for word in words(text)), capital_relation, capital_frequency
    ),
    "change_case:english_capital": lambda text: text.isupper() and _may_be_english(text),
    "change_case:english_lowercase": lambda text: text.islower() and _may_be_english(text),
    "punctuation:no_comma": lambda text: "," not in text,
}
