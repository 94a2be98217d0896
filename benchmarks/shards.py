"""Compare sample shards with Parquet files that pyarrow writes by default, and the possible encodings of each large
column: CPU time to write and read, bytes per token.

    python benchmarks/shards.py [--groups 128] [--turns 9]

Times are medians of CPU seconds. The formats are measured alternately, so that other load on the machine affects them
equally. The samples are synthetic: groups of 8 with a prompt of 60 to 300 tokens and responses of about 900, token ids
from a vocabulary of 150,000 with Zipf's law, about five letters of text per token, log-probs with random mantissa (the
worst case for compression), and tool tokens in every third response.
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
    parser.add_argument("--groups", type=int, default=128, help="number of groups of 8 samples")
    parser.add_argument("--turns", type=int, default=9, help="repetitions of every measurement")
    options = parser.parse_args()
    samples = make_samples(options.groups)
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    letters = sum(len(sample.response) for sample in samples) / sum(sum(sample.loss_mask) for sample in samples)
    print(f"{len(samples)} samples, {num_tokens:,} tokens, {letters:.1f} letters of text per trained token\n")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        compare_shards(samples, num_tokens, Path(scratch), options.turns)
        compare_encodings(to_table(samples), num_tokens, Path(scratch), options.turns)


def make_samples(num_groups: int) -> list[Sample]:
    """Return `num_groups` groups of synthetic samples, as the module docstring describes them."""
    rng = np.random.default_rng(0)
    shares = np.cumsum(1 / (np.arange(VOCABULARY) + 2.7) ** 1.05)  # Zipf's law with Mandelbrot's shift
    # Frequent words are short.
    lengths = rng.integers(1, 4, VOCABULARY) + np.log2(np.arange(VOCABULARY) + 2).astype(int) // 3
    letters = np.frombuffer(b"etaoinshrdlcumwfgypbvk", dtype=np.uint8)
    words = [
        " " + bytes(letters[np.minimum(rng.geometric(0.12, length), len(letters)) - 1]).decode() for length in lengths
    ]
    ids = rng.permutation(VOCABULARY)

    def draw_ranks(count: int) -> np.ndarray:
        return np.searchsorted(shares, rng.random(count) * shares[-1])

    samples = []
    for group in range(num_groups):
        prompt = draw_ranks(int(rng.integers(60, 300)))
        for number in range(GROUP_SIZE):
            response = draw_ranks(int(np.clip(rng.lognormal(6.6, 0.7), 16, 8192)))
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


def compare_shards(samples: list[Sample], num_tokens: int, scratch: Path, turns: int) -> None:
    """Print times and sizes of `write_shards`, and of pyarrow with default options, from lists and from a table."""
    table = to_table(samples)
    lists = {name: table[name].to_pylist() for name in SCHEMA.names}
    plain, shard = scratch / "plain.parquet", scratch / "shard-00000.parquet"
    seconds = measure_alternately(
        {
            "write: plain pyarrow, a table": lambda: pq.write_table(table, plain, compression="zstd"),
            "write: plain pyarrow, lists": lambda: pq.write_table(pa.table(lists, SCHEMA), plain, compression="zstd"),
            "write: write_shards, samples": lambda: write_shards(scratch, samples, "shard"),
            "read: plain pyarrow, a table": lambda: pq.ParquetFile(plain).read(),
            "read: shard, a table": lambda: pq.ParquetFile(shard).read(),
            "read: shard, samples": lambda: from_table(pq.ParquetFile(shard).read()),
        },
        turns,
    )
    for name, value in seconds.items():
        print(f"  {name:<32}{value / num_tokens * 1e9:7.1f} ns per token")
    for other in ("lists", "a table"):
        print(
            "  write_shards has "
            f"{seconds[f'write: plain pyarrow, {other}'] / seconds['write: write_shards, samples']:.2f} "
            f"times the speed of plain pyarrow from {other}"
        )
    for name, path in (("plain", plain), ("shard", shard)):
        print(f"  {name:<8}{path.stat().st_size / num_tokens:6.2f} bytes per token")


def compare_encodings(table: pa.Table, num_tokens: int, scratch: Path, turns: int) -> None:
    """Print size, write and read time of each large column in every encoding that supports its type."""
    numbers = {"plain": None, "byte stream split": "BYTE_STREAM_SPLIT"}
    choices: dict[str, dict[str, str | None]] = {
        "token_ids": {**numbers, "delta": "DELTA_BINARY_PACKED"},
        "rollout_logprobs": numbers,
        "loss_mask": {"plain": None, "delta": "DELTA_BINARY_PACKED"},
        "response": {"plain": None, "delta": "DELTA_LENGTH_BYTE_ARRAY"},
    }
    for column, known in choices.items():
        leaf = column if column == "response" else f"{column}.list.element"
        one, path = table.select([column]), scratch / "column.parquet"
        for level in (1, 3):
            ways: dict[str, dict[str, Any]] = {"dictionary": {"use_dictionary": True}}
            for name, encoding in known.items():
                ways[name] = {"use_dictionary": False, "column_encoding": encoding and {leaf: encoding}}
            for name, way in ways.items():
                write = partial(pq.write_table, one, path, compression="zstd", compression_level=level, **way)
                seconds = measure_alternately({"write": write, "read": partial(pq.read_table, path)}, turns)
                print(
                    f"  {column:<18}{name:<18} zstd {level}{path.stat().st_size / num_tokens:8.3f} bytes per token"
                    + "".join(f", {what} {value / num_tokens * 1e9:5.1f} ns" for what, value in seconds.items())
                )


def measure_alternately(work: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Call all functions one after the other, `turns` times, and return name -> median CPU seconds of a call."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, once in work.items():
            begin = time.process_time()
            once()
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
