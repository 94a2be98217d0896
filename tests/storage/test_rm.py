"""`penstock rm` removes a run completely, even after a kill, unless a driver runs or a fork needs its files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from made_run import DyingStore, config_of, make_run, write_data
from run_records import parent_record

from penstock.flows.cli import main
from penstock.flows.commands import fork, maintenance
from penstock.flows.commands.maintenance import gc_main, rm_main
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run, read_flow_and_config
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.history.run_record import ForkRecord
from penstock.storage.leases import Lease, new_driver_lease_key, store_time
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.maintenance.deletion import (
    describe_removing_process,
    find_orphans,
    is_removed,
    remove_orphan,
    remove_run,
)
from penstock.storage.store import Store
from penstock.storage.tracking.tracker import tracking_directory

KEYS = RunKeys("r")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    store = Store(str(root / "store"))
    make_run(store, config_of(store, write_data(root / "data.jsonl")), 3, save=(2,), score=(0,))
    make_run(store, config_of(store, root / "data.jsonl", "empty"), 0, score=(0,))
    make_run(store, config_of(store, root / "data.jsonl", "other"), 1)
    return root


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return Store(str(tmp_path / "store"))


def command(store: Store, *words: str) -> int:
    return rm_main([*words, "--store", store.root])


def files(store: Store, prefix: str = "") -> set[str]:
    return {found.key for found in store.walk(prefix)}


def test_removing_a_run_with_rounds_needs_its_name_as_confirmation(store: Store) -> None:
    others = {key for key in files(store) if not key.startswith(("runs/r/", "runs/empty/"))}
    (Path(store.root) / "runs/empty/rollouts/000000/attempt-x").mkdir(parents=True)
    assert command(store, "empty") == 0
    assert not (Path(store.root) / "runs/empty").exists()
    with pytest.raises(RunError, match="confirm its removal with --yes r"):
        command(store, "r")
    assert main(["rm", "r", "--store", store.root]) == 2
    with pytest.raises(OptionError, match="--yes other"):
        command(store, "r", "--yes", "other")
    for name in ("ghost", "../other"):
        with pytest.raises((RunError, OptionError)):
            command(store, name)
    assert audit_run(store, KEYS).problems == []
    assert command(store, "r", "--yes", "r") == 0
    assert files(store) == others and store.list("runs") == ["other"]
    assert audit_run(store, RunKeys("other")).problems == []


def test_a_run_with_a_live_driver_is_not_removed(store: Store) -> None:
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    with pytest.raises(RunError, match="has a running driver, process"):
        command(store, "r", "--yes", "r")
    assert describe_removing_process(store, KEYS) is None and not is_removed(store, KEYS)
    lease.release()
    assert command(store, "r", "--yes", "r") == 0


def test_a_driver_starting_during_removal_is_seen_or_sees_the_removal(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(store, tmp_path / "data.jsonl")
    lease = Lease(store, new_driver_lease_key(KEYS)).take()
    remover = Lease(store, f"{KEYS.prefix}/removing.lease").take()  # it will look for drivers next
    with pytest.raises(RunError, match="is being removed"):
        open_run(store, resolve("train", config, store), lease=lease)
    with pytest.raises(RunError, match="is being removed"):
        command(store, "r", "--yes", "r")
    remover.release()
    open_run(store, resolve("train", config, store), lease=lease)
    lease.release()


def test_a_run_needed_by_a_fork_is_not_removed(store: Store) -> None:
    assert fork.main(["r", "--at", "2", "--name", "f", "--store", store.root]) == 0
    assert fork.main(["f", "--at", "1", "--name", "g", "--store", store.root]) == 0
    assert command(store, "f", "--yes", "f") == 0, "it has no files of its own"
    with pytest.raises(RunError, match="its fork 'g'"):
        command(store, "r", "--yes", "r")
    Path(store.path("runs/g/run.json")).write_text("{")  # its commits tell
    with pytest.raises(RunError, match="its fork 'g'"):
        command(store, "r", "--yes", "r")
    assert command(store, "g", "--yes", "g") == 0
    assert command(store, "r", "--yes", "r") == 0


def test_a_fork_made_during_removal_is_seen_or_sees_the_removal(store: Store) -> None:
    store.create(
        RunKeys("f").fork,
        ForkRecord(flow="sft", config={}, parent=parent_record("r", 2)).model_dump_json().encode(),
    )
    with pytest.raises(RunError, match="its fork 'f'"):
        command(store, "r", "--yes", "r")
    store.delete([RunKeys("f").fork])
    remover = Lease(store, f"{KEYS.prefix}/removing.lease").take()
    with pytest.raises(RunError, match="is being removed"):
        fork.main(["r", "--at", "2", "--name", "f", "--store", store.root])
    assert files(store, "runs/f") == set()
    remover.release()


def test_gc_does_not_touch_a_running_removal(store: Store) -> None:
    store.create(KEYS.removed, b"")
    remover = Lease(store, f"{KEYS.prefix}/removing.lease").take()
    before = files(store, KEYS.prefix)
    assert gc_main(["r", "--delete", "--older-than", "0", "--store", store.root]) == 0
    assert files(store, KEYS.prefix) == before
    remover.release()
    assert gc_main(["r", "--delete", "--store", store.root]) == 0
    assert files(store, KEYS.prefix) == set()


def test_gc_keeps_a_run_started_again_after_its_listing(store: Store, tmp_path: Path) -> None:
    store.create(KEYS.removed, b"")
    found = find_orphans(store, "r", older_than=86400)
    assert [(orphan.kind, orphan.key) for orphan in found] == [("removed run", KEYS.prefix)]
    make_run(store, config_of(store, tmp_path / "data.jsonl"), 3, save=(2,))
    before = files(store, KEYS.prefix)
    assert not remove_orphan(store, found[0], store_time(store))
    assert files(store, KEYS.prefix) == before and audit_run(store, KEYS).problems == []


@pytest.mark.parametrize("finish", ["rm", "gc", "start"])
def test_a_killed_removal_is_finished_later(store: Store, tmp_path: Path, finish: str, capsys, monkeypatch) -> None:
    others = {key for key in files(store) if not key.startswith("runs/r/")}
    whole = len(files(store, KEYS.prefix))
    config = config_of(store, tmp_path / "data.jsonl")
    shutil.copytree(store.root, tmp_path / "kept")
    for left in (1, whole // 2, whole + 1):  # the first change marks the run as removed
        shutil.rmtree(store.root)
        shutil.copytree(tmp_path / "kept", store.root)
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(Lease, "release", lambda self: self.stop_renewing())  # a killed process releases nothing
            remove_run(DyingStore(store, left), KEYS)
        store.delete([f"{KEYS.prefix}/removing.lease"])  # it has ended with its process
        assert is_removed(store, KEYS)
        with pytest.raises(RunError, match="was removed"):
            read_flow_and_config(config.run, "r")
        assert main(["runs", "--store", store.root]) == 0 and "removed" in capsys.readouterr().out
        finishes: dict[str, Callable[[], object]] = {
            "rm": lambda: command(store, "r"),
            "gc": lambda: gc_main(["--delete", "--store", store.root]),
            "start": lambda: open_run(store, resolve("train", config, store)),
        }
        finishes[finish]()
        assert files(store) == others | ({KEYS.record} if finish == "start" else set()), left
        assert find_orphans(store, "r", older_than=0) == []


def test_removal_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    store = Store(f"memory://{tmp_path.name}")
    make_run(store, config_of(store, write_data(tmp_path / "data.jsonl")), 1, save=(1,))
    outbox = tracking_directory(store, "r")
    outbox.mkdir(parents=True)
    (outbox / "outbox.jsonl").write_text("{}")
    monkeypatch.setattr(maintenance, "open_store", lambda config, probe: store)
    assert rm_main(["r", "--yes", "r"]) == 0
    assert files(store, "runs") == set() and not outbox.exists()
