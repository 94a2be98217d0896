"""Write GSM8K as prompts: `python examples/gsm8k/prepare.py gsm8k data`.

Reads the files of the data set `openai/gsm8k` (Parquet or JSONL with `question` and `answer`) and writes train.jsonl
and test.jsonl with rows {"prompt": ..., "label": "72"}. The label is the number after `####` at the end of an answer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
LABEL = re.compile(r"####\s*(-?[\d.,]*\d)\s*$")


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a Parquet or JSONL file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        yield from parquet.read_table(path, columns=["question", "answer"]).to_pylist()
    else:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line) for line in lines)


def prompt_of(row: dict[str, str]) -> dict[str, str]:
    """Return the prompt of a row of GSM8K.

    Raises:
        ValueError: the answer does not end with `#### NUMBER`.
    """
    label = LABEL.search(row["answer"])
    if label is None:
        raise ValueError(
            f"the answer ends with {row['answer'][-40:]!r}, but GSM8K's answers end with '#### NUMBER': give the files "
            "of the data set openai/gsm8k"
        )
    return {"prompt": f"{row['question'].strip()}\n\n{INSTRUCTION}", "label": label[1].replace(",", "")}


def prepare(source: Path, target: Path) -> dict[str, int]:
    """Write train.jsonl and test.jsonl into `target`. Return the number of rows of each.

    Args:
        source: directory with the downloaded data set; the names of its files begin with `train` or `test`.
        target: created if it does not exist.

    Raises:
        SystemExit: a split has no file.
    """
    target.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in ("train", "test"):
        files = [path for path in sorted(source.rglob(f"{split}*")) if path.suffix in (".parquet", ".jsonl")]
        # The data set also has the configuration `socratic`, with other answers to the same questions.
        files = [path for path in files if "socratic" not in path.relative_to(source).as_posix()]
        if not files:
            raise SystemExit(f"{source} has no {split}*.parquet or {split}*.jsonl: download the data set there first")
        with (target / f"{split}.jsonl").open("w", encoding="utf-8") as out:
            rows = [prompt_of(row) for path in files for row in read_rows(path)]
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        counts[split] = len(rows)
    return counts


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/gsm8k/prepare.py DOWNLOADED_DIRECTORY OUTPUT_DIRECTORY")
    for name, number in prepare(Path(sys.argv[1]), Path(sys.argv[2])).items():
        print(f"{sys.argv[2]}/{name}.jsonl: {number} problems")
