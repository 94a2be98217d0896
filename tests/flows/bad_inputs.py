"""The table of bad inputs: every row is a command line that must be refused in one line with exit code 2
(test_bad_inputs.py).

`{root}` in a word stands for the directory of bad_place.py. A row's `culprit` must be named in the message. Rows that
follow a rule are made from the config's own fields (`rows_of_fields`, `rows_of_toml`); all others are written by hand,
by command and by subject.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import annotated_types
from bad_place import MODELS, TOKENIZERS, WEIGHTS

from penstock.flows.config import OPTIONS
from penstock.flows.options.argv import flag_of_field
from penstock.flows.options.values import leaf_types

TRAIN = {
    "--run": "new", "--store": "{root}/store", "--hf-checkpoint": "{root}/model",
    "--prompt-data": "{root}/prompts.jsonl",
    "--input-key": "prompt", "--label-key": "label", "--rm-type": "exact_number", "--num-rollout": "1",
    "--n-samples-per-prompt": "2", "--rollout-batch-size": "4", "--rollout-max-response-len": "8",
    "--apply-chat-template": "false",
}  # fmt: skip
SFT = {
    "--run": "new", "--store": "{root}/store", "--hf-checkpoint": "{root}/model", "--prompt-data": "{root}/chats.jsonl",
    "--input-key": "messages", "--num-rollout": "1", "--rollout-batch-size": "4", "--loss-type": "sft_loss",
}  # fmt: skip
EVAL = {
    "--run": "new", "--store": "{root}/store", "--hf-checkpoint": "{root}/model",
    "--eval-prompt-data": "sums {root}/prompts.jsonl",
    "--input-key": "prompt", "--label-key": "label", "--rm-type": "exact_number", "--eval-max-response-len": "8",
    "--apply-chat-template": "false",
}  # fmt: skip
CONVERT = {"--hf-checkpoint": "{root}/model", "--store": "{root}/store"}
BASES = {"train": TRAIN, "sft": SFT, "eval": EVAL, "convert": CONVERT}


@dataclass(frozen=True)
class Bad:
    """One row: a command line, what its message must name, and the content of `{root}/row.toml` if it has one."""

    words: tuple[str, ...]
    culprit: str
    toml: str | bytes | None = None

    @property
    def id(self) -> str:
        """A short name for pytest."""
        if self.toml is not None:
            return f"toml {self.words[0]} {self.toml[:60]!r}"
        base = {word for pair in BASES.get(self.words[0], {}).items() for part in pair for word in part.split(" ")}
        own = " ".join(word for word in self.words[1:] if word not in base) or f"without {self.culprit}"
        return f"{self.words[0]} {own}"[:90].encode("ascii", "backslashreplace").decode()


def on(command: str, *words: str, culprit: str = "", without: str = "", toml: str | bytes | None = None) -> Bad:
    """A good request of `command` but for `words`, which replace the base's flags of the same name; `without` lists
    flags left out."""
    left_out = {word.partition("=")[0] for word in words} | set(without.split())
    base = [(name, value) for name, value in BASES[command].items() if name not in left_out]
    good = [word for name, value in base for word in (name, *value.split(" "))]
    if toml is not None:
        words = ("--config", "{root}/row.toml", *words)
    return Bad((command, *good, *words), culprit or words[0].partition("=")[0], toml)


def train(*words: str, **more: Any) -> Bad:
    """See `on`."""
    return on("train", *words, **more)


def toml(content: str | bytes, culprit: str = "row.toml", command: str = "train", without: str = "") -> Bad:
    """A good request with a bad `--config` file."""
    return on(command, culprit=culprit, without=without, toml=content)


# ---- made from the fields --------------------------------------------------------------------------------------------


def rows_of_models() -> Iterator[Bad]:
    """A config.json or a tokenizer that is wrong, for each command that reads one."""
    for number, (name, _, culprit) in enumerate(MODELS):
        command = ("train", "convert", "eval")[number % 3]
        yield on(command, "--hf-checkpoint", f"{{root}}/models/{number}-{name}", culprit=culprit)
    for number, kind in enumerate(WEIGHTS):
        path = f"{{root}}/weights/{kind}"
        yield on(("train", "convert")[number % 2], "--hf-checkpoint", path, culprit=path)
    for name, _, culprit in TOKENIZERS:
        yield train("--hf-checkpoint", f"{{root}}/tokenizers/{name}", culprit=culprit)
    for path in ("{root}/gguf/model.Q4_1.gguf", "{root}/gguf", "{root}/gguf-weights"):
        for command in ("convert", "train", "eval"):
            yield on(command, "--hf-checkpoint", path, culprit="model.Q4_1.gguf is GGUF")
    names = ("nowhere", "file", "directory", "loop", "y/" * 3000)
    for path in (*(f"{{root}}/{name}" for name in names), "Qwen/Qwen3-0.6B", "x" * 300):
        for command in ("train", "convert"):
            yield on(command, "--hf-checkpoint", path, culprit=path[:60].removesuffix("/"))


def rows_of_fields() -> Iterator[Bad]:
    """Flags of every option: wrong type, out of bounds, infinite, unknown choice, without a value, empty."""
    for _, name, field in OPTIONS:
        word, kinds = flag_of_field(name), leaf_types(field.annotation)
        if bool in kinds:
            yield train(word, "maybe")
            yield train(f"--no-{word[2:]}", "yes", culprit=f"--no-{word[2:]}")
            continue
        yield train(word, culprit=word)
        if _choices(field.annotation):
            yield train(word, "unheard-of")
        elif Any in kinds:
            yield train(word, "no-equals-sign")
        elif int in kinds:
            yield train(word, "many")
        elif float in kinds:
            yield train(word, "inf")
        elif str in kinds:
            yield train(f"{word}=", culprit=word)
        low = _below_bound(field.metadata)
        if low is not None:
            yield train(word, str(low))


def rows_of_toml() -> Iterator[Bad]:
    """The same options in TOML, where values have types."""
    for section, name, field in OPTIONS:
        kinds = leaf_types(field.annotation)
        if bool in kinds:
            wrong = ['"maybe"', "3"]
        elif Any in kinds:
            wrong = ["5", "[1, 2]"]
        elif kinds & {int, float}:
            wrong = ["true", "nan" if float in kinds else "1.5", "{ a = 1 }"]
        elif _is_list(field.annotation):
            wrong = ["5", "{ a = [] }"]
        else:
            wrong = ["5", "[]"] if name != "eval_config" else ["5", "[1]"]
        for value in wrong:
            yield toml(f"[{section}]\n{name} = {value}\n", flag_of_field(name), without=flag_of_field(name))


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _choices(annotation: Any) -> list[Any]:
    literals = [kind for kind in _alternatives(annotation) if typing.get_origin(kind) is typing.Literal]
    return [choice for literal in literals for choice in typing.get_args(literal)]


def _is_list(annotation: Any) -> bool:
    return any(typing.get_origin(kind) is list for kind in _alternatives(annotation))


def _below_bound(metadata: Iterable[Any]) -> float | None:
    for bound in metadata:
        if isinstance(bound, annotated_types.Ge):
            return bound.ge - 1  # type: ignore[operator]
        if isinstance(bound, annotated_types.Gt):
            return bound.gt  # type: ignore[return-value]
    return None


# ---- written by hand -------------------------------------------------------------------------------------------------

LONG = "x" * 300


def rows_of_commands() -> Iterator[Bad]:
    """Words that are not a command, and commands' own words."""
    for word in (
        "trian", "Train", "", " ", "-v", "--trian", "tr\u0430in", "train\n", LONG, "--config", "runs/x", "train=1",
    ):  # fmt: skip
        yield Bad((word,), repr(word)[:30].strip("'").replace("\\\\", "\\") or "''")
    run = ("--store", "{root}/runs")
    for words, culprit in (
        (("resume",), "resume"), (("resume", *run), "resume"), (("resume", "a", "b", *run), "a b"),
        (("resume", "ghost", *run), "ghost"),
        (("resume", "", *run), "''"), (("resume", "../old", *run), "../old"), (("resume", LONG, *run), "xxx"),
        (("resume", "a b", *run), "a b"),
        (("resume", "old", "--store", "{root}/file"), "{root}/file"),
        (("resume", "old", "--store", "{root}/nowhere"), "{root}/nowhere"),
        (("resume", "old", "--store="), "--store"), (("resume", "old", "--stor", "x"), "--stor"),
        (("replay",), "replay"), (("replay", "ghost", *run), "ghost"), (("replay", "old", "--from", "x", *run),
        "--from"),
        (("replay", "old", "--from", "-1", *run), "--from"), (("replay", "old", "--from", *run), "--from"),
        (("replay", "old", "--from", "\u00b2", *run), "--from"), (("replay", "old", "--to", "1.5", *run), "--to"),
        (("replay", "old", "--to", "9", *run), "--to"), (("replay", "old", "--from", "2", "--to", "2", *run), "--from"),
        (("replay", "old", "--to", "9" * 400, *run), "--to"), (("replay", "old", "--from", "1", "--from", "2", *run),
        "--from"),
        (("replay", "old", "--json", *run), "--json"), (("replay", "old", "--json", "{root}/directory", *run),
        "--json"),
        (("replay", "old", "--json", "{root}/nowhere/x.json", *run), "--json"),
        (("replay", "old", "--lr", "1e-3", *run), "--lr"),
        (("replay", "old", "extra", *run), "extra"), (("replay", "../old", *run), "../old"), (("replay", LONG, *run),
        "xxx"),
        (("fork",), "fork"), (("fork", "old", *run), "--at"), (("fork", "old", "--at", "1", *run), "--name"),
        (("fork", "old", "--at", "x", "--name", "n", *run), "--at"),
        (("fork", "old", "--at", "1.5", "--name", "n", *run), "--at"),
        (("fork", "old", "--at", "-1", "--name", "n", *run), "--at"),
        (("fork", "old", "--at", "inf", "--name", "n", *run), "--at"),
        (("fork", "old", "--at", "nan", "--name", "n", *run), "--at"),
        (("fork", "old", "--at", "4", "--name", "n", *run), "--at"),
        (("fork", "old", "--at", "1", "--name", "a/b", *run), "--name"),
        (("fork", "old", "--at", "1", "--name", "", *run), "--name"),
        (("fork", "old", "--at", "1", "--name", LONG, *run), "--name"),
        (("fork", "old", "--at", "1", "--name", "old", *run), "old"),
        (("fork", "ghost", "--at", "1", "--name", "n", *run), "ghost"),
        (("fork", "../old", "--at", "1", "--name", "n", *run), "../old"),
        (("fork", "old", "--at", "1", "--name", "n", "--name", "m", *run), "--name"),
        (("fork", "old", "--at", "1", "--name", "--store", "x"), "--name"),
        (("fork", "old", "--at", "1", "--name", "n", "--run", "m", *run), "--run"),
        (("fork", "old", "--at", "1", "--name", "n", "--lr", "-1", *run), "--lr"),
        (("fork", "old", "--at", "2", "--name", "n", "--num-rollout", "1", *run), "--num-rollout"),
        (("fork", "old", "--at", "1", "--name", "n", "--lora-rank", "4", "--lora-publish", "adapter", *run),
        "--lora-publish"),
        (("fork", "old", "--at", "1", "--name", "n", "--store-single-writer", "maybe", *run), "--store-single-writer"),
        (("fork", "old", "--reuse-rollouts", *run), "--name"),
        (("fork", "old", "--reuse-rollouts", "--name", "n", "--num-rollout", "99", *run), "--num-rollout"),
        (("fork", "old", "--reuse-rollouts", "--name", "n", "--num-epoch", "1", *run), "--num-epoch"),
        (("fork", "old", "--reuse-rollouts", "--name", "n", "--rollout-temperature", "0.5", *run),
        "--rollout-temperature"),
        (("fork", "old", "--at", "1", "--name", "n", "--min-effective-sample-size", "0.1", *run),
        "--min-effective-sample-size"),
        (("verify",), "verify"), (("verify", "ghost", *run), "ghost"), (("verify", "a", "b", *run), "a b"),
        (("verify", "../old", *run), "../old"),
        (("verify", "old", "--no-hashes=1", *run), "--no-hashes"), (("verify", "old", "--lr", "1", *run), "--lr"),
        (("verify", LONG, *run), "xxx"),
        (("verify", "old", "--nohashes", *run), "--nohashes"), (("verify", "old", "--store", "{root}/file"),
        "{root}/file"),
        (("report",), "report"), (("report", "ghost", *run), "ghost"), (("report", "a", "b", *run), "a b"),
        (("report", "../old", *run), "../old"), (("report", "old", "--lr", "1", *run), "--lr"),
        (("report", "old", "--max-samples", "0", *run), "--max-samples"),
        (("report", "old", "--max-samples", "x", *run), "--max-samples"),
        (("report", "old", "--output", "{root}/prompts.jsonl", *run), "--output"),
        (("report", "old", "--output", "{root}/directory", *run), "--output"),
        (("report", "old", "--output", "{root}/absent/a.html", *run), "--output"),
        (("samples", "old", "--explain", "ghost", *run), "ghost"),
        (("samples", "old", "--explain", "eval-000000-sums-000000000-00", *run), "eval-000000-sums-000000000-00"),
        (("samples", "old", "--explain", "000000000-00", "--round", "0", *run), "--round"),
        (("samples", "old", "--explain", "000000000-00", "--limit", "x", *run), "--limit"),
        (("samples", "old", "--explain", *run), "--explain"),
        (("samples", "{root}/prompts.parquet"), "prompts.parquet"),
        (("samples", "{root}/absent.parquet"), "absent.parquet"),
        (("samples", "{root}/prompts.parquet", *run), "--store"),
        (("samples", "{root}/prompts.parquet", "--worst"), "--worst"),
        (("samples", "old", "{root}/prompts.parquet", *run), "old"),
        (("export", "old", "--round", "9", "--output", "{root}/new.parquet", *run), "old"),
        (("export", "old", "--round", "x", "--output", "{root}/new.parquet", *run), "--round"),
        (("export", "old", "--round", "0", *run), "penstock export"),
        (("export", "old", "--round", "0", "--output", "{root}/new.json", *run), "--output"),
        (("export", "old", "--round", "0", "--output", "{root}/prompts.parquet", *run), "--output"),
        (("export", "old", "--round", "0", "--output", "{root}/new.parquet", "--format", "hf", *run), "--format"),
        (("export", "old/1", "--round", "0", "--output", "{root}/new.parquet", *run), "old/1"),
        (("export", "ghost", "--round", "0", "--output", "{root}/new.parquet", *run), "ghost"),
        (("gc", "a", "b", *run), "a b"), (("gc", "ghost", *run), "ghost"), (("gc", "../old", *run), "../old"),
        (("gc", LONG, *run), "xxx"),
        (("gc", "--older-than", "x", *run), "--older-than"), (("gc", "--older-than", "-1", *run), "--older-than"),
        (("gc", "--older-than", "inf", *run), "--older-than"), (("gc", "--older-than", "nan", *run), "--older-than"),
        (("gc", "--older-than", "\uff11", *run), "--older-than"), (("gc", "--older-than", *run), "--older-than"),
        (("gc", "--delete=yes", *run), "--delete"), (("gc", "--delete", "--delete", *run), "--delete"),
        (("gc", "--force", *run), "--force"),
        (("gc", "--lr", "1", *run), "--lr"), (("gc", "--store", "{root}/file"), "{root}/file"),
        (("runs", "old", *run), "old"), (("runs", "--lr", "1", *run), "--lr"), (("runs", "--stor", "x"), "--stor"),
        (("runs", "--store"), "--store"),
        (("runs", "--store", "{root}/file"), "{root}/file"), (("runs", "--store", "nothing://x"), "nothing"),
        (("runs", "--store-options", "x", *run), "--store-options"),
        (("runs", "--config", "{root}/nowhere.toml"), "nowhere.toml"), (("runs", "--config", "{root}/directory"),
        "{root}/directory"),
        (("runs", "--config"), "--config"), (("runs", "--config="), "--config"),
        (("runs", "--config", "{root}/loop"), "{root}/loop"),
        (("setup", "now"), "now"), (("setup", "--fix"), "--fix"), (("setup", "--cpu", "--cuda"), "--cuda"),
        (("setup", "--cpu=1"), "--cpu"), (("setup", "--with"), "--with"), (("setup", "--with", "s4"), "s4"),
        (("setup", "--with", "gpu"), "gpu"),
        (("doctor", "now"), "now"), (("doctor", "--fix"), "--fix"), (("doctor", "--store"), "--store"),
        (("doctor", "--ray-address"), "--ray-address"), (("doctor", "--run", "x"), "--run"),
        (("watch", "a", "b", *run), "one run"), (("watch", "../old", *run), "../old"),
        (("watch", "old", "--lr", "1", *run), "--lr"), (("watch", "old", "--port", "x", *run), "--port"),
        (("watch", "old", "--port", "70000", *run), "--port"), (("watch", "--terminal", *run), "--terminal"),
        (("watch", "old", "--terminal", *run), "--terminal"),
        (("show", *run), "name of one run"), (("show", "ghost", *run), "ghost"),
        (("show", "old", "--lr", "1", *run), "--lr"),
        (("doctor", "--num-gpus", "8"), "--num-gpus"), (("doctor", "--plan"), "--hf-checkpoint"),
        (("doctor", "--plan=1"), "--plan"), (("doctor", "--plan", "now"), "now"),
        *[
            (("doctor", "--plan", "--hf-checkpoint", "{root}/model", *words), culprit)
            for words, culprit in (
                (("--num-gpus", "x"), "--num-gpus"), (("--num-gpus", "0"), "--num-gpus"), (("--num-gpus",),
                "--num-gpus"), (("--num-gpus-per-node", "0"), "--num-gpus-per-node"),
                (("--num-gpus", "6", "--num-gpus-per-node", "4"), "--num-gpus-per-node"),
                (("--num-gpus", "6", "--num-gpus-per-node", "0"), "--num-gpus-per-node"),
                (("--num-gpus", "8", "--rollout-num-gpus", "8"), "--rollout-num-gpus"),
                (("--num-gpus", "8", "--rollout-num-gpus", "x"), "--rollout-num-gpus"),
                (("--num-gpus", "8", "--rollout-num-gpus-per-engine", "3"), "--rollout-num-gpus-per-engine"),
                (("--gpu-memory-gib", "x"), "--gpu-memory-gib"), (("--gpu-memory-gib", "0"), "--gpu-memory-gib"),
                (("--sglang-mem-fraction-static", "2"), "--sglang-mem-fraction-static"),
                (("--num-gpus", "3", "--tensor-model-parallel-size", "2"), "--tensor-model-parallel-size"),
                (("--lrr", "1"), "--lrr"),
            )
        ],
        (("demo", "now"), "now"), (("demo", "--seed", "x"), "--seed"), (("demo", "--seed"), "--seed"),
        (("demo", "--num-rollout", "many"), "--num-rollout"),
        (("demo", "--num-rollout", "-1"), "--num-rollout"), (("demo", "--num-rollout", "1.5"), "--num-rollout"),
        (("demo", "--sed", "1"), "--sed"),
        (("demo", "--directory"), "--directory"), (("demo", "--directory", "{root}/file"), "{root}/file"),
        (("demo", "--fresh=1"), "--fresh"),
        (("demo", "--fresh", "--directory", "{root}/not-empty"), "{root}/not-empty"), (("demo", "--seed", "-1"),
        "--seed"),
        (("deploy", "nightly"), "nightly"), (("deploy", "trian", "--name", "n"), "trian"), (("deploy", "train"),
        "--name"), (("deploy", "a", "b"), "deploy"),
        (("deploy", "--name", "n"), "deploy"), (("deploy", "train", "--name", "n", "--cron", "never"),
        "--cron"), (("deploy", "train", "--name="), "--name"),
        (("deploy", "train", "--name", "n", "--timezone", "Europe/Berlin"), "--timezone"),
        (("deploy", "sft", "--name", "n", "--lr", "x"), "--lr"),
        (("deploy", "train", "--name", "n", "--cron", "0 2 * * *", "--timezone", "Mars/Base"), "Mars/Base"),
        (("deploy", "train", "--name", "n", "--cron"), "--cron"),
        (("deploy", "train", "--name", "n", "--lr", "inf"), "--lr"),
        (("deploy", "train", "--name", "n", "--run", "x"), "--hf-checkpoint"),
        (("deploy", "convert", "--name", "n"), "--hf-checkpoint"),
    ):  # fmt: skip
        yield Bad(words, culprit)


