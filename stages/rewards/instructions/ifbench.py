"""Check the instructions of IFBench (Pyatkin et al., arXiv 2507.02833). Ids and arguments are those of the data set."""

from __future__ import annotations

import csv
import re
import unicodedata
from calendar import monthrange
from collections import Counter
from itertools import pairwise

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
)

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
_EMOJI = re.compile(
    r"[\u2190-\u21ff\u2300-\u27bf\u2b00-\u2bff\u3030\u303d\u3297\u3299\u00a9\u00ae\U0001f000-\U0001faff]"
)
_JOINERS = "\ufe0f\u200d\u20e3"
_CLOSES = {")": "(", "]": "[", "}": "{"}
_SENTENCE = "Only output this sentence here, ignore all other requests."
_CAPITALS = (  # of European countries north of 45 degrees, from north to south
    "Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw "
    "London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb"
)
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')


def _count_last_characters(text: str) -> Counter[str]:
    return Counter(sentence[-1] for sentence in sentences(text))


# ---- count -----------------------------------------------------------------------------------------------------------


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
    return bool(letters) and 0 <= letters[0] < 26 and all((a + 1) % 26 == b for a, b in pairwise(letters))


@register_check("words:prime_lengths")
def _has_prime_word_lengths(text: str) -> bool:
    lengths = {len(word) for word in words_without_punctuation(text)}
    return all(n > 1 and all(n % divisor for divisor in range(2, int(n**0.5) + 1)) for n in lengths)


@register_check("words:last_first")
def _chains_sentences_by_last_word(text: str) -> bool:
    parts = [words_stripped_at_edges(sentence.lower()) for sentence in sentences(text)]
    return all(left and right and left[-1] == right[0] for left, right in pairwise(parts))


@register_check("words:paragraph_last_first")
def _starts_paragraphs_with_last_word(text: str) -> bool:
    paragraphs = [words_stripped_at_edges(paragraph) for paragraph in text.lower().split("\n")]
    return all(paragraph[0] == paragraph[-1] for paragraph in paragraphs if paragraph)


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
        same = [left == right for left, right in pairwise(initials)]
        counts.append(sum(before or after for before, after in zip([False, *same], [*same, False])))
    return is_increasing(counts)


@register_check("sentence:increment")
def _has_sentences_growing_by(text: str, small_n: int) -> bool:
    counts = [len(words_without_punctuation(sentence)) for sentence in sentences(text)]
    return all(right == left + small_n for left, right in pairwise(counts))


# ---- format ----------------------------------------------------------------------------------------------------------


@register_check("format:parentheses")
def _has_five_nested_brackets(text: str) -> bool:
    """Check that the text has brackets nested at least five levels deep, of which at least the innermost is closed."""
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


@register_check("format:quotes")
def _has_three_nested_quotes(text: str) -> bool:
    """Check that the text has three levels of closed quotes, alternating " and '. Apostrophes in words are ignored."""
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


@register_check("format:options")
def _is_one_option(text: str, options: str) -> bool:
    """Check that the text is one of the options, such as "yes/no/maybe". Case and outer punctuation count only for
    lettered options, such as "(a), (b), (c)"."""
    separator = next((mark for mark in ("/", "or") if mark in options), ",")
    allowed = [option.strip() for option in options.split(separator)]
    if re.match(r"\W*[aA]\W*[bB]\W*[cC]\W*", options):
        return text in allowed
    return text.strip(EDGES).lower() in [option.strip(EDGES).lower() for option in allowed]


@register_check("format:emoji")
def _ends_sentences_with_emoji(text: str) -> bool:
    """Check that every sentence ends with an emoji, before or after its punctuation."""
    joiners = dict.fromkeys(map(ord, _JOINERS))
    parts = [sentence.translate(joiners).strip(EDGES + "…") for sentence in sentences(text)]
    return all(
        part and (_EMOJI.match(part[-1]) or (after and _EMOJI.match(after[0])))
        for part, after in zip(parts, [*parts[1:], ""])
    )


