"""Check the 25 instructions of IFEval (Zhou et al., arXiv 2311.07911). Ids and arguments are named as in the data set.

A keyword is matched literally, not as a regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from penstock.stages.rewards.instructions.text import (
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
    """Return whether a text is English, or is in Latin letters with an undetected language, such as `HELLO WORLD`."""
    language = language_of(text)
    return language == "en" or (language is None and is_latin(text))


@register_check("keywords:existence")
def _has_all_keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


@register_check("keywords:frequency")
def _has_keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _satisfies_relation(text.lower().count(keyword.strip().lower()), relation, frequency)


@register_check("keywords:forbidden_words")
def _has_no_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(count_occurrences(word, text) for word in forbidden_words)


@register_check("keywords:letter_frequency")
def _has_letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _satisfies_relation(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


@register_check("language:response_language")
def _is_in_language(text: str, language: str) -> bool:
    if language not in LANGUAGES:
        raise RewardError(
            f"language {language!r} cannot be detected (only {', '.join(LANGUAGES)}): remove rows with this language"
        )
    return language_of(text) == language


@register_check("length_constraints:number_sentences")
def _has_number_of_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _satisfies_relation(len(sentences(text)), relation, num_sentences)


@register_check("length_constraints:number_words")
def _has_number_of_words(text: str, num_words: int, relation: str) -> bool:
    return _satisfies_relation(count_words(text), relation, num_words)


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


@register_check("detectable_format:constrained_response")
def _has_allowed_answer(text: str) -> bool:
    return any(answer in text for answer in _ALLOWED_ANSWERS)


@register_check("detectable_format:number_highlighted_sections")
def _has_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Check that the text has at least `num_highlights` nonempty highlights; *single* and **double** count as one."""
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n*]*\*\*", text) if part[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


@register_check("detectable_format:multiple_sections")
def _has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


@register_check("detectable_format:json_format")
def _is_json(text: str) -> bool:
    fenced = _FENCE.match(text.strip())
    try:
        json.loads(fenced.group(1) if fenced else text, parse_int=str)  # int refuses more than 4300 digits
    except (ValueError, RecursionError):
        return False
    return True


@register_check("detectable_format:title")
def _has_title(text: str) -> bool:
    return any(line.partition("<<")[2].rpartition(">>")[0].strip("<> ") for line in text.split("\n"))


@register_check("combination:two_responses")
def _has_two_different_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    responses = [part for part in parts if part]
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


@register_check("combination:repeat_prompt")
def _starts_with_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@register_check("startend:end_checker")
def _ends_with_phrase(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@register_check("change_case:capital_word_frequency")
def _has_capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _satisfies_relation(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


@register_check("change_case:english_capital")
def _is_english_upper_case(text: str) -> bool:
    return text.isupper() and _may_be_english(text)


@register_check("change_case:english_lowercase")
def _is_english_lower_case(text: str) -> bool:
    return text.islower() and _may_be_english(text)


@register_check("punctuation:no_comma")
def _has_no_comma(text: str) -> bool:
    return "," not in text


@register_check("startend:quotation")
def _is_in_quotation_marks(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'
