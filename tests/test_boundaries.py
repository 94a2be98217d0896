"""The import rules of the house, checked on the syntax tree. Every rule is a function of a root directory that returns
the violations found there, so that each is also tried on a tree with a planted violation."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("flows", "stages", "engines", "storage")  # each may import itself and those after it
STAGES = ("convert", "rollout", "train", "eval")
MAX_MODULES = 20  # in one folder
OWNERS = {  # third-party package -> where alone it may be imported
    "megatron": "engines/megatron/",
    "sglang": "engines/sglang/",
    "sgl_kernel": "engines/sglang/",
    "prefect": "flows/",
    "mlflow": "storage/tracking/",
    "tensorboard": "storage/tracking/",
    "wandb": "storage/tracking/",
}
SLIME_ROOMS = ("flows/slime/", "stages/slime/")  # what is about slime; outside, one row each registers them
SLIME_ROWS = ("flows/options/refused.py", "stages/plugins.py")
CONFIG_IMPORTS = {  # what a config.py may import besides penstock
    *("__future__", "collections", "difflib", "enum", "hashlib", "json", "pathlib", "re", "tomllib", "typing"),
    "pydantic",
}


@dataclass(frozen=True)
class Import:
    """One import statement, at top level or inside a function."""

    name: str  # absolute and dotted; of `from a import b` it is a.b
    line: int
    relative: bool = False


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.Constant, ...]:
    """The imports and the constants of a file."""
    return tuple(
        node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant)
    )


def imports(path: Path) -> Iterator[Import]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(f"{node.module or ''}.{alias.name}", node.lineno, relative=node.level > 0)


def product_modules(root: Path) -> dict[str, Path]:
    """The product's modules: path without its suffix, in dots -> file."""
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def all_files(root: Path) -> list[Path]:
    folders = ("penstock", *PACKAGES, "tests", "examples", "benchmarks")
    return [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]


def own(name: str) -> str:
    """The part of a dotted name behind `penstock.`; empty if it is not ours."""
    return name.removeprefix("penstock.") if name.startswith("penstock.") else ""


def upward_imports(root: Path) -> list[str]:
    """The direction is flows -> stages -> engines -> storage."""
    return [
        f"{module}:{found.line} imports {found.name}, which is above it"
        for module, path in product_modules(root).items()
        for found in imports(path)
        if own(found.name).split(".")[0] in PACKAGES[: PACKAGES.index(module.split(".")[0])]
    ]


def relative_imports(root: Path) -> list[str]:
    """Modules are imported by their absolute name."""
    return [
        f"{module}:{found.line} has a relative import"
        for module, path in product_modules(root).items()
        for found in imports(path)
        if found.relative
    ]


def foreign_imports(root: Path) -> list[str]:
    """Each large third-party package is imported in one place."""
    return [
        f"{module}:{found.line} imports {found.name}, which only {owner} may"
        for module, path in product_modules(root).items()
        for found in imports(path)
        if (owner := OWNERS.get(found.name.split(".")[0])) and not path.relative_to(root).as_posix().startswith(owner)
    ]


def imports_between_stages(root: Path) -> list[str]:
    """No stage imports another stage."""
    out = []
    for module, path in product_modules(root).items():
        here = module.split(".")[1:2]
        if module.split(".")[0] != "stages" or here[0:1] == [] or here[0] not in STAGES:
            continue
        for found in imports(path):
            there = own(found.name).split(".")[:2]
            if there[0] == "stages" and there[1:] != here and there[-1] in STAGES:
                out.append(f"{module}:{found.line} imports {found.name}: one stage imports another")
    return out


def config_imports(root: Path) -> list[str]:
    """A config.py imports nothing but pydantic, a few standard modules and ours."""
    return [
        f"{module}:{found.line} imports {found.name}"
        for module, path in product_modules(root).items()
        if path.name == "config.py"
        for found in imports(path)
        if not own(found.name) and found.name.split(".")[0] not in CONFIG_IMPORTS
    ]


BARE_TEXT = re.compile(
    rf"(^|[\n;])\s*(from|import) ({'|'.join(PACKAGES)})(\.\w+)*( import |\s*($|[\n;]))"  # a program in a string
    rf"|^({'|'.join(PACKAGES)})(\.\w+)+$"  # a module path
    rf"|^({'|'.join(PACKAGES)})\.$"  # of an f-string: the text before the first replacement
)


