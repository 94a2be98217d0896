"""Create a random model of 402,176 parameters and six problems, with which the example runs in minutes on a CPU.

A random model almost never writes a program letter by letter. Therefore the tokenizer has one token for each tag, and
one for a complete program of each problem.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

TAGS = ["<code>", "</code>", "<interpreter>", "</interpreter>"]
PROBLEMS = {
    "the sum of 1 to 100": "sum(range(101))",
    "2 to the power of 30": "2**30",
    "the factorial of 9": "__import__('math').factorial(9)",
    "the number of primes below 100": "sum(all(n % d for d in range(2, n)) for n in range(2, 100))",
    "the digits of 3**99, added": "sum(map(int, str(3**99)))",
    "the middle of 7, 42, 19": "sorted([7, 42, 19])[1]",
}


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    words = [*TAGS, *(f"<code>print({program})</code>" for program in PROBLEMS.values())]
    make_tokenizer(words=words).save_pretrained(make_tiny_model(Path(directory) / "model"))
    rows = [{"prompt": f"{problem}?", "label": str(eval(program))} for problem, program in PROBLEMS.items()]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
