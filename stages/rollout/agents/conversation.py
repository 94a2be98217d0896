"""Record a chat with the model as one sample: only new messages are rendered and tokenized.

EngineCalls generates replies and enforces the length limits; chat_format.py renders messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.stages.rollout.agents.tool_calls import parse_tool_calls
from penstock.stages.rollout.plugins.engine_calls import EngineCalls
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.text.chat_format import ChatFormat, chat_format
from penstock.stages.rollout.text.messages import Message
from penstock.storage.samples.sample import Status


@dataclass(frozen=True)
class Turn:
    """Position and status of one reply of the model in a conversation."""

    num_messages: int  # messages of the conversation up to and including the reply
    num_tokens: int  # tokens of the sample up to the end of the reply
    num_written: int  # tokens that the model generated for the reply
    status: Status  # COMPLETED, or TRUNCATED if the reply reached a length limit


class Conversation:
    """A chat with the model, recorded in a sample as the exact tokens.

    If the chat template drops parts of earlier replies (mostly reasoning), the sample keeps these parts: its tokens are
    exactly those that the model has seen and generated.

    Args:
        handle: sends requests to the engines of the round.
        sample: the sample to which replies and messages are appended. The sample's prompt is the first user message,
            unless the first call of `reply` passes messages.
        tools: tool definitions in OpenAI's format, for the chat template; if given, tool calls are parsed from replies.
        template_options: additional variables of the chat template, e.g. {"enable_thinking": False}.
    """

    def __init__(
        self,
        handle: EngineCalls,
        sample: UserSample,
        tools: Sequence[dict[str, Any]] | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.handle, self.sample = handle, sample
        self.tools, self.template_options = list(tools or ()), dict(template_options or {})
        self.messages: list[Message] = []  # all messages so far, including replies
        self.turns: list[Turn] = []
        self.num_inherited = 0  # number of turns copied from the conversation of which this is a fork
        self._num_opening = 0  # number of messages before the first reply

    async def reply(self, messages: Sequence[Message] = (), **sampling: Any) -> Message:
        """Return the model's reply to `messages`: {"role": "assistant", "content": ..., "tool_calls": ...}.

        If the length limit leaves no room for the messages, the reply is empty and `sample.status` is TRUNCATED. If the
        round aborts the request, the reply has no tool calls and `sample.status` is ABORTED.

        Args:
            messages: the messages since the last reply. In the first call: the whole conversation so far, or no
                messages to use the sample's prompt.
            sampling: the engine's sampling parameters, for this reply only.

        Raises:
            ValueError: the chat template or the engine rejects the messages.
        """
        sample = self.sample
        num_tokens, response = len(sample.token_ids), sample.response
        opening = list(messages) or [{"role": "user", "content": sample.prompt}]
        try:
            if not self.turns:
                if messages:
                    self._set_prompt(opening)
            elif not self.handle.append(sample, self._encode_new_messages(messages)):
                return {"role": "assistant", "content": ""}
            start = len(sample.token_ids)
            await self.handle.generate(sample, **sampling)
        except BaseException:
            if self.turns:  # remove the tokens of a request that failed or was cancelled
                for stream in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs):
                    del stream[num_tokens:]
                sample.response = response
            raise
        reply = self._parse_reply(start, sampling.get("stop") or ())
        if sample.status is not Status.ABORTED and len(sample.token_ids) > start:
            if not self.turns:
                self._num_opening = len(opening)
            self.messages += [*(messages if self.turns else opening), reply]
            self.turns.append(
                Turn(len(self.messages), len(sample.token_ids), len(sample.token_ids) - start, sample.status)
            )
        return reply

    def fork(self, num_turns: int, blank: UserSample) -> Conversation:
        """Return a new conversation that starts with the first `num_turns` turns of this conversation. In the new one,
        these turns are part of the prompt and not trained on.

        Args:
            num_turns: number of turns to share, at least one.
            blank: sample without a response, for the new conversation; its prompt is replaced by the shared turns.
        """
        turn = self.turns[num_turns - 1]
        other = Conversation(self.handle, blank, self.tools, self.template_options)
        other.messages, other.turns = self.messages[: turn.num_messages], self.turns[:num_turns]
        other.num_inherited, other._num_opening = num_turns, self._num_opening
        shared = self.sample.token_ids[: turn.num_tokens]
        blank.restart(self.handle.tokenizer.decode([shared], skip_special_tokens=False)[0], shared)
        return other

    @property
    def _format(self) -> ChatFormat:
        return chat_format(self.handle.tokenizer)

    def _set_prompt(self, messages: Sequence[Message]) -> None:
        """Replace the sample's prompt by the rendered `messages`."""
        text = self._format.render_opening(messages, self.tools, self.template_options)
        self.sample.restart(text, self.handle.tokenizer.encode([text])[0])

    def _encode_new_messages(self, messages: Sequence[Message]) -> list[int]:
        opening = self.messages[: self._num_opening]
        between = self._format.render_between_replies(
            opening, self.messages[-1], messages, self.tools, self.template_options
        )
        last = self.sample.token_ids[-1] if self.turns[-1].status is Status.COMPLETED else None
        return self._format.encode_between_replies(*between, last)

    def _parse_reply(self, start: int, stops: str | Sequence[str]) -> Message:
        """Parse the reply whose first token is token `start` of the sample."""
        token_ids = self.sample.token_ids
        text = self._format.decode_reply(token_ids[start:], ended=self.sample.status is Status.COMPLETED)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0]
        if not self.tools or self.sample.status is Status.ABORTED:
            return {"role": "assistant", "content": text}
        content, calls = parse_tool_calls(text, self.tools, in_thought=self._format.opens_thought(token_ids[:start]))
        if not calls:
            return {"role": "assistant", "content": text}
        # Kimi K2's chat template writes the ids of tool calls and requires this format; other templates accept any id.
        num_calls = sum(len(message.get("tool_calls") or ()) for message in self.messages)
        return {
            "role": "assistant",
            "content": content or None,
            "tool_calls": [
                {
                    "id": f"functions.{call.name}:{num_calls + index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for index, call in enumerate(calls)
            ],
        }
