"""A few samples of a round for people to read, chosen the same way whenever it is asked: the best, the worst, and some between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from storage.sample import Sample

LONGEST = 2000  # characters of a text


def shown(samples: Sequence[Sample], count: int) -> list[dict[str, Any]]:
    """`count` samples as rows of a table, the best first: from the whole range of rewards, and failed ones only if there are too few others."""
    graded = sorted((sample for sample in samples if sample.reward is not None), key=_rank)
    failed = [sample for sample in samples if sample.reward is None]
    num = min(count, len(graded))
    chosen = [graded[round(i * (len(graded) - 1) / max(num - 1, 1))] for i in range(num)] + failed
    return [_row(sample) for sample in chosen[:count]]


def clipped(text: str, longest: int = LONGEST) -> str:
    """A text with its middle cut out if it is longer than that."""
    if len(text) <= longest:
        return text
    mark = f" [... {len(text) - longest:,} characters ...] "
    half = (longest - len(mark)) // 2
    return text[:half] + mark + text[-half:]


def _rank(sample: Sample) -> tuple[float, str]:
    return -(sample.reward or 0.0), sample.sample_id


def _row(sample: Sample) -> dict[str, Any]:
    return {
        "sample": sample.sample_id,
        "reward": sample.reward,
        "status": sample.status.value,
        "prompt": clipped(sample.prompt),
        "response": clipped(sample.response),
        "label": clipped(sample.label),
        "tokens": sum(sample.loss_mask),
        "turns": sample.metadata.get("num_turns", 1),
        "error": clipped(str(sample.metadata.get("error", ""))),
    }
