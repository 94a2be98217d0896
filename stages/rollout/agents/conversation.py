"""Turn an agent's chat requests into conversations; each conversation becomes one sample.

Every request contains the whole list of messages. If the list continues a recorded conversation after its last reply,
the new messages are appended to that conversation. If the list continues after an earlier reply (a retry, or agents
working in parallel), a fork of the conversation is created that starts with the shared turns; the shared turns are
trained on only in the original conversation. If the list shares no reply with any conversation (a subagent, a
summarized history), a new conversation is created. endpoint.py serves HTTP.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from penstock.stages.rollout.agents.tool_calls import ToolCall, parse_tool_calls
from penstock.stages.rollout.group import EngineCalls
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.prompts.prompt_images import read_image_file
from penstock.stages.rollout.prompts.prompt_rows import to_image_source
from penstock.stages.rollout.text.templates import (
    CALL_FORMS,
    THOUGHT_TAGS,
    Message,
    convert_tool_calls,
    normalize_messages,
    preview,
)
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import DataError, TemplateError
from penstock.storage.samples.sample import Status

logger = logging.getLogger(__name__)

PLACEHOLDER = f"placeholder-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class Turn:
    """Position and status of one reply of the model in a conversation."""

    num_messages: int  # messages of the conversation up to and including the reply
    num_tokens: int  # tokens of the sample up to the end of the reply
    num_written: int  # tokens that the model generated for the reply
    status: Status  # COMPLETED, or TRUNCATED if the reply reached a length limit
    num_images: int = 0  # images of the sample up to the end of the reply


class Conversation:
    """A chat with the model, recorded in a sample as exactly the tokens that the model has seen and generated, even if
    the chat template drops parts of earlier replies (mostly reasoning). The first message is the prompt of the sample,
    unless the first call of `reply` passes messages. With `tools` (OpenAI's format), tool calls are parsed from
    replies."""

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
        """Return the model's reply: {"role": "assistant", "content": ..., "tool_calls": ...}. `messages` has the
        messages since the last reply; in the first call, the whole conversation so far, or nothing to use the sample's
        prompt.

        If the length limit leaves no room for the messages, the reply is empty and `sample.status` is TRUNCATED. If the
        round aborts the request, the reply has no tool calls and `sample.status` is ABORTED.
        """
        sample = self.sample
        num_tokens, response, num_images = len(sample.token_ids), sample.response, len(sample.images)
        opening = list(messages) or [{"role": "user", "content": sample.prompt}]
        try:
            texts, files = split_images(messages)
            if self.turns:
                before, _ = split_images(self.messages[: self._num_opening])
                between = self._format.render_between_replies(
                    before, self.messages[-1], texts, self.tools, self.template_options
                )
                last = sample.token_ids[-1] if self.turns[-1].status is Status.COMPLETED else None
                if not self.handle.append(sample, self._format.encode_between_replies(*between, last), files):
                    return {"role": "assistant", "content": ""}
            elif messages:
                text, sample.images = self._format.render(texts, self.tools, self.template_options), []
                sample.restart(text, self.handle.add_images(sample, self.handle.tokenizer.encode([text])[0], files))
            start = len(sample.token_ids)
            await self.handle.generate(sample, **sampling)
        except BaseException:
            if self.turns:  # remove the tokens of a request that failed or was cancelled
                for stream in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs):
                    del stream[num_tokens:]
                del sample.images[num_images:]
                sample.response = response
            raise
        reply = self._parse_reply(start, sampling.get("stop") or ())
        if sample.status is not Status.ABORTED and len(sample.token_ids) > start:
            if not self.turns:
                self._num_opening = len(opening)
            self.messages += [*(messages if self.turns else opening), reply]
            num_tokens = len(sample.token_ids)
            self.turns.append(
                Turn(len(self.messages), num_tokens, num_tokens - start, sample.status, len(sample.images))
            )
        return reply

    def fork(self, num_turns: int, blank: UserSample) -> Conversation:
        """Return a new conversation that starts with the first `num_turns` turns of this one. These turns are its
        prompt, so they are not trained on. `blank`: a sample without response, which records the new conversation."""
        turn = self.turns[num_turns - 1]
        other = Conversation(self.handle, blank, self.tools, self.template_options)
        other.messages, other.turns = self.messages[: turn.num_messages], self.turns[:num_turns]
        other.num_inherited, other._num_opening = num_turns, self._num_opening
        shared = self.sample.token_ids[: turn.num_tokens]
        blank.restart(self.handle.tokenizer.decode([shared], skip_special_tokens=False)[0], shared)
        blank.images = self.sample.images[: turn.num_images]
        return other

    @property
    def _format(self) -> ChatFormat:
        return chat_format(self.handle.tokenizer)

    def _parse_reply(self, start: int, stops: str | Sequence[str]) -> Message:
        """Parse the reply whose first token is token `start` of the sample. `stops`: stop strings, at which the text is
        cut."""
        status = self.sample.status
        tools = () if status is Status.ABORTED else self.tools
        text, calls = self._format.parse_reply(
            self.sample.token_ids, start, tools, stops, ended=status is Status.COMPLETED
        )
        if not calls:
            return {"role": "assistant", "content": text}
        # Kimi K2's chat template writes the ids of tool calls and requires this format; other templates accept any id.
        num_calls = sum(len(message.get("tool_calls") or ()) for message in self.messages)
        return {
            "role": "assistant",
            "content": text or None,
            "tool_calls": [
                {
                    "id": f"functions.{call.name}:{num_calls + index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for index, call in enumerate(calls)
            ],
        }


# ---- sessions of agents ----------------------------------------------------------------------------------------------


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


class AgentSession(AbstractContextManager["AgentSession", bool]):
    """One execution of an agent on the prompt of one sample. `samples` returns the results.

    Used as a context manager around the agent, the session closes at the end of the `with` block. An exception in the
    block is suppressed if the agent's last request was refused because the context was full or the round was over: a
    full context truncates the sample, like any other response.
    """

    def __init__(
        self, handle: EngineCalls, sample: UserSample, base_url: str, api_key: str, on_close: Callable[[], object]
    ) -> None:
        self.base_url, self.api_key, self.trajectory_id = base_url, api_key, sample.trajectory_id
        self._handle, self._sample, self._on_close = handle, sample, on_close
        self._blank = copy.deepcopy(sample)
        self._conversations: list[Conversation] = []
        self._busy: set[Conversation] = set()  # conversations with a request in flight
        self._closed = False
        self._last_error: Exception | None = None

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
        """Answer one chat request. Several requests may run concurrently, all in the same event loop. `tools` and
        `template_options` (variables) are for the chat template, `sampling` for the engine."""
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
            self._sample.metadata["error"] = f"the agent got no answer from the model: {reason}"
            return [self._sample]
        return [self._completed_sample(conversation) for conversation in answered]

    def _completed_sample(self, conversation: Conversation) -> UserSample:
        """Return the sample of a conversation up to its last complete reply, without tokens of a request in flight."""
        sample, turn = copy.copy(conversation.sample), conversation.turns[-1]
        sample.metadata = dict(sample.metadata)
        sample.token_ids = sample.token_ids[: turn.num_tokens]
        sample.loss_mask = sample.loss_mask[: turn.num_tokens]
        sample.images = sample.images[: turn.num_images]
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
        # Best match: (number of shared messages, whether they include the last turn and no request is in flight, the
        # conversation, number of shared turns).
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


def split_images(messages: Sequence[Message]) -> tuple[list[Message], list[bytes]]:
    """Return messages whose image parts have no image, and the files of their images, which must be in the messages:
    an agent does not choose files of this machine."""
    if not any(isinstance(message, dict) and isinstance(message.get("content"), list) for message in messages):
        return list(messages), []
    sources: list[Any] = []
    normalized = normalize_messages(list(messages), sources)
    images = [to_image_source(source) for source in sources]
    if others := [image for image in images if not image.lower().startswith("data:")]:
        raise DataError(
            f"an agent's message has the image {preview(others[0])}, but agents cannot choose files of this machine: "
            "give the image itself as data:image/png;base64,..."
        )
    return normalized, [read_image_file(image, ()) for image in images]


def _message_comparison_key(message: Message) -> tuple[str, ...]:
    """Return a key that is equal for equal messages, also if an agent trimmed the white space of a reply or reformatted
    the JSON arguments of a tool call."""
    images: list[Any] = []
    [message] = convert_tool_calls(normalize_messages([message], images), CALL_FORMS[0])
    role, text = message["role"], message["content"] or ""
    if images:
        text = hashlib.sha256(f"{text}{images}".encode()).hexdigest()
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


# ---- rendering a conversation turn by turn ---------------------------------------------------------------------------


class ChatFormat:
    """Renders conversations turn by turn with the chat template of a tokenizer. Raises TemplateError."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._prompts, self._tokenizer = tokenizer, tokenizer.inner
        tokenizer.chat_template_source()  # raises TemplateError if the checkpoint has no chat template
        added = self._tokenizer.added_tokens_decoder
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._tags = frozenset(i for i, token in added.items() if not THOUGHT_TAGS.fullmatch(token.content))
        question = {"role": "user", "content": "1+1"}
        thinking = {"role": "assistant", "content": f"<think>\n{PLACEHOLDER}\n</think>\n\n2"}
        with suppress(TemplateError):  # ignored here: the first real conversation will raise it
            if PLACEHOLDER not in self.render([question, thinking, question]):
                logger.warning(
                    "the chat template drops the reasoning of earlier replies; multi-turn samples keep this reasoning, "
                    "because a sample must hold exactly the tokens that the model has seen and generated"
                )

    def render_between_replies(
        self,
        opening: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[Any],
        options: dict[str, Any],
    ) -> tuple[str, str]:
        """Return (closing text, between text): the text with which the template ends the turn of `reply`, and all text
        from the end of `reply` to the start of the model's next reply, which begins with the closing text.

        `opening` has the messages before the first reply; messages between `opening` and `reply` are not rendered. Only
        the first of the tool calls of `reply` is rendered.
        """
        render = functools.partial(self.render, tools=tools, options=options)
        plain = {"role": "assistant", "content": PLACEHOLDER}
        closing = _text_after_placeholder(render([*opening, plain], open_reply=False))
        if reply.get("tool_calls"):  # some templates accept tool results only after a tool call
            call = {"name": reply["tool_calls"][0]["function"]["name"], "arguments": json.dumps({"value": PLACEHOLDER})}
            calling = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{**reply["tool_calls"][0], "function": call}],
            }
            with suppress(TemplateError):  # other templates cannot render tool calls
                before = _text_after_placeholder(render([*opening, calling], open_reply=False))
                after = _text_after_placeholder(render([*opening, calling, *messages], open_reply=True))
                if after.startswith(before):
                    return closing, closing + after.removeprefix(before)
        return closing, _text_after_placeholder(render([*opening, plain, *messages], open_reply=True))

    def encode_between_replies(self, closing_text: str, between_text: str, last_reply_token: int | None) -> list[int]:
        """Return the token ids of `between_text`, without its leading end-of-turn token if the reply ends with one
        (`last_reply_token`; None if the reply was truncated)."""
        ids, ends = (
            self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in (between_text, closing_text)
        )
        ended = last_reply_token is not None and last_reply_token in self._special
        closed_again = bool(ids) and (ids[0] == last_reply_token or (ids[0] in ends[:1] and ids[0] in self._special))
        return ids[1:] if ended and closed_again else ids

    def parse_reply(
        self,
        token_ids: Sequence[int],
        start: int,
        tools: Sequence[dict[str, Any]],
        stops: str | Sequence[str],
        *,
        ended: bool,
    ) -> tuple[str, list[ToolCall]]:
        """Return the text of the reply whose first token is token `start`, up to the first stop string, and the calls
        of `tools` in it, which the text does not have. `ended`: the model ended its turn, so a special token at the end
        is not part of the text."""
        reply = token_ids[start:]
        if ended and reply and reply[-1] in self._special:
            reply = reply[:-1]
        text = self._tokenizer.decode(reply, skip_special_tokens=False)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.partition(stop)[0]
        if not tools:
            return text, []
        # The prompt may end inside a thought (<think> without </think>). Only the text after its last special token
        # that is not a thought tag counts, because earlier messages may mention these tags.
        after = next((index for index in range(start, 0, -1) if token_ids[index - 1] in self._tags), 0)
        tags = THOUGHT_TAGS.findall(self._tokenizer.decode(token_ids[after:start], skip_special_tokens=False))
        content, calls = parse_tool_calls(text, tools, in_thought=bool(tags) and "/" not in tags[-1])
        return (content if calls else text), calls

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: dict[str, Any] | None = None,
        *,
        open_reply: bool = True,
    ) -> str:
        """Render messages, followed by the generation prompt if `open_reply`. Raises TemplateError."""
        all_tools = [list(tools or ()) or None]
        return self._prompts.render_chats(
            [list(messages)], add_generation_prompt=open_reply, tools=all_tools, options=options
        )[0]


def _text_after_placeholder(text: str) -> str:
    _, placeholder, after = text.rpartition(PLACEHOLDER)
    if not placeholder:
        raise TemplateError(
            f"the chat template omits the assistant's messages (its output ends with {after[-80:]!r}): use another "
            "template"
        )
    return after


chat_format = functools.cache(ChatFormat)  # cached, so that its warning is logged once per tokenizer
