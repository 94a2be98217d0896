"""The numbers of a rollout that people look at, from its samples alone. Names are slime's; docs/metrics.md says what each one is."""

from __future__ import annotations

import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from storage.sample import Sample, Status

_LONG_TEXT = 10_000  # characters from which repetition is looked for
_REPETITION = 10.0  # a text that compresses more than this is repeating itself


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths, turns, how generation ended, and groups without contrast (GRPO learns nothing from those)."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    out = {
        "rollout/raw_reward": statistics.fmean(rewards) if rewards else 0.0,
        "rollout/num_samples": float(len(samples)),
        "rollout/truncated_ratio": ratio(sample.status is Status.TRUNCATED for sample in samples),
        "rollout/failed_ratio": ratio(sample.status is Status.FAILED for sample in samples),
        "rollout/removed_ratio": ratio(is_removed(sample) for sample in samples),
        "rollout/repetition_frac": ratio(is_repetitive(sample.response) for sample in samples),
    }
    out |= length_metrics(samples) | multi_turn_metrics(samples)
    out["rollout/num_groups"] = float(len({sample.group_id for sample in samples}))
    out |= {f"rollout/zero_std/count_{reward}": float(count) for reward, count in zero_std_groups(samples).items()}
    out |= {f"rollout/error_cat/{name}": float(count) for name, count in error_categories(samples).items()}
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample.rewards.items():
            parts[name].append(value)
    return out | {f"rollout/rewards/{name}": statistics.fmean(values) for name, values in parts.items()}


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens of responses and of whole samples. slime's response_len counts what is trained: neither tools' nor removed tokens."""
    lengths = [sum(sample.loss_mask) for sample in samples]
    return {
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/total_lengths": statistics.fmean(len(sample.token_ids) for sample in samples),
    }


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns, tokens that tools or environments wrote, and responses with them; nothing if every response is one piece."""
    turns = [float(sample.metadata["num_turns"]) for sample in samples if "num_turns" in sample.metadata]
    raw = [sample.response_length for sample in samples]
    tools = [length - sum(sample.loss_mask) for length, sample in zip(raw, samples)]
    if not turns and not any(tools):
        return {}
    out = {f"multi_turn/num_turns/{name}": value for name, value in (_mean_and_max(turns) if turns else {}).items()}
    out["multi_turn/tool_tokens/mean"] = statistics.fmean(tools)
    return out | {f"multi_turn/raw_response_length/response_length_{name}": value for name, value in _mean_and_max(raw).items()}


def staleness_metrics(samples: Sequence[Sample], policy_version: int) -> dict[str, float]:
    """How many policies ago the responses began, seen from `policy_version`, the round's; nothing for demonstrations."""
    ages = [policy_version - sample.policy_versions[0] for sample in samples if sample.policy_versions[0] >= 0]
    return {f"rollout/staleness/{name}": value for name, value in (_mean_and_max(ages) if ages else {}).items()}


def drop_metrics(reasons: Mapping[str, int]) -> dict[str, float]:
    """Groups that the filter has dropped, by its reason."""
    return {f"rollout/dynamic_filter/drop_{reason}": float(count) for reason, count in reasons.items()}


def is_removed(sample: Sample) -> bool:
    """Whether it is finished, and yet nothing of it is trained: a filter has removed it, or an earlier policy has generated it all."""
    return sample.status in (Status.COMPLETED, Status.TRUNCATED) and not any(sample.loss_mask)


def _mean_and_max(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "max": float(max(values))}


def zero_std_groups(samples: Sequence[Sample]) -> Counter[str]:
    """Return reward (rounded to one digit) -> number of groups in which every sample got it; groups with one graded sample are among them."""
    groups: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            groups[sample.group_id].append(sample.reward)
    return Counter(rounded(rewards[0]) for rewards in groups.values() if len(set(rewards)) == 1)


def rounded(reward: float) -> str:
    """Return a reward as slime writes it in names of metrics: `1.0`, `0.2`."""
    return str(round(float(reward), 1) + 0.0)  # + 0.0: no "-0.0"


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
