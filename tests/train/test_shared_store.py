"""A store in a local directory must be shared by all nodes of a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.stages.train.trainer_group import check_store_is_shared
from penstock.storage.errors import OptionError
from penstock.storage.store import Store


def seen(path: str) -> list[bool]:
    return [Path(path).exists()] * 2


def test_a_shared_directory_is_accepted_and_left_as_it_was(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    before = sorted(Path(store.root).rglob("*"))
    check_store_is_shared(store, seen, ["a", "b"])
    assert sorted(Path(store.root).rglob("*")) == before


def test_a_directory_that_a_node_does_not_see_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    before = sorted(Path(store.root).rglob("*"))
    with pytest.raises(OptionError, match=r"--store .* 1 of 2 nodes \(for instance Ray's node b\): .* object store"):
        check_store_is_shared(store, lambda path: [seen(path)[0], False, False], ["a", "b", "b"])
    assert sorted(Path(store.root).rglob("*")) == before


def test_an_object_store_needs_no_check() -> None:
    store = Store("memory://shared-by-all", single_writer=True, probe=False)
    check_store_is_shared(store, lambda path: [False], ["a", "b"])
