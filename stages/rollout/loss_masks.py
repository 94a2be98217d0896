"""Find in the template's own text of a conversation what the assistant generates: the trained spans of SFT.

A template that marks them with `{% generation %}` is taken at its word. For any other template each answer is located by rendering the
conversation again with a random mark around the texts of one message: what precedes the first mark and follows the last one must be the
beginning and the end of the unmarked text, and the rest must differ in nothing but the marks and white space, or the row is refused. So a
template may render earlier turns differently once a conversation continues (Qwen3 drops thoughts) and the mask is still exact.

    start   where the prompt of this answer ends, as it is rendered for generation
    end     behind the token that ends the turn (a special one, or one of generation_config.json); what the template writes behind that
            token is not trained. In templates without such a token (GLM) the next role's token ends the turn
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stages.rollout.agents.chat_format import CALL_FORMS, as_form
from stages.rollout.prompts.source import Messages
from stages.rollout.tokenizer import STEP_LOSS_MASK, PromptTokenizer, Tools
from storage.errors import DataError, TemplateError

Message = dict[str, Any]
Span = tuple[int, int]  # characters
Piece = tuple[str, bool]  # text, whether it is trained
MARK = f"q{secrets.token_hex(12)}q"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINK_TAGS = re.compile(r"(</?think>)")
_TOOL_RESPONSE_END = re.compile(r"(\s*</tool_response>\s*)?\Z")  # Qwen3 tells tool results in user messages by their tags


def split_pieces(messages: Messages, tokenizer: PromptTokenizer, tools: Tools = None) -> list[Piece]:
    """Return the template's text of a conversation, cut into trained and untrained pieces.

    Args:
        messages: of the conversation; an assistant's message with `step_loss_mask` 0 is not trained.
        tokenizer: with the template.
        tools: definitions for the template.

    Raises:
        TemplateError: the template fails, or the spans cannot be proven.
        DataError: a `step_loss_mask` is neither 0 nor 1.
    """
    trained = [index for index, message in enumerate(messages) if message["role"] == "assistant" and _is_trained(message)]
    template = tokenizer.template(tools=bool(tools))
    conversation = _Conversation(messages, tokenizer, tools)
    spans = conversation.declared(trained) if _GENERATION.search(template) else [conversation.span(i) for i in trained]
    pieces, position = [], 0
    for start, end in spans:
        if not position <= start <= end:
            raise _unproven("its answers overlap")
        pieces += [(conversation.text[position:start], False), (conversation.text[start:end], True)]
        position = end
    return [piece for piece in (*pieces, (conversation.text[position:], False)) if piece[0]]


def dropped_thoughts(messages: Messages, pieces: Sequence[Piece]) -> bool:
    """Return whether the last answer has thoughts of which the template writes nothing."""
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
    """A conversation and its renderings."""

    messages: Messages
    tokenizer: PromptTokenizer
    tools: Tools

    @cached_property
    def text(self) -> str:
        """The whole conversation; of the forms in which tool calls are written, the first that the template accepts is kept."""
        first: TemplateError | None = None
        for form in _forms(self.messages):
            text = self._render(form)
            if not isinstance(text, TemplateError):
                self.messages = form
                return text
            first = first or text
        assert first is not None, "there is at least one form"
        raise type(first)(f"the chat template fails ({str(first)[:150]}): repair the row, or use another template") from first

    def declared(self, trained: Sequence[int]) -> list[Span]:
        """Return the spans of the template's `{% generation %}` blocks, those of untrained messages left out."""
        text = self.text
        marked = self._must_render(self.messages, mark=MARK).split(MARK)
        if "".join(marked) != text:
            raise _unproven("it changes what its {% generation %} blocks write")
        ends = [0]
        for part in marked:
            ends.append(ends[-1] + len(part))
        spans = list(zip(ends[1:-1:2], ends[2:-1:2]))
        answers = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(spans) == len(answers):
            return [span for index, span in zip(answers, spans) if index in trained]
        if len(trained) == len(answers):
            return spans
        raise _unproven(f"it has {len(spans)} {{% generation %}} blocks for {len(answers)} answers")

    def span(self, index: int) -> Span:
        """Return what is generated of an assistant's message."""
        return self._start(index), self._end(index)

    def _start(self, index: int) -> int:
        prompt = self._render(self.messages[:index], prompt=True)
        if isinstance(prompt, str) and self.text.startswith(prompt):
            return len(prompt)
        if index == 0:
            raise _unproven("the conversation begins with an answer; give that message step_loss_mask 0")
        # The prompt of this answer shows earlier turns differently: compare only what follows the message before it.
        before = self.messages[: index - 1]
        asked = _mark_end(self.messages[index - 1])
        tail = self._must_render([*before, asked], prompt=True).rpartition(MARK)[2]
        _, position = self._locate(index - 1, asked)
        if self.text.startswith(tail, position):
            return position + len(tail)
        content, _ = self._locate(index, _mark(self.messages[index], also_empty=True))  # also of an answer that only calls
        gap = self.text[position:content]
        shared = _common_prefix(gap, tail)
        if shared == gap or any(token in shared for token in self._added_tokens):
            return content  # the prompt goes on with what this rendering leaves out: thoughts, mostly
        raise _unproven("it opens this answer in another way than a prompt")

    def _end(self, index: int) -> int:
        marked, _, position = self._text_of(index)
        closing = rest = self.text[position:]
        if index + 1 < len(self.messages):
            closing = self._must_render([*self.messages[:index], marked]).rpartition(MARK)[2]
        shared = _common_prefix(closing, rest)
        end = max((shared.rfind(token) + len(token) for token in self.tokenizer.end_tokens if token in shared), default=0)
        if end:
            return position + end
        if shared != closing:
            raise _unproven("it closes this answer in another way when the conversation continues")
        # No token ends the turn: the model ends it with the next role's.
        following = rest[len(closing) :]
        return position + len(closing) + max((len(t) for t in self.tokenizer.end_tokens if following.startswith(t)), default=0)

    def _text_of(self, index: int) -> tuple[Message, int, int]:
        """Return an assistant's message with marks, and where its texts begin and end."""
        marked = _mark(self.messages[index])
        try:
            return marked, *self._locate(index, marked)
        except _NotWrittenError:
            marked = _mark(self.messages[index], also_empty=True)
            return marked, *self._locate(index, marked)

    def _locate(self, index: int, marked: Message) -> tuple[int, int]:
        """Return where the first mark of a message stands in the text without marks, and where the last one does."""
        text = self._must_render([*self.messages[:index], marked, *self.messages[index + 1 :]])
        before, mark, rest = text.partition(MARK)
        if not mark:
            raise _NotWrittenError(
                f"the chat template does not write message {index + 1} of the conversation: use another template"
            )
        after = rest.rpartition(MARK)[2]
        start, end = len(before), len(self.text) - len(after)
        same = "".join(text.replace(MARK, "").split()) == "".join(self.text.split())
        if not (same and start <= end and self.text.startswith(before) and self.text.endswith(after)):
            raise _unproven(f"message {index + 1} is rendered depending on its words")
        return start, end

    @cached_property
    def _added_tokens(self) -> list[str]:
        return [token.content for token in self.tokenizer.inner.added_tokens_decoder.values()]

    def _render(self, messages: Messages, *, prompt: bool = False, mark: str = "") -> str | TemplateError:
        return self.tokenizer.try_render([(messages, self.tools, prompt)], mark=mark)[0]

    def _must_render(self, messages: Messages, *, prompt: bool = False, mark: str = "") -> str:
        text = self._render(messages, prompt=prompt, mark=mark)
        if isinstance(text, TemplateError):
            raise _unproven(f"it fails for a part of the conversation: {str(text)[:100]}")
        return text


