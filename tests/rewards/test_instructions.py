"""Every instruction of IFEval and IFBench, on responses that follow it and responses that do not."""

from typing import Any

import pytest

from penstock.stages.rewards.builtin import ifbench
from penstock.stages.rewards.hub import REWARDS
from penstock.stages.rewards.instructions.text import CHECKS, LANGUAGES, count_syllables, language_of, sentences, words
from penstock.storage.errors import RewardError
from penstock.storage.samples.sample import Sample

Case = tuple[str, dict[str, Any], list[str], list[str]]
AFRICA = (
    "Zimbabwe Zambia Uganda Tunisia Togo Tanzania Sudan Somalia Senegal Rwanda Nigeria Niger Namibia "
    "Mozambique Morocco Mali Libya"
)
CAPITALS = (
    "Reykjavik, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, "
    "Chișinău, Bern, Ljubljana, Zagreb"
)
STORY = " ".join(f"{letter}x went home." for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
QUIZ = "\n".join(
    f"Question {n}. {'Who ' * n}was it?\na) Dali\nb) Klee\nc) Miro\nd) Ernst\ne) Marc" for n in (1, 2, 3, 4)
)
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{n},Peru,Lima,2001,{n}" for n in range(7))
GOODS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f"{n},Toys,Lego,9,1" for n in range(13))
MARKS = '"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"\n' + "\n".join(
    '"1"\t"Art"\t"A"\t"2"\t"90"' for _ in range(3)
)

