"""Buckets in shared memory: nothing is left in /dev/shm after `free`, whatever the receivers do, and they can go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from penstock.engines.sglang.weight_update import FlatBucket
from penstock.flows.commands import maintenance
from penstock.stages.train import actor
from penstock.stages.train.actor import TrainActor

SHM = Path("/dev/shm")
TOTAL = 1000 * (128 + 63)  # sum of the bytes of 1000 times 1.0 as float32
RECEIVER = """
import base64, pickle, sys, torch
for line in sys.stdin:
    if line == "close\\n":
        del content
        print("closed", flush=True)
        continue
    if line != "read\\n":
        content = pickle.loads(base64.b64decode(line))
    print(int(content["flattened_tensor"].sum()), flush=True)
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


def ask(receiver: Receiver, line: str) -> str:
    assert receiver.stdin is not None and receiver.stdout is not None
    receiver.stdin.write(line + "\n")
    receiver.stdin.flush()
    return receiver.stdout.readline().strip()


def test_shared_file_is_gone_when_the_bucket_is_freed_and_a_receiver_still_reads(bucket: FlatBucket) -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    killed, reading = (subprocess.Popen([sys.executable, "-c", RECEIVER], text=True, **pipes) for _ in range(2))
    assert ask(killed, bucket.serialize()) == ask(reading, bucket.serialize()) == str(TOTAL)
    assert ask(reading, "close") == "closed" and ask(reading, bucket.serialize()) == str(TOTAL)
    bucket.serialize()  # for a server that has the adapter already, and opens nothing
    assert len(own_files()) == 1
    killed.kill()
    killed.communicate()
    bucket.free()
    assert own_files() == []
    assert ask(reading, "read") == str(TOTAL)

    alone = FlatBucket([("w", torch.ones(1000))])
    assert ask(reading, alone.serialize()) == str(TOTAL)
    alone.free()
    assert reading.communicate("close\n") == ("closed\n", ""), "the last receiver tried to delete the file"
    assert reading.returncode == 0 and own_files() == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_bucket_without_receivers_is_freed(bucket: FlatBucket, is_shared: bool) -> None:
    if is_shared:
        bucket.serialize()
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


def test_ranks_of_one_node_meet_at_a_file_that_ends_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_scratch.py` kills the owner of a temporary directory."""
    monkeypatch.setattr(actor, "own_temp_directory", lambda: tmp_path)
    first, second = (TrainActor.open_rendezvous(object.__new__(TrainActor), one_node=True) for _ in range(2))
    assert first != second and Path(first.removeprefix("file://")).parent == tmp_path
