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


def toml(content: str | bytes, culprit: str = "row.toml", without: str = "") -> Bad:
    """A good request with a bad `--config` file."""
    return on("train", culprit=culprit, without=without, toml=content)


def split_row(text: str) -> tuple[list[str], str]:
    """Split a row written as `WORDS => CULPRIT`. Without `=>`, the culprit is the first word, before `=`."""
    words, _, culprit = text.partition(" => ")
    return words.split(" "), culprit or words.partition(" ")[0].partition("=")[0]


def train_rows(*rows: str) -> Iterator[Bad]:
    """Rows of `penstock train`, each written as `split_row` reads it."""
    for row in rows:
        words, culprit = split_row(row)
        yield train(*words, culprit=culprit)


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
    for command, path in (("convert", "gguf/model.Q4_1.gguf"), ("train", "gguf"), ("eval", "gguf-weights")):
        yield on(command, "--hf-checkpoint", f"{{root}}/{path}", culprit="model.Q4_1.gguf is GGUF")
    names = ("nowhere", "file", "directory", "loop", "y/" * 3000)
    for number, path in enumerate((*(f"{{root}}/{name}" for name in names), "Qwen/Qwen3-0.6B", "x" * 300)):
        command = ("train", "convert")[number % 2]
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


def _below_bound(metadata: Iterable[Any]) -> Any:
    for bound in metadata:
        if isinstance(bound, annotated_types.Ge):
            return bound.ge - 1
        if isinstance(bound, annotated_types.Gt):
            return bound.gt
    return None


# ---- written by hand -------------------------------------------------------------------------------------------------

LONG = "x" * 300


