"""Every code block of the documentation is checked: commands by the real parsers, Python, TOML, JSON and SQL as well.

Blocks without a language, and `text`, are output. Nothing is started: commands that train are parsed and validated as
a configuration, other commands run in an empty directory, where the run that they name does not exist.
tests/docs/test_walk.py runs the commands of the first page.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from doc_pages import BLOCK, ROOT, Snippet, snippets_of

from penstock.flows import cli
from penstock.flows.config import SECTIONS, validate_config
from penstock.flows.options import flags
from penstock.flows.options.help import SHORT
from penstock.stages.eval.config import EvalConfig
from penstock.storage.errors import PenstockError
from tests.engines.real_models import REAL_MODELS
from tests.forked_worker import forked_workers  # noqa: F401 fixture

PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*/README.md")]
)
LANGUAGES = ("bash", "python", "toml", "json", "sql")
OUTPUT = ("", "text", "console")
FLOWS = ("train", "sft", "eval")
# Commands that fail before they do anything if their run or file does not exist. Only these are called: of every other
# command, also of one that is added later, only the flags are checked.
HARMLESS = {
    *("convert", "export", "eval", "import-slime", "resume", "replay", "fork", "promote", "rm", "verify", "gc"),
    *("bisect", "runs", "show", "lineage", "samples", "query", "report", "regrade"),
}
# Programs of others, which are not checked.
PROGRAMS = re.compile(
    "ls|cd|cat|base64|mkdir|jq|dot|git|openssl|kill|source|export|head|tail|ssh|curl|pip|apt|hf|ray|prefect|tensorboard|"
    "wandb|docker|kubectl|helm|sbatch|uv|pre-commit"
)
# A command that was parsed completely fails because its run, store or file does not exist.
NOT_THERE = re.compile(
    r"no such file|does not exist|no run|has no|not found|cannot be read|is not a run|no policy|is not a directory|"
    r"no champion|no decision",
    re.IGNORECASE,
)


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]


def of_language(language: str) -> list[Snippet]:
    return [snippet for snippet in SNIPPETS if snippet.language == language]


def commands_of(snippet: Snippet) -> Iterator[list[str]]:
    """Yield the simple commands of a shell block, without redirections, assignments and comments."""
    for line in re.sub(r"\\\n\s*", " ", snippet.text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        for token in [*lexer, ";"]:
            if set(token) <= set("|;&") and token != "":
                if words:
                    yield words
                words = []
            elif words and set(words[-1]) <= set("<>"):
                words.pop()  # the file of a redirection
            elif token != "..." and (words or not re.match(r"^[A-Z_]+=", token)):
                words.append(token)


def test_every_block_has_a_known_language() -> None:
    unknown = [f"{snippet}: {snippet.language}" for snippet in SNIPPETS if snippet.language not in LANGUAGES + OUTPUT]
    assert unknown == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that commands of the documentation name."""
    folder = tmp_path_factory.mktemp("workplace")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("recipe.toml", "qwen3-4B.toml"):
        (folder / name).write_text((ROOT / "configs/recipes/1gpu.toml").read_text())
    (folder / "evals.toml").write_text('[[datasets]]\nname = "aime"\npath = "aime.jsonl"\n')
    return folder


@pytest.mark.parametrize("snippet", of_language("bash"), ids=str)
def test_commands_are_parsed(
    snippet: Snippet, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    for words in commands_of(snippet):
        program = re.sub(r"^python3(\.\d+)?$", "python", words[0].rpartition("/bin/")[2])
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in words[1:] if "=" not in word} <= set(targets), f"{snippet}: {words}"
        elif program in ("python", "pytest"):
            check_script(snippet, words)
        elif program == "penstock":
            check_command(snippet, words[1:], capsys)
        else:
            assert PROGRAMS.fullmatch(program), f"{snippet}: {words}"


def check_script(snippet: Snippet, words: list[str]) -> None:
    """Check that the file of this repository that `python` or `pytest` names exists."""
    paths = [word for word in words[1:] if "/" in word and not word.startswith("-")]
    name = paths[0].removeprefix("/path/to/penstock/") if paths else ""
    assert words[1] == "-m" or (ROOT / name).exists(), f"{snippet}: {name} does not exist"


