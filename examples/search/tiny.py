"""Create a random model of about 400,000 parameters and four questions, to run the example in minutes on a CPU.

A random model almost never writes a tag letter by letter. Therefore the tokenizer has one token for each tag, one for
a complete query of each question, and one for each answer.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

TAGS = ["<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]
QUESTIONS = {"france": "paris", "italy": "rome", "japan": "tokyo", "kenya": "nairobi"}


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    queries = [f"<search>capital of {country}</search>" for country in QUESTIONS]
    answers = [f"<answer>{city}</answer>" for city in QUESTIONS.values()]
    tokenizer = make_tokenizer(words=[*TAGS, *queries, *answers])
    tokenizer.save_pretrained(make_tiny_model(Path(directory) / "model", vocab=72))
    rows = [{"prompt": f"the capital of {country}?", "label": city} for country, city in QUESTIONS.items()]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
