"""Damaged records in a store: every command names the record, in one line with exit code 2, and `runs` lists the other
runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import config_of, make_run, write_data
from run_records import parent_record

from penstock.storage.commit import RunKeys
from penstock.storage.history.run_record import Start, record_start
from penstock.storage.store import Store

Damage = bytes | Callable[[dict[str, Any]], object]


def sets(**fields: Any) -> Damage:
    """Set fields of a record."""
    return lambda record: record.update(fields)


def with_parent(**fields: Any) -> Damage:
    """Make the run a fork whose origin has these fields."""
    return sets(parent=parent_record("p", 1).model_dump() | fields)


DAMAGED_RUNS: dict[str, Damage] = {
    "newer-version": sets(record_version=99),
    "version-null": sets(record_version=None),
    "list": b"[]",
    "surrogate": b'"\\ud800"',
    "nested": b"[" * 100_000,
    "no-flow": lambda record: record.pop("flow"),
    "other-flow": sets(flow="other"),
    "config-list": sets(config=[]),
    "section-list": lambda record: record["config"].update(run=[]),
    "time-text": sets(created_at="yesterday"),
    "time-negative": sets(created_at=-1e18),
    "unknown-field": sets(owner="ada"),
    "parent-number": sets(parent=3),
    "parent-path": with_parent(run="../x"),
    "parent-negative": with_parent(at=-1),
    "parent-restarts": with_parent(restarts="all"),
    "grandparent": with_parent(parent={"run": "p"}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two runs of two rounds, the second one with a changed schedule and a start."""
    root = tmp_path_factory.mktemp("records")
    store, data = Store(str(root / "store")), write_data(root / "data.jsonl")
    make_run(store, config_of(store, data, "good"), 2, save=(2,))
    make_run(store, config_of(store, data, "bad"), 2, save=(2,))
    make_run(store, config_of(store, data, "bad", "--num-rollout", "7"), 2)
    record_start(store, RunKeys("bad"), Start())
    return store


@pytest.fixture
def damage(made: Store) -> Any:
    """A function that damages a record of the run `bad`; afterwards the record is restored."""
    written: dict[Path, bytes] = {}

    def change(name: str, damage: Damage) -> str:
        path = Path(made.path(f"runs/bad/{name}"))
        written[path] = path.read_bytes()
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        else:
            damage(record := json.loads(written[path]))
            path.write_text(json.dumps(record))
        return f"runs/bad/{name}"

    yield change
    for path, content in written.items():
        path.write_bytes(content)


def check_runs(store: Store, key: str, printed: Callable[..., str]) -> None:
    """`penstock runs` lists the undamaged run and names the damaged record."""
    out = printed("runs", "--store", store.root)
    assert "2 of 9" in out and "bad is damaged: " in out and key in out


@pytest.mark.parametrize("name", DAMAGED_RUNS)
def test_damaged_run_record_is_named_by_every_command(
    name: str, made: Store, damage: Callable[[str, Damage], str], printed: Callable[..., str]
) -> None:
    key, before = damage("run.json", DAMAGED_RUNS[name]), sorted(file.key for file in made.walk(""))
    for command in ("resume bad", "show bad", "fork bad --at 1 --name f"):
        error = printed(*command.split(), "--store", made.root, code=2)
        assert key in error and error.count("\n") == 1 and len(error) < 400, error
    assert f"WRONG: {key} is not a valid record" in printed("verify", "bad", "--store", made.root, code=1)
    check_runs(made, key, printed)
    assert sorted(file.key for file in made.walk("")) == before


@pytest.mark.parametrize(
    ("name", "damaged", "readers"),
    [
        ("changes/000000.json", b"[]", "show runs"),
        ("changes/000000.json", sets(schedule={"num_rollout": 3}), "show runs"),
        ("changes/000000.json", lambda record: record.pop("at"), "show runs"),
        ("rollouts/000001.commit.json", b'"\\udfff"', "runs"),
        ("rollouts/000001.commit.json", sets(summary=[1]), "runs"),
        ("steps/000001.commit.json", b"{}", ""),  # `runs` only counts them
        ("steps/000001.commit.json", sets(record_version=99), ""),
        ("starts/000000.json", b"[]", ""),
        ("base.json", b"{}", ""),
    ],
)
def test_other_damaged_record_is_found_by_verify_and_those_that_read_it(
    name: str,
    damaged: Damage,
    readers: str,
    made: Store,
    damage: Callable[[str, Damage], str],
    printed: Callable[..., str],
) -> None:
    key = damage(name, damaged)
    assert f"WRONG: {key} is not a valid record" in printed("verify", "bad", "--store", made.root, code=1)
    if "show" in readers:
        assert key in printed("show", "bad", "--store", made.root, code=2)
    if "runs" in readers:
        check_runs(made, key, printed)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("run.json", os.mkfifo),
        ("changes/000000.json", os.mkdir),
        ("rollouts/000001.commit.json", lambda path: path.symlink_to(path)),
    ],
    ids=["pipe", "directory", "loop"],
)
def test_record_that_is_not_a_file_is_refused(
    name: str,
    make: Callable[[Path], object],
    made: Store,
    damage: Callable[[str, Damage], str],
    printed: Callable[..., str],
) -> None:
    path = Path(made.path(damage(name, b"")))
    path.unlink()
    make(path)
    try:
        assert "cannot be read" in printed("show", "bad", "--store", made.root, code=2)
        check_runs(made, f"runs/bad/{name}", printed)
    finally:
        path.rmdir() if make is os.mkdir else path.unlink()


def test_runs_names_the_missing_record_of_a_run_with_commits(
    made: Store, damage: Callable[[str, Damage], str], printed: Callable[..., str]
) -> None:
    key = damage("run.json", b"")
    Path(made.path(key)).unlink()
    check_runs(made, f"{key} is missing", printed)
