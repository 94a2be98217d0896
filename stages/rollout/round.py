"""A round's samples before they are generated: what all of them have in common, and one blank sample per response wanted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stages.rollout.prompts.source import Prompt
from stages.rollout.tokenizer import PromptTokenizer
from storage.refs import Kind
from storage.sample import Sample, Status

Group = list[Sample]  # of one prompt


@dataclass(frozen=True)
class Round:
    """What is generated."""

    run: str
    rollout_id: int  # the round; of an evaluation, the policy version
    policy_version: int  # what the engines serve; what another one answers is an error
    kind: Kind = "rollout"  # or "eval"
    id_prefix: str = ""  # before all ids, to keep those of evaluations apart from those of rollouts

    @property
    def weight_version(self) -> str:
        """What engines report while they serve this policy."""
        return f"{self.run}/{self.policy_version}"


def blank_groups(prompts: Sequence[Prompt], tokenizer: PromptTokenizer, round: Round, num_samples: int) -> list[Group]:
    """Render and tokenise; `num_samples` samples each that wait for their response.

    Group ids count the prompts issued in the run: a round that is done again has the same ones.
    """
    texts = tokenizer.render([prompt.content for prompt in prompts], [prompt.tools for prompt in prompts])
    return [
        [_blank_sample(prompt, text, token_ids, index, round) for index in range(num_samples)]
        for prompt, text, token_ids in zip(prompts, texts, tokenizer.encode(texts))
    ]


def _blank_sample(prompt: Prompt, text: str, token_ids: list[int], index: int, round: Round) -> Sample:
    group_id = f"{round.id_prefix}{prompt.issue:09d}"
    sample_id = f"{group_id}-{index:02d}"
    return Sample(
        sample_id=sample_id,
        group_id=group_id,
        trajectory_id=sample_id,
        rollout_id=round.rollout_id,
        prompt=text,
        label=prompt.label,
        token_ids=list(token_ids),
        loss_mask=[0] * len(token_ids),
        rollout_logprobs=[0.0] * len(token_ids),
        policy_versions=(round.policy_version, round.policy_version),
        metadata={**prompt.metadata, "source": {"epoch": prompt.epoch, "file": prompt.file, "row": prompt.row}},
    )


def copied(sample: Sample) -> Sample:
    """The same sample with streams and metadata of its own."""
    return replace(
        sample,
        token_ids=list(sample.token_ids),
        loss_mask=list(sample.loss_mask),
        rollout_logprobs=list(sample.rollout_logprobs),
        rewards=dict(sample.rewards),
        metadata=copy.deepcopy(sample.metadata),
    )


def taken_up(sample: Sample, round: Round) -> Sample:
    """A sample that comes back from an earlier round, made one of this round. What it has already is kept.

    `metadata["start_rollout_id"]` says where it began, if it has begun.
    """
    if any(sample.loss_mask):
        sample.metadata.setdefault("start_rollout_id", sample.rollout_id)
    else:
        sample.policy_versions = (round.policy_version, round.policy_version)
    sample.rollout_id = round.rollout_id
    if sample.status is Status.ABORTED:
        sample.status = Status.PENDING
    return sample