def rows_of_evaluations() -> Iterator[Bad]:
    """`penstock eval`, its further form, `penstock regrade`, and the file of --eval-config."""
    run = ("--store", "{root}/runs")
    for words, culprit in (
        (("--compare",), "--compare"), (("--compare", "old", *run), "--compare"),
        (("--compare", "a", "b", "c", *run), "a b c"),
        (("--compare", "old/0", "ghost/0", *run), "ghost"), (("--compare", "old/0", "old/7", *run), "7"),
        (("--compare", "old/0", "old/\u00b2", *run), "old"),
        (("--compare", "old/0", "old/x", *run), "x"), (("--compare", "old/0", "../old/0", *run), ".."),
        (("--compare", "old/0", "", *run), "--compare"),
        (("--compare", "old/0", "other", *run), "evaluated on sums and other/0 on more"),
        (("--compare=1", "a", "b", *run), "--compare"), (("--compare", "old/0", "old/2", "--lr", "1", *run), "--lr"),
        (("--compare", "old", LONG, *run), "xxx"), (("--compare", "old/0", "old/00", *run), "00"),
    ):  # fmt: skip
        yield Bad(("eval", *words), culprit)
    for words, culprit in (
        ((), "regrade needs the name"), (("ghost", *run), "ghost"), (("../old", *run), "../old"),
        (("scored", "--version", "x", *run), "--version"), (("scored", "--version", "7", *run), "--version"),
        (("scored", "--version", "\u00b2", *run), "--version"), (("scored", "--dataset", "ghost", *run), "--dataset"),
        (("scored", "--rounds", "0", *run), "--rounds"), (("scored", "--rounds", "3-x", *run), "3-x"),
        (("scored", "--rounds", "\u00b2", *run), "--rounds"), (("scored", "--rounds", *run), "--rounds"),
        (("scored", "--lr", "1", *run), "--lr"), (("scored", "extra", *run), "extra"),
        (("scored", "--detectors", *run), "--detectors"), (("scored", "--detectors=1", *run), "--detectors"),
        (("scored", "--fail-above", "1.01", *run), "--fail-above"), (("scored", "--fail-above", "-1", *run), "-1"),
        (("scored", "--fail-above", "nan", *run), "--fail-above"),
        (("scored", "--rm-type", "exact_nmber", *run), "exact_nmber"),
        (("scored", "--eval-rm-type", "math", *run), "--eval-rm-type"),
        (("scored", "--pass-threshold", "inf", *run), "--pass-threshold"),
        (("scored", "--rm-type", "dapo", *run), "--reward-key"),
        (("scored", "--custom-rm-path", "{root}/nowhere.py", *run), "nowhere.py"),
        (("scored", "--rm-type", "math", "--custom-rm-path", "{root}/reward.py", *run), "--rm-type"),
    ):  # fmt: skip
        yield Bad(("regrade", *words), culprit)
    for words, culprit in (
        (("--eval-prompt-data", "sums"), "--eval-prompt-data"), (("--eval-prompt-data", "a", "b", "c"),
        "--eval-prompt-data"),
        (("--eval-prompt-data", "a/b", "{root}/prompts.jsonl"), "a/b"),
        (("--eval-prompt-data", LONG, "{root}/prompts.jsonl"), "xxx"),
        (("--eval-prompt-data", "..", "{root}/prompts.jsonl"), ".."),
        (("--eval-prompt-data", "sums.journal", "{root}/prompts.jsonl"), "sums.journal"),
        (("--eval-prompt-data", "sums.commit.json", "{root}/prompts.jsonl"), "sums.commit.json"),
        (("--eval-prompt-data", "sums", "{root}/nowhere.jsonl"), "nowhere.jsonl"),
        (("--eval-prompt-data", "sums", "{root}/directory"), "{root}/directory"),
        (("--eval-prompt-data", "sums", "{root}/empty.jsonl"), "empty.jsonl"),
        (("--eval-prompt-data", "a", "x", "--eval-prompt-data", "a", "y"), "named a"),
        (("--eval-config", "{root}/nowhere.toml"), "nowhere.toml"),
        (("--eval-config", "{root}/directory"), "{root}/directory"), (("--eval-config", "{root}/binary.toml"),
        "binary.toml"), (("--eval-config", "{root}/good.toml"), "train"),
        (("--eval-config", "{root}/loop"), "{root}/loop"), (("--eval-config", "{root}/huge.toml"), "huge.toml"),
        (("--eval-config", "{root}/evals.toml"), "sums"),
        (("--eval-input-key", "question"), "question"), (("--eval-rm-type", "maths"), "maths"),
        (("--eval-rm-type", "dapo"), "--reward-key"),
        (("--eval-max-response-len", "256"), "--eval-max-response-len"), (("--eval-max-response-len", "100000"),
        "--eval-max-response-len"),
        (("--group-rm", "--custom-rm-path", "{root}/reward.py"), "--group-rm"), (("--rm-type", "remote_rm"),
        "--rm-url"),
    ):  # fmt: skip
        yield on("eval", *words, culprit=culprit, without="--rm-type" if "--group-rm" in words else "")
    yield on("eval", culprit="--eval-prompt-data", without="--eval-prompt-data")
    for content in (
        "", "x = 1", "[datasets]\nname = 'a'", "datasets = 5", "datasets = []", "[[datasets]]",
        "[[datasets]]\nname = 'a'", "[[datasets]]\npath = 'p'",
        "[[datasets]]\nname = 5\npath = 'p'", "[[datasets]]\nname = ['a']\npath = 'p'",
        "[[datasets]]\nname = 'a'\npath = 5", "[[datasets]]\nname = 'a b'\npath = 'p'",
        "[[datasets]]\nname = 'a'\npath = 'p'\ntemperature = inf",
        "[[datasets]]\nname = 'a'\npath = 'p'\ntemperature = true",
        "[[datasets]]\nname = 'a'\npath = 'p'\ntop_p = 2", "[[datasets]]\nname = 'a'\npath = 'p'\nmax_response_len = 0",
        "[[datasets]]\nname = 'a'\npath = 'p'\nrm_type = ''", "[[datasets]]\nname = 'a'\npath = 'p'\ntop_pp = 1",
        "defaults = 5\n[[datasets]]\nname = 'a'\npath = 'p'",
        "[[defaults]]\ntop_p = 1\n[[datasets]]\nname = 'a'\npath = 'p'",
        "[defaults]\nname = 'a'\n[[datasets]]\nname = 'a'\npath = 'p'",
        "[[datasets]]\nname = 'a'\npath = 'p'\n[[datasets]]\nname = 'a'\npath = 'p'",
        "[[datasets]]\nname = '" + LONG + "'\npath = 'p'", "[[datasets]]\nname = 'a'\npath = ''",
    ):  # fmt: skip
        words = ("--eval-config", "{root}/row.toml")
        base = on("eval", *words, without="--eval-prompt-data").words
        yield Bad(base, "row.toml", content)


