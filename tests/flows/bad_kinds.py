"""Kinds of bad inputs, each tried at every place where it can occur (test_bad_kinds.py): files that cannot be read,
damaged and oversized data, patterns and imports that never end, addresses, layouts of stores.

`{case}` in a word or a variable stands for an empty directory of the case, `{root}` for the directory of bad_place.py.
"""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bad_inputs import on

Content = bytes | str | Callable[[Path], object]  # of a file, or writes it
COPIES = {"model": "model", "store": "runs"}  # directory of a case -> the directory of `root` that it is a copy of


@dataclass(frozen=True)
class Case:
    """A command that must be refused, what its message must name, and the files of the case."""

    id: str
    words: tuple[str, ...]
    culprit: str
    files: dict[str, Content] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def write(self, directory: Path, root: Path) -> None:
        """Write the files. One in a directory of COPIES replaces that of the copy."""
        for name, content in self.files.items():
            path, first = directory / name, name.partition("/")[0]
            if first in COPIES:
                shutil.copytree(root / COPIES[first], directory / first)
                path.unlink(missing_ok=True)
            path.parent.mkdir(exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)


# ---- files that cannot be read ---------------------------------------------------------------------------------------

UNREADABLE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path),
    "directory": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}
MODEL = on("train", "--hf-checkpoint", "{case}/model").words
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def unreadable_files() -> Iterator[Case]:
    """Every file that a run reads, in every form that cannot be read."""
    file = "{case}/"
    places = {  # file of the case -> the command that reads it
        "run.toml": on("train", "--config", file + "run.toml").words,
        "more.yaml": on("train", "--custom-config-path", file + "more.yaml").words,
        "evals.toml": on("eval", "--eval-config", file + "evals.toml", without="--eval-prompt-data").words,
        "evals.yaml": on("eval", "--eval-config", file + "evals.yaml", without="--eval-prompt-data").words,
        "prompts.jsonl": on("train", "--prompt-data", file + "prompts.jsonl").words,
        "prompts.parquet": on("train", "--prompt-data", file + "prompts.parquet").words,
        "chats.jsonl": on("sft", "--prompt-data", file + "chats.jsonl").words,
        "sums.jsonl": on("eval", "--eval-prompt-data", "sums", file + "sums.jsonl").words,
        "reward.py": on("train", "--custom-rm-path", file + "reward.py", without="--rm-type").words,
        "filter.py": on("train", "--dynamic-sampling-filter-path", file + "filter.py").words,
        "family.py": on("train", "--model-family-path", file + "family.py").words,
        "secret": on("train", "--use-wandb", "--wandb-key", f"secret-file:{file}secret").words,
        "q.sql": ("query", "--file", file + "q.sql", "--store", "{root}/runs"),
        "run.sh": ("import-slime", file + "run.sh"),
    }
    for kind, make in UNREADABLE.items():
        for name, words in places.items():
            yield Case(f"{kind} {name}", words, name, {name: make})
        for name in MODEL_FILES:
            if kind in ("loop", "directory") and name in ("generation_config.json", "tokenizer_config.json"):
                continue  # as without the file
            yield Case(f"{kind} {name}", MODEL, "model", {f"model/{name}": make})
    report = ("report", "old", "--output", file + "r.html", "--store", "{root}/runs")
    yield Case("pipe report", report, "r.html", {"r.html": os.mkfifo})


# ---- damaged and oversized content -----------------------------------------------------------------------------------

ROW = b'{"prompt": "1+1=", "label": "2"}\n'
BILLION_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


def compressed(suffix: str, data: bytes) -> bytes:
    """Compress data."""
    if suffix == "zst":
        return pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[suffix](data)


def write_bomb(path: Path) -> None:
    """Compress 320 MiB of a repeated row."""
    row = json.dumps({"prompt": "1+1=" + "x" * 1000, "label": "2"}).encode() + b"\n"
    path.write_bytes(gzip.compress(row * (8 << 10)) * 40)  # the format allows concatenation


def sparse(num_bytes: int) -> Content:
    """Return a function that writes a file of zeros, which takes no room on the disk."""

    def write(path: Path) -> None:
        path.touch()
        os.truncate(path, num_bytes)

    return write


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "text": lambda data: ROW,
    "cut": lambda data: data[: len(data) // 2],
    "changed": lambda data: data[:40] + bytes(40) + data[80:],
    "empty": lambda data: b"",
}


