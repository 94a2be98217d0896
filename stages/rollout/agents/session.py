"""What an agent's calls of the model become: conversations, each of them a sample.

A call brings a whole list of messages. If it goes on where a recorded conversation ended, that sample grows. If it goes on
from an earlier reply (another attempt, a second agent that works at the same time), a new sample begins with what both share,
which is trained on in the first one only. If it shares no reply with any (a helper with a task of its own, a history that was
summarised), a new sample begins there. HTTP is `endpoint.py`'s.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stages.rollout.agents.chat_format import Message, text_of
from stages.rollout.agents.conversation import Conversation, Turn
from stages.rollout.user_sample import UserSample
from storage.sample import Status

if TYPE_CHECKING:
    from stages.rollout.engine_handle import EngineHandle


class Stopped(Exception):
    """The round wants no more, or the agent's time is over; nobody is to try again."""


class NoRoom(ValueError):
    """The conversation is as long as it may be."""


@dataclass(frozen=True)
class Answer:
    """A reply, and where its tokens are."""

    message: Message
    conversation: Conversation
    turn: Turn


class AgentSession:
    """One execution of an agent, for one sample.

    As a context manager around the agent, it ends with it. If the agent fails because a call was refused for want of room, or
    because the round is over, that is no failure: the former cuts the conversation off, as a length limit does any response.

    Args:
        handle: of the engines.
        sample: what the agent works for. It stays as it is; `samples` gives what the agent has made of it.
        base_url: what the agent's OpenAI client is given.
        api_key: likewise; every call of the session must carry it.
        on_close: called when the session ends.
    """

    def __init__(
        self, handle: EngineHandle, sample: UserSample, base_url: str, api_key: str, on_close: Callable[[], None]
    ) -> None:
        self.base_url, self.api_key, self.trajectory_id = base_url, api_key, sample.trajectory_id
        self._handle, self._sample, self._on_close = handle, sample, on_close
        self._blank = copy.deepcopy(sample)
        self._conversations: list[Conversation] = []
        self._busy: set[Conversation] = set()  # those that a call is being answered in
        self._closed = False
        self._last_error: Exception | None = None

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.close()
        return isinstance(error, Exception) and isinstance(self._last_error, NoRoom | Stopped)

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        template_options: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answer one call. Any number may run at once, all in one event loop.

        Args:
            messages: the whole conversation, as the agent tells it.
            tools: as of OpenAI's API.
            template_options: further variables of the chat template.
            sampling: SGLang's sampling parameters.

        Raises:
            ValueError: the call is wrong.
            NoRoom: the conversation is as long as it may be.
            Stopped: the round wants no more.
            RuntimeError, ConnectionError, TimeoutError: of the engines; it ends the round (EngineHandle.generate).
        """
        conversation, known = self._matching(messages, tools, template_options or {})
        self._busy.add(conversation)
        num_turns = len(conversation.turns)
        try:
            if self._closed:
                raise Stopped("this agent's session has ended")
            message = await conversation.reply(messages[known:], **sampling)
            if conversation.sample.status is Status.ABORTED:
                self._sample.status, self._sample.aborted = Status.ABORTED, True  # holds also if the agent fails over it
                raise Stopped("generation was stopped: this round needs no more samples")
            if len(conversation.turns) == num_turns:
                raise NoRoom(f"the conversation has {len(conversation.sample.token_ids)} tokens and no room for more")
        except Exception as error:
            self._last_error = error
            raise
        finally:
            self._busy.discard(conversation)
        self._last_error = None
        return Answer(message, conversation, conversation.turns[-1])

    def close(self) -> None:
        """Answer no more calls."""
        self._closed = True
        self._on_close()

    def samples(self) -> list[UserSample]:
        """End the session: what the agent's calls have become, in the order in which they began. From any thread.

        Stopped from outside: the sample as it was, ABORTED. Without an answered call: likewise, FAILED, with the reason.
        """
        self.close()
        made = [conversation for conversation in self._conversations if len(conversation.turns) > conversation.num_inherited]
        if self._sample.status is Status.ABORTED:
            return [self._sample]
        if not made:
            reason = f"its last call failed: {self._last_error}" if self._last_error else "it made no call"
            self._sample.status = Status.FAILED
            self._sample.metadata["error"] = f"the agent got no answer of the model: {reason}"
            return [self._sample]
        return [self._finished(conversation) for conversation in made]

    def _finished(self, conversation: Conversation) -> UserSample:
        """The sample up to the last answer; a call still running (the agent did not wait for it) is left out."""
        sample, turn = copy.copy(conversation.sample), conversation.turns[-1]
        sample.metadata = dict(sample.metadata)
        sample.token_ids = sample.token_ids[: turn.num_tokens]
        sample.loss_mask = sample.loss_mask[: turn.num_tokens]
        sample.rollout_logprobs = sample.rollout_logprobs[: turn.num_tokens]
        no_room = Status.TRUNCATED in (turn.status, sample.status)
        sample.status = Status.TRUNCATED if no_room else turn.status
        sample.response = self._handle.tokenizer.decode(
            [sample.token_ids[sample.prompt_length :]], skip_special_tokens=self._handle.config.rollout_skip_special_tokens
        )[0]
        return sample

    def _matching(self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]) -> tuple[Conversation, int]:
        """The conversation that these messages go on with, and how many of them it has. If it must be made, it is."""
        keys = [_key(message) for message in messages]
        best: tuple[int, bool, Conversation, int] | None = None  # messages shared, at its end, itself, turns shared
        for conversation in self._conversations:
            if (conversation.tools, conversation.template_options) != (list(tools), options):
                continue
            recorded = [_key(message) for message in conversation.messages]
            for num_turns, turn in enumerate(conversation.turns, start=1):
                if turn.num_messages < len(keys) and recorded[: turn.num_messages] == keys[: turn.num_messages]:
                    goes_on = num_turns == len(conversation.turns) and conversation not in self._busy
                    if best is None or (turn.num_messages, goes_on) > best[:2]:
                        best = (turn.num_messages, goes_on, conversation, num_turns)
        if best is not None and best[1]:
            return best[2], best[0]
        blank = copy.deepcopy(self._blank)
        made = Conversation(self._handle, blank, tools, options) if best is None else best[2].fork(best[3], blank)
        self._conversations.append(made)
        return made, 0 if best is None else best[0]


def _key(message: Message) -> tuple[str, ...]:
    """What makes two messages the same: what a model is shown of them. Agents trim replies and write arguments anew."""
    text = text_of(message)
    calls = [
        (call["function"]["name"], _canonical(call["function"].get("arguments"))) for call in message.get("tool_calls") or ()
    ]
    role = message["role"]
    return (
        role,
        text.strip() if role == "assistant" else text,
        json.dumps(calls),
        str(message.get("name") or ""),
        str(message.get("tool_call_id") or ""),
    )


def _canonical(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return arguments
    return json.dumps(arguments, sort_keys=True)