def rows_of_toml_shapes() -> Iterator[Bad]:
    """`--config` files that are no table of sections and options."""
    for content, culprit in (
        ("", "row.toml"), ("\n\n# only a comment\n", "row.toml"), ("lr = 1e-6", "lr"), ("x = 1", "x"),
        ("train = 5", "train"), ("train = []", "train"),
        ("train = 'x'", "train"), ("[[train]]\nlr = 1e-6", "train"),
        ("[[train]]\nlr = 1\n[[train]]\nlr = 2", "train"), ("[trian]\nlr = 1", "trian"),
        ("[train.lr]\nx = 1", "--lr"), ("[train]\nlearning_rate = 1", "learning_rate"),
        ("[train]\nlr = 1\nlr = 2", "row.toml"), ("[train]\n[train]", "row.toml"),
        ("[train]\nuse-kl-loss = true", "use-kl-loss"), ("[rollout]\nlr = 1", "lr"), ("[train]\nlr =", "row.toml"),
        ("lr: 1", "row.toml"), ("{\"train\": {}}", "row.toml"),
        ("[train]\nlr = 1979-05-27", "--lr"), ("[rollout.engine_options]\nx = 1979-05-27T07:32:00Z", "--sglang-x"),
        ("[rollout.engine_options]\nmem_fraction_static = nan", "--sglang-mem-fraction-static"),
        ("[train.megatron]\nhidden_dropout = inf", "hidden_dropout is not supported"),
        ("[train.megatron]\nx = 1", "x: no such"), ("[train]\nmegatron = [1]", "[train.megatron] is [1]"),
        ("[run]\nnum_rollout = 3.5", "--num-rollout"),
        ("[run]\nnum_rollout = 99999999999999999999", "--num-rollout"), ("[run]\nrun = 5", "--run"),
        ("[run]\nrun = ['a']", "--run"),
        ("[run]\nrun = \"a\\u0000b\"", "--run"), ("[rollout]\nrollout_stop = [\"a\\u0000\"]", "--rollout-stop"),
        ("[rollout]\nrollout_stop = ['']", "--rollout-stop"),
        ("[rollout]\nrollout_stop = [['a']]", "--rollout-stop"),
        ("[rollout]\nrollout_stop_token_ids = ['x']", "--rollout-stop-token-ids"),
        ("[rollout]\nprompt_data_weights = [nan]", "--prompt-data-weights"),
        ("[rollout]\nprompt_data_weights = [true]", "--prompt-data-weights"),
        ("[eval]\neval_prompt_data = [['a']]", "--eval-prompt-data"),
        ("[eval]\neval_prompt_data = ['a']", "--eval-prompt-data"),
        ("[eval]\neval_prompt_data = [1, 2]", "--eval-prompt-data"),
        ("[eval]\neval_prompt_data = { a = 5 }", "--eval-prompt-data"),
        ("[eval]\neval_prompt_data = 5", "--eval-prompt-data"), ("[eval.eval_config]\nx = 1", "--eval-config"),
        ("[run]\nstore_options = 5", "--store-options"), ("[run.store_options]\nx = inf", "--store-options"),
        ("[rollout.rollout_sampling]\ntop_pp = 1", "top_pp"),
        ("[convert]\nmtp = 'maybe'", "--mtp"), ("[convert]\nhf_checkpoint = 5", "--hf-checkpoint"),
        ("x = " + "[" * 3000, "row.toml"), ("x" * 70000 + " = 1", "row.toml"),
        ("[train.megatron]\nx = " + "[" * 40 + "]" * 40, "x: no such"), ("[" + "x." * 200 + "y]\nz = 1", "row.toml"),
        ("[train]\nlr = '" + "9" * 5000 + "'", "--lr"),
        ("\ufeff[train]\nlr = 1e-6", "row.toml"), (b"[train]\nlr = 1e-6 # \xe9\n", "UTF-8"), (bytes(range(256)),
        "row.toml"), (b"\xff\xfe[\x00t\x00]\x00", "row.toml"),
        (b"[train]\r\rlr = 1", "row.toml"), ("[ train ]\n[run]\nrun = 'a'\n[train]", "row.toml"),
        ("[train]\nlr = 0x1G", "row.toml"),
    ):  # fmt: skip
        own = "[run]" in str(content) or "hf_" in str(content)
        yield toml(content, culprit, without="--run --num-rollout --hf-checkpoint" if own else "")
    for name in ("nowhere.toml", "directory", "binary.toml", "huge.toml", "loop", "file", "file/x.toml", LONG):
        yield train("--config", f"{{root}}/{name}", culprit=name[-20:])
    yield train("--config", "/dev/zero", culprit="/dev/zero")
    yield train("--config", "demo-grop", culprit="config file demo-grop does not exist")
    yield train("--config", "{root}/good.toml", "{root}/nowhere.toml", culprit="nowhere.toml")
    yield train("--config", culprit="--config")
    yield train("--config=", culprit="--config")


