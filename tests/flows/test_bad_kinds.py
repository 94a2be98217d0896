"""Every kind of bad input ends in one line and exit code 2, starts nothing and takes no name. If one is
read without end, the time limit of every test ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_kinds import Case, all_cases, endless
from test_bad_inputs import check_outcome, imported_schedules, no_engine, run, snapshot  # noqa: F401 fixtures

from penstock.flows.cli import main
from penstock.flows.inspect import read_samples
from penstock.storage import preemption
from penstock.storage.samples.sample import Sample

CASES, ENDLESS = all_cases(), {case.id for case in endless()}


def test_cases_have_unique_ids() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "case",
    [  # a third, and a tenth of those that wait for a time limit
        pytest.param(case, id=case.id, marks=[pytest.mark.full] if number % (10 if case.id in ENDLESS else 3) else [])
        for number, case in enumerate(CASES)
    ],
)
def test_bad_input_of_a_kind_is_refused_in_one_line(
    case: Case,
    bad_input_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fill(text: str) -> str:
        return text.replace("{case}", str(tmp_path)).replace("{root}", str(bad_input_root))

    case.write(tmp_path, bad_input_root)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(preemption, "PATIENCE", 0.3 if case.id in ENDLESS else 5.0)
    monkeypatch.chdir(bad_input_root / "directory")
    before = snapshot(bad_input_root) | snapshot(tmp_path)
    check_outcome(fill(case.culprit), bad_input_root, *run([fill(word) for word in case.words], capsys))
    assert snapshot(bad_input_root) | snapshot(tmp_path) == before, "something was written"


def test_search_that_does_not_end_is_refused(
    bad_input_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Sample("s", "g", "t", 0, prompt="a" * 60)
    monkeypatch.setattr(read_samples, "_read", lambda *arguments: [long])
    monkeypatch.setattr(preemption, "PATIENCE", 0.1)
    assert main(["samples", "old", "--grep", "(a|aa)+$!", "--store", str(bad_input_root / "runs")]) == 2
    assert "--grep: the search takes more than 0.1 s" in capsys.readouterr().err
