"""Fixtures: stores on a local S3 server (moto, which supports `If-None-Match: *`), with faults, and MLflow."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.flows.commands import maintenance
from penstock.storage import objects
from penstock.storage.store import Store
from penstock.storage.tracking import trackers
from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions
from penstock.storage.tracking.tracker import TrackedRun

sys.path.insert(0, str(Path(__file__).parent))
from faulty import KINDS, FaultyProxy
from jsonl_tracker import JsonlTracker


@pytest.fixture(autouse=True)
def keep_files_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `penstock gc --delete` not look for files of dead processes of this machine."""
    monkeypatch.setattr(maintenance, "find_files_of_dead_processes", lambda: [])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


@pytest.fixture
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Store]:
    """Return a function that opens an empty store of a kind: local, memory, s3 or faulty_s3."""

    def open_store(kind: str) -> Store:
        if kind in ("local", "memory"):
            return Store(str(tmp_path / "store") if kind == "local" else f"memory://{tmp_path.name}")
        return request.getfixturevalue("s3_store" if kind == "s3" else "faulty_store")(tmp_path.name)

    return open_store


@pytest.fixture
def s3_store(s3_options: dict[str, Any]) -> Callable[..., Store]:
    """Return a function that opens a store under a prefix of the bucket."""
    return lambda prefix, **options: Store(f"s3://bucket/{prefix}", s3_options, **options)


@pytest.fixture(scope="session")
def faulty_s3(s3_options: dict[str, Any]) -> Callable[..., AbstractContextManager[tuple[FaultyProxy, dict[str, Any]]]]:
    """Return a context manager for a faulty proxy: `with faulty_s3(rate=0.3) as (proxy, options)`. The client's timeout
    is one second, and pauses between tries are short."""

    @contextmanager
    def open_proxy(**arguments: Any) -> Iterator[tuple[FaultyProxy, dict[str, Any]]]:
        from botocore.retries.standard import ExponentialBackoff

        settings = {"hang_seconds": 1.5, "slow_seconds": 0.1, **arguments}
        with FaultyProxy(s3_options["endpoint_url"], **settings) as proxy, pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.0)
            patch.setattr(objects, "_FIRST_PAUSE", 0.01)
            yield proxy, {**s3_options, "endpoint_url": proxy.url, "config_kwargs": {"read_timeout": 1, "proxies": {}}}

    return open_proxy


@pytest.fixture(scope="session")
def faulty_store(faulty_s3: Callable[..., Any]) -> Iterator[Callable[..., Store]]:
    """Return a function that opens a store under a prefix of the bucket, where one call in twenty fails. Stale listings
    have separate tests."""
    with faulty_s3(rate=0.05, seed=5, kinds=KINDS - {"lag"}) as (_, options):
        yield lambda prefix, **more: Store(f"s3://bucket/{prefix}", options, **more)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: creating its tables takes seconds, copying it does not."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowOptions.connect(f"sqlite:///{path}", TrackedRun("none", "1")).client.search_experiments()
    return path


@pytest.fixture
def jsonl_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a tracker that writes one file."""
    monkeypatch.setitem(trackers.TRACKERS, "jsonl", SimpleNamespace(title="JSONL", connect=JsonlTracker))
    return f"jsonl://{tmp_path / 'points.jsonl'}"


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> Path:
    """A copy of the empty MLflow database."""
    copy = tmp_path / "mlflow.db"
    copy.write_bytes(empty_database.read_bytes())
    return copy