IN_STORE = """
resume
resume a b => a b
resume ghost => ghost
replay old --from x => --from
replay old --from -1 => --from
replay old --from 1 --from 2 => --from
replay old --from 2 --to 2 => --from
replay old --to 1.5 => --to
replay old --to 9 => --to
replay old --to {long number} => --to
replay old --json {root}/directory => --json
replay old --json {root}/nowhere/x.json => --json
fork
fork ../old --at 1 --name n => ../old
fork ghost --at 1 --name n => ghost
fork old => --at
fork old --at 1 => --name
fork old --at 4 --name n => run 'old' has 3 trained rounds, but --at is 4
fork old --at 1 --name a/b => --name
fork old --at 1 --name old => run 'old' exists already
fork old --at 1 --name n --run m => --run
fork old --at 1 --name n --learning-rate 1 => unknown flag --learning-rate
fork old --at 2 --name n --num-rollout 1 => --num-rollout 1
fork old --at 1 --name n --lora-rank 4 --lora-publish adapter => --lora-publish
fork old --at 1 --name n --store-single-writer maybe => --store-single-writer
fork old --reuse-rollouts => --name
fork old --at 1 --name n --min-effective-sample-size 0.1 => --min-effective-sample-size
verify old --nohashes => --nohashes
report old --max-samples 0 => --max-samples
report old --output {root}/prompts.jsonl => --output
report old --output {root}/directory => --output
lineage x/5 => has no run 'x' (it has: old, other, scored)
lineage old/7 => run 'old' has no 7
lineage old/sample/99 => run 'old' has no sample/99
lineage old --json --dot => --json and --dot cannot be combined
samples old --round 9 => run 'old' has no finished round 9
samples old --prompt 77 => no such sample in rounds 0 to 2
samples old --prompt some-id => no sample with the id 'some-id'
samples old --versions 5 => --versions needs --eval
samples old --worst --best => cannot be combined
samples old --status good => --status takes one of pending
samples old --explain ghost => ghost
samples old --explain eval-000000-sums-000000000-00 => eval-000000-sums-000000000-00
samples {root}/prompts.parquet => --store
export ghost --round 0 --output {root}/new.parquet => ghost
export old/1 --round 0 --output {root}/new.parquet => old/1
export old --round 0 => penstock export
export old --round 9 --output {root}/new.parquet => old
export old --round 0 --output {root}/new.json => --output
export old --round 0 --output {root}/new.parquet --format hf => --format
gc --older-than x => --older-than
gc --older-than -1 => --older-than
gc --delete=yes => --delete
runs old => old
runs --store-options x => --store-options
runs --config {root}/loop => {root}/loop
watch old --port 70000 => --port
watch --terminal => --terminal
watch old --terminal => --terminal
show => name of one run
eval --compare old/0 => --compare
eval --compare a b c => a b c
eval --compare old/0 ghost/0 => ghost
eval --compare old/0 old/7 => 7
eval --compare old/0 old/² => old
eval --compare old/0 ../old/0 => ..
eval --compare old/0 other => evaluated on sums and other/0 on more
regrade => regrade needs the name
regrade scored --version 7 => --version
regrade scored --dataset ghost => --dataset
regrade scored --rounds 0 => --rounds
regrade scored --fail-above 1.01 => --fail-above
regrade scored --rm-type exact_nmber => exact_nmber
regrade scored --pass-threshold inf => --pass-threshold
regrade scored --rm-type math --custom-rm-path {root}/reward.py => --rm-type
"""
WITHOUT_STORE = """
resume old --store {root}/file => {root}/file
resume old --store {root}/nowhere => {root}/nowhere
resume old --store= => --store
fork old --at 1 --name --store x => --name
samples {root}/prompts.parquet => prompts.parquet
samples {root}/absent.parquet => absent.parquet
runs --store nothing://x => nothing
setup --cpu --cuda => --cuda
setup --with s4 => s4
doctor now => now
doctor --num-gpus 8 => --num-gpus
doctor --plan => --hf-checkpoint
{plan} --num-gpus 0 => --num-gpus
{plan} --num-gpus 6 --num-gpus-per-node 4 => --num-gpus-per-node
{plan} --num-gpus 8 --rollout-num-gpus 8 => --rollout-num-gpus
{plan} --num-gpus 8 --rollout-num-gpus-per-engine 3 => --rollout-num-gpus-per-engine
{plan} --gpu-memory-gib 0 => --gpu-memory-gib
{plan} --sglang-mem-fraction-static 2 => --sglang-mem-fraction-static
{plan} --num-gpus 3 --tensor-model-parallel-size 2 => --tensor-model-parallel-size
{plan} --lrr 1 => --lrr
demo --seed -1 => --seed
demo --num-rollout 1.5 => --num-rollout
demo --directory {root}/file => {root}/file
demo --fresh --directory {root}/not-empty => {root}/not-empty
deploy a b
deploy --name n
deploy trian --name n => unknown flow 'trian': did you mean train?
deploy train => --name
deploy train --name n --cron never => --cron 'never'
deploy train --name n --timezone Europe/Berlin => add --cron
deploy sft --name n --retries -1 => --retries takes an integer
deploy convert --name n --retries 2 => --retries has no effect on convert
deploy train --name n --run x => --hf-checkpoint
deploy convert --name n => --hf-checkpoint
train word --lr 1 => 'word'
train -lr 1 => '-lr'
"""


def rows_of_commands() -> Iterator[Bad]:
    """Words that are not a command, and commands' own words."""
    for word in ("trian", "Train", "", " ", "-v", "--trian", "tr\u0430in", "train\n", LONG, "--config", "train=1"):
        yield Bad((word,), repr(word)[:30].strip("'").replace("\\\\", "\\") or "''")
    for table, more in ((IN_STORE, ("--store", "{root}/runs")), (WITHOUT_STORE, ())):
        text = table.replace("{plan}", "doctor --plan --hf-checkpoint {root}/model")
        for row in text.replace("{long number}", "9" * 400).strip().splitlines():
            words, culprit = split_row(row)
            yield Bad((*words, *more), culprit)
    for command in ("resume", "replay", "verify", "report", "gc", "watch", "show", "regrade"):
        yield Bad((command, "../old", "--store", "{root}/runs"), "../old")
    for name in ("", LONG, "a b"):
        yield Bad(("resume", name, "--store", "{root}/runs"), name[:3] or "''")
    for words, culprit in (
        (("samples", "old", "--grep", "(", "--store", "{root}/runs"), "not a regular expression"),
        (("deploy", "train", "--name", "n", "--cron", "0 2 * * *", "--timezone", "Mars/Base"), "Mars/Base"),
        (("sft", ""), "''"),
    ):
        yield Bad(words, culprit)