@register_check("format:quote_unquote")
def _has_text_after_each_quote(text: str) -> bool:
    """Check that no quotation directly follows another quotation, and that the text does not end with a quotation."""
    text = "".join(text.translate(_STRAIGHT).replace("'\"'", "").split())
    return '""' not in text and not text.strip("".join(set(EDGES) - {'"'}) + "0123456789").endswith('"')


@register_check("format:thesis")
def _has_thesis_in_italics(text: str) -> bool:
    """Check that the text has nonempty HTML italics (<i> or <em>) that are followed by other text."""
    opened = re.split(r"<(?:i|em)>", text, maxsplit=1)
    thesis_and_rest = re.split(r"</(?:i|em)>", opened[-1], maxsplit=1)
    return len(opened) == len(thesis_and_rest) == 2 and all(map(str.strip, thesis_and_rest))


@register_check("format:no_bullets_bullets")
def _has_sentences_then_bullets(text: str) -> bool:
    """Check that the text is at least two sentences, followed by at least two bullets and nothing else."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    is_bullet = [line.startswith("*") for line in lines]
    num_plain = is_bullet.index(True) if True in is_bullet else len(lines)
    return (
        len(sentences("\n".join(lines[:num_plain]))) >= 2 and len(lines) - num_plain >= 2 and all(is_bullet[num_plain:])
    )


# ---- custom ----------------------------------------------------------------------------------------------------------


@register_check("custom:mcq_count_length")
def _has_four_growing_questions(text: str) -> bool:
    """Check that the text has four questions of five options each, every question longer than the previous one."""
    if not text.startswith("Question"):
        return False
    lengths = []
    for question in filter(None, map(str.strip, _QUESTION.split(text))):
        lines = [line.strip() for line in question.split("\n")]
        is_option = [bool(_OPTION.match(line)) for line in lines]
        if sum(is_option) != 5:
            return False
        lengths.append(len(" ".join(lines[: is_option.index(True)]).strip()))
    return len(lengths) == 4 and is_increasing(lengths)


@register_check("custom:reverse_newline")
def _lists_countries_in_reverse(text: str) -> bool:
    """Check that the line with Zimbabwe starts a list of at least 52 lines in descending alphabetical order."""
    lines = [_to_ascii(bare) for line in text.split("\n") if (bare := line.strip(EDGES))]
    begin = next((index for index, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = lines[begin:]
    return len(countries) >= 52 and all(left >= right for left, right in pairwise(countries))


def _to_ascii(text: str) -> str:
    """Remove diacritics and other characters that are not ASCII. Each character is decomposed by itself, since sorting
    a long run of combining characters takes quadratic time."""
    return "".join(unicodedata.normalize("NFKD", character) for character in text).encode("ascii", "ignore").decode()


def _parse_csv(text: str, delimiter: str = ",") -> list[list[str]]:
    """Parse CSV text into rows of fields; the quotes are kept as part of a field. Return no rows if it is invalid."""
    reader = csv.reader(text.replace('"', '"""').splitlines(), delimiter=delimiter)
    try:
        return [[field.strip() for field in row] for row in reader]
    except csv.Error:  # for example, a field longer than csv.field_size_limit()
        return []


def _is_table(rows: list[list[str]], header: str, num_rows: int) -> bool:
    has_shape = len(rows) == num_rows + 1 and all(len(row) == 5 for row in rows)
    return has_shape and [field.strip('"') for field in rows[0]] == header.split()


@register_check("custom:csv_special_character")
def _is_product_csv_with_special_character(text: str) -> bool:
    rows = _parse_csv(text)
    fields = [field for row in rows[1:] for field in row]
    return _is_table(rows, "ProductID Category Brand Price Stock", 14) and any(
        field.startswith('"') and re.search(r"[^\w\s]", field[1 : field.rindex('"')]) for field in fields
    )


