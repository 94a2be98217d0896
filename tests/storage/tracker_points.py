"""The metric points of a run in MLflow, TensorBoard and offline W&B runs, in one form and without NaN, which equals
nothing."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import numpy
from wandb_files import read_history, wait_for_end

from penstock.storage.tracking.tensorboard import read_values
from penstock.storage.tracking.tracker import TrackedRun
from penstock.storage.tracking.wandb import RECORD, STEP

Points = list[tuple[str, int, float, int]]  # name, step, value as 32 bits, milliseconds


def mlflow_points(database: Path) -> Points:
    with sqlite3.connect(database) as connection:
        rows = connection.execute(
            "select metrics.key, step, metrics.value, timestamp from metrics "
            "join tags on tags.run_uuid = metrics.run_uuid and tags.key = 'penstock.part' and tags.value = 'run' "
            "where not is_nan and metrics.key not like 'at a glance/%'"  # what other trackers do not have
        ).fetchall()
    return sorted((name.replace("_at_", "@"), step, float(numpy.float32(value)), at) for name, step, value, at in rows)


def tensorboard_points(directory: Path) -> Points:
    [run] = directory.iterdir()
    return sorted(
        (tag, step, value.simple_value, int(at * 1000))
        for tag, step, at, value in read_values(run)
        if not value.metadata.ByteSize() and not math.isnan(value.simple_value)
    )


def wandb_points(directory: Path, run: TrackedRun) -> Points:
    """Points that were sent twice are equal, and count once."""
    wait_for_end(directory, run.identity)
    return sorted(
        {
            (name, row[STEP], float(numpy.float32(value)), int(row["_timestamp"] * 1000))
            for row in read_history(directory, run.identity)
            for name, value in row.items()
            if name not in (RECORD, STEP) and not name.startswith("_") and not math.isnan(float(value))
        }
    )
