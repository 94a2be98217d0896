"""Write a model with random weights and its prompts for the peers: `python make_shape.py DIRECTORY --model 1.7b`.

DIRECTORY/MODEL gets the model, DIRECTORY/data 256 prompts of 128 tokens as chat messages. The chat template is the bare
content, so that all peers see the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import QWEN3, make_model, write_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=list(QWEN3), default="1.7b")
    options = parser.parse_args()
    data = options.directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    path = make_model(options.model, options.directory)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    rows = [json.loads(line) for line in write_prompts(data / "train.jsonl").read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}], "label": row["label"]} for row in rows]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}, {data / 'train.jsonl'}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
