"""Draw geometry problems in the layout of `hiyouga/geometry3k`, and create a tiny vision-language model to train on
them: `python examples/geometry3k/tiny.py DIRECTORY`.

The model is that of examples/shapes, with one token for each of six answers. The demonstrations in sft.jsonl have
random answers: they teach the form of an answer, but no geometry.
"""

import io
import json
import random
import runpy
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SHAPES = runpy.run_path(str(Path(__file__).parents[1] / "shapes/data.py"))
SIDE, UNIT = 112, 12  # pixels: 4 x 4 tokens; length of a side of 1
RECTANGLES = [(2, 3), (2, 4), (3, 4), (3, 5), (4, 5), (4, 6)]
TRIANGLES = [(3, 4), (4, 4), (4, 6), (5, 6), (5, 8), (6, 8)]  # base and height; the areas are those of the rectangles
AREAS = [a * b for a, b in RECTANGLES]
COUNTS = {"train": 96, "test": 24}
NUM_DEMONSTRATIONS = 1280


def draw(rng: random.Random, base: int, height: int, is_triangle: bool) -> bytes:
    """Return a PNG file of a rectangle or a right triangle with the lengths of two sides."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen, width, depth = ImageDraw.Draw(picture), base * UNIT, height * UNIT
    left, top = rng.randrange(12, SIDE - width), rng.randrange(SIDE - depth - 12)
    corners = [(left, top), (left, top + depth), (left + width, top + depth), (left + width, top)]
    pen.polygon(corners[:3] if is_triangle else corners, outline="black")
    pen.text((left + width // 2, top + depth), str(base), "black")
    pen.text((left - 10, top + depth // 2), str(height), "black")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def make_row(rng: random.Random, name: str) -> dict:
    """Return a row of the data set: the area of a random figure."""
    number, is_triangle = rng.randrange(len(AREAS)), rng.random() < 0.5
    image = draw(rng, *(TRIANGLES if is_triangle else RECTANGLES)[number], is_triangle)
    return {
        "images": [{"bytes": image, "path": name}],
        "problem": "<image>Find the area of the figure.",
        "answer": str(AREAS[number]),
    }


def main(directory: str) -> None:
    """Write model/, geometry3k/ and sft.jsonl with its pictures/ into `directory`."""
    root, rng = Path(directory), random.Random(0)
    answers = [f"\\boxed{{{area}}}" for area in AREAS]
    SHAPES["make_model"](root / "model", words=answers)
    for name in ("geometry3k/data", "pictures"):
        (root / name).mkdir(parents=True)
    rows = {split: [make_row(rng, f"{split}-{n}.png") for n in range(count)] for split, count in COUNTS.items()}
    for split, content in rows.items():
        pq.write_table(pa.Table.from_pylist(content), root / f"geometry3k/data/{split}-00000-of-00001.parquet")
    for row in rows["train"]:
        [image] = row["images"]
        (root / "pictures" / image["path"]).write_bytes(image["bytes"])
    with (root / "sft.jsonl").open("w") as out:
        for row in rng.choices(rows["train"], k=NUM_DEMONSTRATIONS):
            question = {"role": "user", "content": row["problem"]}
            answer = {"role": "assistant", "content": rng.choice(answers)}
            images = [f"pictures/{row['images'][0]['path']}"]
            out.write(json.dumps({"messages": [question, answer], "images": images}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