def damaged(damage: Callable[[bytes], bytes]) -> Content:
    """Return a function that writes a compressed file of rows after a change."""
    data = os.urandom(4000).hex().encode() + b"\n" + ROW * 50
    return lambda path: path.write_bytes(damage(compressed(path.suffix[1:], data)))


def contents() -> Iterator[Case]:
    """Files with damaged content, or of an absurd size."""
    for suffix in ("gz", "bz2", "xz", "zst"):
        name = f"prompts.jsonl.{suffix}"
        row = on("train", "--prompt-data", f"{{case}}/{name}").words
        for kind, damage in DAMAGES.items():
            yield Case(f"{suffix} {kind}", row, name, {name: damaged(damage)})
    row = on("train", "--prompt-data", "{case}/bomb.jsonl.gz@[-9:]").words
    yield Case("gz bomb", row, "bomb.jsonl.gz", {"bomb.jsonl.gz": write_bomb})
    row = on("train", "--prompt-data", "{case}/long.jsonl").words
    yield Case("endless line", row, "long.jsonl:1", {"long.jsonl": sparse(100 << 20)})
    prompt = json.dumps({"prompt": "x1" * (5 << 20), "label": "2"})
    yield Case("prompt of 10 MiB", row, "long.jsonl", {"long.jsonl": prompt})
    for kind, text in {
        "bomb": BILLION_LAUGHS,
        "cycle": "lr: &a [*a]\n",
        "deep": "lr: " + "[" * 5000,
        "deep mapping": "".join(" " * i + "a:\n" for i in range(1500)),
        "tag": "lr: !!python/object/apply:os.system ['true']\n",
        "date": "lr: 2026-02-31\n",
        "surrogate": 'lr: "\\ud800"\n',
    }.items():
        words = on("train", "--custom-config-path", "{case}/more.yaml").words
        yield Case(f"yaml {kind}", words, "levels" if kind == "deep mapping" else "more.yaml", {"more.yaml": text})
        evals = on("eval", "--eval-config", "{case}/evals.yaml", without="--eval-prompt-data").words
        yield Case(f"eval yaml {kind}", evals, "evals.yaml", {"evals.yaml": f"datasets:\n  - name: a\n{text}"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        for kind, content in {
            "sparse": sparse(3 << 30),
            "nested": "[" * 100_000,
            "surrogate": '"\\ud800"',
            "utf-16": b"\xff\xfe{\0}\0",
        }.items():
            yield Case(f"{kind} {name}", MODEL, "model", {f"model/{name}": content})
    tracker = "latest_checkpointed_iteration.txt"
    yield Case("tracker file", on("train", "--load", "{case}").words, tracker, {tracker: b"\xff\xfe"})
    for kind, config in {
        "no json": b"{",
        "list": b"[]",
        "text": b'{"r": 4, "lora_alpha": 16, "bias": "none"}',
        "binary": bytes(range(256)),
        "nested": b"[" * 100_000,
    }.items():
        words = on("train", "--lora-rank", "4", "--lora-alpha", "16", "--lora-load", "{case}").words
        files: dict[str, Content] = {"adapter_config.json": config, "adapter_model.safetensors": b"x"}
        yield Case(f"adapter {kind}", words, "adapter", files)


# ---- code and patterns that do not end -------------------------------------------------------------------------------


def endless() -> Iterator[Case]:
    """User-defined code that does not end its import, and patterns whose search does not end."""
    for kind, code in {
        "sleeps": "import time\ntime.sleep(1000)\n",
        "loops": "while True: pass\n",
        "reads": "import os\nos.read(os.pipe()[0], 1)\n",
        "matches": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')\n",
    }.items():
        for flag in ("--custom-rm-path", "--dynamic-sampling-filter-path", "--custom-advantage-function-path"):
            words = on("train", flag, "{case}/f.py", without="--rm-type" if flag == "--custom-rm-path" else "").words
            words += ("--reward-start-timeout", "2") if flag == "--custom-rm-path" else ()
            yield Case(f"import {kind} {flag}", words, "f.py", {"f.py": code + "def f(*a, **k): return 0.0\n"})
        words = on("train", "--model-family-path", "{case}/f.py").words
        yield Case(f"import {kind} family", words, "f.py", {"f.py": code})
    for pattern in (r"(.*)*$x", r"^(([a-z.0-9_])+)+$!", r"(\w|\w)*!", "(" * 3000, "a{99999999999}"):
        for flag in ("--freeze-params-name-list", "--only-train-params-name-list"):
            yield Case(f"pattern {pattern[:20]} {flag}", on("train", flag, pattern).words, flag)
    for pattern in ("(" * 3000, "a{99999999999}", "(?P<a>x)(?P<a>y)"):
        yield Case(f"grep {pattern[:20]}", ("samples", "old", "--grep", pattern, "--store", "{root}/runs"), "--grep")


# ---- addresses and variables -----------------------------------------------------------------------------------------

NO_URLS = ("nonsense", "http://", "ftp://host/api", "http://host:99999/api", "http://[::1/api")


def addresses() -> Iterator[Case]:
    """Addresses of services, as options and as environment variables."""
    for url in (*NO_URLS, "http://host:port/api", "http://host\n/api"):
        train = on("train", culprit="-").words
        yield Case(f"prefect {url!r}", train, "PREFECT_API_URL", environment={"PREFECT_API_URL": url})
    for url in (*NO_URLS[1:], "nothing://host"):
        yield Case(f"mlflow {url!r}", train, "MLFLOW_TRACKING_URI", environment={"MLFLOW_TRACKING_URI": url})
        yield Case(f"mlflow option {url!r}", (*train, "--mlflow-tracking-uri", url), "--mlflow-tracking-uri")
    for url in NO_URLS:
        yield Case(f"reward {url!r}", on("train", "--rm-type", "remote_rm", "--rm-url", url).words, "--rm-url")
        wandb = ("--use-wandb", "--wandb-mode", "offline", "--wandb-host", url)
        yield Case(f"wandb {url!r}", on("train", *wandb).words, "--wandb-host")
    for address in ("gar:bage:1", "host:99999", "host", ":6379", "ray://host:x", "http://h:1", ""):
        words = on("train", "--ray-address", "auto").words
        if address:
            yield Case(f"RAY_ADDRESS {address}", words, "RAY_ADDRESS", environment={"RAY_ADDRESS": address})
        yield Case(f"ray {address!r}", on("train", "--ray-address", address or "::").words, "--ray-address")


# ---- stores ----------------------------------------------------------------------------------------------------------


AWS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}  # so that nothing asks the network for them


def stores() -> Iterator[Case]:
    """Options and contents of stores."""
    for name in ("runs", "models", "mlflow", "runs/new", "tensorboard"):
        words = on("train", "--store", "{case}", "--use-tensorboard").words
        yield Case(f"file {name}", words, name.partition("/")[0], {name: ""})
    for kind, number, at in (("rollouts", 1, 3), ("steps", 1, 3), ("rollouts", 0, 1)):
        record = f"{kind}/{number:06d}"
        words = ("fork", "old", "--at", str(at), "--name", "f", "--store", "{case}/store")
        files = {f"store/runs/old/{record}.commit.json": lambda path: None}  # the file of the copy is removed
        yield Case(f"fork without {record}", words, record, files)
    commands = ("runs", "show old", "verify old", "gc", "query select(1)", "rm old")
    options = ("key=5", "client_kwargs=5", "config_kwargs=x", "no_such_option=1", 'config_kwargs={"no_such":1}')
    for command, option in zip(commands, itertools.cycle(options)):
        words = (*command.split(), "--store", "s3://bucket/x", "--store-options", option)
        yield Case(f"{command} s3 {option}", words, "bucket/x")
    for option in (*options[1:], "endpoint_url=nonsense", 'client_kwargs={"region_name":5}'):
        words = on("train", "--store", "s3://bucket/x", "--store-options", option).words
        yield Case(f"train s3 {option}", words, "bucket/x", environment=AWS)
    for uri in ("s3://", "s3:///x", "s3://Bucket_With_Capitals!/x", "s3://a b/x"):
        culprit = "a b" if "a b" in uri else "--store"
        yield Case(f"store {uri}", on("train", "--store", uri).words, culprit, environment=AWS)


def all_cases() -> list[Case]:
    """All cases, with unique ids."""
    return [*unreadable_files(), *contents(), *endless(), *addresses(), *stores()]
