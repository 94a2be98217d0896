"""Create a random model of 402,176 parameters and four questions, with which the example runs in a minute on a CPU.

A random model almost never writes a tag letter by letter. Therefore the tokenizer has one token for each tag, and one
for a complete search query of each question.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

TAGS = ["<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
QUESTIONS = {"france": "paris", "italy": "rome", "japan": "tokyo", "kenya": "nairobi"}


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    words = [*TAGS, *(f"<search>capital of {country}</search>" for country in QUESTIONS)]
    make_tokenizer(words=words).save_pretrained(make_tiny_model(Path(directory) / "model"))
    rows = [{"prompt": f"the capital of {country}?", "label": city} for country, city in QUESTIONS.items()]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
