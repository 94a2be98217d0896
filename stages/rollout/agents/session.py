"""Turn an agent's chat requests into conversations; each conversation becomes one sample.

Every request contains the whole list of messages. If the list continues a recorded conversation after its last reply,
the new messages are appended to that conversation. If the list continues after an earlier reply (a retry, or agents
working in parallel), a fork of the conversation is created that starts with the shared turns; the shared turns are
trained on only in the original conversation. If the list shares no reply with any conversation (a subagent, a
summarized history), a new conversation is created. endpoint.py serves HTTP.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from penstock.stages.rollout.agents.conversation import Conversation, Turn
from penstock.stages.rollout.plugins.engine_calls import EngineCalls
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.text.messages import CALL_FORMS, Message, convert_tool_calls, normalize_messages
from penstock.storage.samples.sample import Status


class SessionClosed(Exception):
    """Raised for a request of an agent whose session is closed or whose round is over; the agent must not retry it."""


class ContextLengthError(ValueError):
    """Raised for a request that would exceed the length limits of the run (`--rollout-max-*-len`)."""


@dataclass(frozen=True)
class Answer:
    """A reply of the model, the conversation to which the reply was appended, and the recorded turn of the reply."""

    message: Message
    conversation: Conversation
    turn: Turn


class AgentSession:
    """One execution of an agent on the prompt of one sample.

    Used as a context manager around the agent, the session closes at the end of the `with` block. An exception in the
    block is suppressed if the agent's last request was refused because the context was full or the round was over: a
    full context truncates the sample, like any other response.

    Args:
        handle: sends requests to the engines of the round.
        sample: the prompt for the agent. Its tokens are not changed; `samples` returns the results.
        base_url: URL for the agent's OpenAI client.
        api_key: API key for the OpenAI client; every request must send this key.
        on_close: called when the session closes.
    """

    def __init__(
        self, handle: EngineCalls, sample: UserSample, base_url: str, api_key: str, on_close: Callable[[], None]
    ) -> None:
        self.base_url, self.api_key, self.trajectory_id = base_url, api_key, sample.trajectory_id
        self._handle, self._sample, self._on_close = handle, sample, on_close
        self._blank = copy.deepcopy(sample)
        self._conversations: list[Conversation] = []
        self._busy: set[Conversation] = set()  # conversations with a request in flight
        self._closed = False
        self._last_error: Exception | None = None

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.close()
        return isinstance(error, Exception) and isinstance(self._last_error, ContextLengthError | SessionClosed)

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        template_options: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answer one chat request. Several requests may run concurrently, all in the same event loop.

        Args:
            messages: the whole conversation, as the agent sends it.
            tools: tool definitions in OpenAI's format.
            template_options: additional variables of the chat template.
            sampling: the engine's sampling parameters.

        Raises:
            ValueError: the request is invalid.
            ContextLengthError: the conversation has reached the length limit.
            SessionClosed: the session is closed, or the round is over.
            RuntimeError, ConnectionError, TimeoutError: the engines failed; this also fails the round (see
                EngineCalls.generate).
        """
        conversation, known = self._find_or_create_conversation(messages, tools, template_options or {})
        self._busy.add(conversation)
        num_turns = len(conversation.turns)
        try:
            if self._closed:
                raise SessionClosed("the session of this agent is closed: send no further requests")
            message = await conversation.reply(messages[known:], **sampling)
            if conversation.sample.status is Status.ABORTED:
                self._sample.status = Status.ABORTED  # even if the agent then fails because of the abort
                self._sample.aborted = True
                raise SessionClosed("generation was aborted because the round has enough samples: do not retry")
            if len(conversation.turns) == num_turns:
                raise ContextLengthError(
                    f"the conversation has {len(conversation.sample.token_ids)} tokens and reached the length limit of "
                    "the run: shorten it, or raise --rollout-max-response-len or --rollout-max-context-len"
                )
        except Exception as error:
            self._last_error = error
            raise
        finally:
            self._busy.discard(conversation)
        self._last_error = None
        return Answer(message, conversation, conversation.turns[-1])

    def close(self) -> None:
        """Close the session; further requests are refused."""
        self._closed = True
        self._on_close()

    def samples(self) -> list[UserSample]:
        """Close the session, and return one sample per conversation in order of creation. Thread-safe.

        If a request was aborted because the round is over, return only the sample with which the session was created,
        with status ABORTED. If no request was answered, return only that sample, with status FAILED and the reason in
        `metadata["error"]`.
        """
        self.close()
        answered = [
            conversation for conversation in self._conversations if len(conversation.turns) > conversation.num_inherited
        ]
        if self._sample.status is Status.ABORTED:
            return [self._sample]
        if not answered:
            reason = f"its last request failed: {self._last_error}" if self._last_error else "it sent no request"
            self._sample.status = Status.FAILED
            self._sample.metadata["error"] = f"the agent got no answer of the model: {reason}"
            return [self._sample]
        return [self._completed_sample(conversation) for conversation in answered]

    def _completed_sample(self, conversation: Conversation) -> UserSample:
        """Return the sample of a conversation up to its last complete reply, without the tokens of a request that is
        still in flight."""
        sample, turn = copy.copy(conversation.sample), conversation.turns[-1]
        sample.metadata = dict(sample.metadata)
        sample.token_ids = sample.token_ids[: turn.num_tokens]
        sample.loss_mask = sample.loss_mask[: turn.num_tokens]
        sample.rollout_logprobs = sample.rollout_logprobs[: turn.num_tokens]
        no_room = Status.TRUNCATED in (turn.status, sample.status)
        sample.status = Status.TRUNCATED if no_room else turn.status
        sample.response = self._handle.tokenizer.decode(
            [sample.token_ids[sample.prompt_length :]],
            skip_special_tokens=self._handle.config.rollout_skip_special_tokens,
        )[0]
        return sample

    def _find_or_create_conversation(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> tuple[Conversation, int]:
        """Return the conversation that `messages` continue (forked or created if needed), and how many of `messages`
        this conversation already contains."""
        keys = [_message_comparison_key(message) for message in messages]
        # (number of shared messages, whether they end at the last reply, conversation, number of shared turns)
        best: tuple[int, bool, Conversation, int] | None = None
        for conversation in self._conversations:
            if (conversation.tools, conversation.template_options) != (list(tools), options):
                continue
            recorded = [_message_comparison_key(message) for message in conversation.messages]
            for num_turns, turn in enumerate(conversation.turns, start=1):
                if turn.num_messages < len(keys) and recorded[: turn.num_messages] == keys[: turn.num_messages]:
                    at_end = num_turns == len(conversation.turns) and conversation not in self._busy
                    if best is None or (turn.num_messages, at_end) > best[:2]:
                        best = (turn.num_messages, at_end, conversation, num_turns)
        if best is not None and best[1]:
            return best[2], best[0]
        blank = copy.deepcopy(self._blank)
        new = Conversation(self._handle, blank, tools, options) if best is None else best[2].fork(best[3], blank)
        self._conversations.append(new)
        return new, 0 if best is None else best[0]


def _message_comparison_key(message: Message) -> tuple[str, ...]:
    """Return a key that is equal for equal messages, also if an agent trimmed the white space of a reply or reformatted
    the JSON arguments of a tool call."""
    [message] = convert_tool_calls(normalize_messages([message]), CALL_FORMS[0])
    role, text = message["role"], message["content"] or ""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    ]
    return (
        role,
        text.strip() if role == "assistant" else text,
        json.dumps(calls),
        str(message.get("name") or ""),
        str(message.get("tool_call_id") or ""),
    )
