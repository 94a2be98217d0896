"""Check the 25 instructions of IFEval (Zhou et al., arXiv 2311.07911). Ids and arguments are named as in the data set.

A keyword is matched literally, not as a regular expression.
"""

from __future__ import annotations

import json
import re

from penstock.stages.rewards.instructions.text import (
    CHECKS,
    LANGUAGES,
    count_occurrences,
    count_words,
    is_latin,
    language_of,
    register_check,
    sentences,
    words,
)
from penstock.storage.errors import RewardError

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
    return language == "en" or (language is None and is_latin(text))


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
