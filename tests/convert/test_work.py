"""Conversions split into work items: several ranks, restarts, concurrency, directories as targets, a full disk."""

import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from converted import check_same_tensors, commit_of

from penstock.flows.commands.demo_model import make_tiny_model
from penstock.stages.convert.targets import ASSETS_DIRECTORY, RECORD, TRACKER, Origin, check_free_space
from penstock.stages.convert.to_hf import export_to, finish_export, prepare_export, write_export
from penstock.stages.convert.to_torch_dist import (
    Conversion,
    ConversionOptions,
    convert_hf,
    finish_conversion,
    prepare_conversion,
    write_units,
)
from penstock.stages.convert.torch_dist_files import WorkUnit
from penstock.storage.commit import CheckpointRef
from penstock.storage.errors import ModelError, OptionError, StoreError
from penstock.storage.failpoints import VARIABLE
from penstock.storage.store import Store

SIZES = dict(hidden=32, layers=3, heads=4, groups=2, head_dim=16, ffn=48, vocab=61, tied=False, dtype="bfloat16")
SMALL = 6000  # bytes per unit: nine units, one of them with the embedding alone


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hf"), seed=3, **SIZES)


def planned(store: Store, source: Path, save: str | None = None) -> Conversion:
    work = prepare_conversion(store, source, ConversionOptions(unit_bytes=SMALL, save=save))
    assert isinstance(work, Conversion)
    return work


def elsewhere(work: Conversion) -> Conversion:
    """Return the conversion as another process receives it."""
    return pickle.loads(pickle.dumps(work))


def check_export(ref: CheckpointRef, source: Path, out: Path) -> None:
    """Check that exporting a converted model gives the source."""
    directory = next(path.parent for path in Path(ref.uri).rglob(".metadata"))
    back = export_to(Store(str(out)), str(directory), Origin(directory / ASSETS_DIRECTORY), str(out / "back"))
    check_same_tensors(source, back.uri)


def test_ranks_split_the_work(source: Path, store: Store, tmp_path: Path) -> None:
    work = planned(store, source)
    files = [item.file for item in work.work_items.items if isinstance(item, WorkUnit)]
    assert files == [f"__{index}_0.distcp" for index in range(len(files))] and len(files) > 5
    heard: list[list[tuple[int, int]]] = [[], [], []]
    for rank in range(3):
        write_units(elsewhere(work), rank, 3, lambda done, total, rank=rank: heard[rank].append((done, total)))
        written = {path.name for path in Path(store.path(work.target.attempt)).glob("*.distcp")}
        assert len(written) == len(set(files) & written) < len(files) or rank == 2
    assert sum(told[-1][0] for told in heard) == work.work_items.num_bytes == heard[0][0][1]
    check_export(finish_conversion(elsewhere(work)), source, tmp_path / "out")


def test_restart_does_only_unfinished_units(source: Path, store: Store, tmp_path: Path) -> None:
    work = planned(store, source)
    write_units(work)
    attempt, parts = Path(store.path(work.target.attempt)), Path(store.path(work.target.records_prefix))
    (parts / "share-00002.json").unlink()  # as after a kill during this unit
    (attempt / "__2_0.distcp").write_bytes(b"half")
    (attempt / "__4_0.distcp").unlink()  # a lost file
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in attempt.glob("*.distcp")}
    again = planned(store, source)
    assert [part.name for part in again.work_items.unfinished_items()] == ["share-00002", "share-00004"]
    write_units(again)
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in attempt.glob("*.distcp")}
    assert {name for name in after if before.get(name) != after[name]} == {"__2_0.distcp", "__4_0.distcp"}
    check_export(finish_conversion(again), source, tmp_path / "out")
    assert not parts.exists()


def test_concurrent_conversions_give_one_valid_result(source: Path, store: Store) -> None:
    one, other = planned(store, source), planned(store, source)
    write_units(one)
    for record in Path(store.path(one.target.records_prefix)).glob("*.json"):
        record.unlink()
    write_units(other)
    ref = finish_conversion(one)
    commit = commit_of(store, ref)
    write_units(other)  # after the result was published
    assert finish_conversion(other) == ref
    with store.reading(commit):  # verifies every hash
        pass


def test_source_changed_during_conversion_is_refused(source: Path, store: Store, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    work = planned(store, copy)
    write_units(work)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="copy"):
        finish_conversion(work)
    assert not [name for name in store.list("models") if name.endswith(".commit.json")]


