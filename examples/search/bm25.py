"""A small BM25 index (Robertson and Zaragoza, 2009, with Lucene's idf, which is never negative)."""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path


class Index:
    """An in-memory BM25 index of documents.

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
        ] = {}  # word -> document -> BM25 score; a query sums the scores of its words
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
        """Return the index of a JSONL file with `text` and optionally `title` in every line."""
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        return cls([": ".join(filter(None, (row.get("title"), row["text"]))) for row in rows])

    def search(self, query: str, num_documents: int = 3) -> list[str]:
        """Return the documents with the highest scores, best first; every one shares a word with `query`."""
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
