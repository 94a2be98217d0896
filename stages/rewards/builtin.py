"""The built-in rewards, which hub.py lists and docs/rewards.md describes. They never execute text that a model wrote,
their work is bounded, and only `remote_rm` uses the network.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
import re
import string
import time
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any

import aiohttp

from penstock.stages.rewards.instructions import ifbench as _ifbench_checks  # noqa: F401 - registers CHECKS
from penstock.stages.rewards.instructions.text import CHECKS
from penstock.stages.rewards.math.answers import equal_answers, is_evaluated_integer
from penstock.stages.rewards.math.tokens import WORD, possible_tokenizations
from penstock.storage.errors import RewardError, nearest_name
from penstock.storage.samples.sample import Sample
from penstock.storage.secrets import redact

# ---- math and deepscaler ---------------------------------------------------------------------------------------------
# Answer and label are tokenized (math/tokens.py), parsed as a list, set, tuple, interval, matrix or relation of
# expressions (math/answers.py) and compared by value (math/expressions.py). Nothing is evaluated by Python or SymPy; an
# answer that cannot be parsed is compared as text.

THINK_END = "</think>"
MAX_LENGTH = 1000  # characters; longer answers are compared as text
_MAX_TOKEN_LENGTH = 44  # maximum characters of an end token
_MARK = re.compile(r"\\boxed\s*(\{)?|[{}]")
_BOXED_WORD = re.compile(r"[^\s$]+")
_FRACTION = re.compile(r"\\frac(\d)(\d)(?!\d)")
_END_TOKEN = re.compile(r"(?:<\|[^<>|\s]{1,40}\|>|<｜[^<>｜\s]{1,40}｜>|</s>|<eos>|<end_of_turn>)$")


def strip_end_tokens(text: str) -> str:
    """Remove end tokens such as <|im_end|> or </s>, with the spaces around them, from the end of a response."""
    kept = len(text)
    end = _start_of_spaces_before(text, kept)
    while token := _END_TOKEN.search(text, max(0, end - _MAX_TOKEN_LENGTH), end):
        kept = end = _start_of_spaces_before(text, token.start())
    return text[:kept]


def _start_of_spaces_before(text: str, end: int) -> int:
    """Return the position where the white space before `end` begins."""
    while end and text[end - 1].isspace():
        end -= 1
    return end


def answer_text(response: str) -> str:
    """Return the text after the last </think> of a response (without </think>: all of it), without end tokens."""
    return strip_end_tokens(response.rpartition(THINK_END)[2])


def last_boxed(text: str) -> str | None:
    """Return the content of the last complete `\\boxed{...}` (braces may nest) or `\\boxed x` in `text`, or None, in
    linear time."""
    open_braces: list[int] = []  # position where the content of a box begins, or -1 for other braces
    last = (-1, -1)  # begin and end of the content; the end is -1 for `\boxed x`
    for mark in _MARK.finditer(text):
        if mark[0] == "}":
            begin = open_braces.pop() if open_braces else -1
            last = max(last, (begin, mark.start()))
        elif mark[0] == "{":
            open_braces.append(-1)
        elif mark[1]:
            open_braces.append(mark.end())
        elif text[mark.end() : mark.end() + 1] not in ("", "$"):
            last = max(last, (mark.end(), -1))
    begin, end = last
    if begin < 0:
        return None
    return text[begin:end] if end >= 0 else _BOXED_WORD.match(text, begin)[0].rstrip(".,")  # type: ignore[index]


def grade_math(solution: str, label: str, evaluated_integers: bool = False) -> float:
    """Return 1 if the last boxed answer of `solution` equals `label` (boxed or plain), else 0. With
    `evaluated_integers`, an integer label requires a number as the answer: 391, but not 17 * 23."""
    answer = last_boxed(solution)
    if answer is None:
        return 0.0
    boxed_label = last_boxed(label)
    return float(same_answer(answer, label if boxed_label is None else boxed_label, evaluated_integers))


def same_answer(answer: str, label: str, evaluated_integers: bool = False) -> bool:
    """Return whether an answer equals the label, in LaTeX or plain text. `evaluated_integers`: see `grade_math`."""
    answer, label = answer.strip(), label.strip()
    if not label or not answer or max(len(answer), len(label)) > MAX_LENGTH:
        return bool(label) and answer == label
    answers, labels = possible_tokenizations(answer), possible_tokenizations(label)
    if evaluated_integers and any(map(is_evaluated_integer, labels)):
        answers = [tokens for tokens in answers if is_evaluated_integer(tokens)]
    return any(equal_answers(left, right) for left in answers for right in labels)


def normalize_answer(text: str) -> str:
    """Return an answer in canonical LaTeX, without evaluating it; if longer than MAX_LENGTH, return it unchanged."""
    if len(text) > MAX_LENGTH:
        return text
    parts = []
    for token in possible_tokenizations(text)[0]:
        if not (token[0].isdigit() or token[0] == "."):
            parts.append(token.removeprefix(WORD))
            continue
        number = f"0{token}" if token[0] == "." else token
        has_decimals = "." in number and "e" not in number.lower()
        parts.append(number.rstrip("0").rstrip(".") if has_decimals else number)
    return _FRACTION.sub(r"\\frac{\1}{\2}", "".join(parts))


def deepscaler(sample: Sample, evaluated_integers: bool = False) -> float:
    """Return 1 if the last boxed answer after `</think>` is mathematically equal to the label, else 0."""
    if THINK_END in sample.response:
        solution = sample.response.rpartition(THINK_END)[2]
    elif "###Response" in sample.response:  # Alpaca's template
        solution = sample.response.split("###Response")[1]
    else:
        return 0.0
    return grade_math(solution, sample.label, evaluated_integers)


# ---- dapo ------------------------------------------------------------------------------------------------------------

# 1 if the last `Answer: ...` of the response equals the label, else -1 (DAPO, arXiv 2503.14476). The label must be a
# number. Both are compared as text after Minerva's normalization (arXiv 2206.14858, appendix D).

_MAX_CHARACTERS = 300  # number of characters that are read: of a label, and at the end of a response
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_UNITS = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "points", "feet", "minutes",
    "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "sue",
)  # fmt: skip
_REPLACEMENTS = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"an? ", ""),  # also inside words, because spaces are removed later
        (r"\.\$", "$"),
        (r"\\\$|\\ | ", ""),
        (r"mbox", "text"),
        (r",?\\text\{and\}", ","),
        (r"\\text\{m\}", r"\\text{}"),
        ("|".join(_UNITS), ""),
        (r"\\l?dots|\\text\{[s.\n]?s?\}(?:\^[23])?|\\mathrm\{?th\}?|\^\{?\\circ\}?|\\;|,\\!|\{,\}|\"", ""),
        (r"^.*?\$(.*?)\$.*$", r"\1"),  # keep the first formula only
        (r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
        (r"\$", ""),
    )
]


def dapo(sample: Sample) -> dict[str, float]:
    """Return {"score": 1 or -1, "acc": 1 or 0}; `--reward-key` selects one of the two as the reward."""
    correct = last_answer(sample.response) == to_minerva_number(sample.label)
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


def last_answer(response: str) -> str:
    """Return the last `Answer: ...` of a response in the normal form of the Minerva paper (`to_minerva_form`)."""
    answers = _ANSWER.findall(strip_end_tokens(response[-_MAX_CHARACTERS:]))
    return to_minerva_form(answers[-1] if answers else "[INVALID]")


def to_minerva_form(answer: str) -> str:
    """Return the text after the last `=` of an answer in the normal form of the Minerva paper (arXiv 2206.14858):
    without units, spaces and dollars."""
    answer = answer.rpartition("=")[2]
    for pattern, by in _REPLACEMENTS:
        answer = pattern.sub(by, answer)
    digits = answer.replace(",", "")
    return digits if digits.isdigit() else answer.strip()


def to_minerva_number(label: str) -> str:
    """Normalize a label like `to_minerva_form`, with 34.0 as 34. Raises RewardError if the label is not a number."""
    text = to_minerva_form(label) if len(label) <= _MAX_CHARACTERS else ""
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value.adjusted()) > _MAX_CHARACTERS:
        raise RewardError(f"the label {label[:100]!r} is not a number, which the reward dapo needs: use --rm-type math")
    return str(int(value)) if value == value.to_integral_value() else text


# ---- gpqa ------------------------------------------------------------------------------------------------------------

# 1 if the response chooses the correct option of a multiple-choice question, by letter or by text. Metadata fields, all
# optional: `choices` (a list, or a dictionary by letter), `valid_letters`, `correct_letter`, `correct_answer` or
# `answer_text`. The label is a letter, the text of a choice, or the index of a choice from 0.

_LETTERS = string.ascii_uppercase[:10]  # option letters, if the row gives no choices
_MARKS = r"[\s(\[{*_$]*+"  # *+ is possessive: backtracking over white space would take polynomial time
# The letter is a whole word. A lower-case letter must also end its phrase: "the answer is a matter of taste" is not A.
_LETTER = r"((?-i:[A-Z])(?![\w'’])|(?-i:[a-z])(?=[*_$]*+\s*+(?:[).,;:\]}]|$)))"
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    for pattern in (
        rf"\b(?:answer|option|choice)\s*+(?:is|:)?{_MARKS}(?:\\boxed\{{)?{_MARKS}{_LETTER}",
        r"(?<![\w'’])((?-i:[A-Z]))[)*\]]*+\s*+is\s*+(?:the\s*+)?correct",
    )
]
_SINGLE_CAPITAL = re.compile(r"(?<![\w'’])[A-Z](?![\w'’])")


def gpqa(sample: Sample) -> float:
    """Return 1 if the response chooses the letter of the correct option or, if it chooses no letter, contains the
    text of the correct option, else 0."""
    label, text = sample.label.strip(), answer_text(sample.response)
    letters, choices, correct = _read_options(label, sample.metadata)
    # The chosen letter: in the first phrase such as "the answer is B", else the last letter that is a word of its own.
    phrases = [match[1].upper() for pattern in _PATTERNS if (match := pattern.search(text))]
    chosen = next((letter for letter in [*phrases, *_SINGLE_CAPITAL.findall(text)[::-1]] if letter in letters), None)
    if chosen is not None and correct:
        return float(chosen == correct)
    targets = [str(sample.metadata.get(key) or "") for key in ("correct_answer", "answer_text")]
    if correct in letters:
        targets += choices[letters.index(correct) :][:1]
    if label.upper() not in letters:
        targets.append(label)
    normalized = f" {_normalize(text)} "
    return float(any(f" {target} " in normalized for target in map(_normalize, targets) if target))


def check_correct_option(label: str, metadata: dict[str, Any]) -> None:
    """Check that a label which is a letter or an index names one of the row's choices. Raises RewardError."""
    label = label.strip()
    letters, choices, correct = _read_options(label, metadata)
    has_text = (len(label) > 1 and not label.isdigit()) or metadata.get("correct_answer") or metadata.get("answer_text")
    if choices and correct not in letters and not has_text:
        raise RewardError(
            f"the label {label!r} names none of the {len(choices)} choices {', '.join(letters)}: give the letter, the "
            "text or the index of a choice, counted from 0"
        )