@pytest.mark.integration
def test_conversion_resumes_after_sigkill(source: Path, store: Store, tmp_path: Path) -> None:
    """SIGKILL after all units are written and before the result is visible."""
    faults, out = tmp_path / "faults", tmp_path / "out"
    faults.mkdir()
    (faults / "convert-writing").touch()
    program = (
        "import sys\n"
        "from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf\n"
        "from penstock.storage.store import Store\n"
        "convert_hf(Store(sys.argv[1]), sys.argv[2], options=ConversionOptions(save=sys.argv[3]))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "store"), str(source), str(out)]
    child = subprocess.Popen(command, cwd=Path(__file__).parents[2], env={**os.environ, VARIABLE: str(faults)})
    try:
        deadline = time.monotonic() + 120
        while not (faults / "convert-writing.reached").exists():
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not out.exists()
    before = {path.name: path.stat().st_ino for path in tmp_path.glob(".out.incoming-*/release/*.distcp")}
    ref = convert_hf(store, source, options=ConversionOptions(save=str(out)))
    after = {path.name: path.stat().st_ino for path in out.glob("release/*.distcp")}
    assert before and before.items() <= after.items()
    check_export(ref, source, tmp_path / "again")
    assert not list(tmp_path.glob(".out*"))


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_directory_has_the_files_that_megatron_expects(source: Path, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "some" / "where"
    ref = convert_hf(store, source, options=ConversionOptions(save=str(out)))
    assert ref.uri == str(out) and (out / TRACKER).read_text() == "release"
    assert {path.name for path in out.iterdir()} == {"release", TRACKER, RECORD}
    assert {"metadata.json", "common.pt", ".metadata", ASSETS_DIRECTORY} < {
        path.name for path in (out / "release").iterdir()
    }
    check_export(ref, source, tmp_path / "again")
    assert not store.list("models")
    assert convert_hf(store, source, options=ConversionOptions(save=str(out))) == ref  # exists


def test_other_content_is_not_overwritten(source: Path, store: Store, tmp_path: Path) -> None:
    taken, other = tmp_path / "taken", make_tiny_model(tmp_path / "hf", seed=4, **SIZES)
    convert_hf(store, source, options=ConversionOptions(save=str(taken)))
    before = sorted((path, path.stat().st_mtime_ns) for path in taken.rglob("*"))
    with pytest.raises(OptionError, match=r"taken .*--save"):
        convert_hf(store, other, options=ConversionOptions(save=str(taken)))
    with pytest.raises(OptionError, match=r"taken .*--save"):
        export_to(store, str(taken / "release"), Origin(source), str(taken))
    assert sorted((path, path.stat().st_mtime_ns) for path in taken.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=r"file .*--save"):
        convert_hf(store, source, options=ConversionOptions(save=str(tmp_path / "file")))
    (tmp_path / "empty").mkdir()
    ref = convert_hf(store, other, options=ConversionOptions(save=str(tmp_path / "empty")))
    check_export(ref, other, tmp_path / "again")
    with pytest.raises(OptionError, match="--save /"):
        convert_hf(store, source, options=ConversionOptions(save="/"))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_directory_filled_during_conversion_is_not_changed(source: Path, store: Store, tmp_path: Path) -> None:
    work = planned(store, source, save=str(tmp_path / "out"))
    write_units(work)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(OptionError, match=r"out .*--save"):
        finish_conversion(work)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_object_store_as_target(source: Path, store: Store, tmp_path: Path) -> None:
    ref = convert_hf(store, source, options=ConversionOptions(save="memory://bucket/models/tiny"))
    place = Store("memory://bucket/models", probe=False)
    assert ref.uri == f"{place.uri}/tiny" and place.read(f"tiny/{TRACKER}") == b"release"
    assert convert_hf(store, source, options=ConversionOptions(save="memory://bucket/models/tiny")) == ref
    assert place.list("") == ["tiny"]
    for found in place.walk("tiny"):
        local = tmp_path / "local" / found.key
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(place.read(found.key) or b"")
    check_export(ref.model_copy(update={"uri": str(tmp_path / "local")}), source, tmp_path / "again")


def test_ranks_split_an_export_and_keep_finished_files(source: Path, store: Store, tmp_path: Path) -> None:
    model, out = convert_hf(store, source), tmp_path / "out"
    work = prepare_export(store, model.uri, Origin(source), str(out), shard_bytes=20_000)
    assert not isinstance(work, CheckpointRef)
    for rank in range(2):
        write_export(pickle.loads(pickle.dumps(work)), rank, 2)
    before = {path.name: path.stat().st_ino for path in Path(store.root).parent.glob(".out.incoming-*/*.safetensors")}
    assert len(before) > 2 and not out.exists()
    work = prepare_export(store, model.uri, Origin(source), str(out), shard_bytes=20_000)
    assert not isinstance(work, CheckpointRef)
    write_export(work)
    ref = finish_export(work)
    assert {path.name: path.stat().st_ino for path in out.glob("*.safetensors")} == before
    check_same_tensors(source, out)
    assert prepare_export(store, model.uri, Origin(source), str(out), shard_bytes=20_000) == ref


# ---- full disk -------------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of files; longer writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_raises_store_error_and_keeps_finished_units(source: Path, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = planned(store, source, save=str(out))
    largest = max(part.num_bytes for part in work.work_items.items)
    with files_of_at_most(largest), pytest.raises(StoreError, match="no room is left in"):
        write_units(work)
    assert not out.exists() and not list(tmp_path.glob(".out.incoming-*.parts/writing-*"))
    again = planned(store, source, save=str(out))
    write_units(again)
    check_export(finish_conversion(again), source, tmp_path / "again")
    export = prepare_export(store, str(out / "release"), Origin(source), str(tmp_path / "hf"))
    assert not isinstance(export, CheckpointRef)
    with files_of_at_most(largest), pytest.raises(StoreError, match="no room is left"):
        write_export(export)
    assert not (tmp_path / "hf").exists()


def test_too_small_disk_is_refused_before_writing(store: Store) -> None:
    with pytest.raises(StoreError, match=r"1000000000.0 GB"):
        check_free_space(store, 10**18)
    check_free_space(store, 1)