EVALUATIONS = """
--eval-prompt-data sums
--eval-prompt-data a/b {root}/prompts.jsonl => a/b
--eval-prompt-data .. {root}/prompts.jsonl => ..
--eval-prompt-data sums.commit.json {root}/prompts.jsonl => sums.commit.json
--eval-prompt-data sums {root}/nowhere.jsonl => nowhere.jsonl
--eval-prompt-data sums {root}/nowhere => {root}/nowhere does not exist
--eval-prompt-data sums openai/gsm8k => hf download openai/gsm8k
--eval-prompt-data sums {root}/empty.jsonl => empty.jsonl
--eval-prompt-data a x --eval-prompt-data a y => named a
--eval-config {root}/directory => {root}/directory
--eval-config {root}/good.toml => train
--eval-config {root}/huge.toml => huge.toml
--eval-config {root}/evals.toml => sums
--eval-input-key question => question
--eval-rm-type maths => maths
--eval-max-response-len 256
"""
DATA_SET = "[[datasets]]\nname = 'a'\npath = 'p'\n"


def rows_of_evaluations() -> Iterator[Bad]:
    """Options of `penstock eval`, and the file of --eval-config, of which test_data_sets.py tries more."""
    for row in EVALUATIONS.strip().splitlines():
        words, culprit = split_row(row)
        yield on("eval", *words, culprit=culprit)
    yield on("eval", "--eval-prompt-data", LONG, "{root}/prompts.jsonl", culprit="xxx")
    yield on("eval", "--group-rm", "--custom-rm-path", "{root}/reward.py", without="--rm-type")
    yield on("eval", culprit="--eval-prompt-data", without="--eval-prompt-data")
    for content in (
        "", "x = 1", "datasets = 5", "[[datasets]]\nname = 5\npath = 'p'", "[[datasets]]\nname = 'a'\npath = ''",
        f"[[datasets]]\nname = '{LONG}'\npath = 'p'", f"{DATA_SET}temperature = inf", f"{DATA_SET}temperature = true",
        f"{DATA_SET}rm_type = ''", f"defaults = 5\n{DATA_SET}", f"[[defaults]]\ntop_p = 1\n{DATA_SET}",
    ):  # fmt: skip
        words = on("eval", "--eval-config", "{root}/row.toml", without="--eval-prompt-data").words
        yield Bad(words, "row.toml", content)


