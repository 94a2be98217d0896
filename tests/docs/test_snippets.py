"""Every code block of the documentation is checked: commands by the real parsers, Python, TOML, JSON and SQL as well.

Blocks without a language, and `text`, are output. Nothing is started: commands that train are parsed and validated as
a configuration, other commands run in an empty directory, where the run that they name does not exist.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.flows import cli
from penstock.flows.config import SECTIONS, validate_config
from penstock.flows.options import flags
from penstock.stages.eval.config import EvalConfig
from penstock.storage.errors import PenstockError

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*/README.md")]
)
BLOCK = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LANGUAGES = ("bash", "python", "toml", "json", "sql")
OUTPUT = ("", "text", "console")
FLOWS = ("train", "train-async", "sft", "eval")
STARTING = ("demo", "doctor", "deploy")  # commands that act without a run: only their flags are checked
# Programs of others, which are not checked.
PROGRAMS = {
    *("ls", "cd", "cat", "jq", "dot", "git", "openssl", "kill", "source", "export", "head", "tail", "ssh", "curl"),
    *(
        "pip",
        "apt",
        "hf",
        "ray",
        "prefect",
        "tensorboard",
        "wandb",
        "docker",
        "kubectl",
        "helm",
        "sbatch",
        "uv",
        "pre-commit",
    ),
}
# A command that was parsed completely fails because its run, store or file does not exist.
NOT_THERE = re.compile(
    r"no such file|does not exist|no run|has no|not found|cannot be read|is not a run|no policy|is not a directory|"
    r"no champion|no decision",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Snippet:
    """One code block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def snippets_of(page: Path) -> Iterator[Snippet]:
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        yield Snippet(page, text.count("\n", 0, match.start()) + 1, match[2], "\n".join(lines))


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
        program = words[0].removeprefix(".venv/bin/")
        if program == "make":
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert {word for word in words[1:] if "=" not in word} <= set(targets), f"{snippet}: {words}"
        elif program in ("python", "pytest"):
            check_script(snippet, words)
        elif program == "penstock":
            check_command(snippet, words[1:], capsys)
        else:
            assert program in PROGRAMS, f"{snippet}: {words}"


def check_script(snippet: Snippet, words: list[str]) -> None:
    """Check that the file of this repository that `python` or `pytest` names exists."""
    paths = [word for word in words[1:] if "/" in word and not word.startswith("-")]
    name = paths[0].removeprefix("/path/to/penstock/") if paths else ""
    assert words[1] == "-m" or (ROOT / name).exists(), f"{snippet}: {name} does not exist"


def check_command(snippet: Snippet, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check a `penstock` command without starting anything."""
    command, argv = words[0], [word for word in words[1:] if word not in ("--dry-run", "--help-all")]
    if command in FLOWS and not {"--rescore", "--compare"} & set(argv):
        try:
            validate_config(flags.parse_values(argv))
        except PenstockError as error:
            pytest.fail(f"{snippet}: penstock {' '.join(words)}: {error}")
        return
    cli.main([command, *(word for word in argv if word in ("--rescore", "--compare")), "--help"])
    known = {"--config", *flags.penstock_flags(), *re.findall(r"--[a-z-]+", capsys.readouterr().out)}
    used = {word.partition("=")[0] for word in argv if word.startswith("--")}
    assert {flag for flag in used - known if not flag.startswith(flags.ENGINE_PREFIXES)} == set(), f"{snippet}: {words}"
    if command not in STARTING:
        code = cli.main([command, *(word.replace("s3://", "") for word in argv)])
        message = capsys.readouterr().err
        assert code == 0 or NOT_THERE.search(message), f"{snippet}: penstock {' '.join(words)}: {message}"


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
