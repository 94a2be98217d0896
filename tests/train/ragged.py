"""Made-up rollouts as lists, awkward on purpose, and the tensors that the algorithms get of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from stages.train.algorithms.experience import Experience
from stages.train.algorithms.sequences import SampleSums

STREAMS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs", "values")


@dataclass
class Sample:
    """One sample: a number per trained token in each stream."""

    group: int
    reward: float
    streams: dict[str, list[float]]

    @property
    def length(self) -> int:
        return len(self.streams["values"])


def ragged(seed: int, count: int = 18) -> list[Sample]:
    """Uneven, interleaved groups; group 7 a single sample; group 8 all 0.9; one fully masked sample, and one not graded."""
    rng = random.Random(seed)
    groups = [rng.randrange(5) for _ in range(count)] + [7, 8, 8, 8]
    samples = []
    for i, group in enumerate(groups):
        reward = 0.9 if group == 8 else rng.choice([0.0, 1.0, 0.3, -2.5])
        length = 0 if i in (2, 5) else rng.randrange(1, 12)
        streams = {name: [rng.gauss(-1.0, 1.0) for _ in range(length)] for name in STREAMS}
        samples.append(Sample(group, math.nan if i == 5 else reward, streams))
    return samples


def experience(samples: list[Sample]) -> Experience:
    """The same as an estimator sees it."""
    return Experience(
        sample_index=torch.tensor([i for i, sample in enumerate(samples) for _ in range(sample.length)], dtype=torch.long),
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        group_index=torch.tensor([sample.group for sample in samples]),
        **{name: flat(samples, name) for name in STREAMS},
    )


def flat(samples: list[Sample], stream: str) -> Tensor:  # [N]
    """A stream of all samples behind each other."""
    return torch.tensor([x for sample in samples for x in sample.streams[stream]], dtype=torch.float64)


def sums(lengths: list[int]) -> SampleSums:
    """A micro-batch of samples with so many trained tokens each."""
    index = torch.tensor([i for i, length in enumerate(lengths) for _ in range(length)], dtype=torch.long)
    return SampleSums(index, torch.tensor(lengths))


def options(**changed: object) -> SimpleNamespace:
    """The defaults of the configuration, as far as algorithms read them."""
    base: dict[str, object] = dict(
        advantage_estimator="grpo",
        custom_advantage_function_path=None,
        custom_loss_function_path=None,
        disable_rewards_normalization=False,
        disable_grpo_std_normalization=False,
        normalize_advantages=False,
        gamma=1.0,
        lambd=1.0,
        kl_coef=0.0,
        use_opd=False,
        opd_kl_coef=1.0,
        use_rollout_logprobs=False,
        eps_clip=0.2,
        eps_clip_high=None,
        eps_clip_c=None,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="k1",
        use_unbiased_kl=False,
        entropy_coef=0.0,
        use_opsm=False,
        opsm_delta=1e-4,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        tis_mode="truncate",
        tis_level="token",
        tis_veto=None,
        custom_tis_function_path=None,
        get_mismatch_metrics=False,
        value_clip=0.2,
    )
    assert changed.keys() <= base.keys()
    return SimpleNamespace(**(base | changed))
