"""Generate responses in which the model may query a search engine, as in Search-R1 (arXiv 2503.09516):
`--custom-generate-function-path examples/search/generate.py --custom-rm-path examples/search/generate.py:reward_func`.

The model writes `<search>words</search>`, `<information>...</information>` is appended, and the model continues until
it writes `<answer>...</answer>`. After a turn with neither, a hint is appended. The tokens of the model are trained on,
those of search results and hints are not.

Environment variables: SEARCH_URL is a retrieval server with Search-R1's protocol; without it, the documents of
SEARCH_CORPUS (default: corpus.jsonl in this directory) are indexed in memory. SEARCH_TOPK (default: 3) is the number of
documents in a result.
"""

import json
import math
import os
import re
import string
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import aiohttp

ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
HINT = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


async def generate(args, sample, sampling_params, engine):
    for _ in range(args.max_turns):
        observation = await observe(await engine.generate(sample, stop=["</search>", "</answer>"]))
        if observation is None or not engine.append(sample, observation):
            break
    return sample


async def observe(text: str) -> str | None:
    """Return the text to append after the model's turn `text`: search results or a hint; None if the turn is an
    answer."""
    action = ACTION.search(text)
    if action is None:
        return HINT
    if action[1] == "answer":
        return None
    documents = await search(action[2].strip(), int(os.environ.get("SEARCH_TOPK") or 3))
    listed = "".join(f"Doc {number}(Title: {title}) {text}\n" for number, (title, text) in enumerate(documents, 1))
    return f"\n\n<information>{listed.strip()}</information>\n\n"


async def search(query: str, num_documents: int) -> list[tuple[str, str]]:
    """Return title and text of the best documents, from the server or the local index.

    Raises:
        aiohttp.ClientError: the server does not answer; the sample then fails.
    """
    if not (url := os.environ.get("SEARCH_URL")):
        return [split_title(document) for document in load_index().search(query, num_documents)]
    request = {"queries": [query], "topk": num_documents, "return_scores": True}
    async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(url, json=request) as response:
        [hits] = (await response.json())["result"]
    return [split_title(hit["document"]["contents"]) for hit in hits]


def split_title(contents: str) -> tuple[str, str]:
    """Return title and text of a document, whose first line is the title."""
    title, _, text = contents.partition("\n")
    return title.strip('" '), text


def reward_func(args, sample) -> float:
    """Return 1 if the last <answer> of the response is a right answer, ignoring case, punctuation and articles."""
    answers = [text for kind, text in ACTION.findall(sample.response) if kind == "answer"]
    return float(bool(answers) and normalize(answers[-1]) in map(normalize, right_answers(sample.label)))


def right_answers(label: str) -> list[str]:
    """Return the right answers: a plain text, a JSON list, or Search-R1's {"ground_truth": {"target": ...}}."""
    try:
        value = json.loads(label)
    except ValueError:
        return [label]
    if isinstance(value, dict):
        value = value.get("ground_truth", value)["target"]
    return [str(answer) for answer in value] if isinstance(value, list) else [str(value)]


def normalize(answer: str) -> str:
    """Return an answer in lower case without punctuation, articles and repeated spaces, as SQuAD's exact match does."""
    text = "".join(character for character in answer.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


class Index:
    """An in-memory BM25 index of documents (Robertson and Zaragoza, 2009, with Lucene's idf, which is never negative).

    Args:
        documents: texts of the documents.
        k1: term-frequency saturation; larger values give repeated words more weight.
        b: length normalization, 0 (none) to 1 (full).
    """

    def __init__(self, documents: list[str], k1: float = 1.2, b: float = 0.75) -> None:
        self.documents = documents
        counts = [Counter(words(document)) for document in documents]
        mean = sum(map(Counter.total, counts)) / max(len(counts), 1)
        where: dict[str, list[int]] = defaultdict(list)
        for number, count in enumerate(counts):
            for word in count:
                where[word].append(number)
        self._scores: dict[
            str, dict[int, float]
        ] = {}  # word -> document -> score; a query adds the scores of its words
        for word, numbers in where.items():
            idf = math.log(1 + (len(documents) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            self._scores[word] = {
                number: idf
                * counts[number][word]
                * (k1 + 1)
                / (counts[number][word] + k1 * (1 - b + b * counts[number].total() / mean))
                for number in numbers
            }

    @classmethod
    def read(cls, path: str | Path) -> "Index":
        """Return the index of a JSONL file with `contents`, title and text in two lines, or `title` and `text`."""
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return cls([row.get("contents") or f"{row.get('title', '')}\n{row['text']}" for row in rows])

    def search(self, query: str, num_documents: int = 3) -> list[str]:
        """Return the documents with the highest scores, best first. Documents without a word of `query` are not
        returned."""
        total: Counter[int] = Counter()
        for word in words(query):
            for number, score in self._scores.get(word, {}).items():
                total[number] += score
        return [
            self.documents[number]
            for number, _ in sorted(total.items(), key=lambda hit: (-hit[1], hit[0]))[:num_documents]
        ]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"\w+", text.lower())


@cache
def load_index() -> Index:
    """Return the index of the corpus, which is read at the first query."""
    return Index.read(os.environ.get("SEARCH_CORPUS") or Path(__file__).with_name("corpus.jsonl"))