SUSPECT = re.compile(rf"(from|import) ({'|'.join(PACKAGES)})\b|[\"']({'|'.join(PACKAGES)})\.")  # others are not parsed


def bare_names(root: Path) -> list[str]:
    """Nothing imports a package of ours without `penstock.` in front, not even by a name in a string."""
    out = []
    for path in all_files(root):
        if not SUSPECT.search(path.read_text(encoding="utf-8")):
            continue
        where = path.relative_to(root).as_posix()
        out += [f"{where}:{f.line} imports {f.name}" for f in imports(path) if f.name.split(".")[0] in PACKAGES]
        for node in nodes(path) if path.name != Path(__file__).name else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and BARE_TEXT.search(node.value):
                out.append(f"{where}:{node.lineno} names a module of ours without penstock in front")
    return out


def imported_modules(root: Path) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, inside functions as well."""
    modules = product_modules(root)
    targets = defaultdict(set)
    for module, path in modules.items():
        for found in imports(path):
            name = own(found.name)
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                targets[module].add(target)
    return targets


def circles(targets: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other, directly or not."""

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            new = targets.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reached = {module: reachable(module) for module in targets}
    in_circles = [module for module in targets if module in reached[module]]
    groups = {frozenset(m for m in reached[module] if module in reached[m]) for module in in_circles}
    return [set(group) for group in groups]


def import_circles(root: Path) -> list[str]:
    """No modules import each other."""
    return ["import circle: " + ", ".join(sorted(circle)) for circle in circles(imported_modules(root))]


def folder_circles(root: Path) -> list[str]:
    """No folders of flows import each other. Modules that are in no folder use the folders and are used by them."""
    targets = defaultdict(set)
    for module, others in imported_modules(root).items():
        folders = [
            name.split(".")[1] for name in (module, *others) if name.startswith("flows.") and name.count(".") > 1
        ]
        if module.startswith("flows.") and module.count(".") > 1:
            targets[folders[0]] |= {folder for folder in folders[1:] if folder != folders[0]}
    return ["folders import each other: " + ", ".join(sorted(circle)) for circle in circles(targets)]


def large_folders(root: Path) -> list[str]:
    """A folder holds at most MAX_MODULES modules, its __init__.py not counted."""
    sizes = Counter(path.parent for path in product_modules(root).values() if path.name != "__init__.py")
    folders = {folder.relative_to(root).as_posix(): size for folder, size in sizes.items()}
    return [
        f"{folder} has {size} modules, and at most {MAX_MODULES} are allowed"
        for folder, size in folders.items()
        if size > MAX_MODULES
    ]


def namesakes(root: Path) -> list[str]:
    """A name of a public class is used once."""
    owners = defaultdict(list)
    for module, path in product_modules(root).items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                owners[node.name].append(module)
    return [
        f"the class name {name} is used in {', '.join(modules)}" for name, modules in owners.items() if len(modules) > 1
    ]


def slime_outside_its_rooms(root: Path) -> list[str]:
    """Only the rooms of slime say slime, and one line of each file that registers them."""
    out = []
    for module, path in product_modules(root).items():
        where = path.relative_to(root).as_posix()
        lines = [i for i, line in enumerate(path.read_text().splitlines(), 1) if "slime" in line.lower()]
        if not where.startswith(SLIME_ROOMS):
            out += [f"{module}:{line} says slime" for line in lines[where in SLIME_ROWS :]]
    return out


