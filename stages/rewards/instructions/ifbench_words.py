"""Check IFBench's instructions (Pyatkin et al., arXiv 2507.02833) about counts, ratios, words and sentences.

The instruction ids and argument names are those of the data set.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter

from penstock.stages.rewards.instructions.text import (
    CHECKS,
    EDGES,
    count_occurrences,
    count_syllables,
    count_words,
    is_increasing,
    register_check,
    sentences,
    words,
    words_stripped_at_edges,
    words_without_punctuation,
)  # fmt: skip

_NAMES = (  # the names that the instruction count:person_names lists
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
    "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria "
    "Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella "
    "Jonathan"
)
_CONJUNCTIONS = {"and", "but", "for", "nor", "or", "so", "yet"}
_PERSONAL = (
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves"
)
_OTHER_PRONOUNS = (
    "this that these those who whom whose which what whoever whomever whatever whichever anybody anyone anything "
    "everybody everyone everything nobody nothing somebody someone something each either neither both all some any "
    "none"
)
_PRONOUNS = set(_PERSONAL.split()) | set(_OTHER_PRONOUNS.split())
_FUNCTION_WORDS = (  # the last ones are parts of contractions: "don't" is read as "don" and "t"
    "what which who whom this that these those am is are was were be been being have has had having do does did doing "
    "a an the and but if or because as until while of at by for with about against between into through during before "
    "after above below to from up down in out on off over under again further then once here there when where why how "
    "all any both each few more most other some such no nor not only own same so than too very s t can will just don "
    "should now d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn "
    "wasn weren won wouldn"
)
_STOP_WORDS = (set(_PERSONAL.split()) | set(_FUNCTION_WORDS.split())) - {"us", "mine"}  # as in NLTK's English list
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")


def _count_last_characters(text: str) -> Counter[str]:
    return Counter(sentence[-1] for sentence in sentences(text))


# ---- count -----------------------------------------------------------------------------------------------------------


@register_check("count:numbers")
def _has_exact_count_of_numbers(text: str, N: int) -> bool:
    return len(re.findall(r"\d+", " ".join(words_without_punctuation(text)))) == N  # 3.14 and 1,000 are one number each


@register_check("count:punctuation")
def _has_every_punctuation_mark(text: str) -> bool:
    """Check that the text contains an interrobang (?!, !? or ‽) and, outside of it, each of . , ! ? ; and :."""
    bang = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return bang is not None and all(mark in text.replace(bang, "", 1) for mark in ".,!?;:")


@register_check("count:words_japanese")
def _has_japanese_every_nth_word(text: str, N: int) -> bool:
    nth_words = [word.strip(EDGES) for word in text.split()][N - 1 :: N]
    return all(_JAPANESE.search(word) for word in nth_words if word and not word.isdigit())


@register_check("count:keywords_multiple")
def _has_five_keyword_counts(
    text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7))
    return all(count_occurrences(keyword, text) == count for keyword, count in wanted)


# ---- ratio -----------------------------------------------------------------------------------------------------------


@register_check("ratio:stop_words")
def _has_few_stop_words(text: str, percentage: float) -> bool:
    tokens = re.findall(r"\w+", text.lower())
    return bool(tokens) and 100 * sum(token in _STOP_WORDS for token in tokens) <= percentage * len(tokens)


@register_check("ratio:overlap")
def _has_trigram_overlap(text: str, reference_text: str, percentage: float) -> bool:
    """Check that `percentage` % (+-2) of the text's distinct character trigrams occur in `reference_text`."""
    trigrams, reference = (
        {part[index : index + 3] for index in range(len(part) - 2)} for part in (text, reference_text)
    )
    return bool(trigrams) and abs(100 * len(trigrams & reference) / len(trigrams) - percentage) <= 2


@register_check("ratio:sentence_words")
def _has_three_equal_sentences_without_repeats(text: str) -> bool:
    parts, all_words = sentences(text), words_without_punctuation(text.lower())
    return len(parts) == 3 and len(set(map(len, parts))) == 1 and len(all_words) == len(set(all_words))


# ---- words -----------------------------------------------------------------------------------------------------------


@register_check("words:alphabet")
def _starts_words_in_alphabetical_order(text: str) -> bool:
    letters = [ord(word[0]) - ord("a") for word in words_without_punctuation(text.lower())]
    return bool(letters) and 0 <= letters[0] < 26 and all((a + 1) % 26 == b for a, b in itertools.pairwise(letters))


