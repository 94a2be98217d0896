"""Write prompts of two tasks of reasoning-gym: `python data.py DIRECTORY [--seed 0]`.

The tasks are sums and differences of two numbers of one or two digits, and sorting three numbers from 0 to 99. Before
each question, the prompt has two others with their answers as turns of the conversation, because a model of 135M
parameters does not find the form of the answer without examples.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

TASKS = ("sums", "sorting")
SIZES = {"train": 2000, "heldout": 256}  # rows of each task
Question = tuple[str, str, str]  # question, worked answer, label


def task_class(group: str, name: str) -> Any:
    """Return the module of a task of reasoning-gym. The package's own `__init__` is replaced by an empty module,
    because it imports all tasks, and with them ten packages that the two tasks here do not need.

    Raises:
        SystemExit: the package is not installed.
    """
    package = PathFinder.find_spec("reasoning_gym")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("reasoning-gym is not installed: run `pip install --no-deps reasoning-gym==0.1.25`")
    [directory] = package.submodule_search_locations
    for module, path in (("reasoning_gym", directory), (f"reasoning_gym.{group}", f"{directory}/{group}")):
        empty: Any = ModuleType(module)
        empty.__path__ = [path]
        sys.modules.setdefault(module, empty)
    return importlib.import_module(f"reasoning_gym.{group}.{name}")


def sums(seed: int) -> Callable[[int], Question]:
    """Return a function that returns question number `index` of the sums."""
    task = task_class("arithmetic", "chain_sum")
    data = task.ChainSumDataset(task.ChainSumConfig(min_terms=2, max_terms=2, max_digits=2, seed=seed))

    def question(index: int) -> Question:
        entry = data[index]
        expression = entry["metadata"]["expression"]
        return f"What is {expression}?", f"{expression} = {entry['answer']}", entry["answer"]

    return question


def sorting(seed: int) -> Callable[[int], Question]:
    """Return a function that returns question number `index` of the number sorting."""
    task = task_class("algorithmic", "number_sorting")
    limits = dict(min_numbers=3, max_numbers=3, max_decimals=0, min_value=0.0, max_value=99.0)
    data = task.NumberSortingDataset(task.NumberSortingConfig(**limits, seed=seed))

    def integers(numbers: list[str]) -> str:
        return ", ".join(f"{float(number):.0f}" for number in numbers)

    def question(index: int) -> Question:
        metadata = data[index]["metadata"]
        numbers, order = integers(metadata["original_numbers"]), metadata["direction"]
        label = integers(metadata["sorted_numbers"])
        return f"Sort in {order} order: {numbers}", f"{order}: {label}", label

    return question


def conversation(examples: list[Question], question: str) -> list[dict[str, str]]:
    """Return chat messages: worked examples, then the question."""
    turns = [(role, text) for asked, answer, _ in examples for role, text in (("user", asked), ("assistant", answer))]
    return [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]


def make_rows(task: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of a task by split. No question of the held-out rows is in the training rows, neither as a
    question nor as a worked example."""
    question_at, rng = {"sums": sums, "sorting": sorting}[task](seed), random.Random(seed)
    questions: Iterator[Question] = (question_at(index) for index in range(sys.maxsize))
    heldout: dict[str, Question] = {}
    while len(heldout) < SIZES["heldout"]:
        heldout.setdefault((entry := next(questions))[0], entry)
    train: list[Question] = []
    while len(train) < SIZES["train"]:
        if (entry := next(questions))[0] not in heldout:
            train.append(entry)
    splits = {"train": train, "heldout": list(heldout.values())}
    return {split: [row(task, entry, train, rng) for entry in entries] for split, entries in splits.items()}


def row(task: str, entry: Question, pool: list[Question], rng: random.Random) -> dict[str, Any]:
    """Return a row of prompt data with two worked examples from `pool` that are not its own question."""
    question, _, label = entry
    examples = rng.sample([other for other in rng.sample(pool, 6) if other[0] != question], 2)
    return {"prompt": conversation(examples, question), "label": label, "metadata": {"task": task}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    rows = {task: make_rows(task, options.seed * 1_000_000) for task in TASKS}
    files = {"train": [row for task in TASKS for row in rows[task]["train"]]}
    files |= {f"heldout-{task}": rows[task]["heldout"] for task in TASKS}
    for name, content in files.items():
        path = options.directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
        print(f"{path}: {len(content)} rows")


if __name__ == "__main__":
    main()