CASES: list[Case] = [
    # ---- IFEval ----
    ("keywords:existence", {"keywords": ["cat", "C++"]}, ["A CAT writes C++."], ["A cat writes C.", "dog"]),
    ("keywords:frequency", {"keyword": "is", "frequency": 2, "relation": "at least"}, ["It is, is it?"], ["It is."]),
    ("keywords:frequency", {"keyword": "is", "frequency": 2, "relation": "less than"}, ["It is."], ["It is, is it?"]),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ["I concatenate."], ["A Cat."]),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"}, ["Eel"], ["el"]),
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist nicht die Antwort auf meine Frage."],
        ["This is not the answer."],
    ),
    ("language:response_language", {"language": "hi"}, ["यह एक अच्छा सवाल है।"], ["It is a good question."]),
    ("language:response_language", {"language": "fi"}, [], ["zxcv qwrt", "123 !", ""]),
    ("language:response_language", {"language": "bg"}, [], ["Хорошо"]),
    ("language:response_language", {"language": "en"}, [], ["OK"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        ["Dr. Who came. He left."],
        ["A. Yes. No! So?"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["one\n***\ntwo", "***\none\n***\ntwo"],
        ["one", "a***b***c", "a\n***\n***\nb"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one, two three"], ["one two."]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Hello"},
        ['First.\n\n"Hello, you."'],
        ["Hello.\n\nFirst.", "a\n\nhello\n\nb", "Hello"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [street]"], ["[name]"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\np. s. I forgot"], ["Bye.", "psst"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["P.P.S again"], ["P.S. once"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n- b", "  * a\n  * b\ntext"],
        ["* a", "**bold**\n* a", "* a\n* b\n* c"],
    ),
    ("detectable_format:constrained_response", {}, ["Well: My answer is maybe."], ["My answer is perhaps."]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*one* and **two**"],
        ["*one*", "** **", "*a\nb*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        ["SECTION 1\na\nSECTION 2\nb"],
        ["SECTION 1\na", "Section 1 Section 2"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": 1}\n```', "```\n[1]\n```"],
        ["{a: 1}", 'Here: {"a": 1}'],
    ),
    ("detectable_format:title", {}, ["<<a poem>>\ntext"], ["<a poem>", "<<\n>>", "<<  >>"]),
    ("combination:two_responses", {}, ["one******two"], ["one", "one******one", "a******b******c", "a******  ******b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, ["say hi. Hi!"], ["Hi! Say hi."]),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions?"},
        ['So it is. "any questions?"', "Any questions?<|im_end|>"],
        ["Any questions? No."],
    ),
    ("startend:quotation", {}, ['"all of it"'], ['"a" b', '"']),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I am NASA-FAN"],
        ["I am here"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THE CAT IS ON THE MAT.", "HELLO WORLD"],
        ["The cat is on the mat.", "DAS IST NICHT DIE ANTWORT.", "ЖУК", "ΑΒΓ"],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["the cat is on the mat."],
        ["The cat.", "das ist nicht die antwort auf die frage."],
    ),
    ("punctuation:no_comma", {}, ["one two"], ["one, two"]),
    # ---- IFBench: counts ----
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, ["one two", "it's so"], ["one", "one two three four"]),
    ("count:unique_word_count", {"N": 3}, ["One two, three two."], ["Two two, TWO three"]),
    ("count:conjunctions", {"small_n": 2}, ["This and that, but no"], ["And and and,", "sandy butter"]),
    ("count:person_names", {"N": 2}, ["Emma met Liam."], ["Emma met Emma.", "emma, liam", "Emmanuel and Liam"]),
    ("count:numbers", {"N": 2}, ["3.14 and 1,000"], ["1 2 3", "one"]),
    (
        "count:punctuation",
        {},
        ["Really?! Yes, no; so: go. Why? Ha!"],
        ["Yes, no; so: go. Why? Ha!", "Really?! Yes, no; so: go."],
    ),
    ("count:words_japanese", {"N": 2}, ["a 猫 b いぬ", "one"], ["a cat b 犬"]),
    ("count:pronouns", {"N": 3}, ["She/her sees it"], ["She sees cats"]),
    (
        "count:keywords_multiple",
        {"keyword1": "a1", "keyword2": "b1", "keyword3": "c1", "keyword4": "d1", "keyword5": "e1"},
        ["A1 " + "b1 " * 2 + "c1 " * 3 + "d1 " * 5 + "e1 " * 7],
        ["a1 " + "b1 " * 2 + "c1 " * 3 + "d1 " * 5 + "e1 " * 6, "a1 b1"],
    ),
    # ---- IFBench: ratios ----
    ("ratio:stop_words", {"percentage": 50}, ["the cats chase mice", "don't panic, friends: calm"], ["it is the cat"]),
    ("ratio:sentence_type", {}, ["One. Two. Three?"], ["One. Two?", "One."]),
    ("ratio:sentence_balance", {}, ["One. Two? Three!"], ["One. Two?"]),
    (
        "ratio:overlap",
        {"reference_text": "the mat", "percentage": 50},
        ["the mop!"],  # the, he_ and e_m of six character trigrams
        ["the mat", "no"],
    ),
    ("ratio:overlap", {"reference_text": "abcx", "percentage": 50}, ["abcd"], []),  # they share abc but not bcd
    ("ratio:overlap", {"reference_text": "abcx", "percentage": 40}, [], ["abcd"]),
    ("ratio:overlap", {"reference_text": "the cat sat", "percentage": 100}, ["the cat sat"], []),
    ("ratio:overlap", {"reference_text": "ab", "percentage": 0}, [], ["ab"]),
    (
        "ratio:sentence_words",
        {},
        ["Cats nap. Dogs run. Owls see."],
        ["Cats nap. Dogs nap. Owls see.", "Cats nap. Dogs run. Owl see.", "Cats nap."],
    ),
    # ---- IFBench: words and sentences ----
    ("words:alphabet", {}, ["Young zebras ask bears.", "Alone"], ["A cat", "1 2", "b a"]),
    ("words:vowel", {}, ["A cat sits on"], ["Education", "a\nb"]),
    ("words:consonants", {}, ["Bright stars"], ["Bright sun"]),
    ("words:palindrome", {}, ["level civic radar refer rotor kayak madam tenet solos stats."], ["level " * 9 + "noon"]),
    ("words:prime_lengths", {}, ["We are seven"], ["We have it", "a be"]),
    ("words:repeats", {"small_n": 2}, ["Go, go home"], ["go go GO"]),
    ("words:odd_even_syllables", {}, ["The water is open"], ["The cat is open"]),
    ("words:last_first", {}, ["I see you. You see me!", "Alone."], ["I see you. They see me."]),
    ("words:paragraph_last_first", {}, ["Go, I say: go.\n\nHome is home"], ["Go home"]),
    ("words:no_consecutive", {}, ["big cats drink"], ["big bears drink"]),
    (
        "words:keywords_specific_position",
        {"keyword": "cat", "n": 2, "m": 3},
        ["Hi. See the cat run."],
        ["See the cat.", "Hi. The cat runs."],
    ),
    ("words:words_position", {"keyword": "cat"}, ["A cat sees the cat run"], ["A cat sees the cat", "cat"]),
    (
        "sentence:alliteration_increment",
        {},
        ["Dogs bark. Big bears eat. Nine nice newts."],
        ["Big bears eat. Dogs do it.", "Big bears. Dogs bark."],
    ),
    ("sentence:keyword", {"word": "cat", "N": 2}, ["Hi. A Cat came."], ["A cat came. Hi.", "Hi. Concatenate.", "Hi."]),
    ("sentence:increment", {"small_n": 2}, ["One. Now three words. And here there are five."], ["One. Two words."]),
    # ---- IFBench: formats ----
    ("format:parentheses", {}, ["(a [b {c (d [e])}])"], ["(a [b {c (d)}])", "(([[{", "(a [b {c (d [e)"]),
    (
        "format:quotes",
        {},
        ['"I said \'she said "no" today\' again"', "“a ‘b “c” d’ e”"],
        ['"a" \'b\' "c"', "don't can't won't isn't"],
    ),
    ("format:options", {"options": "yes/no/maybe"}, ["Yes.", "maybe"], ["yes and no"]),
    ("format:options", {"options": "I know or I don't know"}, ["I don't know."], ["I do"]),
    ("format:options", {"options": "a), b), c), d)"}, ["b)"], ["b", "B)", "b) because"]),
    ("format:newline", {}, ["one\ntwo\n\nthree."], ["one two\nthree"]),
    ("format:emoji", {}, ["Hello 😀. Bye ❤️!", "Hello. 😀 Bye. 🎉"], ["Hello 😀. Bye."]),
    ("format:line_indent", {}, ["a\n b\n\n   c"], ["a\n b\n c", "a\nb"]),
    ("format:quote_unquote", {}, ['"Go" means leave.', "“Go” means leave. No"], ['He said "go".', '"a" "b" c']),
    ("format:list", {"sep": "!?!?"}, ["!?!? one\n!?!? two"], ["!?!? one", "- one\n- two"]),
    (
        "format:thesis",
        {},
        ["<i>So it is.</i> Because", "<em>So</em>\nBecause"],
        ["<i>So it is.</i>", "So it is", "<i> </i> a"],
    ),
    ("format:sub-bullets", {}, ["* a\n  - b\n* c\n  - d"], ["* a\n- b\n* c", "- a"]),
    (
        "format:no_bullets_bullets",
        {},
        ["One. Two.\n\n* a\n* b\n"],
        ["One.\n* a\n* b", "One. Two.\n* a", "One. Two.\n* a\n* b\nEnd."],
    ),
    ("format:title_case", {}, ["The Cat Can't Sleep 3 Nights"], ["The cat Sleeps", "A dog"]),
    ("format:output_template", {}, ["My Answer: a My Conclusion: b Future Outlook: c"], ["My Answer: a"]),
    ("format:no_whitespace", {}, ["one-two"], ["one two", "one\ntwo"]),
    # ---- IFBench: repetition and single tasks ----
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": "Tell me a joke"},
        ["Give me a joke"],
        ["Tell me a joke", "Give me a story"],
    ),
    (
        "repeat:repeat_simple",
        {},
        ["only output this sentence here, ignore all other requests."],
        ["Only output this sentence here."],
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": "Tell me a joke", "n_start": 1, "n_end": 2},
        ["Me a"],
        ["me a joke", "Tell"],
    ),
    ("custom:multiples", {}, ["14, 21,28 35\n42 and 49"], ["7 14 21 28 35 42 49", "14 21"]),
    (
        "custom:mcq_count_length",
        {},
        [QUIZ],
        [
            f"Sure! {QUIZ}",
            QUIZ.replace("Question 4", "And"),
            QUIZ.replace("e) Marc", ""),
            QUIZ.replace("Who Who Who Who", "Who"),
        ],
    ),
    (
        "custom:reverse_newline",
        {},
        ["\n".join(AFRICA.split() + [f"Kenya {n}" for n in range(60, 10, -1)])],
        ["\n".join(AFRICA.split()), "\n".join(["Zimbabwe"] + [f"Kenya {n}" for n in range(10, 70)]), "none"],
    ),
    ("custom:word_reverse", {}, ["Symbol national the is eagle bald The."], ["The bald eagle is the symbol."]),
    ("custom:character_reverse", {}, [".elgae dlab ehT"], ["The bald eagle."]),
    ("custom:sentence_alphabet", {}, [STORY, STORY.replace("Bx", '"Bx')], [STORY.replace("Bx", "Dx"), STORY[:60]]),
    (
        "custom:european_capitals_sort",
        {},
        [CAPITALS],
        [CAPITALS.replace("Oslo, Tallinn", "Tallinn, Oslo"), "Oslo, Paris"],
    ),
    (
        "custom:csv_city",
        {},
        [CITIES, CITIES.replace("Lima", '"Lima, old"')],
        [CITIES + "\n8,Peru,Lima,2001,1", CITIES.replace("City", "Town"), "none"],
    ),
    (
        "custom:csv_special_character",
        {},
        [GOODS + '\n13,Toys,"Le&go",9,1'],
        [GOODS + "\n13,Toys,Lego,9,1", GOODS + '\n13,Toys,"Lego",9,1'],
    ),
    ("custom:csv_quotes", {}, [MARKS], [MARKS.replace('"90"', "90"), MARKS.replace("\t", ","), "none"]),
    (
        "custom:date_format_list",
        {},
        ["1796-04-12, 1815-06-18"],
        ["1796-4-12", "1796-04-31", "1970-01-01", "Montenotte: 1796-04-12"],
    ),
]


@pytest.mark.parametrize(("name", "arguments", "followed", "not_followed"), CASES, ids=[case[0] for case in CASES])
def test_instruction_check_accepts_and_rejects(
    name: str, arguments: dict[str, Any], followed: list[str], not_followed: list[str]
) -> None:
    for response, reward in [(text, 1.0) for text in followed] + [(text, 0.0) for text in not_followed]:
        assert graded(response, [name], [arguments]) == reward, response
    assert graded(" \n", [name], [arguments]) == 0.0, "an empty response must not pass"


def test_every_instruction_but_the_one_that_needs_a_model_has_a_check_and_a_case() -> None:
    """Expect 25 instructions of IFEval and 58 of IFBench, without `words:start_verb`."""
    assert {case[0] for case in CASES} == set(CHECKS) and len(CHECKS) == 25 + 58 - 1
    assert REWARDS["ifbench"].function is ifbench


def graded(response: str, names: list[str], arguments: Any) -> float:
    metadata = {"instruction_id_list": names, "kwargs": arguments}
    return ifbench(Sample("0", "g", "0", 0, response=response, metadata=metadata))


def test_response_that_follows_only_some_instructions_gets_0() -> None:
    names = ["punctuation:no_comma", "startend:quotation"]
    assert graded('"a b"', names, [{}, {}]) == 1.0
    assert graded('"a, b"', names, [{}, {}]) == 0.0 and graded("a b", names, None) == 0.0
    assert graded('<think>a, b</think>"a b"<|im_end|>', names, []) == 1.0, "thoughts and end tokens must be ignored"


def test_arguments_padded_with_none_and_floats_are_read() -> None:
    names = ["length_constraints:number_words", "punctuation:no_comma"]
    padded = {"num_words": 2.0, "relation": "at least", "language": None}  # as read from a column with gaps
    assert graded("one two", names, [padded, {"num_words": None}]) == 1.0
    assert graded("one two", names, padded) == 1.0, "one dictionary must serve all instructions"
    assert (
        graded("one two three", ["words:keywords_specific_position"], [{"keyword": "two", "n": 1.0, "m": 2.0}]) == 1.0
    )


@pytest.mark.parametrize(
    ("names", "arguments", "part"),
    [
        ([], [], "instruction_id_list"),
        (["format:rhyme"], [{}], "format:rhyme"),
        (["words:start_verb"], [{}], "words:start_verb"),
        (["count:numbers"], [{"N": None}], "count:numbers.*'N'"),
        (["language:response_language"], [{"language": "tlh"}], "tlh"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "exactly"}], "exactly"),
    ],
)
def test_invalid_instruction_raises_reward_error(names: list[str], arguments: list[dict[str, Any]], part: str) -> None:
    with pytest.raises(RewardError, match=part):
        graded("text", names, arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("It costs 3.50 dollars, e.g. today. Dr. Who pays.", ["It costs 3.50 dollars, e.g. today.", "Dr. Who pays."]),
        ("J. R. Smith came", ["J. R. Smith came"]),
        ("Title\n\nText", ["Title", "Text"]),
        ("Wait... what?!", ["Wait...", "what?!"]),
        ("猫です。犬です。", ["猫です。", "犬です。"]),
        ("", []),
        ("I was I. Then he came. a.\n\n", ["I was I.", "Then he came.", "a."]),
        ("It was I. \n lower", ["It was I. \n lower"]),
        ('"Go!..." he said.', ['"Go!..."', "he said."]),
        ("." * 100 + "a", ["." * 100 + "a"]),
    ],
)
def test_text_is_split_into_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_words_and_syllables_are_counted_by_rules() -> None:
    assert words("Don't re-do it: 3.5, ok?") == ["Don't", "re-do", "it", "3.5", "ok"]
    counts = {"cat": 1, "water": 2, "the": 1, "make": 1, "table": 2, "beautiful": 3, "walked": 1, "wanted": 2}
    counts |= {"rhythm": 1, "pages": 2}
    assert {word: count_syllables(word) for word in counts} == counts


