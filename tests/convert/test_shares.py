"""Conversions in parts: by several ranks, after a kill, beside another one, into directories, and onto a disk that is full."""

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
import torch

from flows.demo_model import make_tiny_model
from stages.convert.export import Origin
from stages.convert.hf_files import HFWeights
from stages.convert.targets import ASSETS_DIRECTORY, RECORD, TRACKER, check_room
from stages.convert.to_hf import export_to, finish_export, prepare_export, write_export
from stages.convert.to_torch_dist import Conversion, convert_hf, finish, prepare, write_shares
from storage.errors import StoreError
from storage.faults import VARIABLE
from storage.refs import CheckpointRef
from storage.store import Store

SIZES = dict(hidden=32, layers=3, heads=4, groups=2, head_dim=16, ffn=48, vocab=61, tied=False, dtype="bfloat16")
SMALL = 6000  # bytes a share: nine of them, the embedding alone in one


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hf"), seed=3, **SIZES)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def planned(store: Store, source: Path, **options: str) -> Conversion:
    work = prepare(store, source, share_bytes=SMALL, **options)
    assert isinstance(work, Conversion)
    return work


def elsewhere(work: Conversion) -> Conversion:
    """As another process gets it."""
    return pickle.loads(pickle.dumps(work))


def is_the_source(ref: CheckpointRef, source: Path, out: Path) -> bool:
    """Whether a converted model gives the source back."""
    directory = next(path.parent for path in Path(ref.uri).rglob(".metadata"))
    back = export_to(Store(str(out)), str(directory), Origin(directory / ASSETS_DIRECTORY), str(out / "back"))
    with HFWeights(source) as a, HFWeights(back.uri) as b:
        return a.info == b.info and all(torch.equal(a.fetch(name), b.fetch(name)) for name in a.info)


def test_ranks_share_the_work(source: Path, store: Store, tmp_path: Path) -> None:
    work = planned(store, source)
    files = [part.share.file for part in work.parts.parts if hasattr(part, "share")]
    assert files == [f"__{index}_0.distcp" for index in range(len(files))] and len(files) > 5
    heard: list[list[tuple[int, int]]] = [[], [], []]
    for rank in range(3):
        write_shares(elsewhere(work), rank, 3, lambda done, total, rank=rank: heard[rank].append((done, total)))
        written = {path.name for path in Path(store.path(work.target.attempt)).glob("*.distcp")}
        assert len(written) == len(set(files) & written) < len(files) or rank == 2
    assert sum(told[-1][0] for told in heard) == work.num_bytes == heard[0][0][1]
    assert is_the_source(finish(elsewhere(work)), source, tmp_path / "out")


def test_what_is_done_is_not_done_again(source: Path, store: Store, tmp_path: Path) -> None:
    work = planned(store, source)
    write_shares(work)
    attempt, parts = Path(store.path(work.target.attempt)), Path(store.path(work.target.parts))
    (parts / "share-00002.json").unlink()  # as if it had been killed while this one was written
    (attempt / "__2_0.distcp").write_bytes(b"half")
    (attempt / "__4_0.distcp").unlink()  # somebody has tidied up
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in attempt.glob("*.distcp")}
    again = planned(store, source)
    assert [part.name for part in again.parts.left()] == ["share-00002", "share-00004"]
    write_shares(again)
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in attempt.glob("*.distcp")}
    assert {name for name in after if before.get(name) != after[name]} == {"__2_0.distcp", "__4_0.distcp"}
    assert is_the_source(finish(again), source, tmp_path / "out")
    assert not parts.exists()


def test_two_at_once_do_not_harm_each_other(source: Path, store: Store) -> None:
    one, other = planned(store, source), planned(store, source)
    write_shares(one)
    for record in Path(store.path(one.target.parts)).glob("*.json"):
        record.unlink()
    write_shares(other)
    ref = finish(one)
    commit = store.committed(ref.key.removesuffix(".commit.json"))
    assert commit is not None
    write_shares(other)  # it has noticed nothing
    assert finish(other) == ref
    with store.reading(commit):  # every hash is looked at
        pass


def test_a_source_that_changes_meanwhile_is_refused(source: Path, store: Store, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    work = planned(store, copy)
    write_shares(work)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="was changed while it was converted"):
        finish(work)
    assert not [name for name in store.list("models") if name.endswith(".commit.json")]


