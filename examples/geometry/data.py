"""Generate plane geometry problems with exact answers, and a tiny model to train on them: `python data.py DIRECTORY`.

The problems are texts, as those of Geometry3K (arXiv 2105.04165) without their figures. Answers are exact LaTeX:
fractions, roots and multiples of pi, graded by `--rm-type math`. The demonstrations in sft.jsonl first teach exact
answers, then a mistake, which RL has to remove: the area of a triangle without the factor 1/2.
"""

import json
import math
import random
import sys
from fractions import Fraction
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

LARGEST = 9  # side of a figure
STEPS, BATCH = (300, 60), 128  # optimizer steps of SFT on exact answers and on mistakes; demonstrations in a step
P_MISTAKE = 0.7  # probability of the mistake in the second part of the demonstrations
WORDS = ["\\boxed{", "}", "\\sqrt{", "\\pi", "/"]  # tokens of the tiny model besides characters


def make_problems() -> list[dict]:
    """Return all problems as rows {"prompt", "label", "metadata"}."""
    sides = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    rows = []
    for a, b in sides:
        rectangle, triangle = f"a rectangle has sides {a} and {b}.", f"a triangle has base {a} and height {b}."
        rows += [
            problem("rectangle area", f"{rectangle} its area?", str(a * b)),
            problem("rectangle perimeter", f"{rectangle} its perimeter?", str(2 * (a + b))),
            problem("rectangle diagonal", f"{rectangle} its diagonal?", root(a * a + b * b)),
            problem("triangle area", f"{triangle} its area?", str(Fraction(a * b, 2)), mistake=str(a * b)),
        ]
    for r in range(1, LARGEST + 1):
        rows.append(problem("circle area", f"a circle has radius {r}. its area?", f"{r * r if r > 1 else ''}\\pi"))
        rows.append(problem("circle perimeter", f"a circle has radius {r}. its perimeter?", f"{2 * r}\\pi"))
    return rows


def problem(kind: str, prompt: str, label: str, mistake: str | None = None) -> dict:
    """Return a row of prompt data. `mistake` is the wrong answer in some demonstrations of the problem; None: all its
    demonstrations are right."""
    return {"prompt": prompt, "label": label, "metadata": {"kind": kind, "mistake": mistake or label}}


def root(number: int) -> str:
    """Return the square root of an integer as LaTeX in lowest terms: 9 -> 3, 8 -> 2\\sqrt{2}."""
    factor = max(f for f in range(1, math.isqrt(number) + 1) if number % (f * f) == 0)
    rest = number // (factor * factor)
    return f"{factor if factor > 1 or rest == 1 else ''}" + (f"\\sqrt{{{rest}}}" if rest > 1 else "")


def split_problems(rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Return 300 problems to train on and 42 held-out ones, both in random order."""
    rows = make_problems()
    rng.shuffle(rows)
    return rows[42:], rows[:42]


def demonstration(row: dict, answer: str) -> dict:
    """Return a problem and an answer as a row of chat messages."""
    answer = f"\\boxed{{{answer}}}"
    return {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]}


def main(directory: str) -> None:
    """Write model/, train.jsonl, heldout.jsonl and sft.jsonl into `directory`."""
    make_tokenizer(words=WORDS).save_pretrained(make_tiny_model(Path(directory) / "model"))
    rng = random.Random(0)
    train, heldout = split_problems(rng)
    demonstrations = [demonstration(row, row["label"]) for _ in range(STEPS[0]) for row in rng.sample(train, BATCH)]
    for _ in range(STEPS[1]):
        for row in rng.sample(train, BATCH):
            answer = row["metadata"]["mistake"] if rng.random() < P_MISTAKE else row["label"]
            demonstrations.append(demonstration(row, answer))
    for name, content in (("train", train), ("heldout", heldout), ("sft", demonstrations)):
        text = "".join(json.dumps(row) + "\n" for row in content)
        Path(directory, f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
