"""Write Geometry3K as prompts with images: `python examples/geometry3k/prepare.py geometry3k data`.

Reads the Parquet files of the data set `hiyouga/geometry3k` (columns `images`, `problem`, `answer`) and writes
train.parquet and test.parquet with the columns `prompt`, `images` and `label`. The bytes of the images are in the
files.
"""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
COLUMNS = ["images", "problem", "answer"]
IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def prompt_of(row: dict) -> dict:
    """Return the prompt of a row of Geometry3K. Images without a placeholder come before the problem."""
    problem = row["problem"].strip()
    missing = len(row["images"]) - problem.count("<image>")
    prompt = f"{'<image>' * missing}{problem}\n\n{INSTRUCTION}"
    return {"prompt": prompt, "images": row["images"], "label": row["answer"].strip()}


def prepare(source: Path, target: Path) -> dict[str, int]:
    """Write train.parquet and test.parquet into `target`, which is created. Return the number of rows of each.

    Args:
        source: directory with the downloaded data set; the names of its files begin with `train` or `test`.
    """
    target.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in ("train", "test"):
        files = sorted(source.rglob(f"{split}*.parquet"))
        if not files:
            raise SystemExit(f"{source} has no {split}*.parquet: download the data set hiyouga/geometry3k there first")
        rows = [prompt_of(row) for file in files for row in pq.read_table(file, columns=COLUMNS).to_pylist()]
        schema = pa.schema({"prompt": pa.string(), "images": IMAGES, "label": pa.string()})
        pq.write_table(pa.Table.from_pylist(rows, schema), target / f"{split}.parquet")
        counts[split] = len(rows)
    return counts


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/geometry3k/prepare.py DOWNLOADED_DIRECTORY OUTPUT_DIRECTORY")
    for name, number in prepare(Path(sys.argv[1]), Path(sys.argv[2])).items():
        print(f"{sys.argv[2]}/{name}.parquet: {number} problems")
