"""Samples are read from Parquet as they were written; inconsistent samples and unknown versions are refused."""

import random
import string
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_run import commit_samples

from penstock.storage.commit import Commit
from penstock.storage.errors import RunError
from penstock.storage.samples import shards
from penstock.storage.samples.sample import (
    SCHEMA,
    SCHEMA_VERSION,
    Sample,
    Status,
    from_table,
    to_table,
)
from penstock.storage.samples.shards import read_samples, read_table, write_shards
from penstock.storage.store import Store

ALPHABET = string.printable + "äß汉字🙂\u0000\u2028'\"\\"


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(0, 30)))


def random_sample(rng: random.Random, number: int) -> Sample:
    """Return any valid sample: perhaps empty, untrained, without reward, with text in any script."""
    num_prompt, num_response = rng.randrange(0, 9), rng.randrange(0, 9)
    mask = [0] * num_prompt + [rng.randrange(2) for _ in range(num_response)]
    return Sample(
        sample_id=f"{number:09d}-{rng.randrange(100):02d}",
        group_id=f"{number:09d}",
        trajectory_id=random_text(rng),
        rollout_id=rng.choice([0, 7, 2**40]),
        prompt=random_text(rng),
        response=random_text(rng),
        label=random_text(rng),
        token_ids=[rng.randrange(2**31) for _ in mask],
        loss_mask=mask,
        # stored as float32
        rollout_logprobs=[float(np.float32(-rng.expovariate(1.0))) if trained else 0.0 for trained in mask],
        routed_experts=rng.choice([None, b"", rng.randbytes(12)]),
        reward=rng.choice([None, 0.0, -1.5, rng.random(), float("inf")]),
        rewards={random_text(rng): rng.random() for _ in range(rng.randrange(3))},
        status=rng.choice(list(Status)),
        policy_versions=(rng.randrange(-1, 5), rng.randrange(-1, 2**40)),
        images=[rng.randbytes(4).hex() for _ in range(rng.randrange(3))],
        metadata=rng.choice([{}, {"row": number, "nested": {"list": [1, None, 2.5, random_text(rng)]}}]),
    )


@pytest.mark.parametrize("seed", range(5))
def test_round_trip_through_parquet(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    samples = [random_sample(rng, number) for number in range(rng.randrange(0, 40))]
    pq.write_table(to_table(samples), tmp_path / "x.parquet")
    assert from_table(pq.ParquetFile(tmp_path / "x.parquet").read()) == samples


def streams(token_ids: list, loss_mask: object, rollout_logprobs: object) -> Sample:
    return Sample("s", "g", "t", 0, token_ids=token_ids, loss_mask=loss_mask, rollout_logprobs=rollout_logprobs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(streams([1, 2], [0, 1], [0.0, 1e300]), id="a log-prob that float32 does not hold"),
        pytest.param(streams([1, 2], [0, 1], [0, np.float32(-0.1)]), id="whole and numpy numbers"),
        pytest.param(streams([1, 2], np.array([0, 1]), (0.0, -0.1)), id="a numpy mask and a tuple"),
        pytest.param(streams([1, 2], (0, 1), np.array([0.0, -0.1])), id="a tuple and numpy log-probs"),
        pytest.param(streams([1, 2], [0, 1], [None, -0.1]), id="no log-prob"),
        pytest.param(
            streams([2**31 - 1, -(2**31)], [False, True], [float("-inf"), 5e-324]), id="the ends of the types"
        ),
    ],
)
def test_token_columns_are_equal_to_those_of_arrow(odd: Sample) -> None:
    samples = [*(random_sample(random.Random(number), number) for number in range(5)), odd, streams([], [], [])]
    table = to_table(samples)
    table.validate(full=True)
    for name in ("token_ids", "loss_mask", "rollout_logprobs"):
        lists = [[int(v) if isinstance(v, bool) else v for v in getattr(sample, name)] for sample in samples]
        assert table[name].equals(pa.chunked_array([pa.array(lists, SCHEMA.field(name).type)])), name


