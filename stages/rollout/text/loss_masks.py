"""Locate the assistant turns in the rendered text of a conversation: the spans that SFT trains on.

If the chat template encloses the assistant turns in `{% generation %}` blocks, these blocks are the spans. With any
other template, each assistant message is located by rendering the conversation again with a random string (`MARK`)
around each text of the message. The text before the first mark must be the start of the unmarked text, the text after
the last mark its end, and the text between may differ only in marks and white space; otherwise the row is rejected. So
the loss mask is exact even if a template renders earlier turns differently once a conversation continues (Qwen3 drops
reasoning). A span has this start and end:

    start   the end of the prompt of this assistant message, as rendered for generation
    end     after the token that ends the turn (a special token, or one of generation_config.json); text after that
            token is not trained. In templates without such a token (GLM) the token of the next role ends the turn
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.stages.rollout.text.templates import THOUGHT_TAGS, Message, Messages
from penstock.stages.rollout.text.tokenizer import STEP_LOSS_MASK, PromptTokenizer, Tools
from penstock.storage.errors import DataError, TemplateError

Span = tuple[int, int]  # start and end, in characters of the rendered text
Piece = tuple[str, bool]  # text, whether it is trained
MARK = f"q{secrets.token_hex(12)}q"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPLIT_AT_THOUGHT_TAGS = re.compile(f"({THOUGHT_TAGS.pattern})")
# Qwen3's template recognizes tool results in user messages by these tags.
_TOOL_RESPONSE_END = re.compile(r"(\s*</tool_response>\s*)?\Z")


def split_trained_text(messages: Messages, tokenizer: PromptTokenizer, tools: Tools = None) -> list[Piece]:
    """Return the rendered text of a conversation as pieces (text, whether SFT trains on it). Raises TemplateError if
    the template fails or the trained spans cannot be located exactly, and DataError."""
    trained = [
        index for index, message in enumerate(messages) if message["role"] == "assistant" and _is_trained(message)
    ]
    template = tokenizer.chat_template_source(tools=bool(tools))
    conversation = _Conversation(tokenizer.prepare(messages, tools=bool(tools)), tokenizer, tools)
    check_messages_are_written(messages, tokenizer, tools)
    spans = (
        conversation.generation_block_spans(trained)
        if _GENERATION.search(template)
        else [(conversation.span_start(i), conversation.span_end(i)) for i in trained]
    )
    pieces, position = [], 0
    for start, end in spans:
        if not position <= start <= end:
            raise _cannot_locate_error("the spans of two assistant messages overlap")
        pieces += [(conversation.text[position:start], False), (conversation.text[start:end], True)]
        position = end
    return [piece for piece in (*pieces, (conversation.text[position:], False)) if piece[0]]


def join_pieces(
    pieces: Sequence[Piece], encoded: Sequence[list[int]], max_seq_len: int | None
) -> tuple[list[int], list[int]]:
    """Return the token ids and the loss mask (0 or 1 per token) of a conversation. `encoded` has the token ids of each
    piece: pieces are tokenized separately, so that a prompt has the same ids as in generation. Raises DataError."""
    token_ids = [token for ids in encoded for token in ids]
    loss_mask = [int(is_trained) for (_, is_trained), ids in zip(pieces, encoded, strict=True) for _ in ids]
    problem = None
    if max_seq_len is not None and len(token_ids) > max_seq_len:
        problem = (
            f"the conversation has {len(token_ids)} tokens, but the model has only {max_seq_len} positions: shorten or "
            "remove the row"
        )
    elif not any(loss_mask):
        problem = (
            "no token of the conversation would be trained on: add an assistant message with content and without "
            '"step_loss_mask": 0, or remove the row'
        )
    if problem is not None:
        raise DataError(problem)
    return token_ids, loss_mask


def check_messages_are_written(messages: Messages, tokenizer: PromptTokenizer, tools: Tools) -> None:
    """Check that the chat template writes the content and the tool calls of every message: a random string at the end
    of each content, and in place of the arguments of each call, must be in the rendered text."""
    marked: Messages = []
    marks: dict[str, str] = {}  # random string -> what the template must write
    for index, message in enumerate(tokenizer.prepare(messages, tools=bool(tools))):
        message, where = dict(message), f"message {index + 1} of the conversation ({message['role']})"
        content = message["content"] or ""
        if isinstance(content, list) or content.strip():
            marks[mark := f"{MARK}{index}q"] = f"the content of {where}"
            message["content"] = _append_to_text(content, mark)
        for number, call in enumerate(message.get("tool_calls") or ()):
            marks[mark := f"{MARK}call{index}q{number}q"] = f"a tool call of {where}"
            is_text = isinstance(call["function"]["arguments"], str)
            function = {**call["function"], "arguments": json.dumps({mark: mark}) if is_text else {mark: mark}}
            calls = message["tool_calls"]
            message["tool_calls"] = [*calls[:number], {**call, "function": function}, *calls[number + 1 :]]
        marked.append(message)
    [text] = tokenizer.render_chats([marked], add_generation_prompt=False, tools=[tools])
    for mark, what in marks.items():
        if mark not in text.lower():
            raise TemplateError(
                f"the chat template does not write {what}: use a template that writes it, or remove it from the row"
            )


def drops_reasoning(messages: Messages, pieces: Sequence[Piece]) -> bool:
    """Return whether the chat template drops the reasoning of the last trained assistant message."""
    answers = [message for message in messages if message["role"] == "assistant" and _is_trained(message)]
    if not answers:
        return False
    content = answers[-1]["content"]
    thoughts = answers[-1].get("reasoning_content") or ""
    if not thoughts and isinstance(content, str) and "</think>" in content:
        thoughts = content.split("</think>")[0].split("<think>")[-1]
    return bool(thoughts.strip()) and thoughts.strip() not in "".join(text for text, _ in pieces)


@dataclass
class _Conversation:
    """A conversation, its rendered text, and methods that locate the trained spans in the text."""

    messages: Messages
    tokenizer: PromptTokenizer
    tools: Tools

    @cached_property
    def text(self) -> str:
        """Rendered text of the whole conversation."""
        return self.tokenizer.render_chats([self.messages], add_generation_prompt=False, tools=[self.tools])[0]

    def generation_block_spans(self, trained: Sequence[int]) -> list[Span]:
        """Return the spans in `text` of the `{% generation %}` blocks of the messages with the indices `trained`."""
        marked = self._render_or_raise(self.messages, mark=MARK).split(MARK)
        reason = "random strings inserted around the {% generation %} blocks change the rest of the text"
        if "".join(marked) == self.text:
            ends = [*itertools.accumulate(map(len, marked))]
            spans = list(zip(ends[:-1:2], ends[1:-1:2]))
            answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
            if len(spans) == len(answers):
                return [span for index, span in zip(answers, spans) if index in trained]
            if len(trained) == len(answers):
                return spans
            reason = f"the template writes {len(spans)} {{% generation %}} blocks for {len(answers)} assistant messages"
        raise _cannot_locate_error(reason)

    def span_start(self, index: int) -> int:
        """Return the start in `text` of the span of the assistant message `messages[index]` that SFT trains on."""
        if index == 0:
            return self._first_span_start()
        [prompt] = self.tokenizer.try_render([(self.messages[:index], self.tools, True)])
        if isinstance(prompt, str) and self.text.startswith(prompt):
            return len(prompt)
        # The earlier turns are rendered differently in the prompt: compare only the text after the previous message.
        before = self.messages[: index - 1]
        asked = self.messages[index - 1]
        if asked["role"] == "assistant":
            asked = _mark_texts(asked)
        else:
            asked = {**asked, "content": _append_to_text(asked["content"], MARK)}
        tail = self._render_or_raise([*before, asked], prompt=True).rpartition(MARK)[2]
        _, position = self._locate_marks(index - 1, asked)
        if self.text.startswith(tail, position):
            return position + len(tail)
        content, is_start = self._text_start(index)
        gap = self.text[position:content]
        shared = _common_prefix(gap, tail)
        added = [token.content for token in self.tokenizer.inner.added_tokens_decoder.values()]
        ends = [shared.rfind(token) + len(token) for token in added if token in shared]
        if shared == gap or ends:  # the prompt may end with a reasoning tag that the whole conversation does not have
            return content if is_start or shared == gap else position + max(ends)
        raise _cannot_locate_error(
            f"the text before message {index + 1} differs from the prompt rendered to generate this message"
        )

    def _first_span_start(self) -> int:
        """Return the start of the span of the first message: the end of the generation prompt before its text."""
        question = {"role": "user", "content": MARK}
        prompt, ended = (
            self._render_or_raise([question], prompt=prompt).rpartition(MARK)[2] for prompt in (True, False)
        )
        content, is_start = self._text_start(0)
        header = prompt.removeprefix(ended)
        position = self.text.rfind(header, 0, content) if header else -1
        if position < 0 and not is_start:
            raise _cannot_locate_error("no generation prompt precedes message 1")
        return content if position < 0 else position + len(header)

    def _text_start(self, index: int) -> tuple[int, bool]:
        """Return the start of the first text of the assistant message `messages[index]`, and whether this is the start
        of the message; otherwise, tool calls may begin with tags before it."""
        try:
            return self._locate_marks(index, _mark_texts(self.messages[index], also_empty=True))[0], True
        except TemplateError:  # for example, DeepSeek V3 writes tool calls only if the content is null
            return self._locate_marks(index, _mark_texts(self.messages[index]))[0], False

    def span_end(self, index: int) -> int:
        """Return the end in `text` of the span of the assistant message `messages[index]` that SFT trains on."""
        marked = _mark_texts(self.messages[index])
        try:
            _, position = self._locate_marks(index, marked)
        except _NotWrittenError:
            marked = _mark_texts(self.messages[index], also_empty=True)
            _, position = self._locate_marks(index, marked)
        closing = rest = self.text[position:]
        if index + 1 < len(self.messages):
            closing = self._render_or_raise([*self.messages[:index], marked]).rpartition(MARK)[2]
        shared = _common_prefix(closing, rest)
        end = max(
            (shared.rfind(token) + len(token) for token in self.tokenizer.end_tokens if token in shared), default=0
        )
        if end:
            return position + end
        if shared != closing:
            raise _cannot_locate_error(
                f"the end of message {index + 1} is rendered differently when the conversation continues after it"
            )
        # The template writes no token that ends a turn: the model ends its turn with the token of the next role.
        following = rest[len(closing) :]
        return (
            position
            + len(closing)
            + max((len(t) for t in self.tokenizer.end_tokens if following.startswith(t)), default=0)
        )

    def _locate_marks(self, index: int, marked: Message) -> tuple[int, int]:
        """Render the conversation with message `index` replaced by `marked`, the same message with random strings
        (MARK). Return where the first and the last of them would be in the text rendered without them (`text`)."""
        text = self._render_or_raise([*self.messages[:index], marked, *self.messages[index + 1 :]])
        before, mark, rest = text.partition(MARK)
        if not mark:
            raise _NotWrittenError(
                f"the chat template does not write message {index + 1} of the conversation: use another template"
            )
        after = rest.rpartition(MARK)[2]
        if not self.text.startswith(before):
            before = before.rstrip()  # GLM-4.5 writes a line break only before an answer that is not empty
        start, end = len(before), len(self.text) - len(after)
        same = "".join(text.replace(MARK, "").split()) == "".join(self.text.split())
        if not (same and start <= end and self.text.startswith(before) and self.text.endswith(after)):
            raise _cannot_locate_error(f"random strings inserted into message {index + 1} change the rest of the text")
        return start, end

    def _render_or_raise(self, messages: Messages, *, prompt: bool = False, mark: str = "") -> str:
        [text] = self.tokenizer.try_render([(messages, self.tools, prompt)], mark=mark)
        if isinstance(text, TemplateError):
            raise _cannot_locate_error(
                "the chat template fails on a shortened copy of the conversation, or on one with random strings in its "
                f"texts: {str(text)[:100]}"
            )
        return text


def _common_prefix(one: str, other: str) -> str:
    differing = (index for index, (a, b) in enumerate(zip(one, other)) if a != b)
    return one[: next(differing, min(len(one), len(other)))]


class _NotWrittenError(TemplateError):
    """Raised if a message does not appear in the output of the chat template."""


def _cannot_locate_error(reason: str) -> TemplateError:
    return TemplateError(
        f"the assistant messages cannot be located in the rendered conversation ({reason}): use a chat template that "
        "has a {% generation %} block around each assistant message"
    )


def _is_trained(message: Message) -> bool:
    value = message.get(STEP_LOSS_MASK)
    if value not in (None, 0, 1):
        raise DataError(
            f"{STEP_LOSS_MASK} of an assistant message is {value!r}: set 1 to train on the message, or 0 to exclude it"
        )
    return value is None or bool(value)


def _mark_texts(message: Message, *, also_empty: bool = False) -> Message:
    """Return an assistant message with the random string MARK before and after each text of its content, reasoning and
    tool calls. Empty texts stay empty, because templates test for them; with `also_empty`, the content gets two further
    MARKs, even if it is empty."""
    out = dict(message)
    for key in ("reasoning_content", "content"):
        if isinstance(message.get(key), str):
            out[key] = "".join(_surround_with_marks(part) for part in _SPLIT_AT_THOUGHT_TAGS.split(message[key]))
    if also_empty:
        content = out["content"] or ""
        out["content"] = content + MARK + MARK if content.strip() else MARK + content + MARK
    if message.get("tool_calls"):
        functions = [call["function"] for call in message["tool_calls"]]
        marked = [{key: _mark_values(function[key]) for key in ("name", "arguments")} for function in functions]
        calls = zip(message["tool_calls"], functions, marked)
        out["tool_calls"] = [{**call, "function": {**function, **new}} for call, function, new in calls]
    return out


def _mark_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mark_values(entry) for key, entry in value.items()}
    return [_mark_values(entry) for entry in value] if isinstance(value, list) else _surround_with_marks(value)


def _surround_with_marks(text: Any) -> Any:
    """Return `text` with the random string MARK at its start and end; think tags, white space and values other than
    strings are unchanged."""
    return (
        f"{MARK}{text}{MARK}" if isinstance(text, str) and text.strip() and not THOUGHT_TAGS.fullmatch(text) else text
    )


def _append_to_text(content: Any, mark: str) -> Any:
    """Return `content`, text or parts, with `mark` at its end; if the text ends with </tool_response>, `mark` precedes
    this tag."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": mark}]
    end = _TOOL_RESPONSE_END.search(content)
    assert end is not None, "the pattern matches at the end of any text"
    return content[: end.start()] + mark + content[end.start() :]