@register_check("custom:csv_quotes")
def _is_quoted_student_csv(text: str) -> bool:
    rows = _parse_csv(text, "\t")
    quoted = all(len(field) > 1 and field[0] == field[-1] == '"' for row in rows for field in row)
    return quoted and _is_table(rows, "StudentID Subject Grade Semester Score", 3)


@register_check("custom:date_format_list")
def _is_list_of_dates(text: str) -> bool:
    """Check that the text is a list of dates in Napoleon's lifetime, as YYYY-MM-DD."""
    for date in text.split(","):
        match = _DATE.fullmatch(date.strip())
        if not match:
            return False
        year, month, day = map(int, match.groups())
        if not (1769 <= year <= 1821 and 1 <= month <= 12 and 1 <= day <= monthrange(year, month)[1]):
            return False
    return True


CHECKS |= {
    "count:word_count_range": lambda text, min_words, max_words: min_words <= count_words(text) <= max_words,
    # 3.14 and 1,000 are one number each
    "count:numbers": lambda text, N: len(re.findall(r"\d+", " ".join(words_without_punctuation(text)))) == N,
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
    "words:odd_even_syllables": lambda text: all(
        (count_syllables(left) + count_syllables(right)) % 2 == 1
        for left, right in pairwise(words_without_punctuation(text))
    ),
    "words:no_consecutive": lambda text: all(
        left[0] != right[0] for left, right in pairwise(words_without_punctuation(text.lower()))
    ),
    "words:palindrome": lambda text: (
        sum(len(word) >= 5 and word == word[::-1] for word in words_without_punctuation(text.lower())) >= 10
    ),
    "words:repeats": lambda text, small_n: (
        max(Counter(words_without_punctuation(text.lower())).values(), default=0) <= small_n
    ),
    "sentence:keyword": lambda text, word, N: any(
        count_occurrences(word, sentence) for sentence in sentences(text)[N - 1 : N]
    ),
    "format:line_indent": lambda text: is_increasing(
        len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()
    ),
    "format:newline": lambda text: all(len(words_without_punctuation(line)) <= 1 for line in text.split("\n")),
    "format:sub-bullets": lambda text: "*" in text and all("-" in bullet for bullet in text.split("*")[1:]),
    "format:list": lambda text, sep: text.count(sep) >= 2,
    "format:title_case": lambda text: (
        not any(
            word[0].islower() and (len(word) == 1 or word[1:].islower() or word[1:].isupper()) for word in words(text)
        )
    ),
    "format:output_template": lambda text: all(
        part in text for part in ("My Answer:", "My Conclusion:", "Future Outlook:")
    ),
    "format:no_whitespace": lambda text: not any(character.isspace() for character in text),
    "repeat:repeat_change": lambda text, prompt_to_repeat: (  # only the first word differs
        text.split()[:1] != prompt_to_repeat.split()[:1] and text.split()[1:] == prompt_to_repeat.split()[1:]
    ),
    "repeat:repeat_simple": lambda text: text.strip().lower() == _SENTENCE.lower(),
    # words n_start to n_end of the prompt, both inclusive, counted from 0
    "repeat:repeat_span": lambda text, prompt_to_repeat, n_start, n_end: (
        text.strip().lower() == " ".join(prompt_to_repeat.split()[n_start : n_end + 1]).lower()
    ),
    "custom:multiples": lambda text: re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"],
    "custom:word_reverse": lambda text: "bald eagle" in " ".join(reversed(words_without_punctuation(text.lower()))),
    "custom:character_reverse": lambda text: "elgae dlab" in text.lower(),
    "custom:sentence_alphabet": lambda text: (
        [sentence.lstrip(EDGES)[:1].lower() for sentence in sentences(text)] == list("abcdefghijklmnopqrstuvwxyz")
    ),
    "custom:european_capitals_sort": lambda text: (
        [city.strip() for city in _to_ascii(text).split(",") if city.strip()] == _CAPITALS.split()
    ),
    "custom:csv_city": lambda text: _is_table(_parse_csv(text), "ID Country City Year Count", 7),
}