def rows_of_toml_shapes() -> Iterator[Bad]:
    """`--config` files that are no table of sections and options."""
    for content, culprit in (
        ("\n\n# only a comment\n", "row.toml"), ("lr = 1e-6", "lr"), ("train = 5", "train"), ("train = []", "train"),
        ("[[train]]\nlr = 1e-6", "train"), ("[trian]\nlr = 1", "trian"), ("[train.lr]\nx = 1", "--lr"),
        ("[train]\nlearning_rate = 1", "learning_rate: no such option: did you mean lr?"),
        ("[train]\nlr = 1\nlr = 2", "row.toml"),
        ("[train]\nuse-kl-loss = true", "use-kl-loss"), ("[rollout]\nlr = 1", "lr"), ("[train]\nlr =", "row.toml"),
        ("lr: 1", "row.toml"), ("[train]\nlr = 1979-05-27", "--lr"), ("[train]\nlr = 0x1G", "row.toml"),
        ("[rollout.engine_options]\nx = 1979-05-27T07:32:00Z", "--sglang-x"),
        ("[rollout.engine_options]\nmem_fraction_static = nan", "--sglang-mem-fraction-static"),
        ("[train.megatron]\nhidden_dropout = inf", "hidden_dropout is not supported"),
        ("[train.megatron]\nx = 1", "x: no such"), ("[train]\nmegatron = [1]", "[train.megatron] is [1]"),
        ("[run]\nnum_rollout = 99999999999999999999", "--num-rollout"), ("[run]\nrun = ['a']", "--run"),
        ("[run]\nrun = \"a\\u0000b\"", "--run"), ("[rollout]\nrollout_stop = [\"a\\u0000\"]", "--rollout-stop"),
        ("[rollout]\nrollout_stop = ['']", "--rollout-stop"), ("[rollout]\nrollout_stop = [['a']]", "--rollout-stop"),
        ("[rollout]\nrollout_stop_token_ids = ['x']", "--rollout-stop-token-ids"),
        ("[rollout]\nprompt_data_weights = [nan]", "--prompt-data-weights"),
        ("[eval]\neval_prompt_data = [['a']]", "--eval-prompt-data"),
        ("[eval]\neval_prompt_data = [1, 2]", "--eval-prompt-data"),
        ("[eval]\neval_prompt_data = { a = 5 }", "--eval-prompt-data"), ("[eval.eval_config]\nx = 1", "--eval-config"),
        ("[run]\nstore_options = 5", "--store-options"), ("[run.store_options]\nx = inf", "--store-options"),
        ("[rollout.rollout_sampling]\ntop_pp = 1", "top_pp"), ("[convert]\nhf_checkpoint = 5", "--hf-checkpoint"),
        ("x = " + "[" * 3000, "row.toml"), ("x" * 70000 + " = 1", "row.toml"),
        ("[train.megatron]\nx = " + "[" * 40 + "]" * 40, "x: no such"), ("[" + "x." * 200 + "y]\nz = 1", "row.toml"),
        ("[train]\nlr = '" + "9" * 5000 + "'", "--lr"), ("\ufeff[train]\nlr = 1e-6", "row.toml"),
        (b"[train]\nlr = 1e-6 # \xe9\n", "UTF-8"), (bytes(range(256)), "row.toml"), (b"[train]\r\rlr = 1", "row.toml"),
    ):  # fmt: skip
        own = "[run]" in str(content) or "hf_" in str(content)
        yield toml(content, culprit, without="--run --num-rollout --hf-checkpoint" if own else "")
    for name in ("nowhere.toml", "directory", "binary.toml", "huge.toml", "loop", "file/x.toml", LONG):
        yield train("--config", f"{{root}}/{name}", culprit=name[-20:])
    yield train("--config", "/dev/zero", culprit="/dev/zero")
    yield train("--config", "demo-grop", culprit="config file demo-grop does not exist")
    yield train("--config", "{root}/good.toml", "{root}/nowhere.toml", culprit="nowhere.toml")
    yield train("--config=", culprit="--config")


def rows_of_words() -> Iterator[Bad]:
    """How flags are written."""
    yield from train_rows(
        "--", "---lr 1", "\u2014lr 1", "\u2013\u2013lr 1", "--lr\u200b 1 => --lr", "--l\u0433 1 => --l", "--LR 1",
        "--lr 1e-6 2e-6", "--lr \uff11", "--lr 1,5", "--lr 0x1", "--lr 1e400", "--lr -inf", "--lr NaN", "--lr=",
        "--lr -1e-6", "--lr none", "--no-lr", "--no-lr 1", "--num-rollout 1_0x", "--num-rollout 1.5",
        "--num-rollout " + "9" * 30, "--num-rollout " + "9" * 5000, "--num-rollout \u0663", "--num-rollout 1 2",
        "--num-rollout true", "--use-kl-loss 1", "--use-kl-loss=", "--use-kl-loss true false",
        "--no-use-kl-loss=true", "--no-no-use-kl-loss", "--no-use-kl-los", "--no-",
        "--use-kl-los => --use-kl-loss", "--rollout-batchsize 6 => --rollout-batch-size", "--unheard-of 6",
        f"--{LONG} 6 => --xxx", "--caf\u00e9 => --caf", "--lr\udcff 1 => --lr", "--input-key a\udcffb",
        "--input-key a\0b", "--sglang-", "--router-", "--sglang-mem-fraction 0.3 => --sglang-mem-fraction-static",
        "--sglang-mem-fraction-static inf", "--router-polcy random => --router-policy",
        "--tensor-model-parallel 2 => --tensor-model-parallel-size", "--store-options =x", "--store-options a=1 b",
        "--rollout-sampling min_p", "--rollout-sampling top_p=inf => top_p", "--rollout-sampling top_p= => top_p",
        "--rollout-stop-token-ids 1 x", "--prompt-data-weights 1 2", "--prompt-data-weights 0",
    )  # fmt: skip
    yield train("--rollout-stop", "a", "")
    for name in ("a/b", "../x", ".hidden", "-x", "a b", "a\nb", "\u0430", "a\\b", "x" * 201, LONG, "~", "\u202ea", "."):
        yield train("--run", name, culprit="--run")


