"""The import rules of the house, walked over the syntax tree: flows -> stages -> engines -> storage, never back."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("flows", "stages", "engines", "storage")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# top-level package -> our packages it may not import
FORBIDDEN = {"storage": {"engines", "stages", "flows"}, "engines": {"stages", "flows"}, "stages": {"flows"}, "flows": set()}
# third party -> the only places that may import it
OWNERS = {
    "megatron": ("engines/megatron/",),
    "sglang": ("engines/sglang/",),
    "prefect": ("flows/",),
    "mlflow": ("storage/tracking",),
    "sgl_kernel": ("engines/sglang/",),
}
STAGES = {"convert", "rollout", "train", "eval"}


def imports(path: Path) -> set[str]:
    """Every dotted module name that `path` imports, at top level or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_direction_and_owners(path: Path) -> None:
    where = path.relative_to(ROOT)
    package = where.parts[0]
    for name in imports(path):
        head = name.split(".")
        assert head[0] not in FORBIDDEN[package], f"{where} imports {name}: against flows -> stages -> engines -> storage"
        if head[0] in OWNERS:
            assert any(str(where).startswith(owner) for owner in OWNERS[head[0]]), (
                f"{where} imports {name}: only {OWNERS[head[0]]} may"
            )
        if package == "stages" and where.parts[1] in STAGES and head[0] == "stages" and len(head) > 1 and head[1] in STAGES:
            assert head[1] == where.parts[1], f"{where} imports {name}: one stage imports another"


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "config.py"], ids=lambda p: str(p.relative_to(ROOT)))
def test_configs_import_only_pydantic_and_ours(path: Path) -> None:
    allowed = {
        "__future__",
        "typing",
        "collections",
        "pathlib",
        "pydantic",
        "storage",
        "stages",
        "engines",
        "flows",
        "difflib",
        "tomllib",
        "hashlib",
        "json",
        "re",
    }
    found = {name.split(".")[0] for name in imports(path)}
    assert found <= allowed, f"{path} imports {found - allowed}"


def test_importing_flows_loads_no_torch() -> None:
    modules = [f"flows.{path.stem}" for path in (ROOT / "flows").glob("*.py") if path.stem != "__init__"]
    program = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(sorted({{'torch','ray','megatron','sglang'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