def _common_prefix(one: str, other: str) -> str:
    differing = (index for index, (a, b) in enumerate(zip(one, other)) if a != b)
    return one[: next(differing, min(len(one), len(other)))]


class _NotWrittenError(TemplateError):
    """A message is not in the template's text."""


def _unproven(reason: str) -> TemplateError:
    return TemplateError(
        f"the chat template does not show which tokens the assistant generates ({reason}): use a template with {{% generation %}} blocks"
    )


def _is_trained(message: Message) -> bool:
    value = message.get(STEP_LOSS_MASK)
    if value not in (None, 0, 1):
        raise DataError(f"{STEP_LOSS_MASK} of an assistant's message is {value!r}: give 1 to train on it, or 0")
    return value is None or bool(value)


def _mark(message: Message, *, also_empty: bool = False) -> Message:
    """Return an assistant's message with marks around all its texts; empty ones stay empty, because templates ask whether they are."""
    out = dict(message)
    for key in ("reasoning_content", "content"):
        if isinstance(message.get(key), str):
            out[key] = "".join(_around(part) for part in _THINK_TAGS.split(message[key]))
        elif isinstance(message.get(key), list):
            out[key] = [_mark_part(part, _around) for part in message[key]]
    if also_empty and isinstance(message.get("content") or "", str):
        out["content"] = (out["content"] or "") + MARK + MARK
    if message.get("tool_calls"):
        out["tool_calls"] = [_mark_call(call) for call in message["tool_calls"]]
    return out


def _mark_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    marked = {**function, "name": _around(function.get("name")), "arguments": _mark_values(function.get("arguments"))}
    marked = {key: value for key, value in marked.items() if key in function}
    return {**call, "function": marked} if "function" in call else marked


def _mark_values(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mark_values(entry) for key, entry in value.items()}
    return [_mark_values(entry) for entry in value] if isinstance(value, list) else _around(value)


def _around(text: Any) -> Any:
    """Return a text between marks; tags, white space and everything but text stay as they are."""
    return f"{MARK}{text}{MARK}" if isinstance(text, str) and text.strip() and not _THINK_TAGS.fullmatch(text) else text


def _mark_end(message: Message) -> Message:
    """Return a message with a mark where its text ends."""
    content = message["content"]
    if message["role"] == "assistant":
        return _mark(message)
    if isinstance(content, list) and content:
        return {**message, "content": [*content[:-1], _mark_part(content[-1], lambda text: text + MARK)]}
    if not isinstance(content, str):
        raise _unproven(f"the content of a {message['role']} message is a {type(content).__name__}")
    end = _TOOL_RESPONSE_END.search(content)
    assert end is not None, "the pattern matches at the end of any text"
    return {**message, "content": content[: end.start()] + MARK + content[end.start() :]}


def _mark_part(part: Any, change: Any) -> Any:
    return {**part, "text": change(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part


def _forms(messages: Messages) -> list[Messages]:
    """Return the conversation as it is, and with arguments of calls as dictionaries or text and no content as "" or None: templates
    differ in what they can concatenate."""
    if not any(message.get("tool_calls") for message in messages):
        return [messages]
    return [messages, *([as_form(message, form) for message in messages] for form in CALL_FORMS)]
