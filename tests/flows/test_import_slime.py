"""`penstock import-slime` and `--dry-run`: slime's launch scripts become recipes, without executing anything."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.engines.families import read_shape
from penstock.engines.megatron.model.transformer_config import model_options
from penstock.flows.options.flags import parse_config
from penstock.flows.slime.flag_table import OF_MODEL, REFUSED
from penstock.flows.slime.recipe import Recipe, format_recipe, import_script
from penstock.flows.slime.shell import compute, read_script, split_statements
from penstock.storage.errors import ModelError, OptionError
from tests.engines.real_models import REAL_MODELS

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((Path(__file__).parent / "slime_scripts").glob("*.sh"))
RECIPES = sorted((ROOT / "configs/recipes").glob("*.toml"))


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def imported(directory: Path, text: str) -> Recipe:
    """Import a script with this text."""
    return import_script(write_script(directory / "run.sh", text))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_becomes_a_recipe_that_plans(
    script: Path,
    tmp_path: Path,
    model_dir: Callable[[str], str],
    printed: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WANDB_KEY", "key-of-wandb")
    printed("import-slime", str(script), "--output", str(tmp_path / "recipe.toml"))
    model = next(line for line in script.read_text().splitlines() if "models/" in line).rpartition("/")[2][:-4]
    words = ["--config", str(tmp_path / "recipe.toml"), "--hf-checkpoint", model_dir(model)]
    config, recipe = parse_config(words), import_script(script)
    assert config.rollout == recipe.config.rollout and config.train == recipe.config.train
    assert config.run.run.endswith("_slime") and config.run.store == "/root"
    out = printed("train", *words, "--dry-run")
    assert "optimizer steps" in out and "not ready here: " in out and "; --prompt-data" in out
    assert "key-of-wandb" not in out


@pytest.mark.parametrize("model", {row.architecture: name for name, row in REAL_MODELS.items()}.values())
def test_script_of_every_architecture_plans(
    model: str, tmp_path: Path, model_dir: Callable[[str], str], printed: Callable[..., str]
) -> None:
    directory = model_dir(model)
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" '{value}'")
        for name, value in model_options(read_shape(directory)).items()
        if value and REFUSED.get(f"--{name.replace('_', '-')}") == OF_MODEL
    ]
    (tmp_path / "models").mkdir()
    write_script(tmp_path / f"models/{model}.sh", f"MODEL_ARGS=({' '.join(words)})")
    text = f"source models/{model}.sh\npython train.py ${{MODEL_ARGS[@]}} --num-rollout 1 --n-samples-per-prompt 2"
    script = write_script(tmp_path / "run.sh", f"{text} --rm-type math --prompt-data no.jsonl")
    printed("import-slime", str(script), "--output", str(tmp_path / "recipe.toml"))
    recipe = (tmp_path / "recipe.toml").read_text()
    assert f"{len(words)} options that describe the model: config.json has them" in recipe, recipe
    words = ["--config", str(tmp_path / "recipe.toml"), "--hf-checkpoint", directory]
    printed("train", *words, "--dry-run")


def test_scripts_are_not_executed(tmp_path: Path) -> None:
    text = f"touch {tmp_path}/executed\nX=$(touch {tmp_path}/executed)\npython train.py --lr $X --num-rollout `id`\n"
    recipe = imported(tmp_path, text)
    assert not (tmp_path / "executed").exists()
    assert [line.partition(":")[0] for line in recipe.dropped] == ["--lr <command>", "--num-rollout <command>"]


def test_values_keep_their_comments_and_reasons(tmp_path: Path) -> None:
    script = """
