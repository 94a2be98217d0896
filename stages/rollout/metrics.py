"""Compute the metrics of a rollout and a preview of its samples. docs/metrics.md explains each metric."""

from __future__ import annotations

import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.generation import TokenCounts
from penstock.stages.rollout.group import GroupRunner, policy_spans
from penstock.storage.samples.sample import Sample, Status

_LONG_TEXT = 10_000  # a response with more characters is checked for repetition in its last 10,000 characters
_REPETITION = 10.0  # zlib's compression ratio above which a text counts as repetitive
PREVIEW_CHARS = 2000  # maximum characters of a prompt, response, label or error in the sample preview


def rollout_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics (name -> value) of a round's samples: rewards, statuses, errors and lengths, and the number of
    groups whose rewards are all equal, which have no advantage in GRPO."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    tails = [sample.response[-_LONG_TEXT:].encode() for sample in samples if len(sample.response) > _LONG_TEXT]
    num_repetitive = sum(len(tail) / len(zlib.compress(tail)) > _REPETITION for tail in tails)
    statuses = Counter(sample.status for sample in samples)
    num_removed = sum(  # a hook set `remove_sample`, or all tokens are masked as stale
        sample.status in (Status.COMPLETED, Status.TRUNCATED) and not any(sample.loss_mask) for sample in samples
    )
    num_samples = max(len(samples), 1)
    out = {
        "rollout/raw_reward": statistics.fmean(rewards) if rewards else 0.0,
        "rollout/num_samples": float(len(samples)),
        "rollout/truncated_ratio": statuses[Status.TRUNCATED] / num_samples,
        "rollout/failed_ratio": statuses[Status.FAILED] / num_samples,
        "rollout/removed_ratio": num_removed / num_samples,
        "rollout/repetition_frac": num_repetitive / num_samples,
    }
    out |= length_metrics(samples) | multi_turn_metrics(samples)
    groups: dict[str, list[float]] = {sample.group_id: [] for sample in samples}
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None:
            groups[sample.group_id].append(sample.reward)
        for name, value in sample.rewards.items():
            parts[name].append(value)
    out["rollout/num_groups"] = float(len(groups))
    equal = Counter(format_reward(rewards[0]) for rewards in groups.values() if len(set(rewards)) == 1)
    out |= {f"rollout/zero_std/count_{reward}": float(count) for reward, count in equal.items()}
    errors = [str(sample.metadata.get("error", "unknown")) for sample in samples if sample.status is Status.FAILED]
    categories = Counter(error.split(":")[0].strip().replace(" ", "_")[:40] for error in errors)
    out |= {f"rollout/error_cat/{name}": float(count) for name, count in categories.items()}
    return out | {f"rollout/rewards/{name}": statistics.fmean(values) for name, values in parts.items()}


def length_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of response length and total length, in tokens. response_len counts only tokens with
    loss mask 1, so tool output does not count and a sample without trained tokens has length 0."""
    lengths = [sum(sample.loss_mask) for sample in samples]
    return {
        "rollout/response_len/mean": statistics.fmean(lengths),
        "rollout/response_len/median": float(statistics.median(lengths)),
        "rollout/response_len/max": float(max(lengths)),
        "rollout/response_len/min": float(min(lengths)),
        "rollout/total_lengths": statistics.fmean(len(sample.token_ids) for sample in samples),
    }


def multi_turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of multi-turn responses: number of turns, number of untrained tokens (output of tools or
    environments), and response lengths including untrained tokens; {} for single-turn responses."""
    turns = [float(sample.metadata["num_turns"]) for sample in samples if "num_turns" in sample.metadata]
    raw = [sample.response_length for sample in samples]
    tools = [length - sum(sample.loss_mask) for length, sample in zip(raw, samples)]
    if not turns and not any(tools):
        return {}
    out = {
        "multi_turn/tool_tokens/mean": statistics.fmean(tools),
        "multi_turn/raw_response_length/response_length_mean": statistics.fmean(raw),
        "multi_turn/raw_response_length/response_length_max": float(max(raw)),
    }
    if turns:
        out |= {"multi_turn/num_turns/mean": statistics.fmean(turns), "multi_turn/num_turns/max": max(turns)}
    return out


