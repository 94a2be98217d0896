"""Every `penstock` command inside another one (docker run, ray job submit, kubectl exec, sbatch, the build of an image)
is accepted by the command's own parser, and `ray` and `mlflow` commands by theirs. Commands of a page that are not in
another one are checked by tests/docs/test_snippets.py."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from penstock.flows import cli
from penstock.flows.config import Flow, validate_config
from penstock.flows.install import command as setup
from penstock.flows.install.command import declared
from penstock.flows.options.argv import split_args
from penstock.flows.options.flags import parse_values
from penstock.flows.services import deploy

ROOT = Path(__file__).parents[2]
CLUSTERS = ROOT / "configs/clusters"
PAGES = [ROOT / "docs" / f"{name}.md" for name in ("containers", "slurm", "kubernetes", "ray-jobs")]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shell_lines() -> Iterator[tuple[str, str]]:
    """Yield where a shell command is, and the command in one line: of the pages, the image and the manifests."""
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            yield from ((page.name, line) for line in re.sub(r"\\\n\s*", " ", block).splitlines())
    container = re.sub(r"\\\n\s*", " ", (CLUSTERS / "Containerfile").read_text())
    for line in container.splitlines():
        if line.startswith("RUN"):
            yield from (("Containerfile", part.strip()) for part in line.split("&&"))
    for path in sorted((CLUSTERS / "kubernetes").glob("*.yaml")):
        for text in re.findall(r"(?:ray start|exec prefect)[^&]+", " ".join(path.read_text().split())):
            yield path.name, text.partition(" env:")[0]


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Return the commands of a program: where they are, and their arguments."""
    found = []
    for place, line in shell_lines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words = list(lexer)
        for index, word in enumerate(words):
            if word.endswith(".sbatch") and program == "penstock":
                found.append((place, ["train", "--ray-address", "10.0.0.1:6379", *words[index + 1 :]]))
            if program == "penstock" and place.endswith(".md") and index == 0:
                continue
            # "penstock" is also a name of a namespace, a user and a work pool
            if word == program and set(words[index + 1 : index + 2]) & {*cli.COMMANDS, "start"}:
                rest = words[index + 1 :]
                end = next((at for at, each in enumerate(rest) if set(each) <= set("|;&<>")), len(rest))
                found.append((place, rest[:end]))
    return found


def check_training(argv: list[str]) -> None:
    """Check the flags of a run, without the recipe, which does not exist."""
    at = argv.index("--config") if "--config" in argv else len(argv)
    validate_config(parse_values(argv[:at] + argv[at + 2 :]))


@pytest.mark.parametrize(
    "place, words", commands("penstock"), ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else value
)
def test_penstock_command_is_accepted_by_its_parser(place: str, words: list[str]) -> None:
    name, *argv = [
        re.sub(r"\$\{(KIND|EXTRAS)\}", lambda found: {"KIND": "cpu", "EXTRAS": "s3"}[found[1]], word) for word in words
    ]
    argv = [word for word in argv if "TORCH_INDEX" not in word]
    if name == "train":
        check_training(argv)
    elif name == "deploy":
        [flow], own, rest = split_args(argv, deploy.FIELDS)
        assert set(own) == {"--name", "--cron"}
        assert flow in list(Flow)
        check_training(rest)
    elif name == "setup":
        positional, own, rest = split_args(argv, setup.FLAGS)
        assert not positional and not rest
        assert setup.parse_extras(own.get("--with", ""), ROOT) is not None
    else:
        assert (name, argv) == ("demo", []), f"{place}: add a check for penstock {name}"


def test_commands_of_every_kind_were_found() -> None:
    names = {(place, words[0]) for place, words in commands("penstock")}
    assert {("slurm.md", "train"), ("ray-jobs.md", "train"), ("kubernetes.md", "deploy")} <= names
    assert {("containers.md", "demo"), ("Containerfile", "setup")} <= names


def test_extras_of_the_image_exist() -> None:
    extras = re.search(r"^ARG EXTRAS=(.*)$", (CLUSTERS / "Containerfile").read_text(), re.MULTILINE)
    assert extras is not None and set(extras[1].split(",")) <= set(declared(ROOT)[1])


def test_image_is_built_from_everything_that_the_wheel_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in lines if line.startswith("!")}
    packages = {
        path.resolve().relative_to(ROOT).parts[0] for path in (ROOT / "penstock").iterdir() if path.is_symlink()
    }
    assert allowed == {"penstock", "pyproject.toml", "README.md", "LICENSE", *packages} and "*" in lines


MAKE_CONTEXTS = """
import json, sys
from mlflow.cli import server
from ray.scripts.scripts import start
given = json.load(sys.stdin)
for words in given["ray"]:
    start.make_context("start", words)
server.make_context("server", given["mlflow"])
"""


@pytest.mark.integration
def test_ray_and_mlflow_accept_their_commands() -> None:
    places, starts = set(), []
    for place, words in commands("ray"):
        places.add(place)
        starts.append(words[1:])
    sbatch = re.findall(r'^ +start_ray "[^"]+" (.*)$', (CLUSTERS / "penstock.sbatch").read_text(), re.MULTILINE)
    for line in sbatch:
        plain = re.sub(r'"?\$\(address_of "\$node"\)"?|"?\$[A-Z_]+', "1", line).replace('"', "")
        starts.append(["--block", "--disable-usage-stats", *shlex.split(plain)])
    assert len(sbatch) == 2 and places == {"ray-jobs.md", "prefect-worker.yaml"}
    [deployment] = [
        each
        for each in yaml.safe_load_all((CLUSTERS / "kubernetes/mlflow.yaml").read_text())
        if each["kind"] == "Deployment"
    ]
    server = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    # In a process of its own: these imports decide the authentication of all later Ray clusters of a process.
    given = json.dumps({"ray": starts, "mlflow": server})
    subprocess.run([sys.executable, "-c", MAKE_CONTEXTS], input=given, text=True, check=True)
