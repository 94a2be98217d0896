"""The real engine handle with a client that writes scripted replies token by token."""

import asyncio
from collections.abc import Sequence
from typing import Any

from chat_templates import chat_tokenizer
from scripted_engine import ScriptedClient

from penstock.engines.generation import Generation
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.custom_generation import EngineHandle
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.storage.samples.sample import Sample


class ScriptedReplies(ScriptedClient):
    """Replies one after another: a text, token ids, or an exception. Log-probs are -1, -2, ... over all tokens ever
    written."""

    def __init__(self, tokenizer: Any, replies: Sequence[str | list[int] | Exception]) -> None:
        super().__init__(["http://engine"])
        self.tokenizer, self.replies = tokenizer, list(replies)
        self.requests: list[tuple[list[int], dict[str, Any]]] = []  # type: ignore[assignment]
        self.num_tokens = 0
        self.stopped = False
        self.hold: asyncio.Event | None = None

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int = 1, *, images: Any = (), session: Any = None
    ) -> list[Generation]:
        self.requests.append((input_ids, sampling))
        reply = self.replies.pop(0) if not self.stopped else []
        await asyncio.sleep(0.005)
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(reply, Exception):
            raise reply
        token_ids = self.tokenizer.encode([reply])[0] if isinstance(reply, str) else reply
        limit = sampling["max_new_tokens"]
        reason = "abort" if self.stopped else "length" if len(token_ids) > limit else "stop"
        token_ids = token_ids[:limit]
        logprobs = [-float(self.num_tokens + index) for index in range(1, len(token_ids) + 1)]
        self.num_tokens += len(token_ids)
        return [Generation(token_ids, logprobs, reason, [("run/0", len(token_ids))])]  # type: ignore[arg-type]


def handle_with(template: str | None, *replies: str | list[int] | Exception, **options: Any) -> EngineHandle:
    tokenizer = chat_tokenizer(template)
    config = RolloutConfig(**{"rollout_max_response_len": 2000} | options)
    return EngineHandle(
        ScriptedReplies(tokenizer, replies), tokenizer, config, RolloutRound("run", rollout_id=0, policy_version=0)
    )


def pending(handle: EngineHandle, prompt: str = "1+1=") -> UserSample:
    token_ids = handle.tokenizer.encode([prompt])[0]
    zeros = [0] * len(token_ids)
    sample = Sample(
        "g-00", "g", "g-00", 0, prompt=prompt, token_ids=token_ids, loss_mask=zeros, rollout_logprobs=[0.0] * len(zeros)
    )
    return UserSample.of(sample)


def trained(handle: EngineHandle, sample: Sample) -> list[str]:
    """The stretches of text that are trained on."""
    out, stretch = [], []
    for token_id, mask in zip([*sample.token_ids, 0], [*sample.loss_mask, 0]):
        if mask:
            stretch.append(token_id)
        elif stretch:
            out.append(handle.tokenizer.decode([stretch], skip_special_tokens=False)[0])
            stretch = []
    return out


def text(handle: EngineHandle, sample: Sample) -> str:
    return handle.tokenizer.decode([sample.token_ids], skip_special_tokens=False)[0]
