"""A search engine that the model may ask while it answers, in the manner of Search-R1 (2503.09516):
`--custom-generate-function-path examples/search/generate.py --custom-rm-path examples/search/generate.py:reward_func`.

The model writes `<search>words</search>`, reads `<information>...</information>` and continues until it writes
`<answer>...</answer>`. What it writes is trained on, what was found is not. SEARCH_CORPUS names another corpus than the
one beside this file.
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
        if query is None or not engine.append(sample, found(query[1])):
            break
    return sample


def found(query: str) -> str:
    """What the search engine says."""
    return f"<information>{' '.join(index().search(query, NUM_DOCUMENTS)) or 'nothing'}</information>"


@cache
def index() -> Index:
    """The corpus, read at the first question."""
    return Index.read(os.environ.get("SEARCH_CORPUS") or Path(__file__).with_name("corpus.jsonl"))


def reward_func(args, sample) -> float:
    """1 if the last answer is the label, word for word."""
    answers = ANSWER.findall(sample.response)
    return float(bool(answers) and words(answers[-1]) == words(sample.label))