def rows_of_requests() -> Iterator[Bad]:
    """What belongs to a run and is missing, contradicts itself, or cannot be done with this model. More options that
    contradict each other are in test_train_config.py and test_megatron_options.py."""
    for left_out in ("--run", "--hf-checkpoint", "--num-rollout", "--prompt-data", "--rm-type", "--label-key"):
        yield on("train", culprit=left_out, without=left_out)
    yield on("train", culprit="'input'", without="--input-key")
    for left_out in ("--run", "--hf-checkpoint", "--num-rollout", "--prompt-data"):
        yield on("sft", culprit=left_out, without=left_out)
    yield on("convert", culprit="--hf-checkpoint", without="--hf-checkpoint")
    yield train("--advantage-estimator", "cispo", "--n-samples-per-prompt", "1", culprit="cispo")
    baseline = ("--advantage-estimator", "reinforce_plus_plus_baseline", "--normalize-advantages")
    yield train("--n-samples-per-prompt", "1", *baseline)
    yield from train_rows(
        "--rollout-batch-size 3 --global-batch-size 4", "--global-batch-size 16", "--num-steps-per-rollout 3",
        "--global-batch-size 8 --num-steps-per-rollout 2", "--actor-num-gpus-per-node 16 => 16 data-parallel replicas",
        "--expert-model-parallel-size 3", "--over-sampling-batch-size 3", "--num-rollout 0",
        "--rollout-max-response-len 256", "--rollout-max-context-len 10000", "--sglang-context-length 8",
        "--keep-best eval/x", "--keep-best eval/x --keep-checkpoints 2",
        "--keep-best eval/sums-pas@1 --keep-checkpoints 2", "--rollout-top-k 0", "--mask-offpolicy-in-partial-rollout",
        "--kl-coef 0.1", "--use-unbiased-kl", "--gdpo-reward-weights right=1 --advantage-estimator gdpo",
        "--overlong-buffer-len 9", "--overlong-penalty-factor 2", "--replay-share 0.01", "--replay-max-staleness 2",
        "--replay-share 0.5 --advantage-estimator ppo", "--replay-share 0.5 --loss-type sft_loss",
        "--replay-share 0.5 --load-debug-rollout-data x", "--baseline-over-trajectories --advantage-estimator ppo",
        "--baseline-over-trajectories --disable-rewards-normalization",
        "--overlong-buffer-len 4 --advantage-estimator maxrl",
        "--overlong-buffer-len 4 --advantage-estimator gdpo --gdpo-reward-weights right=1", "--loss-type sft_loss",
        "--loss-type custom_loss", "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1 --advantage-estimator ppo",
        "--use-opd", "--opd-self", "--opd-teacher-load a={root}/model", "--opd-top-k 4 --opd-teacher-load {root}/model",
        "--opd-divergence jsd --opd-teacher-url http://127.0.0.1:1", "--keep-step-logprobs --save-trained-tokens false",
        "--use-tis --use-rollout-logprobs", "--custom-tis-function-path x.py", "--tis-clip-low 3", "--load {root}/file",
        "--save {root}/a/b", "--num-epoch 3", "--save-hf hf", "--freeze-params-name-list nothing", "--no-freeze-vision",
        "--freeze-params-name-list mlp --only-train-params-name-list mlp", "--only-train-params-name-list .*x",
        "--mtp-num-layers 3", "--update-weight-mode delta", "--disable-compute-advantages-and-returns",
        "--ref-update-interval 2", "--num-critic-only-steps 2", "--use-routing-replay --use-rollout-routing-replay",
        "--use-routing-replay", "--use-rollout-routing-replay", "--gamma 2",
        "--lr-decay-style cosine --lr-decay-iters 5 --lr-warmup-iters 5 => --lr-decay-iters", "--min-lr 1",
        "--critic-lr 1e-9 --min-lr 1e-8", "--vision-lr 1e-9 --min-lr 1e-8",
        "--lr-decay-style linear --lr-decay-iters 3 --critic-lr-warmup-iters 9 => --critic-lr-warmup-iters",
        "--virtual-pipeline-model-parallel-size 2", "--tensor-model-parallel-size 3 --actor-num-gpus-per-node 3",
        "--tensor-model-parallel-size 16 --actor-num-gpus-per-node 16 --rollout-batch-size 16",
        "--expert-model-parallel-size 2 --actor-num-gpus-per-node 2", "--engine-port 99999",
        "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--network-interface lo", "--ray-address nowhere",
        "--ray-address ray://", "--mtp maybe",
        # Options of Megatron.
        "--recompute-granularity full => --recompute-method", "--hidden-dropout 2", "--hidden-dropout 0.1",
        "--moe-aux-loss-coeff 0.01", "--fp8 e4m3", "--fp16", "--apply-layernorm-1p", "--use-gated-attention",
        "--cuda-graph-impl local", "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec", "--window-size 1",
        "--use-megatron-fsdp", "--exp-avg-dtype bf16", "--attention-backend flsh => flash", "--optimizer sgd",
        "--decoupled-lr 1", "--num-layers 7", "--init-method f", "--transformer-impl te",
        # Engines and rewards.
        "--opd-engine => --opd-teacher-engine", "--opd-teacher-engine {root}/directory => directory",
        '--opd-teacher-engine {root}/model --multimodal-keys {"image":"images"} => --multimodal-keys',
        "--opd-teacher-engine {root}/model --opd-teacher-num-gpus 3 => --opd-teacher-num-gpus 3",
        "--engine no-such-engine", "--sglang-tp-size 2", "--sglang-model-path x", "--sglang-host 0.0.0.0",
        "--router-host x", "--rollout-sampling top_pp=0.9 => top_p",
        "--rollout-sampling temperature=0.5 => temperature",
        "--rollout-sampling-seeds --rollout-sampling seed=1 => --rollout-sampling",
        "--rollout-external-engine-addrs nowhere => nowhere", "--rollout-external-engine-addrs host:x => host:x",
        "--rollout-external-engine-addrs 127.0.0.1:1 --sglang-log-level info => --sglang-log-level",
        "--rm-type exact_nmber => exact_nmber", "--rm-type dapo => --reward-key", "--rm-type remote_rm => --rm-url",
        "--rm-type math --custom-rm-path {root}/reward.py => --custom-rm-path",
    )  # fmt: skip
    for path in (
        "nowhere.py", "two.py", "partial.py", "imports.py", "broken.py", "raises.py", "functions.py:gone",
        "functions.py:gen", "directory",
    ):  # fmt: skip
        yield train("--custom-rm-path", f"{{root}}/{path}", culprit=path.partition(":")[0], without="--rm-type")
    for path, culprit in (("no.such.module:f", "no.such.module"), ("json", "json"), ("", "--custom-rm-path")):
        yield train("--custom-rm-path", path, culprit=culprit, without="--rm-type")
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
    yield from train_rows(
        "--custom-pg-loss-reducer-function-path {root}/trainer.py:reducer => reducer of ",
        "--custom-advantage-function-path {root}/trainer.py:gae => gae of ",
        "--use-tis --custom-tis-function-path {root}/trainer.py:mis => mis of ",
    )


