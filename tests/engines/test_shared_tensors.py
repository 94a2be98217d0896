"""Buckets in shared memory: nothing is left in /dev/shm after `free`, whatever the receivers do, and they can go on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.engines.sglang.weight_update import FlatBucket
from penstock.flows.commands import maintenance

SHM = Path("/dev/shm")
TOTAL = 1000 * (128 + 63)  # sum of the bytes of 1000 times 1.0 as float32
RECEIVER = """
import base64, pickle, sys
content = pickle.loads(base64.b64decode(sys.stdin.readline()))
print(int(content["flattened_tensor"].sum()), flush=True)
sys.stdin.readline()
print(int(content["flattened_tensor"].sum()), flush=True)
del content
print("closed", flush=True)
"""
Receiver = subprocess.Popen[str]


FILES = f"torch_{os.getpid()}_*"  # in SHM
EARLIER: set[Path] = set()  # of other tests of this process


def own_files() -> list[Path]:
    return [file for file in SHM.glob(FILES) if file not in EARLIER]


@pytest.fixture
def bucket() -> FlatBucket:
    EARLIER.update(SHM.glob(FILES))
    return FlatBucket([("w", torch.ones(1000))])


def receive(bucket: FlatBucket) -> Receiver:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], text=True, **pipes)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(bucket.serialize() + "\n")
    process.stdin.flush()
    assert int(process.stdout.readline()) == TOTAL
    return process


def reads_and_closes(process: Receiver) -> None:
    out, err = process.communicate("\n")
    assert (out.split(), err, process.returncode) == ([str(TOTAL), "closed"], "", 0)


def is_killed(process: Receiver) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("ends", [[is_killed, reads_and_closes], []], ids=len)
def test_shared_file_is_gone_and_receivers_still_read(
    bucket: FlatBucket, ends: list[Callable[[Receiver], None]]
) -> None:
    receivers = [receive(bucket) for _ in ends]
    bucket.serialize()  # for a server that has the adapter already, and opens nothing
    assert len(own_files()) == 1
    bucket.free()
    assert own_files() == []
    for receiver, end in zip(receivers, ends, strict=True):
        end(receiver)
    assert own_files() == []


def test_receivers_that_end_before_the_bucket_is_freed(bucket: FlatBucket) -> None:
    for end in (is_killed, reads_and_closes):
        end(receive(bucket))
    bucket.free()
    assert own_files() == []


def test_bucket_that_is_not_shared_is_freed(bucket: FlatBucket) -> None:
    bucket.free()
    assert own_files() == [] and not hasattr(bucket, "flat")


@pytest.mark.parametrize(
    ("name", "age", "is_residue"),
    [
        ("torch_{dead}_123_0", 7200, True),
        ("torch_{dead}_123_0", 60, False),
        ("torch_{alive}_123_0", 7200, False),
        ("torch_mine_123_0", 7200, False),
        ("sem.{dead}", 7200, False),
    ],
)
def test_old_tensor_of_a_dead_process_is_residue(name: str, age: float, is_residue: bool, tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    path = tmp_path / name.format(dead=ended.pid, alive=os.getpid())
    path.write_bytes(b"x")
    os.utime(path, (time.time() - age,) * 2)
    found = maintenance.find_files_of_dead_processes(tmp_path / "none", shm=tmp_path)
    assert [entry.path for entry in found] == [path] * is_residue
    assert [maintenance.remove_residue(entry) for entry in found] == [True] * is_residue


def test_rendezvous_file_of_a_killed_rank_is_removed_with_its_directory() -> None:
    tmp_path = Path(tempfile.mkdtemp())  # short: below a long path, sockets would be in /tmp
    program = """
from pathlib import Path
from penstock.stages.train.actor import TrainActor
url = TrainActor.open_rendezvous(object.__new__(TrainActor), one_node=True)
Path(url.removeprefix("file://")).write_text("x")
print(url, flush=True)
input()
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        file = Path(rank.stdout.readline().strip().removeprefix("file://"))
        assert file.parent.parent == tmp_path and file.exists()
        assert maintenance.find_files_of_dead_processes(tmp_path, shm=tmp_path) == []
        rank.kill()
    [entry] = maintenance.find_files_of_dead_processes(tmp_path, shm=tmp_path)
    assert maintenance.remove_residue(entry) and not file.exists()
    tmp_path.rmdir()  # it is empty