RULES: list[Callable[[Path], list[str]]] = [
    *(upward_imports, relative_imports, foreign_imports, imports_between_stages),
    *(config_imports, bare_names, import_circles, folder_circles, large_folders, namesakes, slime_outside_its_rooms),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


GOOD_TREE = {
    "penstock/__init__.py": "",
    "flows/cli.py": "import prefect\nfrom penstock.stages.train import step\nfrom penstock.storage import store\n",
    "stages/train/step.py": "def f():\n    from penstock.engines.megatron import engine\n",
    "stages/train/config.py": "from typing import Any\nimport pydantic\nfrom penstock.storage import store\n",
    "stages/rollout/generate.py": "from penstock.stages import rewards\nfrom penstock.stages.rollout import round\n",
    "stages/rollout/round.py": "import json\n",
    "stages/rewards/grading.py": "NAME = 'storage of engines'\n",
    "engines/megatron/engine.py": "import megatron.core\n",
    "stages/plugins.py": "ADAPTERS = ('penstock.stages.slime.slime_modules',)\n",
    "stages/slime/slime_modules.py": "'''Provide slime's modules.'''\n",
    "storage/store.py": "import os\n",
    "storage/tracking/tracker.py": "import mlflow\n",
}
UPWARD = "from penstock.stages.train import step\n"
PLANTED: list[tuple[Callable[[Path], list[str]], dict[str, str]]] = [
    (upward_imports, {"storage/tracking/bad.py": f"if TYPE_CHECKING:\n    {UPWARD}"}),
    (upward_imports, {"storage/bad.py": "def f():\n    import penstock.engines.megatron.engine\n"}),
    (upward_imports, {"stages/train/bad.py": "def f():\n    from penstock import flows\n"}),
    (relative_imports, {"stages/train/bad.py": "def f():\n    from .step import f\n"}),
    (foreign_imports, {"stages/train/bad.py": "def f():\n    from megatron.core import parallel_state\n"}),
    (foreign_imports, {"storage/bad.py": "import mlflow\n"}),
    (imports_between_stages, {"stages/rollout/bad.py": "from penstock.stages import train\n"}),
    (imports_between_stages, {"stages/train/deep/bad.py": "def f():\n    import penstock.stages.rollout.round\n"}),
    (config_imports, {"engines/config.py": "def f():\n    import numpy as np\n"}),
    (bare_names, {"examples/reward/bad.py": "from stages import rewards\n"}),
    (bare_names, {"benchmarks/bad.py": "import flows.cli as cli\n"}),
    (bare_names, {"flows/bad.py": "importlib.import_module(f'flows.{name}')\n"}),
    (bare_names, {"flows/bad.py": "importlib.import_module('stages.train.step')\n"}),
    (bare_names, {"tests/bad.py": "program = 'import sys; from engines.megatron import engine; print(engine)'\n"}),
    (
        import_circles,
        {
            "flows/a.py": "from penstock.flows import b\n",
            "flows/b.py": "def f():\n    from penstock.flows.c import name\n",
            "flows/c.py": "def f():\n    import penstock.flows.a\n",
        },
    ),
    (
        import_circles,
        {
            "flows/deep/__init__.py": "from penstock.flows.deep.a import name\n",
            "flows/deep/a.py": "from penstock.flows.deep import name\n",
        },
    ),
    (
        folder_circles,
        {
            "flows/one/a.py": "from penstock.flows.two import b\n",
            "flows/two/b.py": "",
            "flows/two/c.py": "def f():\n    from penstock.flows.one.d import name\n",
            "flows/one/d.py": "",
        },
    ),
    (namesakes, {"stages/train/a.py": "class Batch: ...\n", "storage/a.py": "class Batch: ...\nclass _Own: ...\n"}),
    (slime_outside_its_rooms, {"engines/bad.py": "def f():\n    '''Return what Slime returns.'''\n"}),
    (slime_outside_its_rooms, {"stages/slimes.py": "SLIME_NAMES = {}\n"}),
    (slime_outside_its_rooms, {"stages/plugins.py": "import penstock.stages.slime.a\nNAME = 'slime'\n"}),
    (large_folders, {f"engines/megatron/layer{i}.py": "" for i in range(MAX_MODULES)}),
]  # fmt: skip


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_a_tree_without_violations_passes_every_rule(tmp_path: Path) -> None:
    plant(tmp_path, GOOD_TREE)
    assert [message for rule in RULES for message in rule(tmp_path)] == []


@pytest.mark.parametrize("rule, files", PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_violation_fails_its_rule_alone(
    rule: Callable[[Path], list[str]], files: dict[str, str], tmp_path: Path
) -> None:
    plant(tmp_path, GOOD_TREE | files)
    assert len(rule(tmp_path)) == 1
    others = [message for other in RULES if other not in (rule, relative_imports) for message in other(tmp_path)]
    assert others == []


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _ in PLANTED} == set(RULES)


IMPORT_FLOWS = """
import importlib
for name in MODULES:
    importlib.import_module(name)
"""
CHECK_A_RUN = """
from penstock.engines import backends
from penstock.engines.megatron import memory_plan
from penstock.engines.sglang import checks, passthrough
assert len(passthrough.sglang_flags()) > 400
checks.check_model({"architectures": ["Qwen3ForCausalLM"]})
"""


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (IMPORT_FLOWS, {"torch", "ray", "megatron", "sglang", *PACKAGES}),
        (CHECK_A_RUN, {"torch", "megatron", "sglang", "transformers"}),
    ],
    ids=["all modules of flows", "checks before a run"],
)
def test_no_engine_is_loaded_by(program: str, heavy: set[str]) -> None:
    modules = [f"penstock.{name}" for name in product_modules(ROOT) if name.startswith("flows.")]
    run_program(f"MODULES = {modules!r}\n{program}\nimport sys; sys.exit({heavy!r} & sys.modules.keys() or 0)", ROOT)


