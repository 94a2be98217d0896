"""The benchmark of 1 to 8 GPUs: its parts fit GPUs of 80 GB, run side by side on GPUs of their own, and its report is
continued."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest

from penstock.engines.training import GIB
from penstock.flows.commands.demo_model import make_tokenizer
from penstock.flows.config import Flow, validate_config
from penstock.flows.gpu_plan import plan_gpu_memory
from penstock.flows.inspect.plan import plan_fits
from penstock.flows.options.flags import parse_values
from tests.engines.real_models import REAL_MODELS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import scaling
import scaling_runs
from gpu_models import IMAGE_TOKENS, RECIPE, VISION, vision_config
from scaling import Report, efficiencies, run_side_by_side
from scaling_parts import MEMORY, Part, all_parts
from scaling_runs import CHECKS, DoesNotFit, Interrupted, PartRun, RunFailed

NAMES = {"1.7b": "qwen3-1.7B", "4b": "qwen3-4B", "8b": "qwen3-8B", "30b-a3b": "qwen3-30B-A3B"}
NAMES |= {"llama-8b": "llama3.1-8B-Instruct"}
H100_GIB = 79.6  # of 80 GB; what the driver reports


def fits(part: Part, directory: Path) -> bool:
    from penstock.engines.families import read_shape

    if part.model in VISION:
        entries = vision_config(*VISION[part.model], make_tokenizer(64, words=IMAGE_TOKENS)).to_dict()
    else:
        model = REAL_MODELS[NAMES[part.model]]
        entries = {"architectures": [model.architecture], **model.config}
    (directory / "config.json").write_text(json.dumps(entries))
    words = ["--config", str(RECIPE), "--rollout-max-response-len", str(part.length)]
    config = validate_config(parse_values([*words, *MEMORY[part.model].split(), *part.options.split()]))
    assert max(config.train.num_ranks + (config.rollout.rollout_num_gpus or 0), 1) == part.gpus
    return plan_fits(plan_gpu_memory(Flow.TRAIN, config, read_shape(str(directory)), round(H100_GIB * GIB)))


@pytest.mark.parametrize("gpus", [1, 8])
def test_every_part_fits_gpus_of_80_gb(gpus: int, tmp_path: Path) -> None:
    parts = list(all_parts(gpus))
    assert len({part.name for part in parts}) == len(parts) and {part.gpus for part in parts} <= {1, 2, 4, 8}
    assert [part.name for part in parts if not fits(part, tmp_path)] == []


def test_parts_run_side_by_side_on_gpus_of_their_own() -> None:
    busy, most, order, lock = set(), [0], [], threading.Lock()

    def work(part: Part, gpus: list[int]) -> None:
        with lock:
            assert len(gpus) == part.gpus and not busy & set(gpus)
            busy.update(gpus)
            most[0] = max(most[0], len(busy))
            order.append(part.gpus)
        time.sleep(0.02)
        with lock:
            busy.difference_update(gpus)

    parts = [Part("dense", "1.7b", gpus, 1, "", note=str(index)) for index, gpus in enumerate((1, 4, 2, 1, 2, 1))]
    run_side_by_side(parts, 4, work, threading.Event(), float("inf"))
    assert sorted(order) == [1, 1, 1, 2, 2, 4] and most[0] == 4
    order.clear()
    run_side_by_side(parts, 4, work, threading.Event(), time.monotonic())
    assert sorted(order) == [1, 1, 2], "no part starts after the time is up"


def report_of(tmp_path: Path, commit: str) -> Report:
    return Report(Namespace(output=None, directory=tmp_path, commit=commit, train_options=[], rehearse=False))


def test_continued_report_keeps_commit_and_hardware_of_finished_parts(tmp_path: Path) -> None:
    first, second = Part("dense", "1.7b", 1, 1, ""), Part("dense", "4b", 1, 1, "")
    kills = Part("kills", "4b", 1, 1, "")
    report = report_of(tmp_path, "a")
    report.add(first, {"seconds of a round": 1.0})
    report.add(second, {"failed": "out of memory"})
    report.add(kills, {check: True for check in CHECKS[:3]})
    report = report_of(tmp_path, "b")
    assert [report.is_finished(part) for part in (first, second, kills)] == [True, False, False]
    assert [report.is_good(part) for part in (first, second, kills)] == [True, False, False]
    report.add(kills, {check: check != CHECKS[3] for check in CHECKS})
    report = report_of(tmp_path, "c")
    assert [report.parts[part.name]["commit"] for part in (first, second, kills)] == ["a", "a", "b"]
    assert report.is_finished(kills) and not report.is_good(kills)


def test_efficiency_compares_gpus_of_one_kind() -> None:
    def result(gpus: int, training: float, hardware: str) -> dict:
        stages = {"training": training, "generation": 8.0}
        entry = {"model": "4b", "gpus": gpus, "floor of a round": 1.0, "parts of a round": stages}
        return entry | {"hardware": hardware}

    results = {
        "dense-4b-4": result(4, 2.0, "A, A, A, A; 64 CPU cores"),
        "dense-4b-2": result(2, 3.0, "A, A; 32 CPU cores"),
        "dense-4b-8": result(8, 1.0, "B, B; 64 CPU cores"),
        "apart-4b": result(2, 1.0, "A; 1 CPU cores"),
    }
    table = efficiencies(results)
    assert table["dense-4b-4"] == {"training": 0.75, "generation": 0.5}
    assert table["dense-4b-8"] == table["dense-4b-2"] == {"training": 1.0, "generation": 1.0}
    assert "apart-4b" not in table


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartRun:
    monkeypatch.setattr(scaling_runs, "make_prefect_home", lambda directory, name: directory / name)
    return PartRun(Part("dense", "1.7b", 1, 1, ""), tmp_path, [], [], threading.Event())


def print_and_exit(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(scaling_runs, "PENSTOCK", [sys.executable, "-c", program])


def test_plan_that_fails_is_not_taken_for_a_part_that_does_not_fit(
    run: PartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    print_and_exit(monkeypatch, "print('does not fit: 90 of 80 GiB'); exit(1)")
    with pytest.raises(DoesNotFit, match="does not fit: 90 of 80 GiB"):
        scaling_runs.check_fit(run)
    print_and_exit(monkeypatch, "raise RuntimeError('no such model')")
    with pytest.raises(RunFailed, match="RuntimeError: no such model"):
        scaling_runs.check_fit(run)
    print_and_exit(monkeypatch, "print('\\npenstock: --x is unknown\\nuse --y\\n'); exit(2)")
    with pytest.raises(RunFailed) as failed:
        scaling_runs.check_fit(run)
    assert str(failed.value) == "penstock: --x is unknown\nuse --y"


def test_interrupted_command_is_stopped(run: PartRun, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    start = PartRun.start
    monkeypatch.setattr(PartRun, "start", lambda *args: processes.append(start(*args)) or processes[-1])
    print_and_exit(monkeypatch, "import time; time.sleep(600)")
    run.stop.set()
    with pytest.raises(Interrupted):
        run.run("train")
    assert processes[0].returncode == -15


def test_part_that_fails_is_reported_and_its_store_is_removed(
    run: PartRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logs = run.store / run.keys.prefix / "logs"
    program = f"import pathlib, sys; 'train' in sys.argv or exit(); logs = pathlib.Path({str(logs)!r}); "
    program += "logs.mkdir(parents=True); (logs / 'engine.log').write_text('text'); print('penstock: no GPU'); exit(1)"
    print_and_exit(monkeypatch, program)
    report = report_of(tmp_path, "a")
    scaling.run_part(run, report)
    assert report.parts[run.part.name]["failed"] == "penstock: no GPU"
    assert not run.store.exists() and (tmp_path / "dense-1.7b-1-logs/engine.log").read_text() == "text"


@pytest.mark.parametrize("second, equal", [("equal bit for bit", True), ("within tolerance", False)])
def test_only_missing_checks_are_made_and_replay_must_be_equal_bit_for_bit(
    run: PartRun, second: str, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.store.mkdir()
    monkeypatch.setattr(PartRun, "num_trained", lambda run: 2)
    content = json.dumps({0: {"verdict": "equal bit for bit"}, 1: {"verdict": second}})
    program = "import sys, pathlib; sys.argv[1] == 'replay' or exit(3); "
    print_and_exit(monkeypatch, f"{program}pathlib.Path(sys.argv[-1]).write_text({content!r})")
    saved: list[dict[str, bool]] = []
    scaling_runs.kill_and_replay(run, {check: True for check in CHECKS[:3]}, lambda checks: saved.append(dict(checks)))
    assert saved == [{check: check != CHECKS[3] or equal for check in CHECKS}]
    assert run.store.exists() == (not equal)