def rows_of_one_half() -> Iterator[Bad]:
    """Weight updates and their checks, and runs of one half."""
    for command in ("sft", "eval"):  # they send no weights to engines
        yield on(command, "--check-weight-update-equal")
    yield from train_rows(
        "--check-weight-update-equal --sglang-speculative-algorithm NEXTN", "--sglang-speculative-num-steps 3",
        "--sglang-speculative-algorithm NEXTN => has no multi-token prediction layer",
        "--update-weight-disk-dir {root}/prompts.jsonl",
        "--update-weight-disk-dir {root} --update-weight-transport nccl",
        "--lora-rank 4 --lora-publish adapter --sglang-dp-size 2 => --lora-publish adapter",
        "--rollout-external-engine-addrs 10.0.0.7:30000 --store s3://bucket/store => --update-weight-disk-dir",
        "--debug-train-only => has none",  # no rollouts are committed
        "--debug-train-only --debug-rollout-only", "--debug-train-only --check-weight-update-equal",
        "--debug-rollout-only --rollout-external-engine-addrs 127.0.0.1:1",
    )  # fmt: skip
    yield on("sft", "--debug-train-only")
    yield on("eval", "--debug-rollout-only")
    yield train("--debug-rollout-only", "--num-rollout-per-start", "2", without="--num-rollout")