@pytest.mark.integration
def test_a_killed_conversion_goes_on(source: Path, store: Store, tmp_path: Path) -> None:
    """SIGKILL when everything is written and nothing is visible."""
    faults, out = tmp_path / "faults", tmp_path / "out"
    faults.mkdir()
    (faults / "convert-writing").touch()
    program = (
        "import sys\nfrom stages.convert.to_torch_dist import convert_hf\nfrom storage.store import Store\n"
        "convert_hf(Store(sys.argv[1]), sys.argv[2], save=sys.argv[3])\n"
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
    ref = convert_hf(store, source, save=str(out))
    after = {path.name: path.stat().st_ino for path in out.glob("release/*.distcp")}
    assert before and before.items() <= after.items()
    assert is_the_source(ref, source, tmp_path / "again") and not list(tmp_path.glob(".out*"))


# ---- places -------------------------------------------------------------------------------------------------------------------


def test_a_directory_gets_what_megatron_expects(source: Path, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "some" / "where"
    ref = convert_hf(store, source, save=str(out))
    assert ref.uri == str(out) and (out / TRACKER).read_text() == "release"
    assert {path.name for path in out.iterdir()} == {"release", TRACKER, RECORD}
    assert {"metadata.json", "common.pt", ".metadata", ASSETS_DIRECTORY} < {path.name for path in (out / "release").iterdir()}
    assert is_the_source(ref, source, tmp_path / "again")
    assert not store.list("models")
    assert convert_hf(store, source, save=str(out)) == ref  # it is there


def test_other_things_are_not_overwritten(source: Path, store: Store, tmp_path: Path) -> None:
    taken, other = tmp_path / "taken", make_tiny_model(tmp_path / "hf", seed=4, **SIZES)
    convert_hf(store, source, save=str(taken))
    before = sorted((path, path.stat().st_mtime_ns) for path in taken.rglob("*"))
    with pytest.raises(ValueError, match=r"taken holds something else already"):
        convert_hf(store, other, save=str(taken))
    with pytest.raises(ValueError, match=r"taken holds something else already"):
        export_to(store, str(taken / "release"), Origin(source), str(taken))
    assert sorted((path, path.stat().st_mtime_ns) for path in taken.rglob("*")) == before
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file holds something else already"):
        convert_hf(store, source, save=str(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert is_the_source(convert_hf(store, other, save=str(tmp_path / "empty")), other, tmp_path / "again")
    with pytest.raises(ValueError, match="is the top of a disk"):
        convert_hf(store, source, save="/")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_directory_that_is_filled_meanwhile_is_left_alone(source: Path, store: Store, tmp_path: Path) -> None:
    work = planned(store, source, save=str(tmp_path / "out"))
    write_shares(work)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ValueError, match="was filled meanwhile"):
        finish(work)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_object_store_is_a_place_too(source: Path, store: Store, tmp_path: Path) -> None:
    ref = convert_hf(store, source, save="memory://bucket/models/tiny")
    place = Store("memory://bucket/models", probe=False)
    assert ref.uri == f"{place.uri}/tiny" and place.read(f"tiny/{TRACKER}") == b"release"
    assert convert_hf(store, source, save="memory://bucket/models/tiny") == ref
    assert place.list("") == ["tiny"]
    for found in place.walk("tiny"):
        local = tmp_path / "local" / found.key
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(place.read(found.key) or b"")
    assert is_the_source(ref.model_copy(update={"uri": str(tmp_path / "local")}), source, tmp_path / "again")


def test_ranks_share_an_export_and_keep_what_is_done(source: Path, store: Store, tmp_path: Path) -> None:
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
    with HFWeights(source) as a, HFWeights(out) as b:
        assert a.info == b.info and all(torch.equal(a.fetch(name), b.fetch(name)) for name in a.info)
    assert prepare_export(store, model.uri, Origin(source), str(out), shard_bytes=20_000) == ref


# ---- no room ------------------------------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses to make a file longer, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_becomes_full_is_one_sentence_and_the_rest_is_kept(source: Path, store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = planned(store, source, save=str(out))
    largest = max(part.num_bytes for part in work.parts.parts)
    with (
        files_of_at_most(largest),
        pytest.raises(StoreError, match=r"no room is left in .*: make room and start the same command"),
    ):
        write_shares(work)
    assert not out.exists() and not list(tmp_path.glob(".out.incoming-*.parts/writing-*"))
    again = planned(store, source, save=str(out))
    write_shares(again)
    assert is_the_source(finish(again), source, tmp_path / "again")
    leaving = prepare_export(store, str(out / "release"), Origin(source), str(tmp_path / "hf"))
    assert not isinstance(leaving, CheckpointRef)
    with files_of_at_most(largest), pytest.raises(StoreError, match="no room is left"):
        write_export(leaving)
    assert not (tmp_path / "hf").exists()


def test_a_disk_that_is_too_small_is_known_before(store: Store) -> None:
    with pytest.raises(StoreError, match=r"1000000000.0 GB are to be written and .* GB free: make room"):
        check_room(store, 10**18)
    check_room(store, 1)
