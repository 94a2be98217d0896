"""A conversation that is one sample: what the model wrote stays its tokens, and only what is new is rendered and tokenised.

Who generates and how much room there is, is the handle's business; what a template writes, `chat_format.py`'s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stages.rollout.agents.chat_format import ChatFormat, Message, chat_format
from stages.rollout.agents.tool_calls import parse_tool_calls
from stages.rollout.user_sample import UserSample
from storage.sample import Status

if TYPE_CHECKING:
    from stages.rollout.engine_handle import EngineHandle


@dataclass(frozen=True)
class Turn:
    """Where a reply of the model ended."""

    num_messages: int  # of the conversation up to here, the reply included
    num_tokens: int  # of the sample up to here
    num_written: int  # of them in this reply
    status: Status  # COMPLETED, or TRUNCATED if it ran into a limit


class Conversation:
    """Messages with a model, recorded token by token.

    If the template leaves something out of earlier replies (thoughts, mostly), it stays here all the same: the tokens of a
    sample are those that the model has seen.

    Args:
        handle: of the engines.
        sample: grows. Its prompt is the first message, unless the first `reply` gives others.
        tools: definitions in OpenAI's form, for the template; calls of them are read from the replies.
        template_options: further variables of the template, e.g. {"enable_thinking": False}.
    """

    def __init__(
        self,
        handle: EngineHandle,
        sample: UserSample,
        tools: Sequence[dict[str, Any]] | None = None,
        template_options: dict[str, Any] | None = None,
    ) -> None:
        self.handle, self.sample = handle, sample
        self.tools, self.template_options = list(tools or ()), dict(template_options or {})
        self.messages: list[Message] = []  # all of them, replies included
        self.turns: list[Turn] = []
        self.num_inherited = 0  # turns that are another conversation's
        self._num_opening = 0  # messages before the first reply

    async def reply(self, messages: Sequence[Message] = (), **sampling: Any) -> Message:
        """What the model says to `messages`: {"role": "assistant", "content": ..., "tool_calls": ...}.

        If there is no room for more, or generation was stopped, the answer calls no tools, and `sample.status` says which.

        Args:
            messages: what is new since the last reply; before the first one, a whole conversation, or nothing if the sample's
                prompt is it.
            sampling: SGLang's sampling parameters, for this reply.

        Raises:
            ValueError: the template or the engine refuses the messages.
        """
        sample = self.sample
        num_tokens, response = len(sample.token_ids), sample.response
        opening = list(messages) or [{"role": "user", "content": sample.prompt}]
        try:
            if not self.turns:
                if messages:
                    self._open(opening)
            elif not self.handle.append(sample, self._following(messages)):
                return {"role": "assistant", "content": ""}
            start = len(sample.token_ids)
            await self.handle.generate(sample, **sampling)
        except BaseException:
            if self.turns:  # a call that failed, or that nobody waits for any more, has not been
                for stream in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs):
                    del stream[num_tokens:]
                sample.response = response
            raise
        reply = self._reply(sample.token_ids[start:], sampling.get("stop") or ())
        if sample.status is not Status.ABORTED and len(sample.token_ids) > start:
            if not self.turns:
                self._num_opening = len(opening)
            self.messages += [*(messages if self.turns else opening), reply]
            self.turns.append(Turn(len(self.messages), len(sample.token_ids), len(sample.token_ids) - start, sample.status))
        return reply

    def fork(self, num_turns: int, blank: UserSample) -> Conversation:
        """Another conversation that begins with the first turns of this one. They are trained on here, not there.

        Args:
            num_turns: at least one.
            blank: becomes the other one's sample; what is shared is its prompt.
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

    def _open(self, messages: Sequence[Message]) -> None:
        """Let these messages be the sample's prompt."""
        text = self._format.opening(messages, self.tools, self.template_options)
        self.sample.restart(text, self.handle.tokenizer.encode([text])[0])

    def _following(self, messages: Sequence[Message]) -> list[int]:
        opening = self.messages[: self._num_opening]
        between = self._format.following(opening, self.messages[-1], messages, self.tools, self.template_options)
        last = self.sample.token_ids[-1] if self.turns[-1].status is Status.COMPLETED else None
        return self._format.following_ids(*between, last)

    def _reply(self, token_ids: list[int], stops: str | Sequence[str]) -> Message:
        text = self._format.written(token_ids, ended=self.sample.status is Status.COMPLETED)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0]
        if not self.tools or self.sample.status is Status.ABORTED:
            return {"role": "assistant", "content": text}
        content, calls = parse_tool_calls(text, self.tools)
        if not calls:
            return {"role": "assistant", "content": text}
        # Kimi K2's template writes the ids, and wants them like this; the others do not care.
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
