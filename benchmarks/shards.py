"""Sample shards against plain pyarrow: time to write, time to read, bytes per token; and what each encoding of a column
would cost.

    python benchmarks/shards.py [--groups 128] [--turns 9]

All in CPU seconds, in turns, medians: others on the machine hit all alike. Samples are made up: groups of 8 with a
prompt of 60 to 300 tokens and responses of about 900, ids of a vocabulary of 150,000 by Zipf's law, text of about five
letters a token, log-probs of random mantissa (nothing compresses worse), and tool tokens in every third response.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.storage.samples.sample import SCHEMA, Sample, Status, from_table, to_table
from penstock.storage.samples.shards import write_shards

VOCABULARY = 150_000
GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    samples = made_up(options.groups)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    letters = sum(len(sample.response) for sample in samples) / sum(sum(sample.loss_mask) for sample in samples)
    print(f"{len(samples)} samples, {num_tokens:,} tokens, {letters:.1f} letters of text for each that is trained\n")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        whole_shards(samples, num_tokens, Path(scratch), options.turns)
        encodings(to_table(samples), num_tokens, Path(scratch), options.turns)


def made_up(num_groups: int) -> list[Sample]:
    rng = np.random.default_rng(0)
    shares = np.cumsum(1 / (np.arange(VOCABULARY) + 2.7) ** 1.05)  # Zipf's law with Mandelbrot's shift
    lengths = (
        rng.integers(1, 4, VOCABULARY) + np.log2(np.arange(VOCABULARY) + 2).astype(int) // 3
    )  # frequent words are short
    letters = np.frombuffer(b"etaoinshrdlcumwfgypbvk", dtype=np.uint8)
    words = [
        " " + bytes(letters[np.minimum(rng.geometric(0.12, length), len(letters)) - 1]).decode() for length in lengths
    ]
    ids = rng.permutation(VOCABULARY)

    def ranks(count: int) -> np.ndarray:
        return np.searchsorted(shares, rng.random(count) * shares[-1])

    samples = []
    for group in range(num_groups):
        prompt = ranks(int(rng.integers(60, 300)))
        for number in range(GROUP_SIZE):
            response = ranks(int(np.clip(rng.lognormal(6.6, 0.7), 16, 8192)))
            trained = np.ones(len(response), dtype=bool)
            if number % 3 == 2:
                trained[len(response) // 3 : len(response) // 2] = False
            logprobs = np.where(trained, -np.logaddexp(0, -rng.normal(4, 4, len(response))), 0).astype(np.float32)
            samples.append(
                Sample(
                    sample_id=f"{group:09d}-{number:02d}",
                    group_id=f"{group:09d}",
                    trajectory_id=f"{group:09d}-{number:02d}",
                    rollout_id=7,
                    prompt="".join(words[rank] for rank in prompt),
                    response="".join(words[rank] for rank in response),
                    label=str(group),
                    token_ids=ids[np.concatenate([prompt, response])].tolist(),
                    loss_mask=[0] * len(prompt) + trained.astype(int).tolist(),
                    rollout_logprobs=[0.0] * len(prompt) + logprobs.tolist(),
                    reward=float(rng.random() < 0.5),
                    status=Status.COMPLETED,
                    policy_versions=(7, 7),
                    metadata={"source": {"epoch": 0, "file": 0, "row": group}},
                )
            )
    return samples


def whole_shards(samples: list[Sample], num_tokens: int, scratch: Path, turns: int) -> None:
    """`write_shards` against what pyarrow does by default, from Python lists and from a table that is already there."""
    table = to_table(samples)
    lists = {name: table[name].to_pylist() for name in SCHEMA.names}
    plain, ours = scratch / "plain.parquet", scratch / "ours-00000.parquet"
    seconds = in_turns(
        {
            "write: plain pyarrow, a table": lambda: pq.write_table(table, plain, compression="zstd"),
            "write: plain pyarrow, lists": lambda: pq.write_table(pa.table(lists, SCHEMA), plain, compression="zstd"),
            "write: write_shards, samples": lambda: write_shards(scratch, samples, "ours"),
            "read: plain shard, a table": lambda: pq.ParquetFile(plain).read(),
            "read: ours, a table": lambda: pq.ParquetFile(ours).read(),
            "read: ours, samples": lambda: from_table(pq.ParquetFile(ours).read()),
        },
        turns,
    )
    for name, value in seconds.items():
        print(f"  {name:<32}{value / num_tokens * 1e9:7.1f} ns a token")
    for other in ("lists", "a table"):
        print(
            "  write_shards has "
            f"{seconds[f'write: plain pyarrow, {other}'] / seconds['write: write_shards, samples']:.2f} of "
            f"the rate with {other}"
        )
    for name, path in (("plain", plain), ("ours", ours)):
        print(f"  {name:<8}{path.stat().st_size / num_tokens:6.2f} bytes a token")


def encodings(table: pa.Table, num_tokens: int, scratch: Path, turns: int) -> None:
    """Each large column by itself, in every encoding that fits it."""
    numbers = {"plain": None, "byte stream split": "BYTE_STREAM_SPLIT"}
    choices: dict[str, dict[str, str | None]] = {
        "token_ids": {**numbers, "delta": "DELTA_BINARY_PACKED"},
        "rollout_logprobs": numbers,
        "loss_mask": {"plain": None, "delta": "DELTA_BINARY_PACKED"},
        "response": {"plain": None, "delta": "DELTA_LENGTH_BYTE_ARRAY"},
    }
    for column, known in choices.items():
        leaf, one, path = (
            column if column == "response" else f"{column}.list.element",
            table.select([column]),
            scratch / "column.parquet",
        )
        for level in (1, 3):
            ways: dict[str, dict[str, Any]] = {"dictionary": {"use_dictionary": True}}
            for name, encoding in known.items():
                ways[name] = {"use_dictionary": False, "column_encoding": encoding and {leaf: encoding}}
            for name, way in ways.items():
                write = partial(pq.write_table, one, path, compression="zstd", compression_level=level, **way)
                seconds = in_turns({"write": write, "read": partial(pq.read_table, path)}, turns)
                print(
                    f"  {column:<18}{name:<18} zstd {level}{path.stat().st_size / num_tokens:8.3f} bytes a token"
                    + "".join(f", {what} {value / num_tokens * 1e9:5.1f} ns" for what, value in seconds.items())
                )


def in_turns(work: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median CPU seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, once in work.items():
            begin = time.process_time()
            once()
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