def check_command(snippet: Snippet, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check a `penstock` command without starting anything."""
    command, argv = words[0], [word for word in words[1:] if word not in ("--dry-run", "--help-all")]
    if command in FLOWS and "--compare" not in argv:
        try:
            validate_config(flags.parse_values(argv))
        except PenstockError as error:
            pytest.fail(f"{snippet}: penstock {' '.join(words)}: {error}")
        return
    cli.main([command, *(word for word in argv if word in ("--compare", "--cost", "--to")), "--help"])
    known = {"--config", *flags.penstock_flags(), *re.findall(r"--[a-z-]+", capsys.readouterr().out)}
    used = {word.partition("=")[0] for word in argv if word.startswith("--")}
    assert {flag for flag in used - known if not flag.startswith(flags.engine_prefixes())} == set(), (
        f"{snippet}: {words}"
    )
    if command in HARMLESS:
        # Neither a store on the network nor a directory of this machine is reached.
        code = cli.main([command, *(word.removeprefix("s3://").removeprefix("/") for word in argv)])
        message = capsys.readouterr().err
        assert code == 0 or NOT_THERE.search(message), f"{snippet}: penstock {' '.join(words)}: {message}"


# ---- commands that train, as printed, up to the start ----------------------------------------------------------------

MODEL = re.compile(r"--hf-checkpoint [\w/.-]+ .*--(eval-)?prompt-data ")  # commands without `...` and champions
PRINTED = [
    (f"{snippet}", words[1:])
    for snippet in of_language("bash")
    # The tests of the examples type those of examples/shapes, which docs/images.md repeats: they need its model.
    if not str(snippet).startswith(("examples/", "docs/images.md")) or "gsm8k" in str(snippet)
    for words in commands_of(snippet)
    if words[0].endswith("penstock") and words[1] in FLOWS and MODEL.search(" ".join(words))
]
PRINTED += [(f"penstock {name} --help", text.example.split()[1:]) for name, text in SHORT.items()]
ROW = {
    **dict.fromkeys(("input", "prompt", "question"), r"What is 15 + 27? Write it in \\boxed{}, after Answer:"),
    **dict.fromkeys(("label", "answer"), "42"),
    "messages": [{"role": "user", "content": "37+8="}, {"role": "assistant", "content": "45"}],
    "metadata": {"data_source": "sums", "ground_truth": "42", "extra_info": {}},
}


FULL = pytest.mark.full


@pytest.fixture(scope="module")
def stocked_workplace(workplace: Path, tiny_model: Path) -> Path:
    """The workplace with models, and with the functions that pages print."""
    models = {str(words[words.index("--hf-checkpoint") + 1]) for _, words in PRINTED if "--hf-checkpoint" in words}
    for name in models | {"/models/Qwen3-4B"}:
        directory = workplace / name.removeprefix("/")
        shutil.copytree(tiny_model, directory)
        config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": 65536}
        if name.rpartition("/")[2] == "GLM-4.5":
            real = REAL_MODELS["glm4.5-355B-A32B"]
            config = {"architectures": [real.architecture], **real.config}
            (directory / "model.safetensors").unlink()
        (directory / "config.json").write_text(json.dumps(config))
    recipe = (ROOT / "configs/recipes/1gpu.toml").read_text()
    (workplace / "rows.jsonl").write_text((json.dumps(ROW) + "\n") * 32)
    inputs = {"[convert]": 'hf_checkpoint = "models/Qwen3-4B"', "[rollout]": 'prompt_data = "rows.jsonl"'}
    for section, line in inputs.items():
        recipe = recipe if section in recipe else f"{recipe}\n{section}\n"
        recipe = recipe.replace(section, f"{section}\n{line}")
    (workplace / "my-run.toml").write_text(recipe)
    (workplace / "my_reward.py").write_text("def grade(args, sample):\n    return 1.0\n")
    (workplace / "my_verl_reward.py").write_text("def compute_score(*args, **kwargs):\n    return 1.0\n")
    (workplace / "my_trl_reward.py").write_text(
        "def reward_func(completions, **kwargs):\n    return [1.0 for _ in completions]\n"
    )
    return workplace


@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param(
            place, words, marks=[] if "--help" in place or "docs/start.md" in place else FULL, id=f"{place} {n}"
        )
        for n, (place, words) in enumerate(PRINTED)
    ],
)
def test_printed_command_starts_as_printed(
    place: str,
    words: list[str],
    stocked_workplace: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(stocked_workplace)
    if "s3://" in str(words):  # for --store s3://bucket without --store-options
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_options")["endpoint_url"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("STORE_KEY", "0a1b2c3d-key")
    monkeypatch.setenv("STORE_SECRET", "0a1b2c3d-hidden")
    words = [word.replace("/models/", "models/") for word in words]
    for word in words:
        if word.endswith(".jsonl"):
            (stocked_workplace / word).parent.mkdir(parents=True, exist_ok=True)
            (stocked_workplace / word).write_text((json.dumps(ROW) + "\n") * 32)
    for snippet in of_language("python"):  # the functions that the page prints
        if place.startswith(f"{snippet.page.relative_to(ROOT)}:") and (
            name := re.match(r"# (\w+\.py)\n", snippet.text)
        ):
            (stocked_workplace / name[1]).write_text(snippet.text)
    code = cli.main([*words, *(["--dry-run"] if "--dry-run" not in words else [])])
    out, err = capsys.readouterr()
    assert code == 0, f"{place}: penstock {' '.join(words)}: {err}"
    last = out.splitlines()[-1]
    assert last.startswith("ready: " if "GLM-4.5" not in str(words) else "not ready here: --hf-checkpoint"), last


@pytest.mark.parametrize("snippet", of_language("python"), ids=str)
def test_python_compiles_and_its_imports_exist(snippet: Snippet) -> None:
    for node in ast.walk(ast.parse(snippet.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), f"{snippet}: {ast.unparse(node)}"


@pytest.mark.parametrize("snippet", of_language("toml"), ids=str)
def test_toml_is_a_configuration(snippet: Snippet, tmp_path: Path) -> None:
    values = tomllib.loads(snippet.text)
    if "datasets" in values:
        (tmp_path / "evals.toml").write_text(snippet.text)
        assert EvalConfig(eval_config=str(tmp_path / "evals.toml")).eval_config is not None
    else:
        assert set(values) <= set(SECTIONS)
        validate_config(values)


@pytest.mark.parametrize("snippet", of_language("json"), ids=str)
def test_json_is_valid(snippet: Snippet) -> None:
    try:
        json.loads(snippet.text)
    except json.JSONDecodeError:
        assert all(isinstance(json.loads(line), dict) for line in snippet.text.splitlines())


@pytest.mark.parametrize("snippet", of_language("sql"), ids=str)
def test_sql_is_valid(snippet: Snippet) -> None:
    duckdb = pytest.importorskip("duckdb")
    assert duckdb.extract_statements(snippet.text)


# ---- functions of the pages, executed -------------------------------------------------------------------------


def module_of(page: str, name: str) -> dict[str, Any]:
    """Return the names that a page's Python block defines; its first line is the comment `# NAME`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = next(match[3] for match in BLOCK.finditer(text) if match[3].startswith(f"# {name}\n"))
    names: dict[str, Any] = {}
    exec(compile(code, name, "exec"), names)
    return names


@pytest.mark.parametrize(
    ("page", "label", "answers"),
    [
        ("rewards.md", "45", {"45<|end|>": 1.0, "46<|end|>": 0.25, "": 0.0, "no": 0.0}),
        ("start.md", "42", {r"15 + 27 = \boxed{42}.<|im_end|>": 1.0, "41": 0.1, "": 0.0}),
    ],
)
def test_reward_of_the_page_grades(page: str, label: str, answers: dict[str, float]) -> None:
    grade = module_of(page, "my_reward.py")["grade"]
    assert {text: grade(None, SimpleNamespace(response=text, label=label)) for text in answers} == answers


def test_generate_function_of_the_page_on_tools_calls_its_tool() -> None:
    generate = module_of("generation.md", "calculator.py")["generate"]
    appended: list[str] = []

    class Engine:
        async def generate(self, sample: object, stop: list[str]) -> str:
            assert stop == ["</call>"]
            return replies.pop(0)

        def append(self, sample: object, text: str) -> bool:
            appended.append(text)
            return True

    replies = ["<call>12+30.5</call>", "42.5"]
    asyncio.run(generate(SimpleNamespace(max_turns=4), object(), {}, Engine()))
    assert (appended, replies) == (["<result>42.5</result>"], [])


def test_adapters_of_the_migration_pages_call_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    verl, trl = ModuleType("my_verl_reward"), ModuleType("my_trl_reward")

    def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> object:
        right = (data_source, solution_str, ground_truth, extra_info) == ("s", "r", 4, {"a": 1})
        return {"score": float(right), "acc": right} if right else 0

    verl.compute_score = compute_score
    trl.reward_func = lambda prompts, completions, **columns: [
        len(prompt + text) + n for prompt, text, n in zip(prompts, completions, columns["n"])
    ]
    monkeypatch.setitem(sys.modules, "my_verl_reward", verl)
    monkeypatch.setitem(sys.modules, "my_trl_reward", trl)
    metadata = {"data_source": "s", "ground_truth": 4, "extra_info": {"a": 1}}
    grade = module_of("coming-from.md", "verl_adapter.py")["grade"]
    rewards = [grade(None, SimpleNamespace(response=text, metadata=metadata)) for text in ("r", "r<|im_end|>")]
    assert rewards == [1.0, 0.0]
    sample = SimpleNamespace(prompt="p", response="abc", metadata={"n": 2})
    assert module_of("coming-from.md", "trl_adapter.py")["grade"](None, sample) == 6.0


def test_conversions_of_trl_and_verl_data_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [{"role": "user", "content": "2+2?"}]
    rows = [{"prompt": prompt, "solution": "4", "level": 1}]
    module_of("coming-from.md", "trl_to_jsonl.py")["write_rows"](rows, str(tmp_path / "train.jsonl"), "solution")
    [written] = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert written == {"prompt": prompt, "label": "4", "metadata": {"solution": "4", "level": 1}}

    row = {"data_source": "sums", "prompt": prompt, "reward_model": {"ground_truth": 4}, "extra_info": {"index": 7}}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    monkeypatch.setattr(sys, "argv", ["verl_to_jsonl.py", str(tmp_path / "train.parquet")])
    module_of("coming-from.md", "verl_to_jsonl.py")
    metadata = {"data_source": "sums", "ground_truth": 4, "extra_info": {"index": 7}}
    assert json.loads(capsys.readouterr().out) == {"prompt": prompt, "label": 4, "metadata": metadata}
