"""`penstock setup`: which steps it has, what it finds missing, and what it does when the network fails."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from penstock.flows import cli
from penstock.flows.install import command
from penstock.flows.install.command import (
    Step,
    declared,
    describe_progress,
    installation_steps,
    missing_requirements,
    normalize,
    read_lock,
    run_pip,
    run_step,
)
from penstock.flows.options.argv import activate_command
from penstock.storage.errors import InstallError

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "configs/environment/lock").glob("*.txt"))


# ---- what is missing -------------------------------------------------------------------------------------------------


def add_package(site: Path, name: str, version: str, *, requires: tuple[str, ...] = (), whole: bool = True) -> None:
    """Install a package's metadata, as pip does; `whole` is False as after a killed pip."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
    if whole:
        (folder / "INSTALLER").write_text("pip\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages at the beginning of the import path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def make_checkout(folder: Path, dependencies: list[str], extras: dict[str, list[str]]) -> Path:
    lines = [f"{name} = {packages!r}" for name, packages in extras.items()]
    text = "\n".join(["[project]", f"dependencies = {dependencies!r}", "[project.optional-dependencies]", *lines])
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_every_kind_of_missing_package_is_named_once(site: Path, tmp_path: Path) -> None:
    add_package(site, "made-base", "1.5", requires=("made-deep[fast]>=1", "absent-here; python_version < '3'"))
    add_package(site, "made-deep", "1.0+cpu", requires=("made-fast; extra == 'fast'", "made-slow; extra == 'slow'"))
    add_package(site, "made-part", "2.0", whole=False)
    add_package(site, "made-old", "1.0", requires=("made-base",))
    add_package(site, "made-other", "3.0")
    source = make_checkout(
        tmp_path,
        ["Made.Base>=1", "made_part", "made-old>=2", "made-other", "made-gone==1"],
        {"s3": ["made-driver"], "test": ["penstock-rl[s3]", "penstock-rl[test]"], "dev": ["made-tool"]},
    )
    pins = {"made-other": "3.1", "made-deep": "1.0"}
    assert missing_requirements(["test"], source, pins) == [
        "made-driver: not installed",
        "made-fast: not installed",
        "made-gone: not installed",
        "made-old: 1.0 found, >=2 needed",
        "made-other: 3.0 found, 3.1 in the lock file",
        "made-part: installed in part (the installation was interrupted)",
    ]


def test_installed_wheel_and_checkout_declare_the_same(site: Path, tmp_path: Path) -> None:
    source = make_checkout(tmp_path, ["made-base>=1"], {"s3": ["made-driver>=2"], "test": ["penstock-rl[s3]"]})
    requires = ("made-base>=1", 'made-driver>=2; extra == "s3"', "penstock-rl[s3] ; extra == 'test'")
    add_package(site, "penstock-rl", "9", requires=requires)
    metadata = site / "penstock_rl-9.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text() + "Provides-Extra: s3\nProvides-Extra: test\n")
    assert declared(None) == declared(source)


# ---- the steps and the lock files ------------------------------------------------------------------------------------


def test_steps_without_cuda_install_torch_alone_first_and_sglang_without_dependencies() -> None:
    pip, torch, project, sglang, torchvision = installation_steps("cpu", ["s3"], ROOT, "https://index.example/cpu")
    assert pip.arguments[0] == "--upgrade"
    assert torch.arguments == (f"torch=={command.TORCH}", "--index-url", "https://index.example/cpu")
    assert project.arguments[2:] == ("--editable", f"{ROOT}[cpu,s3]") and "cpu-py3" in project.arguments[1]
    assert sglang.arguments[:2] == ("--no-deps", f"sglang=={command.SGLANG['sglang']}")
    assert {"--no-deps", "--target", str(command.sglang_site())} < set(torchvision.arguments)
    with_cuda = installation_steps("cuda", [], ROOT, None)
    assert [step.name for step in with_cuda[:2]] == [pip.name, torch.name] and len(with_cuda) == 3
    assert with_cuda[2].arguments[3] == f"{ROOT}[gpu]" and "cuda-py3" in with_cuda[2].arguments[1]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_lock_file_pins_every_declared_package_to_an_allowed_version(path: Path) -> None:
    pins = read_lock(path)
    base, extras = declared(ROOT)
    python = path.stem.partition("-py")[2]
    unused = {"cpu": "gpu", "cuda": "cpu"}[path.stem.partition("-")[0]]
    texts = base + [text for name, packages in extras.items() if name != unused for text in packages]
    for requirement in map(Requirement, texts):
        name = normalize(requirement.name)
        if name in ("penstock-rl", *(("torch",) if unused == "gpu" else ())):  # torch without CUDA is a step of its own
            continue
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{name}: {pins[name]}"
    assert python in path.read_text().splitlines()[0]


def test_lock_files_agree_with_the_steps_and_the_help_names_every_extra() -> None:
    assert set(declared(ROOT)[1]) - {"cpu", "gpu"} <= set(re.findall(r"[a-z0-9]+", command.USAGE))
    assert [path.stem for path in LOCKS] == [
        f"{kind}-py{python}" for kind in ("cpu", "cuda") for python in ("3.11", "3.12")
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.13"
    for path in LOCKS:
        pins = read_lock(path)
        if path.stem.startswith("cuda"):
            assert pins["torch"] == command.TORCH and pins["sglang"] == command.SGLANG["sglang"]
        else:
            assert "torch" not in pins and not [name for name in pins if name.startswith("nvidia-")]
    assert f"TORCH={command.TORCH}\n" in (ROOT / "configs/environment/lock.sh").read_text()


def test_setup_runs_before_any_package_is_installed() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from penstock.flows.cli import main; main(['setup', '--help'])"
    command = [sys.executable, "-S", "-c", code, str(ROOT)]  # -S: without site-packages
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0 and "penstock setup" in done.stdout, done.stderr


def test_command_in_an_incomplete_environment_names_setup_unless_the_module_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: list[str]) -> int:
        raise ModuleNotFoundError(name=argv[0])

    monkeypatch.setitem(cli.COMMANDS, "runs", run)
    assert cli.main(["runs", "rich.console"]) == 2
    assert "rich.console is not installed" in (err := capsys.readouterr().err) and "setup" in err
    for own in ("penstock.flows.gone", "tomllib.gone"):
        assert cli.main(["runs", own]) == 1
        assert "report this bug" in capsys.readouterr().err


def test_activate_command_is_relative_below_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "my env"))
    assert activate_command() == f"source '{tmp_path}/my env/bin/activate'"
    monkeypatch.chdir(tmp_path)
    assert activate_command() == "source 'my env/bin/activate'"


