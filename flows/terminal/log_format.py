"""Log lines as JSON (--log-format json), with the stage and the round in which they were printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime

_stage: ContextVar[str | None] = ContextVar("stage", default=None)
_round: ContextVar[int | None] = ContextVar("round", default=None)


@contextmanager
def log_context(stage: str, round_number: int | None) -> Iterator[None]:
    """Give the lines that this thread prints during the block a stage and, unless None, a round."""
    tokens = _stage.set(stage), _round.set(round_number)
    try:
        yield
    finally:
        _stage.reset(tokens[0])
        _round.reset(tokens[1])


def json_line(level: str, run: str, message: str) -> str:
    """Return one line of JSON: time (UTC), level, run, round, stage, message."""
    record = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "run": run,
        "round": _round.get(),
        "stage": _stage.get(),
        "message": message,
    }
    return json.dumps(record, ensure_ascii=False)


def round_of_task(name: str) -> int | None:
    """Return the round of a task run's name: `train-000004` is in round 4. The names of publications, checkpoints and
    evaluations have the policy version, which is the number of trained rounds, so `checkpoint-000005` is in round 4,
    too. Return None for stages without a number, and for version 0, which no round has trained."""
    match = re.match(r"([a-z-]+)-(\d+)", name)
    if match is None:
        return None
    stage, number = match.groups()
    rollout_id = int(number) - (stage not in ("rollout", "train", "demonstrations"))
    return rollout_id if rollout_id >= 0 else None
