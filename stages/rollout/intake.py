"""Which groups one attempt at a round gets from its data source, and what becomes of those it did not use.

The data source is made anew for every attempt, from what the round before has committed: so an attempt that fails changes nothing, and the
next one gets the same groups. Every group that was asked for, or waited, is accounted for in the round's commit: trained on, dropped with
a reason, or waiting still.
"""

from __future__ import annotations

from typing import Any

from stages.rollout.beginning import Beginning
from stages.rollout.collect import Collected
from stages.rollout.config import RolloutConfig
from stages.rollout.custom_source import Dataset, grouped, load_buffer_filter, next_groups, open_data_source
from stages.rollout.prompts.lengths import LengthFilter
from stages.rollout.prompts.source import PromptSource
from stages.rollout.round import Group, Round, copied, taken_up
from stages.rollout.tokenizer import PromptTokenizer

FORGOTTEN = "not kept by the data source"


class Intake:
    """The data source of one attempt.

    Args:
        config: names the class of the user's, if there is one.
        prompts: the rows.
        tokenizer: of the policy.
        round: whose samples are made.
        beginning: what the round before has left.

    Raises:
        ValueError: the data changed, or the class of the user's is wrong.
    """

    def __init__(
        self,
        config: RolloutConfig,
        prompts: PromptSource,
        tokenizer: PromptTokenizer,
        round: Round,
        beginning: Beginning,
    ) -> None:
        admits = LengthFilter(config, tokenizer) if round.kind == "rollout" else None  # a score is about all prompts
        self.round = round
        self.dataset = Dataset(config, prompts, tokenizer, admits)
        self.dataset.round = round
        chosen = load_buffer_filter(config.buffer_filter_path) if config.buffer_filter_path else None
        self.source = open_data_source(config, self.dataset, chosen)
        self.source.load_state_dict(beginning.state or {})
        self.source.restore_buffer([copied(sample) for sample in beginning.buffer])
        self.limited = admits is not None and admits.limit is not None
        self._skipped_before = self.dataset.state.skipped
        self._known = {group[0].group_id: group for group in grouped(beginning.buffer)}  # all that this attempt answers for

    def next_groups(self, count: int) -> list[Group]:
        """The next `count` groups, made ones of this round."""
        groups = next_groups(self.source, count)
        for group in groups:
            self._known[group[0].group_id] = group
            for sample in group:
                taken_up(sample, self.round)
        return groups

    def put_back(self, found: Collected) -> None:
        """Give the data source what was not needed. What it forgets, now or before, counts as dropped."""
        self.source.add_samples(found.aside)
        settled = {group[0].group_id for group in found.kept + [group for group, _ in found.dropped] + self.waiting}
        found.dropped += [(group, FORGOTTEN) for group_id, group in sorted(self._known.items()) if group_id not in settled]

    @property
    def waiting(self) -> list[Group]:
        """Groups that a later round may get."""
        return grouped(self.source.buffered_samples())

    @property
    def state(self) -> dict[str, Any]:
        """Where the data source stands now, as JSON."""
        return self.source.state_dict()

    @property
    def num_skipped(self) -> int:
        """Prompts that were too long, in this round."""
        return self.dataset.state.skipped - self._skipped_before