source models/qwen3-4B.sh
MODEL_ARGS=(--num-layers 36 --hidden-size 2560 --rotary-base 10000 --seq-length 4096)
export HF_HOME=/x
python3 train_async.py ${MODEL_ARGS[@]} --prompt-key question --wandb-key $WANDB_KEY --use-wandb --hf-checkpoint /m
"""
    text = format_recipe(import_script(write_script(tmp_path / "my run.sh", script)))
    for line in (
        "# Environment variables that the script exports, not applied: HF_HOME",
        "# Dropped: --seq-length 4096: Megatron's data loader is not used; see --prompt-data",
        "# Dropped: 3 options that describe the model: config.json has them",
        'input_key = "question"  # --prompt-key in the script',
        "async_buffer_size = 1  # train_async.py generates one rollout ahead",
        'run = "my-run"  # the script has no --save, which names the run',
        'wandb_key = "env:WANDB_KEY"',
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("source models/qwen3-next-80B-A3B.sh\npython train.py", ModelError, "qwen3-next-80B-A3B, whose architecture"),
        ("source models/$(sed x).sh\npython train.py --hf-checkpoint /r/Qwen3-VL-8B", ModelError, "Qwen3-VL-8B, whose"),
        ("python train.py --bla 2 --rollout-batch-sze 3", OptionError, "--bla; --rollout-batch-sze: did you mean"),
        ("python other.py --lr 1", OptionError, "runs neither train.py nor train_async.py"),
        ("python train.py --rollout-batch-size 3 --global-batch-size 7", OptionError, "make both products equal"),
        ("python train.py --lr x", OptionError, "--lr 'x'"),
    ],
)
def test_script_that_cannot_run_is_refused(text: str, kind: type, message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message):
        imported(tmp_path, text)


def test_missing_script_and_existing_output_are_refused(tmp_path: Path, printed: Callable[..., str]) -> None:
    script = write_script(tmp_path / "run.sh", "python train.py --run r")
    (tmp_path / "out.toml").write_text("mine")
    for words in ([f"{tmp_path}/no.sh"], [], [str(script), "--output", f"{tmp_path}/out.toml"], [str(tmp_path)]):
        assert printed("import-slime", *words, code=2).count("\n") == 1
    assert (tmp_path / "out.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ("--rollout-function-path fully_async_rollout.generate_rollout_fully_async", ['async_mode = "streaming"']),
        ("--custom-config-path no.yaml", ["# Dropped: --custom-config-path no.yaml: does not exist here; give it to"]),
        ("--eval-config no.yaml --eval-interval 5", ["# Dropped: --eval-config no.yaml --eval-interval 5: the file"]),
        ("--use-slime-router", ["use_router = true"]),
        ("--sglang-enable-ep-moe", ["# Dropped: --sglang-enable-ep-moe: --sglang-enable-ep-moe is not allowed: SGL"]),
        ("--sglang-enable-deterministic-inference", ["rollout_sampling_seeds = true  # slime does so"]),
        ("--prompt-data $NONE/d.jsonl", ['prompt_data = ["<NONE>/d.jsonl"]  # write the path, or set NONE before']),
        ("--prompt-data $DATA/d.jsonl", ['prompt_data = ["/data/d.jsonl"]', "# Dropped: DATA: set in the environment"]),
        (
            "--advantage-estimator on_policy_distillation --rm-url http://h:1/generate --custom-rm-path a.b",
            [
                "[train.opd]",
                'opd_teacher_url = "http://h:1"  # --rm-url',
                'rm_type = "zero"',
                "# Dropped: --custom-rm-",
            ],
        ),
        (
            "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only",
            ["# Dropped: --debug-train-only True: SFT has no engines", 'loss_type = "sft_loss"'],
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_flag_of_a_public_script_is_translated(
    flags: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA", "/data")
    monkeypatch.chdir(tmp_path)
    text = format_recipe(imported(tmp_path, f"python train.py {flags}")).splitlines()
    for line in lines:
        assert any(found.startswith(line) for found in text), text


def test_dry_run_needs_neither_the_key_nor_the_draft_model(
    model_dir: Callable[[str], str], printed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_KEY", raising=False)
    model = model_dir("llama3.1-8B-Instruct")
    words = f"""train --run r --hf-checkpoint {model} --prompt-data no.jsonl --num-rollout 1 --n-samples-per-prompt 2
        --use-wandb --wandb-key env:NO_KEY --sglang-speculative-algorithm EAGLE3 --rm-type math --dry-run
        --sglang-speculative-draft-model-path /nowhere/draft"""
    out = printed(*words.split())
    assert "; the trackers: " in out and "NO_KEY is not set" in out
    assert "; --sglang-speculative-draft-model-path /nowhere/draft does not exist here" in out


def test_line_without_backslash_is_read_as_part_of_the_command(tmp_path: Path) -> None:
    text = "A=(--lr 3e-6)\npython train.py --num-rollout 3\n   ${A[@]} --seed 4\necho"
    recipe = imported(tmp_path, text)
    assert recipe.config.train.lr == 3e-6 and recipe.config.train.seed == 4


def test_missing_file_of_the_model_is_a_comment(tmp_path: Path) -> None:
    script = "source /nowhere/models/qwen3-4B.sh\npython train.py ${MODEL_ARGS[@]} --lr 1e-6 ${NONE[@]}"
    text = format_recipe(imported(tmp_path, script))
    assert "# Dropped: source /nowhere/models/qwen3-4B.sh: does not exist here" in text and "lr = 1e-06" in text


def test_model_file_is_found_in_the_scripts_of_the_tree(tmp_path: Path) -> None:
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "examples" / "a").mkdir(parents=True)
    write_script(tmp_path / "scripts" / "models" / "qwen3-4B.sh", "MODEL_ARGS=(--recompute-granularity full)")
    text = "source /root/slime/scripts/models/qwen3-4B.sh\npython train.py ${MODEL_ARGS[@]}"
    recipe = import_script(write_script(tmp_path / "examples" / "a" / "run.sh", text))
    assert recipe.config.train.megatron.recompute_granularity == "full"


# ---- bash ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=1\nrun $A ${A}x \"$A y\" '$A'", ["1", "1x", "1 y", "$A"]),
        ("A=(x 'y z') # no\nA+=(w)\nrun ${A[@]} \"${A[@]}\"", ["x", "y z", "w", "x", "y z", "w"]),
        ("run ${B:-d} ${B:=e} $((2 * 3 + 1)) $C", ["d", "e", "7", "<C>"]),
        ("for i in 1 2; do A=$i; done\nf() { A=3; }\nrun $A", ["<A>"]),
        ("cat <<EOF\nA=4\nEOF\nA=5; run $A 2>&1 >/dev/null", ["5"]),
        ('X="{\n  \\"k\\": \\"v\\"}"\nrun "$X"', ['{\n  "k": "v"}']),
        ("N=4; run $((N * 512)) $((2 ** 3)) $((x))", ["2048", "<((2 ** 3))>", "<((x))>"]),
        ("run 1 $(seq 16 8 32) $(seq 2) $(seq 1 0 9)", ["1", "16", "24", "32", "1", "2", "<command>"]),
        ("B=b\nif [ $B = a ]; then\nA=1\nelif [[ $B == b ]]; then\nA=2\nelse\nA=3\nfi\nrun $A", ["2"]),
        ("B=b\nif [ $B != b ]; then\nA=1\nelif [ -z $B ]; then\nA=2\nelse\nA=3\nfi\nrun $A", ["3"]),
        ("if [ $NO = b ]; then\nA=1\nelse\nA=2\nfi\nif [ -n $HERE ]; then B=4; else B=5; fi\nrun $A $B", ["1", "4"]),
        ('A=(x y)\nrun ${A[@]+"${A[@]}"} ${NONE[@]+"${NONE[@]}"}', ["x", "y"]),
        ('J=$(cat <<E_O\n{ "a": "${B}" }\nE_O\n)\nrun 1', ["1"]),
        ('run a ${NONE[@]} "${NONE[@]}" b $@', ["a", "b"]),
        ('C="${1:-7}"; run $C $1', ["7", "<1>"]),
        ("B=/x; run \u201c${B}/y/\u201d", ["/x/y/"]),
        ("until curl -sf x; do\n  A=1\ndone\nfor ((i=0; i<3; i++)); do B=1; done\nrun $A$B", ["<A><B>"]),
        ("run $(echo $HERE | tr , x) $(basename /a/b) $(head -1 x)", ["<command>", "b", "<command>"]),
    ],
)  # fmt: skip
def test_words_are_those_of_bash(text: str, words: list[str], tmp_path: Path) -> None:
    script = read_script(write_script(tmp_path / "s.sh", text), lambda source: None, {"HERE": "/here"})
    [command] = [command for command in script.commands if command[0] == "run"]
    assert command[1:] == words


def test_sourced_files_are_read_from_the_directory_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write_script(tmp_path / "models" / "m.sh", "MODEL_ARGS=(--a 1)")
    head = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\nsource "${DIR}/models/m.sh"\n'
    script = read_script(write_script(tmp_path / "s.sh", head + "run ${MODEL_ARGS[@]}"), lambda source: Path(source))
    assert script.commands[-1] == ["run", "--a", "1"] and script.sourced == [f"{tmp_path}/models/m.sh"]


def test_paths_are_computed_from_the_directory_of_the_script(tmp_path: Path) -> None:
    text = """
    DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
    ROOT="$(cd -- "${DIR}/../.." &>/dev/null && pwd)"
    run $DIR $ROOT $(realpath $0) $(pwd)"""
    (tmp_path / "a" / "b").mkdir(parents=True)
    path = write_script(tmp_path / "a" / "b" / "s.sh", text)
    command = read_script(path, lambda source: None).commands[-1]
    assert command == ["run", str(path.parent), str(tmp_path), str(path), str(path.parent)]


@pytest.mark.parametrize("text", ["", "(", "'", "$(", "${", "A=(", "`", "\\", "if", "fi", "((", "$", "<<E\n"])
def test_unfinished_text_does_not_fail(text: str, tmp_path: Path) -> None:
    read_script(write_script(tmp_path / "s.sh", text), lambda source: None)
    assert isinstance(list(split_statements(text)), list)


def test_formulas_are_of_integers_only() -> None:
    assert compute("(3 + 4) * -2") is None and compute("(3 + 4) * 2 - 6 / 4") == "13"
    assert compute("__import__('os')") is None and compute("1 / 0") is None


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_plans(recipe: Path, model_dir: Callable[[str], str], printed: Callable[..., str]) -> None:
    models = [line.split()[2] for line in recipe.read_text().splitlines() if line.startswith("# Model: ")]
    is_demo, flow = recipe.stem.startswith("demo-"), "sft" if recipe.stem == "demo-sft" else "train"
    base = ["--config", "demo-grpo"] if is_demo and flow == "train" else []
    words = [*base, "--config", str(recipe), "--hf-checkpoint", model_dir((models or ["qwen3-0.6B"])[0])]
    out = printed(flow, *words, "--run", "r", "--prompt-data", "/nowhere.jsonl", "--dry-run")
    assert "optimizer steps" in out and "a checkpoint" in out
    if not is_demo and recipe.stem != "laptop":  # they need the memory of a CPU
        assert "fits: a GPU" in printed("doctor", "--plan", *words)


EVAL = """
eval:
  defaults: {n_samples_per_eval_prompt: 2, temperature: null}
  datasets:
    - {name: aime, path: /d/aime.jsonl, rm_type: null}
    - {name: gsm8k, path: "/d/qu\\"ote.jsonl"}
"""
CUSTOM = {
    "null": "mis_veto: null\nmis_mode: mask\n",
    "null in a list": "levels: [1, null]\n",
    "key with spaces and dots": "table: {'a b.c': {'d e': 1}}\n",
    "quotes, backslashes and lines": 'text: "a \\"b\\" \\\\ c\\nd"\n',
    "delete character": 'text: "a\\x7fb"\n',
    "not ASCII": "text: 'déjà 数 🙂'\n",
    "nested": "table: {a: {b: [{c: 1.5, d: true}]}}\n",
}


@pytest.mark.parametrize(
    ("custom", "with_evaluation"), [(None, False), (None, True), *((name, True) for name in CUSTOM)]
)
def test_recipe_is_toml_that_means_the_script(custom: str | None, with_evaluation: bool, tmp_path: Path) -> None:
    (tmp_path / "eval.yaml").write_text(EVAL)
    (tmp_path / "custom.yaml").write_text(CUSTOM[custom] if custom else "")
    words = f"--eval-config {tmp_path}/eval.yaml --eval-interval 5" if with_evaluation else ""
    words += f" --custom-config-path {tmp_path}/custom.yaml" if custom else ""
    text = f"python train.py --hf-checkpoint /m --save /s/r --num-rollout 1 {words}"
    recipe = imported(tmp_path, text)
    text = format_recipe(recipe)
    tomllib.loads(text)
    (tmp_path / "recipe.toml").write_text(text)
    config = parse_config(["--config", str(tmp_path / "recipe.toml")])
    assert config.rollout == recipe.config.rollout and bool(config.rollout.plugin_args) == bool(custom)
    assert config.eval == recipe.config.eval


@pytest.mark.parametrize("path", ["a\x7f.yaml", "a\r\n[run]"])
def test_comment_of_a_recipe_stays_in_its_line(path: str, tmp_path: Path) -> None:
    words = f"--hf-checkpoint /m --save /s/r --num-rollout 1 --eval-config '{path}'"
    recipe = imported(tmp_path, f"python train.py {words}")
    assert set(tomllib.loads(format_recipe(recipe))) == {"run", "convert"}
