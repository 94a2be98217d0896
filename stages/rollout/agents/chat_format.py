"""What a chat template writes: the opening of a conversation, and what comes between one reply of the model and the next.

The second is found by looking: a stand-in for the reply, whose text no template knows, is rendered with the new messages
behind it, and what stands behind the stand-in is new. So what the model wrote is never rendered, and never tokenised again.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from stages.rollout.templates import RenderLimitError
from stages.rollout.tokenizer import PromptTokenizer
from storage.errors import DataError, TemplateError

logger = logging.getLogger(__name__)

Message = dict[str, Any]  # OpenAI's: {"role", "content", "tool_calls", ...}
CALL_FORMS = ((False, None), (True, None), (False, ""), (True, ""))  # arguments as text, content beside calls if there is none
STAND_IN = f"stand-in-{secrets.token_hex(16)}"


@functools.cache
def chat_format(tokenizer: PromptTokenizer) -> ChatFormat:
    """The one of a tokenizer, so that what it has to say is said once."""
    return ChatFormat(tokenizer)


class ChatFormat:
    """A tokenizer's chat template, as far as conversations need it.

    Raises:
        TemplateError: there is none.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._prompts, self._tokenizer = tokenizer, tokenizer.inner
        if not self._tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template, which a conversation needs: add chat_template.jinja to the checkpoint"
            )
        self._special = frozenset(i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special)
        self._warn_of_dropped_thoughts()

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, options: dict[str, Any] | None = None
    ) -> str:
        """A whole conversation, up to where the model begins to write.

        Args:
            messages: in OpenAI's form.
            tools: definitions that the template writes.
            options: further variables of the template, e.g. enable_thinking.

        Raises:
            TemplateError: the template refuses it.
        """
        return self._render(messages, tools, options or {}, open_reply=True)

    def following(
        self,
        opening: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[str, str]:
        """What closes a reply, and all that stands between its last character and the beginning of the next one.

        Args:
            opening: the conversation's first messages. What lies between them and the reply need not be rendered again.
            reply: of the model; only whether it calls tools matters.
            messages: what has come since.

        Raises:
            TemplateError: the template refuses it, or writes no replies.
        """
        render = functools.partial(self._render, tools=tools, options=options or {})
        plain = {"role": "assistant", "content": STAND_IN}
        closing = _behind(render([*opening, plain], open_reply=False))
        if reply.get("tool_calls"):  # some templates want the results of tools behind a call only
            call = {"name": reply["tool_calls"][0]["function"]["name"], "arguments": json.dumps({"value": STAND_IN})}
            calling = {"role": "assistant", "content": None, "tool_calls": [{**reply["tool_calls"][0], "function": call}]}
            with suppress(TemplateError):  # others write no calls at all
                before = _behind(render([*opening, calling], open_reply=False))
                after = _behind(render([*opening, calling, *messages], open_reply=True))
                if after.startswith(before):
                    return closing, closing + after.removeprefix(before)
        return closing, _behind(render([*opening, plain, *messages], open_reply=True))

    def following_ids(self, closing: str, text: str, last: int | None) -> list[int]:
        """Token ids of `following`'s text. If the model has ended its turn itself, with `last`, it is not closed again."""
        ids, ends = (self._tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, closing))
        ended = last is not None and last in self._special
        closed_again = bool(ids) and (ids[0] == last or (ids[0] in ends[:1] and ids[0] in self._special))
        return ids[1:] if ended and closed_again else ids

    def written(self, token_ids: list[int], *, ended: bool) -> str:
        """The text of a reply; if it ended by itself, without the special token that did so."""
        if ended and token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _render(self, messages: Sequence[Message], tools: Any, options: dict[str, Any], *, open_reply: bool) -> str:
        """Return the text of the first form that the template accepts. Raises TemplateError if it accepts none."""
        first: TemplateError | None = None
        for form in CALL_FORMS:
            variant = [as_form({**message, "content": text_of(message)}, form) for message in messages]
            [text] = self._prompts.try_render([(variant, tools or None, open_reply)], options)
            if not isinstance(text, TemplateError):
                return text
            first = first or text
            if isinstance(text, RenderLimitError):
                break
        assert first is not None, "there is at least one form"
        raise type(first)(
            f"the chat template refuses the conversation {json.dumps(messages, default=str)[:120]} ({str(first)[:120]}): "
            "send what it allows, or use another template"
        ) from first

    def _warn_of_dropped_thoughts(self) -> None:
        question = {"role": "user", "content": "1+1"}
        thinking = {"role": "assistant", "content": f"<think>\n{STAND_IN}\n</think>\n\n2"}
        try:
            text = self._render([question, thinking, question], None, {}, open_reply=True)
        except TemplateError:
            return  # it will be said of a real conversation
        if STAND_IN not in text:
            logger.warning(
                "the chat template leaves the thoughts of earlier replies out; in conversations that are trained on they stay, "
                "because a sample's tokens are what the model has seen and written"
            )


def _behind(text: str) -> str:
    before, found, after = text.rpartition(STAND_IN)
    if not found:
        raise TemplateError(f"the chat template does not write the assistant's messages ({before[-80:]!r}): use another template")
    return after


def as_form(message: Message, form: tuple[bool, str | None]) -> Message:
    """Return one message with the arguments of its calls in one form, and that content beside calls if it has none."""
    as_text, no_content = form
    out = {key: value for key, value in message.items() if value is not None} | {"content": message["content"]}
    if not out["content"] and message.get("tool_calls"):
        out["content"] = no_content
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"].get("arguments"), as_text)}}
            for call in message["tool_calls"]
        ]
    return out


def _arguments(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments)
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def text_of(message: Message) -> str:
    """The content as text: as it is, or the parts of it put together.

    Raises:
        DataError: a part is not text.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise DataError(f"the content of a message is {json.dumps(content, default=str)[:80]}: only text is understood, send text")