def _read_options(label: str, metadata: dict[str, Any]) -> tuple[list[str], list[str], str]:
    """Return the letters of a question, the texts of its choices in the same order (or none), and the letter of the
    correct option (or "")."""
    choices = metadata.get("choices") or []
    names = [str(name).strip().upper() for name in choices] if isinstance(choices, dict) else []
    texts = [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]
    letters = [str(letter).strip().upper() for letter in metadata.get("valid_letters") or []]
    if not letters:
        single_letters = names and all(len(name) == 1 for name in names)
        letters = names if single_letters else list(string.ascii_uppercase[: len(texts)] or _LETTERS)
    correct = str(metadata.get("correct_letter") or "").strip().upper()
    if not correct and label.upper() in letters:
        correct = label.upper()
    if not correct:
        by_text = [letter for letter, text in zip(letters, texts) if _normalize(text) == _normalize(label)]
        index = label.removesuffix(".0")  # columns of integers with missing values are often stored as floats
        by_index = [letters[int(index)]] if index.isdecimal() and int(index[:9]) < len(letters) else []
        correct = next(iter(by_text + by_index), "")
    return letters, texts, correct


def _normalize(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


# ---- ifbench ---------------------------------------------------------------------------------------------------------

# 1 if the response follows every instruction (of IFEval or IFBench) of its row, else 0. The row's metadata has
# `instruction_id_list`, and `kwargs`: one dictionary per instruction, or one for all instructions.


def ifbench(sample: Sample) -> float:
    """Return 1 if the answer (the text after </think>) follows all instructions, else 0."""
    text = answer_text(sample.response)
    instructions = read_instructions(sample.metadata)
    return float(bool(text.strip()) and all([CHECKS[name](text, **arguments) for name, arguments in instructions]))


def read_instructions(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (instruction id, arguments) of each instruction in a row's metadata."""
    names = [str(name).strip() for name in metadata.get("instruction_id_list") or []]
    if not names:
        raise RewardError(
            "the row's metadata has no `instruction_id_list`, which the reward ifbench needs: add it, with its `kwargs`"
        )
    kwargs = metadata.get("kwargs") or {}
    per_instruction = kwargs if isinstance(kwargs, list) else [kwargs] * len(names)
    instructions = []
    for name, given in itertools.zip_longest(names, per_instruction[: len(names)]):
        problem, arguments = "", {}
        if name == "words:start_verb":
            problem = "needs a part-of-speech tagger, which Penstock does not include: remove rows with it"
        elif name not in CHECKS:
            near = nearest_name(name, CHECKS)
            hint = f"did you mean {near}?" if near else "remove rows with it; docs/rewards.md lists the known ids"
            problem = f"is unknown: {hint}"
        else:
            parameters = list(inspect.signature(CHECKS[name]).parameters)[1:]  # the first parameter is the text
            arguments = {parameter: (given or {}).get(parameter) for parameter in parameters}
            if missing := [parameter for parameter, value in arguments.items() if value is None]:
                problem = (
                    f"needs the argument {missing[0]!r}, which the row's `kwargs` do not give: add it, or remove the "
                    "row"
                )
        if problem:
            raise RewardError(f"instruction {name!r:.60} {problem}")
        for parameter, value in arguments.items():
            # Parquet readers turn integers into floats in columns with nulls: convert 3.0 to 3
            arguments[parameter] = int(value) if isinstance(value, float) and value.is_integer() else value
        instructions.append((name, arguments))
    return instructions


# ---- exact_number and f1 ---------------------------------------------------------------------------------------------

_INTEGER = re.compile(r"-?\d+")
_WHOLE_NUMBER = re.compile(r"\s*\+?(-?\d{1,300})(?:\.0*)?\s*")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_number(sample: Sample) -> float:
    """Return 1 if the last integer of the response equals the label digit by digit, else 0."""
    numbers = _INTEGER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == (sample.label and to_integer(sample.label)))


def to_integer(label: str) -> str:
    """Return the integer that a label states as digits: 2.00 as 2. Raises RewardError for any other label."""
    match = _WHOLE_NUMBER.fullmatch(label)
    if match is None:
        raise RewardError(
            f"the label {label[:100]!r} is not an integer, and no response can equal it with the reward exact_number: "
            "write the label in digits only, or use --rm-type math"
        )
    return match[1]


def token_f1(sample: Sample) -> float:
    """Return the F1 score over the words of response and label. If either is `yes`, `no` or `noanswer`, both must be
    equal, else the score is 0."""
    response, label = (  # words in lower case, without punctuation and articles
        _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()
        for text in (strip_end_tokens(sample.response), sample.label)
    )
    if response != label and any(" ".join(words) in ("yes", "no", "noanswer") for words in (response, label)):
        return 0.0
    num_common = (Counter(response) & Counter(label)).total()
    if num_common == 0:
        return 0.0
    precision, recall = num_common / len(response), num_common / len(label)
    return 2 * precision * recall / (precision + recall)


# ---- remote_rm -------------------------------------------------------------------------------------------------------

# Transient failures (connection error, timeout, status 408, 425, 429 or 5xx) are retried with exponential backoff up to
# 30 s; the backoff is jittered so that thousands of samples do not retry at the same moment.

MAX_ATTEMPTS = 10
MAX_BACKOFF = 30.0  # seconds
REQUEST_TIMEOUT = 120.0  # seconds per attempt; --reward-timeout limits all attempts together
_TRANSIENT_STATUS = (408, 425, 429)
_session: aiohttp.ClientSession | None = None  # shared by all requests, because the process has one event loop


async def remote_rm(args: Any, sample: Sample) -> Any:
    """POST {prompt, response, label} to the server at `args.rm_url`, within `args.reward_timeout` seconds for all
    attempts; return its JSON response, a number or a dictionary."""
    global _session
    if _session is None:
        _session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))  # worker_process.py limits the calls
    # Stop before --reward-timeout cancels this call: the timeout's message would not contain the server's error.
    deadline = time.monotonic() + 0.95 * args.reward_timeout
    body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    for attempt in itertools.count(1):
        limit = aiohttp.ClientTimeout(total=min(REQUEST_TIMEOUT, deadline - time.monotonic()))
        try:
            async with _session.post(args.rm_url, json=body, timeout=limit) as response:
                if response.status < 400:
                    return await response.json(content_type=None)
                if response.status < 500 and response.status not in _TRANSIENT_STATUS:
                    text = (await response.text())[:200]
                    raise RuntimeError(
                        f"--rm-url {redact(args.rm_url)} rejected the request with status {response.status}: {text}"
                    )
                failure = f"status {response.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            failure = f"{type(error).__name__} {error}".strip()
        except ValueError as error:
            raise RuntimeError(f"--rm-url {redact(args.rm_url)} answered with invalid JSON: {error}") from error
        backoff = random.uniform(0.5, 1.0) * min(2.0 ** (attempt - 1), MAX_BACKOFF)
        if attempt == MAX_ATTEMPTS or time.monotonic() + backoff >= deadline:
            raise RuntimeError(
                f"--rm-url {redact(args.rm_url)} failed {attempt} times, last with {failure}: check the reward server, "
                "or raise --reward-timeout"
            )
        await asyncio.sleep(backoff)
