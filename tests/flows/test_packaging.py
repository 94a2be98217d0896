"""The wheel: what is in it, and that it works outside the checkout, also beside folders named like our packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "stages", "engines", "storage")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    source, folder = tmp_path_factory.mktemp("wheel") / "source", tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("penstock", *PACKAGES, "configs", "third_party"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True, capture_output=True, timeout=300)
    [path] = folder.glob("penstock_rl-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A new virtual environment; removed after the tests, because it has several gigabytes."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    yield folder
    shutil.rmtree(folder)


def run_script(installed: Path, folder: Path, text: str) -> str:
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        [sys.executable, str(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_wheel_has_every_module_below_penstock_and_no_other_package(installed: Path) -> None:
    assert sorted(path.name.partition("-")[0] for path in installed.iterdir()) == ["penstock", "penstock_rl"]
    assert not [path for path in installed.rglob("*") if path.is_symlink()]
    for package in PACKAGES:
        modules = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
        assert {
            path.relative_to(installed / "penstock") for path in (installed / "penstock" / package).rglob("*.py")
        } == modules


FILES_PROGRAM = """
from penstock.engines.sglang.backend import LAUNCHER as sglang
from penstock.flows.config import RECIPES
from penstock.flows.inspect.watch import WatchedRuns, _ASSETS
from penstock.flows.install.command import lock_file
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.prefect_api import LAUNCHER as prefect

print(sglang.exists(), prefect.exists(), parse_config(["--config", "demo-grpo"]).run.num_rollout)
print(all(WatchedRuns([]).respond(path, {})[1] for path in _ASSETS), len(_ASSETS))
print(RECIPES)
print(*(path for path in map(lock_file, ("cpu", "cuda")) if path.exists()), sep="\\n")
"""


def test_files_of_the_wheel_are_found(installed: Path, tmp_path: Path) -> None:
    launchers, pages, recipes, *locks = run_script(installed, tmp_path, FILES_PROGRAM).splitlines()
    assert launchers == "True True 60" and pages == "True 8"
    assert recipes == str(installed / "penstock" / "recipes")
    assert [Path(path).parent for path in locks] == 2 * [installed / "penstock" / "environment" / "lock"]
    assert list(installed.glob("*.dist-info/licenses/third_party/uplot/LICENSE"))


@pytest.mark.integration
@pytest.mark.timeout(3600)
def test_demo_of_the_wheel_passes_in_a_new_environment(wheel: Path, environment: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"HOME": str(tmp_path), "PREFECT_HOME": str(tmp_path / "prefect")}
    variables.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))  # of the real home

    def run(*command: str, code: int = 0) -> str:
        result = subprocess.run(
            [str(environment / "bin" / command[0]), *command[1:]],
            cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == code, result.stdout + result.stderr
        return result.stdout + result.stderr

    run("pip", "install", "--no-deps", str(wheel))
    assert "penstock setup" in run("penstock", "doctor", code=2)
    assert "torch: not installed" in run("penstock", "setup", "--cpu", "--check", code=1)
    run("penstock", "setup", "--cpu")
    assert run("penstock", "setup", "--cpu", "--check").count("  done  ") == 5
    assert "all checks passed" in run("penstock", "doctor")
    assert "The demo took" in run("penstock", "demo", "--num-rollout", "2")
    assert "demo-grpo-seed0" in run("penstock", "runs", "--store", "penstock-demo/store")
    run("penstock", "verify", "demo-grpo-seed0", "--store", "penstock-demo/store")


RAY_PROGRAM = f"""
from {PACKAGES[-1]} import OWNER
from penstock.engines.cluster import Cluster
from penstock.storage.commit import is_run_name

cluster = Cluster.start(None)
try:
    print(OWNER, cluster.run(is_run_name, "a-run"))
finally:
    cluster.stop()
"""


@pytest.mark.integration
def test_ray_worker_of_a_script_beside_folders_of_our_names_imports_penstock(installed: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("OWNER = 'the user'\n")
    assert "the user True" in run_script(installed, tmp_path, RAY_PROGRAM)
