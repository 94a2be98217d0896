"""Every bad input ends in one line and exit code 2, starts nothing and writes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from bad_inputs import BASES, QUICK, REST, Bad, real_rows
from penstock_command import penstock

from penstock.flows.cli import main
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import plan_of
from penstock.flows.services.deploy import parse_schedule
from tests.forked_worker import ForkedWorker, forked_workers  # noqa: F401 fixture

STARTS = {
    *("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn"),
    "socket.connect",
}
PREFLIGHT = "penstock.stages.worker_process"  # looks at what users give, in a process each
MAX_CHARACTERS = 400


class Tripwire(BaseException):
    """Something was started."""


class Watch:
    """Raises Tripwire in this process, while it is on, as soon as a process or a connection would be started."""

    on = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        looks = event == "os.fork" and sys._getframe(1).f_code is ForkedWorker.__init__.__code__
        looks = looks or (event == "subprocess.Popen" and PREFLIGHT in str(arguments[1]))
        if self.on and event in STARTS and not looks:
            raise Tripwire(f"{event} {str(arguments)[:300]}")


watch = Watch()
sys.addaudithook(watch)  # cannot be removed again: it is on only while a row runs
os.register_at_fork(after_in_child=lambda: setattr(watch, "on", False))  # as in the process of a run


@pytest.fixture(scope="module", autouse=True)
def imported_schedules() -> None:
    """Prefect's imports for a schedule run a program."""
    parse_schedule({"--cron": "0 2 * * *"})


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every door through which an engine is started: Ray, the trainer's process group, SGLang's servers, Prefect's."""
    import penstock.engines.cluster
    import penstock.flows.runtime.prefect_api

    def started(*arguments: object, **more: object) -> None:
        raise Tripwire("an engine was started")

    monkeypatch.setattr(penstock.engines.cluster.Cluster, "start", started)
    monkeypatch.setattr(penstock.flows.runtime.prefect_api, "ensure_prefect_api", started)
    if torch := sys.modules.get("torch"):
        monkeypatch.setattr(torch.distributed, "init_process_group", started)
    yield
    assert not watch.on


def test_table_of_bad_inputs_has_no_duplicates() -> None:
    rows = [row for rows in (QUICK | REST).values() for row in rows()]
    assert len({(row.words, row.toml) for row in rows}) == len(rows) > 1400


@pytest.mark.parametrize("command", sorted(BASES))
def test_unchanged_base_request_passes_preflight(command: str, bad_input_root: Path) -> None:
    from penstock.flows.runtime.preflight import preflight

    words = [word for name, value in BASES[command].items() for word in (name, *value.split(" "))]
    words += ["--store", "{root}/good-store"]
    flow = {"train": "train", "eval": "evaluate"}.get(command, command)
    preflight(plan_of(flow, parse_config([word.replace("{root}", str(bad_input_root)) for word in words])))


@pytest.mark.parametrize(
    "rows",
    [
        *(pytest.param(rows, id=subject) for subject, rows in QUICK.items()),
        *(pytest.param(rows, id=subject, marks=pytest.mark.full) for subject, rows in REST.items()),
    ],
)
def test_bad_inputs_are_refused_in_one_line(
    rows: Callable[[], Iterable[Bad]],
    bad_input_root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(bad_input_root / "directory")
    failed, before = {}, snapshot(bad_input_root)
    for row in rows():
        try:
            check_outcome(row.culprit, bad_input_root, *run(prepare(row, bad_input_root), capsys))
            assert snapshot(bad_input_root) == before, "something was written"
        except (Exception, SystemExit, Tripwire) as error:
            failed[row.id] = f"{type(error).__name__}: {error}"
    assert not failed, "\n\n".join(f"{id}\n{error}" for id, error in failed.items())


@pytest.mark.parametrize(
    "row",  # all of them are rows of the test above
    [pytest.param(row, marks=[pytest.mark.full] if n else [], id=row.id) for n, row in enumerate(real_rows())],
)
def test_bad_input_to_a_process_is_refused_in_one_line(row: Bad, bad_input_root: Path) -> None:
    words, before = prepare(row, bad_input_root), snapshot(bad_input_root)
    done = penstock(*words, cwd=bad_input_root / "directory", check=False)
    check_outcome(row.culprit, bad_input_root, done.returncode, done.stdout, done.stderr)
    assert snapshot(bad_input_root) == before


def prepare(row: Bad, root: Path) -> list[str]:
    """Write the TOML file of a row, and return its words."""
    if row.toml is not None:
        content = row.toml
        if isinstance(content, str):
            content = content.replace("{root}", str(root)).encode("utf-8", "surrogatepass")
        (root / "row.toml").write_bytes(content)
    return [word.replace("{root}", str(root)) for word in row.words]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command that may start nothing. Return its exit code, output and errors."""
    capsys.readouterr()
    watch.on = True
    try:
        code = main(words)
    finally:
        watch.on = False
    return code, *capsys.readouterr()


def check_outcome(culprit: str, root: Path, code: int, out: str, err: str) -> None:
    assert code == 2, (code, out, err)
    assert out == ""
    assert err.startswith("penstock: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert len(err) <= MAX_CHARACTERS and err[:-1].isprintable()
    assert culprit.replace("{root}", str(root)) in err, err
    assert "Traceback" not in err and "report this bug" not in err


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Return every file and directory, except row.toml, with its size and time of change."""
    found = {}
    for directory, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]  # Python's, of functions that are imported
        for name in files:
            if name != "row.toml":
                stat = os.lstat(path := os.path.join(directory, name))
                found[path] = (stat.st_size, stat.st_mtime_ns)
        found[directory] = (len(folders), 0)
    return found