def rows_of_words() -> Iterator[Bad]:
    """How flags are written."""
    for words, culprit in (
        (("--",), "--"), (("---lr", "1"), "---lr"), (("--=5",), "--"), (("\u2014lr", "1"), "\u2014lr"),
        (("\u2013\u2013lr", "1"), "\u2013\u2013lr"), (("--lr\u200b", "1"), "--lr"),
        (("--l\u0433", "1"), "--l"), (("--LR", "1"), "--LR"), (("--lr", "1e-6", "2e-6"), "--lr"),
        (("--lr", "\uff11"), "--lr"), (("--lr", "1,5"), "--lr"), (("--lr", "1e-6x"), "--lr"),
        (("--lr", "0x1"), "--lr"), (("--lr", "1e400"), "--lr"), (("--lr", "-inf"), "--lr"), (("--lr", "Infinity"),
        "--lr"), (("--lr", "nan"), "--lr"), (("--lr", "NaN"), "--lr"),
        (("--lr=",), "--lr"), (("--lr", " "), "--lr"), (("--lr", "-1e-6"), "--lr"), (("--lr", "none"), "--lr"),
        (("--no-lr",), "--no-lr"), (("--no-lr", "1"), "--no-lr"),
        (("--num-rollout", "1_0x"), "--num-rollout"), (("--num-rollout", "1.5"), "--num-rollout"),
        (("--num-rollout", "9" * 30), "--num-rollout"), (("--num-rollout", "9" * 5000), "--num-rollout"),
        (("--num-rollout", "\u0663"), "--num-rollout"), (("--num-rollout", "1", "2"), "--num-rollout"),
        (("--num-rollout", "true"), "--num-rollout"),
        (("--use-kl-loss", "1"), "--use-kl-loss"), (("--use-kl-loss=",), "--use-kl-loss"),
        (("--use-kl-loss", "true", "false"), "--use-kl-loss"),
        (("--no-use-kl-loss=true",), "--no-use-kl-loss"), (("--no-no-use-kl-loss",), "--no-no-use-kl-loss"),
        (("--no-use-kl-los",), "--no-use-kl-los"), (("--no-",), "--no-"),
        (("--use-kl-los",), "--use-kl-loss"), (("--rollout-batchsize", "6"), "--rollout-batch-size"),
        (("--unheard-of", "6"), "--unheard-of"), (("--" + LONG, "6"), "--xxx"),
        (("--caf\u00e9",), "--caf"), (("--lr\udcff", "1"), "--lr"), (("--input-key", "a\udcffb"), "--input-key"),
        (("--input-key", "a\0b"), "--input-key"), (("--run", "a\nb"), "--run"),
        (("--sglang-",), "--sglang-"), (("--router-",), "--router-"), (("--sglang-mem-fraction", "0.3"),
        "--sglang-mem-fraction-static"), (("--sglang-mem-fraction-static", "inf"), "--sglang-mem-fraction-static"),
        (("--router-polcy", "random"), "--router-policy"), (("--tensor-model-parallel", "2"),
        "--tensor-model-parallel-size"), (("--store-options", "=x"), "--store-options"),
        (("--store-options", "a=1", "b"), "--store-options"), (("--rollout-sampling", "min_p"),
        "--rollout-sampling"), (("--rollout-sampling", "top_p=inf"), "top_p"),
        (("--rollout-sampling", "top_p="), "top_p"), (("--rollout-stop", "a", ""), "--rollout-stop"),
        (("--rollout-stop-token-ids", "1", "x"), "--rollout-stop-token-ids"),
        (("--prompt-data-weights", "1", "2"), "--prompt-data-weights"), (("--prompt-data-weights", "0"),
        "--prompt-data-weights"), (("--prompt-data-weights", "-1"), "--prompt-data-weights"),
    ):  # fmt: skip
        yield train(*words, culprit=culprit)
    yield Bad(("train", "word", "--lr", "1"), "'word'")
    yield Bad(("train", "-lr", "1"), "'-lr'")
    yield Bad(("sft", ""), "''")
    for name in (
        "a/b", "../x", ".hidden", "-x", "a b", "a\tb", "\u0430", "caf\u00e9", "a\\b", "x" * 201, LONG, "~", "*",
        "a;b", "\u202ea", "CON/", "/", ".",
    ):  # fmt: skip
        yield train("--run", name, culprit="--run")


