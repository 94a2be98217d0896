"""IFBench (Pyatkin et al., 2507.02833), the kinds about counts, ratios, words and sentences. Names and arguments are the data set's."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable

from stages.rewards.instructions.text import (
    EDGES,
    bare_words,
    count_words,
    increases,
    num_occurrences,
    num_syllables,
    sentences,
    stripped_words,
    words,
)  # fmt: skip

_NAMES = (  # of the instruction's own text
    "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper Leo Zoe Daniel "
    "Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas Audrey David "
    "Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan"
)
_CONJUNCTIONS = {"and", "but", "for", "nor", "or", "so", "yet"}
_PERSONAL = (
    "i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its itself "
    "they them their theirs themselves"
)
_OTHER_PRONOUNS = (
    "this that these those who whom whose which what whoever whomever whatever whichever anybody anyone anything everybody "
    "everyone everything nobody nothing somebody someone something each either neither both all some any none"
)
_PRONOUNS = set(_PERSONAL.split()) | set(_OTHER_PRONOUNS.split())
_FUNCTION_WORDS = (  # the last of them are the parts of contractions, because words are runs of letters
    "what which who whom this that these those am is are was were be been being have has had having do does did doing a an the and but if "
    "or because as until while of at by for with about against between into through during before after above below to from up down in "
    "out on off over under again further then once here there when where why how all any both each few more most other some such no nor "
    "not only own same so than too very s t can will just don should now d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn "
    "ma mightn mustn needn shan shouldn wasn weren won wouldn"
)
_STOP_WORDS = (set(_PERSONAL.split()) | set(_FUNCTION_WORDS.split())) - {"us", "mine"}  # as in NLTK's English list
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def _endings(text: str) -> Counter[str]:
    return Counter(sentence[-1] for sentence in sentences(text))


# ---- count -----------------------------------------------------------------------------------------------------------------


def _word_count_range(text: str, min_words: int, max_words: int) -> bool:
    return min_words <= count_words(text) <= max_words


def _unique_word_count(text: str, N: int) -> bool:
    return len(set(stripped_words(text.lower()))) >= N


def _conjunctions(text: str, small_n: int) -> bool:
    return len(_CONJUNCTIONS & set(stripped_words(text.lower()))) >= small_n


def _person_names(text: str, N: int) -> bool:
    return len(set(_NAMES.split()) & set(re.findall(r"\w+", text))) >= N


def _numbers(text: str, N: int) -> bool:
    return len(re.findall(r"\d+", " ".join(bare_words(text)))) == N  # 3.14 and 1,000 are one number each


def _punctuation(text: str) -> bool:
    """An interrobang, and each of the six marks besides it."""
    bang = next((mark for mark in ("?!", "!?", "‽") if mark in text), None)
    return bang is not None and all(mark in text.replace(bang, "", 1) for mark in ".,!?;:")


def _words_japanese(text: str, N: int) -> bool:
    every = [word.strip(EDGES) for word in text.split()][N - 1 :: N]
    return all(_JAPANESE.search(word) for word in every if word and not word.isdigit())


def _pronouns(text: str, N: int) -> bool:
    return sum(word in _PRONOUNS for word in re.findall(r"[a-z]+", text.lower())) >= N


def _keywords_multiple(text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7))
    return all(num_occurrences(keyword, text) == count for keyword, count in wanted)


# ---- ratio -----------------------------------------------------------------------------------------------------------------


def _stop_words(text: str, percentage: float) -> bool:
    found = re.findall(r"\w+", text.lower())
    return bool(found) and 100 * sum(word in _STOP_WORDS for word in found) <= percentage * len(found)


def _sentence_type(text: str) -> bool:
    return _endings(text)["."] == 2 * _endings(text)["?"]


def _sentence_balance(text: str) -> bool:
    return _endings(text)["."] == _endings(text)["?"] == _endings(text)["!"]


def _overlap(text: str, reference_text: str, percentage: float) -> bool:
    """Share of the response's character trigrams that are the reference's too, within two percent."""
    ours, theirs = _trigrams(text), _trigrams(reference_text)
    return bool(ours) and abs(100 * len(ours & theirs) / len(ours) - percentage) <= 2


def _trigrams(text: str) -> set[str]:
    return {text[index : index + 3] for index in range(len(text) - 2)}


def _sentence_words(text: str) -> bool:
    three, all_words = sentences(text), bare_words(text.lower())
    return len(three) == 3 and len(set(map(len, three))) == 1 and len(all_words) == len(set(all_words))


# ---- words -----------------------------------------------------------------------------------------------------------------


def _alphabet(text: str) -> bool:
    letters = [ord(word[0]) - ord("a") for word in bare_words(text.lower())]
    return bool(letters) and 0 <= letters[0] < 26 and all((a + 1) % 26 == b for a, b in itertools.pairwise(letters))


def _vowel(text: str) -> bool:
    return "\n" not in text.strip() and len(set(text.lower()) & set("aeiou")) <= 3


def _consonants(text: str) -> bool:
    return all(_CLUSTER.search(word) for word in text.lower().split())


def _palindrome(text: str) -> bool:
    return sum(len(word) >= 5 and word == word[::-1] for word in bare_words(text.lower())) >= 10


def _prime_lengths(text: str) -> bool:
    return all(_is_prime(len(word)) for word in bare_words(text))


def _repeats(text: str, small_n: int) -> bool:
    return max(Counter(bare_words(text.lower())).values(), default=0) <= small_n


def _odd_even_syllables(text: str) -> bool:
    odd = [num_syllables(word) % 2 for word in bare_words(text)]
    return all(left != right for left, right in itertools.pairwise(odd))


def _last_first(text: str) -> bool:
    each = [stripped_words(sentence.lower()) for sentence in sentences(text)]
    return all(left and right and left[-1] == right[0] for left, right in itertools.pairwise(each))


def _paragraph_last_first(text: str) -> bool:
    each = [stripped_words(paragraph) for paragraph in text.lower().split("\n")]
    return all(paragraph[0] == paragraph[-1] for paragraph in each if paragraph)


def _no_consecutive(text: str) -> bool:
    found = bare_words(text.lower())
    return all(left[0] != right[0] for left, right in itertools.pairwise(found))


def _keywords_specific_position(text: str, keyword: str, n: int, m: int) -> bool:
    sentence = words((sentences(text)[n - 1 : n] or [""])[0].lower())
    return sentence[m - 1 : m] == [keyword.strip().lower()]


def _words_position(text: str, keyword: str) -> bool:
    found = words(text.lower())
    return len(found) > 1 and found[1] == found[-2] == keyword.strip().lower()


# ---- sentence --------------------------------------------------------------------------------------------------------------


def _alliteration_increment(text: str) -> bool:
    return increases(_num_alliterative(stripped_words(sentence.lower())) for sentence in sentences(text))


def _num_alliterative(found: list[str]) -> int:
    """Words that begin with the letter of the word before or behind them."""
    same = [left[0] == right[0] for left, right in itertools.pairwise(found)]
    return sum(before or behind for before, behind in zip([False, *same], [*same, False]))


def _sentence_keyword(text: str, word: str, N: int) -> bool:
    return any(num_occurrences(word, sentence) for sentence in sentences(text)[N - 1 : N])


def _increment(text: str, small_n: int) -> bool:
    counts = [len(bare_words(sentence)) for sentence in sentences(text)]
    return all(right == left + small_n for left, right in itertools.pairwise(counts))


CHECKS: dict[str, Callable[..., bool]] = {
    "count:word_count_range": _word_count_range,
    "count:unique_word_count": _unique_word_count,
    "count:conjunctions": _conjunctions,
    "count:person_names": _person_names,
    "count:numbers": _numbers,
    "count:punctuation": _punctuation,
    "count:words_japanese": _words_japanese,
    "count:pronouns": _pronouns,
    "count:keywords_multiple": _keywords_multiple,
    "ratio:stop_words": _stop_words,
    "ratio:sentence_type": _sentence_type,
    "ratio:sentence_balance": _sentence_balance,
    "ratio:overlap": _overlap,
    "ratio:sentence_words": _sentence_words,
    "words:alphabet": _alphabet,
    "words:vowel": _vowel,
    "words:consonants": _consonants,
    "words:palindrome": _palindrome,
    "words:prime_lengths": _prime_lengths,
    "words:repeats": _repeats,
    "words:odd_even_syllables": _odd_even_syllables,
    "words:last_first": _last_first,
    "words:paragraph_last_first": _paragraph_last_first,
    "words:no_consecutive": _no_consecutive,
    "words:keywords_specific_position": _keywords_specific_position,
    "words:words_position": _words_position,
    "sentence:alliteration_increment": _alliteration_increment,
    "sentence:keyword": _sentence_keyword,
    "sentence:increment": _increment,
}
