"""Which prompts are short enough to be answered, and how long an answer may be."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from stages.rollout.config import RolloutConfig
from stages.rollout.prompts.source import Prompt
from stages.rollout.tokenizer import PromptTokenizer
from storage.errors import DataError

logger = logging.getLogger(__name__)


def prompt_limit(config: RolloutConfig) -> int | None:
    """Most tokens of a prompt: what is said, and one less than prompt and response together. None: no limit."""
    context = None if config.rollout_max_context_len is None else config.rollout_max_context_len - 1
    return min((limit for limit in (config.rollout_max_prompt_len, context) if limit is not None), default=None)


def response_limit(config: RolloutConfig, num_prompt_tokens: int) -> int:
    """Most tokens of the response to a prompt of this length.

    Raises:
        DataError: there is no room for a response (an evaluation skips no prompt).
    """
    if config.rollout_max_context_len is None:
        return config.rollout_max_response_len
    room = config.rollout_max_context_len - num_prompt_tokens
    if room < 1:
        raise DataError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room within --rollout-max-context-len {config.rollout_max_context_len}"
        )
    return min(config.rollout_max_response_len, room)


class LengthFilter:
    """Says which prompts are within the limit, for `PromptSource.take`; the first one that is not is told, the others are counted there.

    Args:
        config: the limits.
        tokenizer: renders and counts.
    """

    def __init__(self, config: RolloutConfig, tokenizer: PromptTokenizer) -> None:
        self.config = config
        self.limit = prompt_limit(config)
        self.tokenizer = tokenizer
        self._told = False

    def __call__(self, prompts: Sequence[Prompt]) -> list[bool]:
        if self.limit is None:
            return [True] * len(prompts)
        texts = self.tokenizer.render([prompt.content for prompt in prompts], [prompt.tools for prompt in prompts])
        lengths = [len(ids) for ids in self.tokenizer.encode(texts)]
        for prompt, length in zip(prompts, lengths):
            if length > self.limit and not self._told:
                self._told = True
                logger.warning(
                    "row %d of %s has %d tokens and a prompt may have %d: it is skipped, and so are all that are too long",
                    prompt.row,
                    self.config.prompt_data[prompt.file],
                    length,
                    self.limit,
                )
        return [length <= self.limit for length in lengths]