def staleness_metrics(samples: Sequence[Sample], policy_version: int) -> dict[str, float]:
    """Return the mean and maximum staleness of the trained tokens, and the fraction of them with each staleness unless
    all are 0. Staleness of a token: `policy_version`, the version that is trained on it, minus the policy version that
    generated it. {} for SFT data."""
    ages: Counter[int] = Counter()
    for sample in samples:
        if sample.policy_versions[0] >= 0:
            for version, num_tokens in policy_spans(sample):
                ages[policy_version - version] += num_tokens
    if not ages:
        return {}
    total = sum(ages.values())
    metrics = {"mean": sum(age * num for age, num in ages.items()) / total, "max": float(max(ages))}
    if max(ages):
        metrics |= {f"fraction_{age}": ages[age] / total for age in range(max(ages) + 1)}
    return {f"rollout/staleness/{name}": value for name, value in metrics.items()}


def throughput_metrics(runner: GroupRunner, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of generation speed, prefix-cache hits and speculative decoding of a round, after `runner` has
    finished. Groups that an earlier attempt generated (read from the journal) do not count. `seconds`: duration of each
    phase of the round (prepare, generate, ...)."""
    counts = runner.counts
    longest = max((sum(sample.loss_mask) for sample in runner.generated), default=0)
    return speculation_metrics(counts) | {
        "rollout/num_adopted_groups": float(len(runner.adopted)),
        "rollout/prefix_cache_hit_rate": counts.cached / max(counts.prompt, 1),
        "rollout/avg_cached_tokens_per_sample": counts.cached / max(len(runner.generated), 1),
        "perf/rollout_time": sum(seconds.values()),
        "perf/tokens_per_gpu_per_sec": runner.num_response_tokens / seconds["generate"] / runner.num_gpus,
        "perf/longest_sample_tokens_per_sec": longest / seconds["generate"],
    }


def speculation_metrics(counts: TokenCounts) -> dict[str, float]:
    """Return the metrics of speculative decoding: tokens per verification, and the fraction of draft tokens that were
    accepted; {} without draft tokens."""
    if counts.proposed == 0:
        return {}
    return {
        "rollout/spec_accept_length": 1 + counts.accepted / counts.verifications,
        "rollout/spec_accept_rate": counts.accepted / counts.proposed,
    }


def format_reward(reward: float) -> str:
    """Return a reward rounded to one decimal, as metric names have it: `1.0`, `0.2`."""
    return str(round(float(reward), 1) + 0.0)  # + 0.0: no "-0.0"


def sample_preview(samples: Sequence[Sample], count: int) -> list[dict[str, Any]]:
    """Return up to `count` samples as table rows (column -> value): graded samples, evenly spaced from the highest to
    the lowest reward, then ungraded samples if there are fewer than `count` graded ones. Deterministic."""
    graded = sorted(
        (sample for sample in samples if sample.reward is not None),
        key=lambda sample: (-(sample.reward or 0.0), sample.sample_id),
    )
    num = min(count, len(graded))
    selected = [graded[round(i * (len(graded) - 1) / max(num - 1, 1))] for i in range(num)]
    selected += [sample for sample in samples if sample.reward is None]
    return [
        {
            "sample": sample.sample_id,
            "reward": sample.reward,
            "status": sample.status.value,
            "prompt": clip_text(sample.prompt),
            "response": clip_text(sample.response),
            "label": clip_text(sample.label),
            "tokens": sum(sample.loss_mask),
            "turns": sample.metadata.get("num_turns", 1),
            "error": clip_text(str(sample.metadata.get("error", ""))),
        }
        for sample in selected[:count]
    ]


def clip_text(text: str) -> str:
    """Return `text`; if it is longer than PREVIEW_CHARS, its middle is replaced by `[... N characters ...]`."""
    if len(text) <= PREVIEW_CHARS:
        return text
    mark = f" [... {len(text) - PREVIEW_CHARS:,} characters ...] "
    half = (PREVIEW_CHARS - len(mark)) // 2
    return text[:half] + mark + text[-half:]
