"""Every bad input ends in one line and exit code 2, starts nothing and writes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from bad_inputs import BASES, QUICK, REST, Bad, real_rows
from bad_place import make_place
from penstock_command import penstock

from penstock.flows.cli import main
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.preflight import plan_of
from penstock.flows.services.deploy import parse_schedule
from tests.forked_worker import ForkedWorker, forked_workers  # noqa: F401 fixture

STARTS = {
    "subprocess.Popen",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "os.exec",
    "os.spawn",
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


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    root = tmp_path_factory.mktemp("bad")
    make_place(root, tiny_model)
    parse_schedule({"--cron": "0 2 * * *"})  # Prefect's imports for it run a program
    return root


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


def test_table_of_bad_inputs_is_large_and_has_no_duplicates() -> None:
    quick, rest = ([row for rows in table.values() for row in rows()] for table in (QUICK, REST))
    assert len(quick) >= 400 and len(rest) >= 1000
    assert len({(row.words, row.toml) for row in (*quick, *rest)}) == len(quick) + len(rest)


@pytest.mark.parametrize("command", sorted(BASES))
def test_unchanged_base_request_passes_preflight(command: str, place: Path) -> None:
    from penstock.flows.runtime.preflight import preflight

    words = [
        word.replace("{root}", str(place))
        for name, value in BASES[command].items()
        for word in (name, *value.split(" "))
    ]
    flow = {"train": "train", "eval": "evaluate"}.get(command, command)
    preflight(plan_of(flow, parse_config([*words, "--store", str(place / "good-store")])))


@pytest.mark.parametrize(
    "rows",
    [
        *(pytest.param(rows, id=subject) for subject, rows in QUICK.items()),
        *(pytest.param(rows, id=subject, marks=pytest.mark.full) for subject, rows in REST.items()),
    ],
)
def test_bad_inputs_are_refused_in_one_line(
    rows: Callable[[], Iterable[Bad]],
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place / "directory")
    failed = {}
    for row in rows():
        try:
            check(row, place, capsys)
        except (Exception, SystemExit, Tripwire) as error:
            failed[row.id] = f"{type(error).__name__}: {error}"
    assert not failed, "\n\n".join(f"{id}\n{error}" for id, error in failed.items())


@pytest.mark.parametrize(
    "row",  # all of them are rows of the test above
    [pytest.param(row, marks=[pytest.mark.full] if n % 6 else [], id=row.id) for n, row in enumerate(real_rows())],
)
def test_bad_input_to_a_process_is_refused_in_one_line(row: Bad, place: Path) -> None:
    words, before = prepare(row, place), snapshot(place)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = penstock(*words, env=environment, cwd=place / "directory", check=False)
    check_outcome(row, place, done.returncode, done.stdout, done.stderr)
    assert snapshot(place) == before


def check(row: Bad, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, before = prepare(row, place), snapshot(place)
    capsys.readouterr()
    watch.on = True
    try:
        code = main(words)
    finally:
        watch.on = False
    out = capsys.readouterr()
    check_outcome(row, place, code, out.out, out.err)
    assert snapshot(place) == before, "something was written"


def prepare(row: Bad, place: Path) -> list[str]:
    """The row's words; its TOML file is written."""
    if row.toml is not None:
        content = (
            row.toml
            if isinstance(row.toml, bytes)
            else row.toml.replace("{root}", str(place)).encode("utf-8", "surrogatepass")
        )
        (place / "row.toml").write_bytes(content)
    return [word.replace("{root}", str(place)) for word in row.words]


def check_outcome(row: Bad, place: Path, code: int, out: str, err: str) -> None:
    assert code == 2, (code, out, err)
    assert out == ""
    assert err.startswith("penstock: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert len(err) <= MAX_CHARACTERS and err.isprintable() is False and err[:-1].isprintable()
    assert row.culprit.replace("{root}", str(place)) in err, err
    assert "Traceback" not in err


def snapshot(place: Path) -> dict[str, tuple[int, int]]:
    """Every file and directory with its size and time of change."""
    found = {}
    for directory, folders, files in os.walk(place):
        folders[:] = [name for name in folders if name != "__pycache__"]  # Python's, of functions that are imported
        for name in files:
            stat = os.lstat(path := os.path.join(directory, name))
            found[path] = (stat.st_size, stat.st_mtime_ns)
        found[directory] = (len(folders), 0)
    return found