def rows_of_async() -> Iterator[Bad]:
    """Options that asynchronous training cannot combine; test_async_options.py tries more."""
    yield from train_rows(
        "--async-buffer-size 1 --colocate => --async-buffer-size 1",
        "--async-mode streaming --debug-rollout-only => --debug-rollout-only",
        "--eval-mode apart --eval-prompt-data sums {root}/prompts.jsonl => --eval-mode apart",
        "--async-mode streaming --pause-generation-mode in_place --rollout-external-engine-addrs 127.0.0.1:1"
        " => --pause-generation-mode in_place",
    )
    yield on("eval", "--eval-mode", "apart", culprit="--eval-mode apart")


def rows_of_data() -> Iterator[Bad]:
    """Prompt files, of which test_prompt_formats.py tries more, stores, and what is converted."""
    for name in (
        "nowhere.jsonl", "directory", "empty.jsonl", "broken.jsonl", "array.jsonl", "null-prompt.jsonl",
        "null-content.jsonl", "image.jsonl", "no-label.jsonl", "latin1.jsonl", "prompts.jsonl.gz", "prompts.parquet",
        "ragged.csv", "nested.json", "words.jsonl", "loop", "*.nothing", "prompts.jsonl@[3:3]", "prompts.jsonl@[x:y]",
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
    for row in (
        "--load {root}/nowhere --save {root}/out", "--load old/9 --save {root}/out --store {root}/runs => old/9",
        "--load old => --save", "--load old --save {root}/out --verify => --verify",
        "--load {root}/directory --save {root}/out => {root}/directory", "--load {root}/file --save {root}/out",
        "--verify=1 => --convert-verify", "--export-dtype fp9", "--origin-hf-dir {root}/model", "--convert-ranks 0",
        "--mtp maybe", "--num-layers 9",
    ):  # fmt: skip
        words, culprit = split_row(row)
        yield on("convert", *words, culprit=culprit, without="--hf-checkpoint" if "--load" in words else "")
    yield on("convert", "--save", "", culprit="--convert-save")


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
    """Return rows that are tried as processes too, one of each of these subjects: most are refused early, some after
    reading the model."""
    sources = (rows_of_commands, rows_of_toml_shapes, rows_of_words, rows_of_requests, rows_of_data)
    chosen = []
    for source in sources:
        rows = [row for row in source() if not any("\0" in word or "\udcff" in word for word in row.words)]
        chosen.append(rows[len(rows) // 4])
    return chosen