@register_check("words:prime_lengths")
def _has_prime_word_lengths(text: str) -> bool:
    lengths = {len(word) for word in words_without_punctuation(text)}
    return all(n > 1 and all(n % divisor for divisor in range(2, int(n**0.5) + 1)) for n in lengths)


@register_check("words:odd_even_syllables")
def _alternates_odd_even_syllables(text: str) -> bool:
    odd = [count_syllables(word) % 2 for word in words_without_punctuation(text)]
    return all(left != right for left, right in itertools.pairwise(odd))


@register_check("words:last_first")
def _chains_sentences_by_last_word(text: str) -> bool:
    parts = [words_stripped_at_edges(sentence.lower()) for sentence in sentences(text)]
    return all(left and right and left[-1] == right[0] for left, right in itertools.pairwise(parts))


@register_check("words:paragraph_last_first")
def _starts_paragraphs_with_last_word(text: str) -> bool:
    paragraphs = [words_stripped_at_edges(paragraph) for paragraph in text.lower().split("\n")]
    return all(paragraph[0] == paragraph[-1] for paragraph in paragraphs if paragraph)


@register_check("words:no_consecutive")
def _has_no_adjacent_equal_initials(text: str) -> bool:
    initials = [word[0] for word in words_without_punctuation(text.lower())]
    return all(left != right for left, right in itertools.pairwise(initials))


@register_check("words:keywords_specific_position")
def _has_keyword_at_word_of_sentence(text: str, keyword: str, n: int, m: int) -> bool:
    sentence = words((sentences(text)[n - 1 : n] or [""])[0].lower())
    return sentence[m - 1 : m] == [keyword.strip().lower()]


@register_check("words:words_position")
def _has_keyword_second_and_second_last(text: str, keyword: str) -> bool:
    tokens = words(text.lower())
    return len(tokens) > 1 and tokens[1] == tokens[-2] == keyword.strip().lower()


# ---- sentence --------------------------------------------------------------------------------------------------------


@register_check("sentence:alliteration_increment")
def _has_increasing_alliteration(text: str) -> bool:
    """Check that the number of alliterating words (same initial as an adjacent word) grows from sentence to
    sentence."""
    counts = []
    for sentence in sentences(text):
        initials = [word[0] for word in words_stripped_at_edges(sentence.lower())]
        same = [left == right for left, right in itertools.pairwise(initials)]
        counts.append(sum(before or after for before, after in zip([False, *same], [*same, False])))
    return is_increasing(counts)


@register_check("sentence:increment")
def _has_sentences_growing_by(text: str, small_n: int) -> bool:
    counts = [len(words_without_punctuation(sentence)) for sentence in sentences(text)]
    return all(right == left + small_n for left, right in itertools.pairwise(counts))


CHECKS |= {
    "count:word_count_range": lambda text, min_words, max_words: min_words <= count_words(text) <= max_words,
    "count:unique_word_count": lambda text, N: len(set(words_stripped_at_edges(text.lower()))) >= N,
    "count:conjunctions": lambda text, small_n: (
        len(_CONJUNCTIONS & set(words_stripped_at_edges(text.lower()))) >= small_n
    ),
    "count:person_names": lambda text, N: len(set(_NAMES.split()) & set(re.findall(r"\w+", text))) >= N,
    "count:pronouns": lambda text, N: sum(word in _PRONOUNS for word in re.findall(r"[a-z]+", text.lower())) >= N,
    "ratio:sentence_type": lambda text: _count_last_characters(text)["."] == 2 * _count_last_characters(text)["?"],
    "ratio:sentence_balance": lambda text: (
        _count_last_characters(text)["."] == _count_last_characters(text)["?"] == _count_last_characters(text)["!"]
    ),
    "words:vowel": lambda text: "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= 3,
    "words:consonants": lambda text: all(_CLUSTER.search(word) for word in text.lower().split()),
    "words:palindrome": lambda text: (
        sum(len(word) >= 5 and word == word[::-1] for word in words_without_punctuation(text.lower())) >= 10
    ),
    "words:repeats": lambda text, small_n: (
        max(Counter(words_without_punctuation(text.lower())).values(), default=0) <= small_n
    ),
    "sentence:keyword": lambda text, word, N: any(
        count_occurrences(word, sentence) for sentence in sentences(text)[N - 1 : N]
    ),
}
