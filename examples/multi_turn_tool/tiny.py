"""Create a random model of 402,176 parameters and six problems, with which the example runs in a minute on a CPU.

A random model almost never writes a tag letter by letter. Therefore the tokenizer has one token for each tag, and one
for a complete tool call of each problem.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

TAGS = ["<calculator>", "</calculator>", "<result>", "</result>"]
PROBLEMS = ["12*8", "7*9+5", "3*(4+5)", "99-45", "61+27", "5*5-7"]


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    words = [*TAGS, *(f"<calculator>{problem}</calculator>" for problem in PROBLEMS)]
    make_tokenizer(words=words).save_pretrained(make_tiny_model(Path(directory) / "model"))
    rows = [{"prompt": f"{problem}=", "label": str(eval(problem))} for problem in PROBLEMS]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