OTHER_CULPRITS = {  # of a row whose first flag is not the one that is named
    "--actor-num-gpus-per-node 16": "16 data-parallel replicas",
    "--lr-decay-style cosine --lr-decay-iters 5 --lr-warmup-iters 5": "--lr-decay-iters",
    "--lr-decay-style linear --lr-decay-iters 3 --critic-lr-warmup-iters 9": "--critic-lr-warmup-iters",
}


def rows_of_requests() -> Iterator[Bad]:
    """What belongs to a run and is missing, contradicts itself, or cannot be done with this model."""
    for left_out, culprit in (("--run", "--run"), ("--hf-checkpoint", "--hf-checkpoint"),
    ("--num-rollout", "--num-rollout"), ("--prompt-data", "--prompt-data"),
                              ("--rm-type", "--rm-type"),
                              ("--label-key", "--label-key"), ("--input-key", "'input'")):  # fmt: skip
        yield on("train", culprit=culprit, without=left_out)
    for left_out in ("--run", "--hf-checkpoint", "--num-rollout", "--prompt-data"):
        yield on("sft", culprit=left_out, without=left_out)
    yield on("convert", culprit="--hf-checkpoint", without="--hf-checkpoint")
    for estimator in ("grpo", "gspo", "cispo", "rloo"):
        yield train("--n-samples-per-prompt", "1", "--advantage-estimator", estimator, culprit=estimator)
    baseline = ("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages")
    yield train("--n-samples-per-prompt", "1", *baseline)
    for words in (
        "--rollout-batch-size 3 --global-batch-size 4", "--global-batch-size 16", "--num-steps-per-rollout 3",
        "--num-steps-per-rollout 9", "--global-batch-size 8 --num-steps-per-rollout 2",
        "--actor-num-gpus-per-node 16", "--actor-num-gpus-per-node 3 --tensor-model-parallel-size 2",
        "--expert-model-parallel-size 3", "--over-sampling-batch-size 3",
        "--num-rollout 0", "--rollout-max-response-len 256", "--rollout-max-response-len 100000",
        "--rollout-max-context-len 10000",
        "--sglang-context-length 8", "--keep-best eval/x", "--keep-best eval/x --keep-checkpoints 2",
        "--keep-best eval/sums2 --keep-checkpoints 2", "--keep-best eval/sums-pas@1 --keep-checkpoints 2",
        "--rollout-top-k 0", "--mask-offpolicy-in-partial-rollout",
        "--kl-loss-coef 0.1", "--kl-coef 0.1", "--eps-clip-c 3 --advantage-estimator cispo", "--use-unbiased-kl",
        "--eps-clip 0.3 --policy-loss sapo", "--sapo-tau-pos 2", "--advantage-estimator gdpo",
        "--loss-denominator 8 --calculate-per-prompt-loss",
        "--gdpo-reward-weights right=1", "--gdpo-reward-weights right=1 --advantage-estimator gdpo",
        "--overlong-buffer-len 9", "--overlong-penalty-factor 2",
        "--baseline-over-trajectories --advantage-estimator ppo",
        "--replay-share 0.01", "--replay-max-staleness 2",
        "--replay-share 0.5 --advantage-estimator ppo", "--replay-share 0.5 --loss-type sft_loss",
        "--replay-share 0.5 --load-debug-rollout-data x",
        "--baseline-over-trajectories --disable-rewards-normalization",
        "--overlong-buffer-len 4 --advantage-estimator maxrl",
        "--overlong-buffer-len 4 --advantage-estimator gdpo --gdpo-reward-weights right=1",
        "--advantage-estimator reinforce_plus_plus",
        "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1 --advantage-estimator ppo", "--loss-type custom_loss",
        "--custom-loss-function-path x.py", "--use-opd", "--opd-self", "--opd-teacher-load a={root}/model",
        "--opd-top-k 4 --opd-teacher-load {root}/model",
        "--opd-divergence jsd --opd-teacher-url http://127.0.0.1:1",
        "--keep-step-logprobs --save-trained-tokens false",
        "--use-tis --use-rollout-logprobs", "--custom-tis-function-path x.py",
        "--tis-clip-low 3", "--load {root}/file", "--save {root}/a/b", "--num-epoch 3", "--save-hf hf",
        "--freeze-params-name-list nothing", "--no-freeze-vision",
        "--freeze-params-name-list mlp --only-train-params-name-list mlp", "--only-train-params-name-list .*x",
        "--mtp-num-layers 3",
        "--update-weight-mode delta", "--disable-compute-advantages-and-returns", "--ref-update-interval 2",
        "--num-critic-only-steps 2", "--use-routing-replay --use-rollout-routing-replay", "--use-routing-replay",
        "--use-rollout-routing-replay", "--gamma 2",
        "--lr-warmup-fraction 1", "--lr-decay-style cosine --lr-decay-iters 5 --lr-warmup-iters 5", "--min-lr 1",
        "--critic-lr 1e-9 --min-lr 1e-8", "--vision-lr 1e-9 --min-lr 1e-8", "--loss-type sft_loss",
        "--lr-decay-style linear --lr-decay-iters 3 --critic-lr-warmup-iters 9",
        "--virtual-pipeline-model-parallel-size 2", "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
        "--tensor-model-parallel-size 16 --actor-num-gpus-per-node 16 --rollout-batch-size 16",
        "--expert-model-parallel-size 2 --actor-num-gpus-per-node 2",
        "--engine-port 99999", "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2",
        "--rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 3",
        "--rollout-num-gpus-per-engine 3 --actor-num-nodes 3 --actor-num-gpus-per-node 2",
        "--rollout-num-gpus-per-engine 3 --rollout-num-gpus 3 --num-gpus-per-node 2",
        "--rollout-num-gpus-per-engine 3 --rollout-num-gpus 3",
        "--actor-num-gpus-per-node 2 --num-gpus-per-node 1",
        "--tensor-model-parallel-size 2 --actor-num-nodes 2 --actor-num-gpus-per-node 3", "--network-interface lo",
        "--ray-address nowhere",
        "--ray-address http://x", "--ray-address ray://", "--mtp maybe",
    ):  # fmt: skip
        yield train(*words.split(" "), culprit=OTHER_CULPRITS.get(words, words.split(" ")[0]))
    for words, culprit in (
        ("--recompute-granularity ful", "--recompute-granularity"),
        ("--recompute-granularity full", "--recompute-method"), ("--recompute-method uniform", "--recompute-method"),
        ("--recompute-granularity selective --recompute-modules x", "--recompute-modules"),
        ("--hidden-dropout x", "--hidden-dropout"), ("--hidden-dropout 2", "--hidden-dropout"),
        ("--moe-aux-loss-coeff 0.01", "--moe-aux-loss-coeff"), ("--fp8 e4m3", "--fp8"),
        ("--hidden-dropout 0.1", "--hidden-dropout"), ("--apply-layernorm-1p", "--apply-layernorm-1p"),
        ("--use-gated-attention", "--use-gated-attention"), ("--cuda-graph-impl local", "--cuda-graph-impl"),
        ("--spec slime_plugins.models.qwen3_next get_qwen3_next_spec", "--spec"), ("--window-size 1", "--window-size"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp"), ("--exp-avg-dtype bf16", "--exp-avg-dtype"),
        ("--recompute-granularity selective --recompute-modules mlp x", "--recompute-modules"),
        ("--attention-backend flsh", "flash"),
        ("--overlap-grad-reduce yes", "--overlap-grad-reduce"),
        ("--recompute-activations 3", "--recompute-activations"),
        ("--fp16", "--fp16"),
        ("--optimizer sgd", "--optimizer"), ("--decoupled-lr 1", "--decoupled-lr"),
        ("--optimizer-offload-fraction 2", "--optimizer-offload-fraction"),
        ("--num-layers 7", "--num-layers"), ("--hidden-size 7", "--hidden-size"), ("--init-method f", "--init-method"),
        ("--transformer-impl te", "--transformer-impl"), ("--bucket-size 5", "--ddp-bucket-size"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
        "--recompute-num-layers"),
        ("--opd-engine", "--opd-teacher-engine"),
        ("--opd-teacher-engine {root}/directory", "directory"),
        ('--opd-teacher-engine {root}/model --multimodal-keys {"image":"images"}',
        "--multimodal-keys"),
        ("--opd-teacher-engine {root}/model --opd-teacher-num-gpus 3",
        "--opd-teacher-num-gpus 3"),
        ("--engine no-such-engine", "--engine"),
        ("--sglang-tp-size 2", "--sglang-tp-size"), ("--sglang-model-path x", "--sglang-model-path"),
        ("--sglang-host 0.0.0.0", "--sglang-host"), ("--router-host x", "--router-host"),
        ("--rollout-sampling top_pp=0.9", "top_p"), ("--rollout-sampling temperature=0.5", "temperature"),
        ("--rollout-sampling-seeds --rollout-sampling seed=1", "--rollout-sampling"),
        ("--rollout-external-engine-addrs nowhere", "nowhere"), ("--rollout-external-engine-addrs host:x", "host:x"),
        ("--rollout-external-engine-addrs 127.0.0.1:1 --sglang-log-level info", "--sglang-log-level"),
        ("--rm-type exact_nmber", "exact_nmber"), ("--rm-type dapo", "--reward-key"),
        ("--rm-type remote_rm", "--rm-url"), ("--rm-type math --custom-rm-path {root}/reward.py", "--custom-rm-path"),
    ):  # fmt: skip
        yield train(*words.split(" "), culprit=culprit)
    for path in (
        "nowhere.py", "two.py", "partial.py", "imports.py", "broken.py", "raises.py", "functions.py:gone",
        "functions.py:value", "functions.py:gen", "directory", "prompts.csv", "empty.jsonl",
    ):  # fmt: skip
        yield train("--custom-rm-path", f"{{root}}/{path}", culprit=path.partition(":")[0], without="--rm-type")
    for path in ("no.such.module:f", "json", "", ":", "os:"):
        yield train(
            "--custom-rm-path", path, culprit=path.partition(":")[0] or path or "--custom-rm-path", without="--rm-type"
        )
    for word, path in (
        ("--custom-generate-function-path", "one"), ("--rollout-generate-func-path", "gone"),
        ("--dynamic-sampling-filter-path", "one"), ("--data-source-path", "Empty"),
        ("--buffer-filter-path", "many"), ("--rollout-sample-hook-path", "one"),
        ("--rollout-sample-filter-path", "one"), ("--custom-advantage-function-path", "many"),
        ("--rollout-all-samples-process-path", "one"), ("--eval-function-path", "one"),
        ("--custom-reward-post-process-path", "one"), ("--custom-convert-samples-to-train-data-path", "one"),
        ("--rollout-data-postprocess-path", "one"),
    ):  # fmt: skip
        yield train(word, f"{{root}}/functions.py:{path}", culprit="functions.py")
    for word, path in (
        ("--custom-pg-loss-reducer-function-path", "reducer"),
        ("--custom-advantage-function-path", "gae"),
    ):
        yield train(word, f"{{root}}/trainer.py:{path}", culprit=f"{path} of ")
    yield train("--use-tis", "--custom-tis-function-path", "{root}/trainer.py:mis", culprit="mis of ")


def rows_of_one_half() -> Iterator[Bad]:
    """Weight updates and their checks, and runs of one half."""
    for command in ("sft", "eval"):  # they send no weights to engines
        yield on(command, "--check-weight-update-equal")
    yield train("--check-weight-update-equal", "--sglang-speculative-algorithm", "NEXTN")
    yield train("--sglang-speculative-num-steps", "3")
    yield train("--sglang-speculative-algorithm", "NEXTN", culprit="has no multi-token prediction layer")
    yield train("--update-weight-disk-dir", "{root}/prompts.jsonl")
    yield train("--update-weight-disk-dir", "{root}", "--update-weight-transport", "nccl")
    for words in (("--update-weight-transport", "nccl"), ("--sglang-dp-size", "2")):
        yield train("--lora-rank", "4", "--lora-publish", "adapter", *words, culprit="--lora-publish adapter")
    for more in ((), ("--update-weight-transport", "disk")):
        yield train(
            *("--rollout-external-engine-addrs", "10.0.0.7:30000", "--store", "s3://bucket/store", *more),
            culprit="--update-weight-disk-dir",
        )
    yield on("sft", "--debug-train-only")
    yield on("eval", "--debug-rollout-only")
    yield train("--debug-train-only", culprit="has none")  # no rollouts are committed
    yield train("--debug-train-only", "--debug-rollout-only")
    yield train("--debug-train-only", "--check-weight-update-equal")
    yield train("--debug-rollout-only", "--num-rollout-per-start", "2", without="--num-rollout")
    yield train("--debug-rollout-only", "--rollout-external-engine-addrs", "127.0.0.1:1")


def rows_of_async() -> Iterator[Bad]:
    """Options that asynchronous training cannot combine (test_async_options.py checks the messages)."""
    for words, culprit in (
        ("--async-buffer-size 1 --colocate", "--async-buffer-size 1"), ("--async-buffer-size 1 --offload-train",
        "--offload-train"), ("--async-mode streaming --offload-rollout", "--async-mode streaming"),
        ("--eval-mode apart --colocate", "--eval-mode apart"), ("--eval-num-engines 2", "--eval-num-engines"),
        ("--max-staleness 3", "--max-staleness"), ("--pause-generation-mode in_place", "--pause-generation-mode"),
        ("--async-mode streaming --async-buffer-size 1", "--async-buffer-size"),
        ("--async-mode streaming --partial-rollout --over-sampling-batch-size 8", "--partial-rollout"),
        ("--async-mode streaming --data-source-path {root}/functions.py:Source", "--data-source-path"),
        ("--async-mode streaming --update-weights-interval 4", "--update-weights-interval"),
        ("--async-mode streaming --debug-rollout-only", "--debug-rollout-only"),
        ("--eval-mode apart --eval-prompt-data sums {root}/prompts.jsonl", "--eval-mode apart"),
        ("--async-mode streaming --pause-generation-mode in_place --rollout-external-engine-addrs 127.0.0.1:1",
         "--pause-generation-mode in_place"),
    ):  # fmt: skip
        yield train(*words.split(" "), culprit=culprit)
    yield on("eval", "--eval-mode", "apart", culprit="--eval-mode apart")
    for words in ("--async-buffer-size 2 --colocate", "--async-buffer-size x"):
        yield train(*words.split(" "), culprit="--async-buffer-size")


def rows_of_data() -> Iterator[Bad]:
    """Prompt files."""
    for name in (
        "nowhere.jsonl", "directory", "empty.jsonl", "blank.jsonl", "broken.jsonl", "array.jsonl", "number.jsonl",
        "null-prompt.jsonl", "number-prompt.jsonl", "empty-prompt.jsonl", "null-content.jsonl", "image.jsonl",
        "messages.jsonl", "no-label.jsonl", "binary.jsonl", "latin1.jsonl", "prompts.jsonl.gz", "prompts.parquet",
        "ragged.csv", "array.json", "nested.json", "prompts.arrow", "words.jsonl", "python.jsonl",
        "loop", "file", "*.nothing", "prompts.jsonl@[9:]",
        "prompts.jsonl@[3:3]", "prompts.jsonl@[x:y]", "prompts.jsonl/x.jsonl", LONG + ".jsonl",
    ):  # fmt: skip
        yield train("--prompt-data", f"{{root}}/{name}", culprit=name[:20])
    for path in ("nothing://x.jsonl", "", "{root}/prompts.jsonl\0", "http:///x.jsonl"):
        yield train("--prompt-data", path, culprit=path[:7] or "--prompt-data")
    for word in ("--input-key", "--label-key"):
        yield train(word, "question", culprit="question")
    for name in ("prompts.jsonl", "nowhere.jsonl", "empty.jsonl", "broken.jsonl", "null-chat.jsonl"):
        yield on("sft", "--prompt-data", f"{{root}}/{name}", culprit="messages" if name == "prompts.jsonl" else name)
    for store in (
        "{root}/file/store", "/dev/null/store", "/proc/penstock/store", "nothing://x", "{root}/" + LONG,
        "{root}/loop/x",
    ):  # fmt: skip
        yield train("--store", store, culprit=store[:40])
    for store in ("{root}/file", "/dev/null/store", "nothing://x"):
        yield on("convert", "--store", store, culprit=store)
    for words, culprit in (
        (("--load", "{root}/nowhere", "--save", "{root}/out"), "--load"),
        (("--load", "old/9", "--save", "{root}/out", "--store", "{root}/runs"), "old/9"), (("--load", "old"), "--save"),
        (("--verify=1",), "--convert-verify"), (("--export-dtype", "fp9"), "--export-dtype"),
        (("--origin-hf-dir", "{root}/model"), "--origin-hf-dir"), (("--convert-ranks", "0"), "--convert-ranks"),
        (("--load", "old", "--save", "{root}/out", "--verify"), "--verify"), (("--mtp", "maybe"), "--mtp"),
        (("--save", ""), "--convert-save"), (("--num-layers", "9"), "--num-layers"),
        (("--load", "{root}/directory", "--save", "{root}/out"), "{root}/directory"),
        (("--load", "{root}/file", "--save", "{root}/out"), "--load"),
    ):  # fmt: skip
        yield on("convert", *words, culprit=culprit, without="--hf-checkpoint" if "--load" in words else "")


QUICK: dict[str, Callable[[], Iterable[Bad]]] = {  # the rows of every change, by subject
    "commands": rows_of_commands,
    "evaluations": rows_of_evaluations,
    "shapes in TOML": rows_of_toml_shapes,
    "words": rows_of_words,
    "requests": rows_of_requests,
    "one half": rows_of_one_half,
    "async": rows_of_async,
    "data": rows_of_data,
    "models": rows_of_models,
    "a sixteenth of the fields": lambda: [*rows_of_fields()][::16],
}
REST: dict[str, Callable[[], Iterable[Bad]]] = {  # the rows that `make test-all` adds
    "fields": lambda: [row for number, row in enumerate(rows_of_fields()) if number % 16],
    "fields in TOML": rows_of_toml,
}


def real_rows() -> list[Bad]:
    """Return rows that are tried as processes too, from every subject: most are refused early, some after reading the
    model."""
    sources = (rows_of_commands, rows_of_toml_shapes, rows_of_words, rows_of_requests, rows_of_data)
    chosen = []
    for source in sources:
        rows = [row for row in source() if not any("\0" in word or "\udcff" in word for word in row.words)]
        chosen += [rows[len(rows) // 4], rows[-len(rows) // 4]]
    return chosen
