"""The wheel: what is in it, and that it works outside the checkout, also beside folders named like our packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
PACKAGES = ("flows", "stages", "engines", "storage")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel."""
    source, folder = tmp_path_factory.mktemp("wheel") / "source", tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("penstock", *PACKAGES, "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    [wheel] = folder.glob("penstock_rl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder


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


def test_recipes_and_launchers_of_the_wheel_exist(installed: Path, tmp_path: Path) -> None:
    out = run_script(
        installed,
        tmp_path,
        "from penstock.engines.sglang.server import LAUNCHER as sglang\n"
        "from penstock.flows.commands.demo import RECIPES\n"
        "from penstock.flows.config import read_toml\n"
        "from penstock.flows.runtime.prefect_api import LAUNCHER as prefect\n"
        "rounds = read_toml(RECIPES / 'demo-sft.toml')['run']['num_rollout']\n"
        "print(sglang.exists(), prefect.exists(), rounds > 0, RECIPES)\n",
    )
    assert out.split() == ["True", "True", "True", str(installed / "penstock" / "recipes")]


@pytest.mark.integration
def test_ray_worker_of_a_script_beside_folders_of_our_names_imports_penstock(installed: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("OWNER = 'the user'\n")
    out = run_script(
        installed,
        tmp_path,
        f"from {PACKAGES[-1]} import OWNER\n"
        "from penstock.engines.cluster import Cluster\n"
        "from penstock.storage.keys import is_run_name\n"
        "cluster = Cluster.start(None)\n"
        "try:\n"
        "    print(OWNER, cluster.run(is_run_name, 'a-run'))\n"
        "finally:\n"
        "    cluster.stop()\n",
    )
    assert "the user True" in out
