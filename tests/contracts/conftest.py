"""`pytest tests/contracts --plugin my_pkg.my:fn --kind reward` checks one user-defined function; without `--plugin`,
Penstock's own functions are checked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.contracts.contracts import CONTRACTS, ROWS, Bench
from tests.contracts.plugins import BAD, GOOD


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock")
    group.addoption(
        "--plugin", help="the function, or class, to ask: file.py, file.py:name, pkg.module:name or pkg.module.name"
    )
    group.addoption("--kind", choices=sorted(CONTRACTS), help="what it is")
    group.addoption(
        "--reward-key", default="score", help="which entry of a reward is the reward, if it is a dictionary (score)"
    )
    group.addoption(
        "--rows", help="JSONL with prompt, response, label and metadata, if it needs certain ones (a reward may)"
    )


def pytest_configure(config: pytest.Config) -> None:
    sys.path.append(str(config.invocation_params.dir))  # where the user's modules are
    if bool(config.getoption("--plugin", None)) != bool(config.getoption("--kind", None)):
        raise pytest.UsageError(f"--plugin and --kind go together; kinds: {', '.join(sorted(CONTRACTS))}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    plugin, kind = (metafunc.config.getoption(name, None) for name in ("--plugin", "--kind"))
    if {"kind", "path"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("kind", "path"), [(kind, plugin)] if plugin else GOOD)
    elif {"kind", "bad", "words"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("kind", "bad", "words"), BAD)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--plugin", None):
        items[:] = [item for item in items if item.originalname == "test_function_keeps_its_contract"]  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    given = request.config.getoption("--rows", None)
    rows = [json.loads(line) for line in Path(given).read_text(encoding="utf-8").splitlines()] if given else ROWS
    return Bench.make(tmp_path_factory.mktemp("contracts"), rows, request.config.getoption("--reward-key"))
