"""The numbers of a round that its samples alone do not tell: what it took to get them. docs/metrics.md says what each one is."""

from __future__ import annotations

from collections.abc import Sequence

from stages.rollout.collect import Collected
from stages.rollout.intake import Intake
from stages.rollout.make import Made
from stages.rollout.metrics import drop_metrics, staleness_metrics
from storage.sample import Sample


def costs(made: Made, intake: Intake, samples: Sequence[Sample], seconds: dict[str, float], num_gpus: int) -> dict[str, float]:
    """What speed, dynamic sampling, length limits and earlier policies have to do with it.

    Args:
        made: the round.
        intake: its data source.
        samples: those that are trained on.
        seconds: where the time went.
        num_gpus: of the engines; where there are no GPUs an engine counts as one.
    """
    stale = staleness_metrics(samples, intake.round.policy_version) if intake.round.kind == "rollout" else {}
    skipped = {"rollout/num_skipped_prompts": float(intake.num_skipped)} if intake.limited else {}
    return _speed(made, seconds, num_gpus) | _waves(made.found, intake) | drop_metrics(made.found.reasons) | skipped | stale


def _speed(made: Made, seconds: dict[str, float], num_gpus: int) -> dict[str, float]:
    """Without what an earlier attempt had generated."""
    fresh = made.production.generated
    longest = max((sum(sample.loss_mask) for sample in fresh), default=0)
    return {
        "rollout/num_adopted_groups": float(len(made.production.adopted)),
        "rollout/prefix_cache_hit_rate": made.num_cached_tokens / max(made.num_prompt_tokens, 1),
        "rollout/avg_cached_tokens_per_sample": made.num_cached_tokens / max(len(fresh), 1),
        "perf/rollout_time": sum(seconds.values()),
        "perf/tokens_per_gpu_per_sec": made.production.num_response_tokens / seconds["generate"] / num_gpus,
        "perf/longest_sample_tokens_per_sec": longest / seconds["generate"],
    }


def _waves(found: Collected, intake: Intake) -> dict[str, float]:
    """Nothing if the first wave was the round."""
    if found.num_waves == 1 and not found.dropped and not found.aside:
        return {}
    return {
        "rollout/num_waves": float(found.num_waves),
        "rollout/num_dropped_groups": float(len(found.dropped)),
        "rollout/num_buffered_groups": float(len(intake.waiting)),
    }
