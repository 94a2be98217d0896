"""Skip prompts that exceed the length limits (`--rollout-max-prompt-len`, `--rollout-max-context-len`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.stages.rollout.config import PromptConfig
from penstock.stages.rollout.prompts.source import Prompt
from penstock.stages.rollout.text.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)


def max_prompt_tokens(config: PromptConfig) -> int | None:
    """Return the maximum number of prompt tokens, which leaves room for at least one response token; None: no limit."""
    context = None if config.rollout_max_context_len is None else config.rollout_max_context_len - 1
    return min((limit for limit in (config.rollout_max_prompt_len, context) if limit is not None), default=None)


class LengthFilter:
    """Prompt filter for `PromptSource.take` that rejects prompts above the length limit. Only the first rejected prompt
    is logged; PromptSource counts all of them.

    Args:
        config: the length limits.
        tokenizer: renders the prompts and counts their tokens.
    """

    def __init__(self, config: PromptConfig, tokenizer: PromptTokenizer) -> None:
        self.config = config
        self.limit = max_prompt_tokens(config)
        self.tokenizer = tokenizer
        self._logged = False

    def __call__(self, prompts: Sequence[Prompt]) -> list[bool]:
        if self.limit is None:
            return [True] * len(prompts)
        texts = self.tokenizer.render([prompt.content for prompt in prompts], [prompt.tools for prompt in prompts])
        lengths = [len(ids) for ids in self.tokenizer.encode(texts)]
        for prompt, length in zip(prompts, lengths):
            if length > self.limit and not self._logged:
                self._logged = True
                logger.warning(
                    "row %d of %s has %d tokens, more than the prompt limit of %d (--rollout-max-prompt-len, or "
                    "--rollout-max-context-len - 1); skipping all prompts above this limit (counted in "
                    "rollout/num_skipped_prompts)",
                    prompt.row,
                    self.config.prompt_data[prompt.file],
                    length,
                    self.limit,
                )
        return [length <= self.limit for length in lengths]