# ---- running them ----------------------------------------------------------------------------------------------------


def test_finished_steps_are_skipped_and_a_replaced_package_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"first": ["a: not installed"], "second": ["b: not installed"]}

    def run(step: Step, log: Path) -> None:
        state[step.name] = []
        if step.name == "second":
            state["first"] = ["a: 2 found, 1 needed"]

    monkeypatch.setattr(command, "run_step", run)
    plan = [Step(name, lambda name=name: state[name], ()) for name in state]
    with pytest.raises(InstallError, match="a: 2 found"):
        command.install(plan, tmp_path / "log")
    state["first"] = []
    command.install(plan, tmp_path / "log")
    assert capsys.readouterr().out.count("done before") == 2


def test_step_installs_partly_installed_packages_again(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_package(site, "made-part", "2.0", whole=False)
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(command, "run_pip", lambda arguments, log: calls.append(tuple(arguments)))
    lines = iter([["made-part: installed in part (the installation was interrupted)"], []])
    run_step(Step("made", lambda: next(lines), ("made-part",)), tmp_path / "log")
    assert calls == [("--no-deps", "--ignore-installed", "made-part==2.0"), ("made-part",)]


# ---- pip and the network ---------------------------------------------------------------------------------------------


class FlakyIndex(http.server.BaseHTTPRequestHandler):
    """A package index with one package. The first downloads of its wheel break off in the middle."""

    wheel: Path
    breaks: int  # downloads that still break off

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        link = f'<a href="/{self.wheel.name}">{self.wheel.name}</a>'
        content = self.wheel.read_bytes() if is_wheel else link.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if is_wheel and type(self).breaks > 0:
            type(self).breaks -= 1
            content = content[: len(content) // 2]
        self.wfile.write(content)
        self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a FlakyIndex. pip uses no other index, nor its cache."""
    wheel = tmp_path / "made_package-1.0-py3-none-any.whl"
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: made-package\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made_package.py", "#" * 200_000)
        for name, content in files.items():
            archive.writestr(f"made_package-1.0.dist-info/{name}", content)
    FlakyIndex.wheel, FlakyIndex.breaks = wheel, 1
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FlakyIndex)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()
    server.server_close()


def test_progress_is_what_pip_does_and_not_its_last_line() -> None:
    lines = [
        "Looking in indexes: https://pypi.org/simple",
        "Downloading filelock-4.3.1-py3-none-any.whl (244 kB)",
        "WARNING: Location 'file:///mirror/' is ignored: it is neither a file nor a directory.",
        "WARNING: Attempting to resume incomplete download (0 bytes/244 kB, attempt 1)",
        "Installing collected packages: mpmath, filelock, torch",
        "Attempting uninstall: filelock",
    ]
    assert [describe_progress(lines[:number]) for number in (1, 3, 4, 6)] == [
        "pip is starting",
        "downloading filelock-4.3.1-py3-none-any.whl (244 kB)",
        "Attempting to resume incomplete download (0 bytes/244 kB, attempt 1)",
        "installing 3 packages, which takes minutes",
    ]


@pytest.mark.integration
def test_broken_downloads_are_repeated_and_a_missing_package_is_not(
    index: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    arguments = ("--no-deps", "--target", str(target), "--index-url", index)
    run_pip((*arguments, "made-package"), log)
    assert (target / "made_package.py").stat().st_size == 200_000 and FlakyIndex.breaks == 0
    shutil.rmtree(target)
    with pytest.raises(InstallError, match="made-package"):
        run_pip((*arguments, "made-package==2"), log)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(InstallError, match="repeat the command"):
        run_pip(("--no-deps", "--target", str(target), "--index-url", "http://127.0.0.1:9/simple", "made-package"), log)
    assert log.read_text().count("No matching distribution") == 2
