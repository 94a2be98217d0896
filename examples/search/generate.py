"""Generate responses in which the model may query a search engine, as in Search-R1 (arXiv 2503.09516):
`--custom-generate-function-path examples/search/generate.py --custom-rm-path examples/search/generate.py:reward_func`.

The model writes `<search>words</search>`, `<information>...</information>` is appended, and the model continues until
it writes `<answer>...</answer>`. The tokens of the model are trained on, those of the search results are not. The
environment variable SEARCH_CORPUS names the corpus (default: corpus.jsonl in this directory).
"""

import os
import re
import sys
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from bm25 import Index, words

QUERY = re.compile(r"<search>([^<]*)</search>$")
ANSWER = re.compile(r"<answer>([^<]*)</answer>")
NUM_DOCUMENTS = 2


async def generate(args, sample, sampling_params, engine):
    for _ in range(args.max_turns):
        text = await engine.generate(sample, stop=["</search>", "</answer>"])
        query = QUERY.search(text)
        if query is None or not engine.append(sample, search(query[1])):
            break
    return sample


def search(query: str) -> str:
    """Return the documents that match `query`, in <information> tags, as the model sees them."""
    return f"<information>{' '.join(load_index().search(query, NUM_DOCUMENTS)) or 'nothing'}</information>"


@cache
def load_index() -> Index:
    """Return the index of the corpus, which is read at the first query."""
    return Index.read(os.environ.get("SEARCH_CORPUS") or Path(__file__).with_name("corpus.jsonl"))


def reward_func(args, sample) -> float:
    """Return 1 if the last <answer> of the response has the same words as the label, else 0."""
    answers = ANSWER.findall(sample.response)
    return float(bool(answers) and words(answers[-1]) == words(sample.label))