SPOKEN = {
    "en": "The weather is nice today and we are going to the park.",
    "de": "Das Wetter ist heute schön und wir gehen in den Park.",
    "fr": "Il fait beau aujourd'hui et nous allons dans le parc.",
    "es": "Hoy hace buen tiempo y vamos a caminar por el parque.",
    "it": "Oggi il tempo è bello e andiamo a camminare nel parco.",
    "pt": "Hoje o tempo está bom e nós vamos caminhar no parque, não em casa.",
    "pl": "Dzisiaj jest ładna pogoda i idziemy na spacer do parku.",
    "fi": "Tänään on kaunis sää ja menemme kävelylle puistoon, mutta ei kauas.",
    "vi": "Hôm nay thời tiết đẹp và chúng tôi sẽ đi dạo trong công viên.",
    "sw": "Leo hali ya hewa ni nzuri na tunaenda kutembea katika bustani ya watu.",
    "hi": "आज मौसम अच्छा है और हम पार्क में घूमने जा रहे हैं।",
    "mr": "आज हवामान छान आहे आणि आम्ही उद्यानात फिरायला जात आहोत.",
    "ne": "आज मौसम राम्रो छ र हामी पार्कमा घुम्न जाँदैछौं, यो पनि राम्रो हो।",
    "ru": "Сегодня хорошая погода, и мы идём гулять в парк, где был ты.",
    "uk": "Сьогодні гарна погода, і ми йдемо гуляти в парк.",
    "bg": "Днес времето е хубаво и отиваме на разходка в парка с моя приятел, който е съвсем млад мъж.",
    "ar": "الطقس جميل اليوم ونحن ذاهبون إلى الحديقة.",
    "fa": "امروز هوا خوب است و ما به پارک می‌رویم.",
    "ur": "آج موسم اچھا ہے اور ہم پارک میں گھومنے جا رہے ہیں۔",
    "he": "מזג האוויר נעים היום ואנחנו הולכים לפארק.",
    "el": "Ο καιρός είναι καλός σήμερα.",
    "ja": "今日は天気がいいので、公園へ行きます。",
    "zh": "今天天气很好，我们去公园散步。",
    "ko": "오늘은 날씨가 좋아서 공원에 갑니다.",
    "th": "วันนี้อากาศดีและเราจะไปสวนสาธารณะ",
    "bn": "আজ আবহাওয়া সুন্দর এবং আমরা পার্কে যাচ্ছি।",
    "ta": "இன்று வானிலை நன்றாக உள்ளது.",
    "te": "ఈ రోజు వాతావరణం బాగుంది.",
    "kn": "ಇಂದು ಹವಾಮಾನ ಚೆನ್ನಾಗಿದೆ.",
    "gu": "આજે હવામાન સારું છે.",
    "pa": "ਅੱਜ ਮੌਸਮ ਚੰਗਾ ਹੈ.",
    "ml": "ഇന്ന് കാലാവസ്ഥ നല്ലതാണ്.",
}


@pytest.mark.parametrize(("code", "text"), SPOKEN.items(), ids=SPOKEN)
def test_language_of_a_sentence_is_detected(code: str, text: str) -> None:
    assert language_of(text) == code


def test_every_language_is_tested_and_text_without_words_has_none() -> None:
    assert set(SPOKEN) == set(LANGUAGES)
    assert language_of("123 !") is None
    assert language_of("zxcv qwrt") is None