def run_program(program: str, folder: Path) -> None:
    """Run a Python program in a folder, in which it finds `penstock`."""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


REMOVED_ROWS = ('"slime",', '"penstock.stages.slime.slime_modules",')  # of SLIME_ROWS
WITHOUT_SLIME = """
import penstock.stages.rollout.rollout
from penstock.flows import cli
from penstock.flows.options.flags import parse_config
from penstock.stages.plugins import PluginError, load_function

assert parse_config(["--run", "r", "--lr", "1e-5"]).run.run == "r"
assert "slime" not in cli.USAGE and cli.main(["import-slime", "run.sh"]) == 2
assert load_function("own.py")(None, None) == 1.0
errors = []
for call in (lambda: parse_config(["--use-slime-router"]), lambda: load_function("foreign.py")):
    try:
        call()
    except (cli.OptionError, PluginError) as error:
        errors.append(str(error))
assert "unknown flag" in errors[0] and "No module named 'slime'" in errors[1]
"""


def test_slime_is_removed_by_its_folders_and_a_row_of_each_owner(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "penstock", tmp_path / "penstock", symlinks=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package)  # with its bytecode, which is valid for the copy
    for room, owner, row in zip(SLIME_ROOMS, SLIME_ROWS, REMOVED_ROWS):
        shutil.rmtree(tmp_path / room)
        text = (tmp_path / owner).read_text()
        assert text.count(row) == 1
        (tmp_path / owner).write_text(text.replace(row, ""))
    (tmp_path / "own.py").write_text("def reward_func(args, sample):\n    return 1.0\n")
    (tmp_path / "foreign.py").write_text("from slime.utils.types import Sample\n\ndef reward_func(args, sample): ...\n")
    run_program(WITHOUT_SLIME, tmp_path)


def test_no_test_module_imports_ray_when_it_is_collected() -> None:
    """Ray reads its token when it is imported, so that all clusters of the test process would fail."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.endswith("_driver.py")]
    suspects = [path for path in paths if re.search(r"^(import|from) ray\b", path.read_text(encoding="utf-8"), re.M)]
    importing = [
        str(path.relative_to(ROOT))
        for path in suspects  # the others are not parsed; a program in a string is no import
        for node in parsed(path).body
        if isinstance(node, ast.Import | ast.ImportFrom) and re.match(r"(import|from) ray\b", ast.unparse(node))
    ]
    assert importing == []


def test_a_folder_of_the_same_name_beside_a_script_hides_nothing(tmp_path: Path) -> None:
    plant(tmp_path, {f"{package}/__init__.py": "OWNER = 'the user'\n" for package in PACKAGES})
    script = tmp_path / "script.py"
    script.write_text(
        "import engines, flows, stages, storage\n"
        "import penstock.engines.cluster, penstock.flows.cli, penstock.stages.train.config\n"
        "from penstock.storage.store import Store\n"
        "assert {package.OWNER for package in (engines, flows, stages, storage)} == {'the user'}\n"
        "print(Store.__module__)\n"
    )
    command = [sys.executable, str(script)]  # Python puts the script's folder first on the path
    result = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.stdout.strip() == "penstock.storage.store", result.stderr
