"""Render a conversation in parts: the text before the model's first reply, and the text between two replies.

To get the text between two replies, a random placeholder is rendered in place of the earlier reply, followed by the new
messages; the text after the placeholder is the result. So the model's replies are never rendered or tokenized again.
"""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.stages.rollout.text.messages import THOUGHT_TAGS, Message
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import TemplateError

logger = logging.getLogger(__name__)

PLACEHOLDER = f"placeholder-{secrets.token_hex(16)}"


@functools.cache
def chat_format(tokenizer: PromptTokenizer) -> ChatFormat:
    """Return the ChatFormat of a tokenizer; cached, so that its warning, that the chat template drops the reasoning of
    earlier replies, is logged once per tokenizer."""
    return ChatFormat(tokenizer)


class ChatFormat:
    """Renders conversations turn by turn with the chat template of a tokenizer. Raises TemplateError."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._prompts, self._tokenizer = tokenizer, tokenizer.inner
        if not self._tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template, which a conversation needs: add chat_template.jinja to the "
                "checkpoint"
            )
        added = self._tokenizer.added_tokens_decoder
        self._special = frozenset(i for i, token in added.items() if token.special)
        self._tags = frozenset(i for i, token in added.items() if not THOUGHT_TAGS.fullmatch(token.content))
        self._warn_of_dropped_thoughts()

    def render_opening(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, options: dict[str, Any] | None = None
    ) -> str:
        """Render the messages before the model's first reply, including the generation prompt. Raises TemplateError."""
        return self._render(messages, tools, options or {}, open_reply=True)

    def render_between_replies(
        self,
        opening: Sequence[Message],
        reply: Message,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[str, str]:
        """Return (closing text, between text). The closing text is what the template writes to end the turn of `reply`.
        The between text is all text from there to the start of the model's next reply, closing text included.

        Args:
            opening: the messages before the first reply; messages between the first reply and `reply` are not rendered.
            reply: last reply of the model; of its tool calls, only the first is rendered.
            messages: the new messages after the reply.
        """
        render = functools.partial(self._render, tools=tools, options=options or {})
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

    def decode_reply(self, token_ids: list[int], *, ended: bool) -> str:
        """Decode the tokens of a reply; if `ended` (the model ended its turn), without the special token at the end."""
        if ended and token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the tokens of a prompt end inside a thought. Only the text after the last added token that is
        not a tag of a thought counts: earlier messages may mention such tags."""
        start = next((index for index in range(len(prompt), 0, -1) if prompt[index - 1] in self._tags), 0)
        tags = THOUGHT_TAGS.findall(self._tokenizer.decode(prompt[start:], skip_special_tokens=False))
        return bool(tags) and "/" not in tags[-1]

    def _render(self, messages: Sequence[Message], tools: Any, options: dict[str, Any], *, open_reply: bool) -> str:
        [text] = self._prompts.try_render([(list(messages), tools or None, open_reply)], options)
        if isinstance(text, TemplateError):
            raise type(text)(
                f"the chat template rejects the conversation {json.dumps(messages, default=str)[:120]} "
                f"({str(text)[:120]}): send messages that it accepts, or use another template"
            ) from text
        if not text.strip():
            raise TemplateError("the chat template renders nothing for the messages: send messages with content")
        return text

    def _warn_of_dropped_thoughts(self) -> None:
        question = {"role": "user", "content": "1+1"}
        thinking = {"role": "assistant", "content": f"<think>\n{PLACEHOLDER}\n</think>\n\n2"}
        try:
            text = self._render([question, thinking, question], None, {}, open_reply=True)
        except TemplateError:
            return  # the first real conversation will raise an error
        if PLACEHOLDER not in text:
            logger.warning(
                "the chat template drops the reasoning of earlier replies; multi-turn samples keep this reasoning, "
                "because a sample must hold exactly the tokens that the model has seen and generated"
            )


def _text_after_placeholder(text: str) -> str:
    _, placeholder, after = text.rpartition(PLACEHOLDER)
    if not placeholder:
        raise TemplateError(
            f"the chat template omits the assistant's messages (its output ends with {after[-80:]!r}): use another "
            "template"
        )
    return after
