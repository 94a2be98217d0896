"""The numbers of a rollout that people look at, from its samples alone. Names are slime's."""

from __future__ import annotations

import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

from storage.sample import Sample, Status

_LONG_TEXT = 10_000  # characters from which repetition is looked for
_REPETITION = 10.0  # a text that compresses more than this is repeating itself


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths, how generation ended, and groups without contrast (GRPO learns nothing from those)."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    out = {
        "rollout/raw_reward": statistics.fmean(rewards) if rewards else 0.0,
        "rollout/num_samples": float(len(samples)),
        "rollout/truncated_ratio": ratio(sample.status is Status.TRUNCATED for sample in samples),
        "rollout/failed_ratio": ratio(sample.status is Status.FAILED for sample in samples),
        "rollout/repetition_frac": ratio(is_repetitive(sample.response) for sample in samples),
    }
    out |= length_metrics(samples)
    out |= {f"rollout/zero_std/count_{reward:g}": float(count) for reward, count in zero_std_groups(samples).items()}
    out |= {f"rollout/error_cat/{name}": float(count) for name, count in error_categories(samples).items()}
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.rewards.items():
            parts[name].append(value)
    return out | {f"rollout/rewards/{name}": statistics.fmean(values) for name, values in parts.items()}


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens of responses and of whole samples."""
    lengths = [sum(sample.loss_mask) for sample in samples]
    return {
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/total_lengths": statistics.fmean(len(sample.token_ids) for sample in samples),
    }


def zero_std_groups(samples: Sequence[Sample]) -> Counter[float]:
    """Reward -> number of groups of two or more in which every sample got it (rounded to one digit)."""
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            groups[sample.group_id].append(sample.reward)
    return Counter(round(rewards[0], 1) for rewards in groups.values() if len(rewards) > 1 and len(set(rewards)) == 1)


def error_categories(samples: Sequence[Sample]) -> Counter[str]:
    """First word of the reason -> number of failed samples."""
    reasons = [str(sample.metadata.get("error", "unknown")) for sample in samples if sample.status is Status.FAILED]
    return Counter(reason.split(":")[0].strip().replace(" ", "_")[:40] for reason in reasons)


def is_repetitive(text: str) -> bool:
    """Whether the end of a long text compresses suspiciously well."""
    if len(text) <= _LONG_TEXT:
        return False
    tail = text[-_LONG_TEXT:].encode()
    return len(tail) / len(zlib.compress(tail)) > _REPETITION


def ratio(flags: object) -> float:
    """Share of true values."""
    values = [bool(flag) for flag in flags]  # type: ignore[attr-defined]
    return sum(values) / len(values) if values else 0.0
