"""`penstock demo --kill` without engines: a process that commits rounds takes the place of the demo."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from penstock.engines.backends import engine_backend
from penstock.flows.cli import main
from penstock.flows.commands import demo
from penstock.flows.commands.demo import DemoProcess, audit_and_replay, run_demo_with_kills
from penstock.storage.store import Store
from tests.storage.made_run import config_of, make_run, write_data

FAKE = f"""
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
engine = subprocess.Popen([*sleep, "{next(iter(engine_backend().processes))}"])
print("started", flush=True)
engine.wait()
print("engine died", flush=True)
time.sleep(60)
"""


def test_only_the_processes_of_the_target_are_killed_and_a_killed_driver_is_restarted() -> None:
    out = io.StringIO()
    demo = DemoProcess([sys.executable, "-c", FAKE], Console(file=out, width=200))
    demo.start()
    try:
        wait_for(lambda: "started" in out.getvalue())
        assert demo.kill("trainer") == []
        assert len(demo.kill("engine")) == 1
        wait_for(lambda: "engine died" in out.getvalue())
        [pid] = demo.kill("driver")
        assert pid and demo.exit_code() is None
        wait_for(lambda: out.getvalue().count("started") == 2)
    finally:
        demo.kill("engine")
        demo.stop()
    assert demo.exit_code() != 0 and demo.kill("engine") == []


@pytest.mark.parametrize(
    "verdicts, code",
    [([demo.EQUAL] * 3, 0), ([demo.EQUAL] * 2, 1), ([demo.EQUAL] * 2 + ["DIFFERS"], 1)],
)
def test_end_is_green_only_if_every_trained_round_is_equal(
    verdicts: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store"))
    keys = make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), rounds=3)
    replayed = json.dumps({r: {"verdict": verdict} for r, verdict in enumerate(verdicts)})
    program = f"import sys, pathlib; pathlib.Path(sys.argv[-1]).write_text({replayed!r})"
    monkeypatch.setattr(demo, "PENSTOCK", (sys.executable, "-c", program))
    out = io.StringIO()
    assert audit_and_replay(store.uri, keys, Console(file=out, width=200)) == code
    assert f"{verdicts.count(demo.EQUAL)} of {len(verdicts)} rounds equal bit for bit" in out.getvalue()
    assert "0 problems in " in out.getvalue()


def test_finished_demo_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(str(tmp_path / "store"))
    make_run(store, config_of(store, write_data(tmp_path / "data.jsonl"), "demo-grpo-seed0"), rounds=3)
    words = ["demo", "--kill", "--directory", str(tmp_path), "--num-rollout", "8"]
    assert main(words) == 2 and "--fresh" in capsys.readouterr().err
    assert main(["demo", "--kill", "--num-rollout", "3"]) == 2 and "at least 4" in capsys.readouterr().err


def test_demo_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "PENSTOCK", (sys.executable, "-c", "print('no'); exit(3)"))
    assert run_demo_with_kills(tmp_path, seed=0, num_rollout=8) == 3
    assert "not killed: engine, trainer, driver" in capsys.readouterr().out


def wait_for(reached) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)
