"""The files that the bad inputs name: valid and invalid data, configs, models and tokenizers, and a store."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "eval"))

GOOD_ROWS = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(8)]
SOURCES = {  # file -> content
    "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in GOOD_ROWS),
    "chats.jsonl": "".join(
        json.dumps({"messages": [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]})
        + "\n"
        for i in range(8)
    ),
    "empty.jsonl": "",
    "broken.jsonl": '{"prompt": "1", "label": "1"}\n{"prompt": "2", \n',
    "array.jsonl": '["prompt"]\n',
    "null-prompt.jsonl": '{"prompt": null, "label": "1"}\n',
    "null-content.jsonl": '{"prompt": [{"role": "user", "content": null}], "label": "1"}\n',
    "image.jsonl": '{"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "label": "1"}\n',
    "null-chat.jsonl": '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": null}]}\n',
    "no-label.jsonl": '{"prompt": "1"}\n',
    "latin1.jsonl": '{"prompt": "é", "label": "1"}\n'.encode("latin-1"),
    "prompts.jsonl.gz": b"not gzip",
    "prompts.parquet": b"not parquet",
    "ragged.csv": "prompt,label\n1,1\n1,1,1\n",
    "nested.json": '[{"prompt": "1", "label": {"answer": 1}}]',
    "words.jsonl": '{"prompt": "1", "label": "two"}\n',
    "reward.py": "def reward_func(args, sample, **kwargs): return 0.0\n",
    "two.py": "def one(args, sample): return 0.0\ndef two(args, sample): return 0.0\n",
    "broken.py": "def reward_func(:\n",
    "raises.py": "raise RuntimeError('at import')\n",
    "partial.py": "import functools\ndef base(args, sample): return 0.0\nscore = functools.partial(base)\n",
    "imports.py": "def reward_func(args, sample):\n    from slime.ray import rollout\n",
    "trainer.py": "def mis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): ...\n"
    "def reducer(total_lengths, response_lengths, loss_masks): ...\ndef gae(args, rollout_data): ...\n",
    "functions.py": "value = 5\ndef one(only): ...\ndef many(a, b, c, d, e, f): ...\nclass Empty: ...\n"
    "def gen(args, sample):\n    yield 1\n",
    "evals.toml": '[[datasets]]\nname = "sums"\npath = "{root}/sums.jsonl"\n',
    "file": "a file\n",
    "binary.toml": bytes(range(256)),
    "good.toml": "[train]\nlr = 1e-6\n",
}


def make_place(root: Path, model: Path) -> None:
    """Fill `root` with what the rows name: good and bad files, models whose config.json is wrong, and a store with
    two runs."""
    from evaluated_run import config_of as config_of_evaluated
    from evaluated_run import evaluate, write_sums
    from made_run import config_of, make_run, write_data

    from penstock.storage.store import Store

    shutil.copytree(model, root / "model")
    for name, content in SOURCES.items():
        data = content if isinstance(content, bytes) else content.replace("{root}", str(root)).encode()
        (root / name).write_bytes(data)
    (root / "directory").mkdir()
    (root / "loop").symlink_to(root / "loop")
    (root / "gguf").mkdir()
    (root / "gguf" / "model.Q4_1.gguf").write_bytes(b"GGUF")
    shutil.copytree(model, root / "gguf-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    (root / "gguf-weights" / "model.Q4_1.gguf").write_bytes(b"GGUF")
    (root / "not-empty").mkdir()
    (root / "not-empty" / "file").write_text("somebody's\n")
    (root / "huge.toml").write_text("# " + "x" * (5 << 20))
    for number, (name, values, _) in enumerate(MODELS):
        make_model(root / "models" / f"{number}-{name}", model, values)
    for kind in WEIGHTS:
        file = shutil.copytree(model, root / "weights" / kind) / "model.safetensors"
        data = {"missing": b"", "cut": file.read_bytes()[:-100], "empty": b"", "text": b"not safetensors"}[kind]
        file.unlink() if kind == "missing" else file.write_bytes(data)
    for name, content, _ in TOKENIZERS:
        directory = root / "tokenizers" / name
        shutil.copytree(model, directory, ignore=shutil.ignore_patterns(name if content is None else ""))
        if content is not None:
            (directory / name.partition("-")[0]).write_bytes(content)
    store, responses = Store(str(root / "runs")), [["0"], ["2"], ["4"], ["6"]]
    make_run(store, config_of(store, write_data(root / "data.jsonl"), "old"), 3, save=(2,), score=(0, 2))
    evaluate(store, config_of_evaluated(store, write_sums(root / "sums.jsonl"), "scored"), 0, responses)
    other = config_of_evaluated(store, write_sums(root / "other.jsonl"), "other")
    evals = other.eval.model_copy(update={"eval_prompt_data": [("more", str(root / "other.jsonl"))]})
    evaluate(store, other.model_copy(update={"eval": evals}), 0, responses, "more")


def make_model(directory: Path, good: Path, values: Any) -> None:
    """A copy of a model with another config.json: entries to change, bytes, or None for none."""
    shutil.copytree(good, directory)
    config = directory / "config.json"
    if isinstance(values, dict):
        entries = json.loads(config.read_text()) | values
        config.write_text(json.dumps({key: value for key, value in entries.items() if value != "absent"}))
    elif values is None:
        config.unlink()
    else:
        config.write_bytes(values)


MODELS: list[tuple[str, Any, str]] = [  # name, config.json, culprit beside its path; others: test_config_entries.py
    ("list", b"[]", "config.json"),
    ("empty", b"", "config.json"),
    ("binary", bytes(range(128, 256)), "config.json"),
    ("missing", None, "config.json"),
    ("other-architecture", {"architectures": ["GPTNeoXForCausalLM"]}, "GPTNeoXForCausalLM"),
    ("text-layers", {"num_hidden_layers": "two"}, "num_hidden_layers"),
    ("odd-groups", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("layer-types", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
]
WEIGHTS = ("missing", "cut", "empty", "text")  # what model.safetensors is
TOKENIZERS: list[tuple[str, bytes | None, str]] = [  # file, "-kind" behind it; content, None removes it; culprit
    ("tokenizer.json", None, "tokenizer"),
    ("tokenizer.json-list", b"[]", "tokenizer"),
    ("tokenizer.json-broken", b"{", "tokenizer"),
    ("tokenizer_config.json-list", b"[]", "tokenizer"),
    ("tokenizer_config.json-binary", bytes(range(128, 256)), "tokenizer"),
]
