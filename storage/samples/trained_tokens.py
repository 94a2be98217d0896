"""Write and read what the trainer knows of each trained token: its log-prob and its advantage.

The file belongs to the commit of a round of training. Training and replay never read it: it is for reports and queries.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.storage.commit import Commit
from penstock.storage.store import Store

FILE = "trained-tokens.parquet"
TOKENS_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("trainer_logprobs", pa.list_(pa.float32())),  # per trained token: of the policy before the round
        ("advantages", pa.list_(pa.float32())),  # per trained token
    ]
)


def write_trained_tokens(
    directory: Path, sample_ids: pa.ChunkedArray, num_tokens: np.ndarray, logprobs: np.ndarray, advantages: np.ndarray
) -> None:
    """Write the file for a round with B samples and N trained tokens.

    Args:
        directory: where to write `FILE`.
        sample_ids: [B].
        num_tokens: [B], trained tokens of each sample, N in total.
        logprobs: [N], by sample and position.
        advantages: [N], in the same order.
    """
    offsets = pa.array(np.concatenate([[0], np.cumsum(num_tokens)]), pa.int32())
    lists = [pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32())) for values in (logprobs, advantages)]
    table = pa.Table.from_arrays([sample_ids, *lists], schema=TOKENS_SCHEMA)
    pq.write_table(table, directory / FILE, compression="zstd")


def read_trained_tokens(store: Store, step: Commit) -> pa.Table | None:
    """Return the table (TOKENS_SCHEMA) of a committed round of training, or None if the round has no such file."""
    if not any(file.path == f"{step.attempt}/{FILE}" for file in step.files):
        return None
    with store.reading(step, only=[FILE]) as directory:
        return pq.read_table(directory / FILE)