def test_prompt_and_response_lengths_are_split_at_the_first_trained_token() -> None:
    sample = Sample("s", "g", "t", 0, token_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 0], rollout_logprobs=[0.0] * 4)
    assert (sample.prompt_length, sample.response_length) == (2, 2)
    sample.loss_mask = [0, 0, 0, 0]
    assert (sample.prompt_length, sample.response_length) == (4, 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"loss_mask": [0, 1]}, "lengths 3, 2, 3"),
        ({"rollout_logprobs": []}, "lengths 3, 3, 0"),
        ({"loss_mask": [0, 1, 2]}, "loss_mask .*0 or 1"),
        ({"loss_mask": [0, 1, -1]}, "loss_mask .*0 or 1"),
        ({"token_ids": [1, 2, 2**31]}, "2147483648"),
    ],
)
def test_inconsistent_token_fields_are_refused(changes: dict, sentence: str) -> None:
    sample = Sample("s", "g", "t", 0, token_ids=[1, 2, 3], loss_mask=[0, 1, 1], rollout_logprobs=[0.0, -1.0, -2.0])
    to_table([sample])
    for name, value in changes.items():
        setattr(sample, name, value)
    with pytest.raises(ValueError, match=sentence):
        to_table([sample])


# ---- shards in a store -----------------------------------------------------------------------------------------------

PREFIX = "runs/r/rollouts/000000"


@pytest.mark.parametrize("num_samples", [0, 3, 4, 11])
def test_shards_keep_the_order_and_record_their_rows(
    num_samples: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SAMPLES_PER_SHARD", 3)
    samples = [random_sample(random.Random(number), number) for number in range(num_samples)]
    commit = commit_samples(store, PREFIX, samples, kind="rollout")
    assert read_samples(store, commit) == samples
    rows = [record.rows for record in commit.files]
    assert sum(row or 0 for row in rows) == num_samples
    assert len(rows) == max(1, -(-num_samples // 3))


def test_a_token_costs_less_than_twelve_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(150_000, size=(64, 500))  # nothing to compress
    noise = -rng.exponential(size=(64, 500)).astype(np.float32)
    samples = [
        Sample(f"{j}", f"{j // 8}", f"{j}", 0, token_ids=row, loss_mask=[1] * 500, rollout_logprobs=logprobs)
        for j, (row, logprobs) in enumerate(zip(ids.tolist(), noise.tolist()))
    ]
    write_shards(tmp_path, samples)
    path = tmp_path / "part-00000.parquet"
    assert path.stat().st_size < 7 * ids.size  # measured: 6.44, with Parquet's defaults 10.1
    assert from_table(pq.ParquetFile(path).read()) == samples


def test_only_shards_that_the_commit_names_are_read(store: Store) -> None:
    commit = commit_samples(store, PREFIX, [Sample("s", "g", "t", 0)], kind="rollout")
    late = Path(store.path(commit.attempt or ""))
    write_shards(late, [Sample("late", "g", "t", 0)], name="part-00000-late")
    pq.write_table(to_table([Sample("late", "g", "t", 0)]), late / "part-00001.parquet")
    assert [sample.sample_id for sample in read_samples(store, commit)] == ["s"]


def test_a_directory_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run=3"))
    commit = commit_samples(store, PREFIX, [Sample("s", "g", "t", 0)], kind="rollout")
    assert read_table(store, commit).schema.names == SCHEMA.names


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, None])
def test_a_committed_shard_of_another_version_is_refused(version: int | None, store: Store) -> None:
    attempt = store.new_attempt(PREFIX)
    with store.writing(attempt) as out:
        metadata = None if version is None else {"penstock_schema_version": str(version)}
        pq.write_table(to_table([]).replace_schema_metadata(metadata), out.path / "part-00000.parquet")
    commit = store.commit(PREFIX, Commit(kind="rollout", attempt=attempt, files=out.files))
    with pytest.raises(RunError, match=f"schema version {version or 'none'}"):
        read_table(store, commit)
