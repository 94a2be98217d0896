"""Synthetic rollouts with edge cases as lists, and the tensors that the algorithms get."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.stages.train.algorithm_config import AlgorithmConfig, DistillationConfig, SequenceMaskingConfig
from penstock.stages.train.algorithms.experience import Experience, SegmentReducer

FIELDS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values")


@dataclass
class Sample:
    """One sample: a number per trained token in each field."""

    group: int
    reward: float
    fields: dict[str, list[float]]
    components: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.fields["values"])


def ragged(seed: int, count: int = 18, lowest: float = -2.5) -> list[Sample]:
    """Return uneven, interleaved groups; group 7 has one sample, group 8 equal rewards; one sample is fully masked, one
    is not graded."""
    rng, parts = random.Random(seed), random.Random(seed)
    groups = [rng.randrange(5) for _ in range(count)] + [7, 8, 8, 8]
    samples = []
    for i, group in enumerate(groups):
        reward = 0.9 if group == 8 else rng.choice([0.0, 1.0, 0.3, lowest])
        length = 0 if i in (2, 5) else rng.randrange(1, 12)
        fields = {name: [rng.gauss(-1.0, 1.0) for _ in range(length)] for name in FIELDS}
        components = {"right": reward, "short": 0.7 if group == 8 else parts.gauss(3, 20)}
        if i == 5:
            reward, components = math.nan, dict.fromkeys(components, math.nan)
        samples.append(Sample(group, reward, fields, components))
    return samples


def experience(samples: list[Sample]) -> Experience:
    """Return the rollout as an estimator gets it."""
    return Experience(
        sample_index=torch.tensor(
            [i for i, sample in enumerate(samples) for _ in range(sample.length)], dtype=torch.long
        ),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        group_index=torch.tensor([sample.group for sample in samples]),
        reward_components={
            name: torch.tensor([sample.components[name] for sample in samples], dtype=torch.float64)
            for name in samples[0].components
        },
        **{name: flat(samples, name) for name in FIELDS},
    )


def flat(samples: list[Sample], name: str) -> Tensor:  # [N]
    """Concatenate a field of all samples."""
    return torch.tensor([x for sample in samples for x in sample.fields[name]], dtype=torch.float64)


def sums(lengths: list[int]) -> SegmentReducer:
    """Return the reducer of a micro-batch of samples with so many trained tokens each."""
    index = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)
    return SegmentReducer(index, torch.tensor(lengths))


def options(**changed: Any) -> AlgorithmConfig:
    """Return the default configuration with some options changed, without the check that they fit together."""
    assert changed.keys() <= AlgorithmConfig.model_fields.keys()
    sections = {"opd": DistillationConfig, "opsm": SequenceMaskingConfig}
    built = {name: model(**changed[name]) for name, model in sections.items() if name in changed}
    return AlgorithmConfig.model_construct(**changed | built)
