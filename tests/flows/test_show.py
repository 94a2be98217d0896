"""`penstock show` and `penstock runs`: a run on one screen, and the stores around the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.cli import main
from penstock.flows.options.nearby_stores import find_nearby_stores, names_no_store
from penstock.storage.history.starts import Start, record_end, record_start
from penstock.storage.store import Store
from tests.storage.made_run import config_of, make_run, write_data


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two stores below the working directory, with the runs `r` (6 rounds, two starts) and `s` (2 rounds)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    data = write_data(tmp_path / "data.jsonl")
    for path, run, rounds in (("demo/store", "r", 6), ("other", "s", 2)):
        store = Store(str(tmp_path / path))
        keys = make_run(store, config_of(store, data, run), rounds=rounds, save=(2,), score=(2,))
        record_start(store, keys, Start(host="first", flow_run="http://127.0.0.1:4200/runs/1"))
        record_end(store, keys, record_start(store, keys, Start(host="second")), "FINISHED", None)
    return ["demo/store", "other"]


def test_runs_lists_every_store_around(stores: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    first, second = out.split("store other")
    assert first.startswith("store demo/store") and "\nr " in first and "\ns " in second
    assert main(["runs", "--store", "other"]) == 0
    out = capsys.readouterr().out
    assert "\ns " in out and "demo/store" not in out


def test_runs_without_a_store_around_says_how_to_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_stores_are_found_below_and_above_but_not_in_hidden_directories(tmp_path: Path) -> None:
    for path in ("a/store", "a/b/deep", "a/b/c/too-deep", ".venv/store", "a/store/inner"):
        record = tmp_path / path / "runs" / "r" / "run.json"
        record.parent.mkdir(parents=True)
        record.write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "project" / "runs").mkdir(parents=True)  # a directory of that name with no run
    assert find_nearby_stores(tmp_path) == ["a/b/deep", "a/store"]
    inside = tmp_path / "a" / "store" / "runs" / "r"
    assert find_nearby_stores(inside) == [str(tmp_path / "a" / "store")]
    assert (
        names_no_store(["--json", "x"]) and not names_no_store(["--store=x"]) and not names_no_store(["--config", "f"])
    )


def test_show_finds_the_store_of_a_run_and_draws_its_curves(
    stores: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "r"]) == 0
    out = capsys.readouterr().out
    assert "6 of 9 rounds, finished; penstock resume r" in out and stores[0] in out
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if line.strip() and line[0] != " ")
    assert "->" in rows["reward"] and any(block in rows["reward"] for block in "▁▅█")
    assert "(version 2)" in rows["eval"] and rows["checkpoints"] == "2"
    assert "on first, killed, http://127.0.0.1:4200/runs/1" in out and "on second, finished after 0:00" in out
    assert "\x1b" not in out


def test_show_of_a_run_in_no_store_or_in_two_names_the_stores(
    stores: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "ghost"]) == 2 and "has no run 'ghost'" in capsys.readouterr().err
    assert main(["samples", "s"]) == 2 and "(run 's' is in other)" in capsys.readouterr().err
    (tmp_path / "demo" / "store" / "runs" / "s").mkdir()
    (tmp_path / "demo" / "store" / "runs" / "s" / "run.json").write_text("{}")
    assert main(["show", "s"]) == 2 and "2 stores have a run 's' (demo/store, other)" in capsys.readouterr().err
