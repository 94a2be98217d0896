"""The 25 instruction kinds of IFEval (Zhou et al., 2311.07911). Names and arguments are the data set's.

A keyword is taken literally, not as a regular expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from stages.rewards.instructions.language import LANGUAGES, is_latin, language_of
from stages.rewards.instructions.text import count_words, num_occurrences, sentences, words
from storage.errors import RewardError

_ALLOWED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
_FENCE = re.compile(r"^```(?:json)?(.*?)(?:```)?$", re.IGNORECASE | re.DOTALL)


def _compare(number: int, relation: str, limit: int) -> bool:
    if relation not in ("less than", "at least"):
        raise RewardError(f"relation {relation!r} is neither 'less than' nor 'at least'")
    return number < limit if relation == "less than" else number >= limit


def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def _frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(text.lower().count(keyword.strip().lower()), relation, frequency)


def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(num_occurrences(word, text) for word in forbidden_words)


def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


def _response_language(text: str, language: str) -> bool:
    if language not in LANGUAGES:
        raise RewardError(f"language {language!r} is not among those that can be told apart: {', '.join(LANGUAGES)}")
    return language_of(text) == language


def _number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(len(sentences(text)), relation, num_sentences)


def _number_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(count_words(text), relation, num_words)


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Paragraphs are separated by ***; one before the first or behind the last may be empty."""
    paragraphs = [part.strip() for part in text.split("***")]
    if not all(paragraphs[1:-1]):
        return False
    return sum(map(bool, paragraphs)) == num_paragraphs


def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    num_full = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if not 1 <= nth_paragraph <= num_full or num_full != num_paragraphs:
        return False
    begin = paragraphs[nth_paragraph - 1].split()[:1]
    return bool(begin) and re.split(r"[.,?!'\"]", begin[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


def _number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return bool(re.search(_POSTSCRIPTS.get(marker) or re.escape(marker), text, re.IGNORECASE))


def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    lines = [line.strip() for line in text.split("\n")]
    return sum(line.startswith("-") or bool(re.match(r"\*[^*]", line)) for line in lines) == num_bullets


def _constrained_response(text: str) -> bool:
    return any(answer in text for answer in _ALLOWED_ANSWERS)


def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """*so* counts once; **so** counts once, too, since its inner pair is read as an empty one."""
    single = [part for part in re.findall(r"\*[^\n*]*\*", text) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n*]*\*\*", text) if part[2:-2].strip()]
    return len(single) + len(double) >= num_highlights


def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def _json_format(text: str) -> bool:
    fenced = _FENCE.match(text.strip())
    try:
        json.loads(fenced.group(1) if fenced else text)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(title.strip("<> ") for title in re.findall(r"<<[^\n]+>>", text))


def _two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    full = [part for part in parts if part]
    return all(parts[1:-1]) and len(full) == 2 and full[0] != full[1]


def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in words(text)), capital_relation, capital_frequency)


def _english_capital(text: str) -> bool:
    return text.isupper() and _may_be_english(text)


def _may_be_english(text: str) -> bool:
    """English, or Latin letters in which no language can be told: `HELLO WORLD`."""
    language = language_of(text)
    return language == "en" or (language is None and is_latin(text))


def _english_lowercase(text: str) -> bool:
    return text.islower() and _may_be_english(text)


def _no_comma(text: str) -> bool:
    return "," not in text


def _quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "language:response_language": _response_language,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_words": _number_words,
    "length_constraints:nth_paragraph_first_word": _nth_paragraph_first_word,
    "detectable_content:number_placeholders": _number_placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _number_bullet_lists,
    "detectable_format:constrained_response": _constrained_response,
    "detectable_format:number_highlighted_sections": _number_highlighted_sections,
    "detectable_format:multiple_sections": _multiple_sections,
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _end_checker,
    "startend:quotation": _quotation,
    "change_case:capital_word_frequency": _capital_word_frequency,
    "change_case:english_capital": _english_capital,
    "change_case:english_lowercase": _english_lowercase,
    "punctuation:no_comma": _no_comma,
}
