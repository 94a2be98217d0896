"""Text to token ids and back, by the tokenizer of the Hugging Face checkpoint.

Prompts are tokenised here and nowhere else; responses never are, their ids come from the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stages.rollout.prompts.source import Messages
from stages.rollout.templates import RENDERER, Chat
from storage.errors import ModelError, TemplateError

Tools = list[dict[str, Any]] | None

# Without any of these AutoTokenizer makes an empty tokenizer from config.json's model_type and says nothing (transformers 5.12).
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
STEP_LOSS_MASK = "step_loss_mask"  # field of an assistant's message in SFT rows: 0 leaves it untrained
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class; transformers 5 renamed it


class PromptTokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        directory: Hugging Face model directory.
        apply_chat_template: render prompts through the template.
        template_options: further variables of the template (`--apply-chat-template-kwargs`).

    Raises:
        ModelError: the tokenizer is missing or does not load.
        TemplateError: no chat template although one is needed.
    """

    template_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, directory: str | Path, *, apply_chat_template: bool, template_options: dict[str, Any] | None = None
    ) -> None:
        if not any((Path(directory) / name).is_file() for name in VOCABULARIES):
            raise ModelError(f"{directory} has no tokenizer: put tokenizer.json and tokenizer_config.json beside the weights")
        try:
            self.inner: Any = _loader(Path(directory)).from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # whatever its files make transformers raise
            reason = str(error).strip().splitlines()[0][:150] if str(error).strip() else type(error).__name__
            raise ModelError(f"the tokenizer in {directory} does not load ({reason}): restore its files") from error
        if apply_chat_template and not self.inner.chat_template:
            raise TemplateError(
                f"the tokenizer in {directory} has no chat template: add chat_template.jinja, or leave out --apply-chat-template"
            )
        self.apply_chat_template = apply_chat_template
        self.template_options = template_options or {}
        self.generation_end_ids = _generation_end_ids(Path(directory))

    @property
    def end_token_id(self) -> int | None:
        """The token that ends a turn."""
        return self.inner.eos_token_id

    @cached_property
    def end_tokens(self) -> frozenset[str]:
        """Texts of the tokens that can end a turn: all special ones, and those of generation_config.json."""
        added = self.inner.added_tokens_decoder
        texts = {token.content for token in added.values() if token.special} | {self.inner.eos_token}
        texts |= {added[number].content for number in getattr(self, "generation_end_ids", ()) if number in added}
        return frozenset(text for text in texts if text)

    def render(self, prompts: Sequence[str | Messages], tools: Sequence[Tools] | None = None) -> list[str]:
        """Return prompts as the text that the model sees. Plain text is one user message if the template is applied, else itself.

        Args:
            prompts: any number.
            tools: definitions that each of them may use; None: no prompt has any.

        Raises:
            TemplateError: the template refuses a conversation, or exceeds its limits.
        """
        if not self.apply_chat_template:
            assert all(isinstance(prompt, str) for prompt in prompts), "check_prompt_data refuses messages without a template"
            return [str(prompt) for prompt in prompts]
        chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        return self.render_chats(chats, add_generation_prompt=True, tools=tools)

    def render_chats(
        self,
        chats: Sequence[Messages],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Tools] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Return conversations as the template writes them; with a generation prompt they end where the assistant begins to write.

        Args:
            chats: any number of conversations.
            add_generation_prompt: see above.
            tools: definitions for each of them.
            options: variables of the template that override `template_options`.

        Raises:
            TemplateError: the template refuses a conversation, or exceeds its limits.
        """
        texts = []
        all_tools = tools or [None] * len(chats)
        results = self.try_render([(chat, own, add_generation_prompt) for chat, own in zip(chats, all_tools)], options)
        for chat, result in zip(chats, results):
            if isinstance(result, TemplateError):
                raise type(result)(
                    f"the chat template fails for the conversation {json.dumps(chat, default=str)[:100]} ({str(result)[:120]}): repair "
                    "the row, or use another template"
                ) from result
            texts.append(result)
        return texts

    def try_render(
        self, chats: Sequence[Chat], options: Mapping[str, Any] | None = None, mark: str = ""
    ) -> list[str | TemplateError]:
        """Return for every conversation (messages, tools, whether to add a generation prompt) its text, or why there is none."""
        results: list[str | TemplateError] = [""] * len(chats)
        variables = {**self.inner.special_tokens_map, **self.template_options, **(options or {})}
        for with_tools in (False, True):
            indices = [index for index, chat in enumerate(chats) if bool(chat[1]) == with_tools]
            if not indices:
                continue
            group = [([_plain(message) for message in chats[i][0]], chats[i][1] or None, chats[i][2]) for i in indices]
            for index, result in zip(indices, RENDERER.render(self.template(tools=with_tools), group, variables, mark)):
                results[index] = result
        return results

    def template(self, *, tools: bool = False) -> str:
        """Return the source of the chat template: the one for tools, if the checkpoint has several.

        Raises:
            TemplateError: there is none.
        """
        templates = self.inner.chat_template
        if isinstance(templates, dict):
            templates = (templates.get("tool_use") if tools else None) or templates.get("default")
        if not templates:
            raise TemplateError("the tokenizer has no chat template: add chat_template.jinja to the checkpoint")
        return str(templates)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts as token ids, nothing added: a template writes its own special tokens."""
        return self.inner(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    def decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Token ids as text."""
        return self.inner.batch_decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are None (Parquet adds them to every row) and without our own."""
    out = {key: value for key, value in message.items() if (value is not None or key == "content") and key != STEP_LOSS_MASK}
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [
            {key: value for key, value in call.items() if value is not None} if isinstance(call, dict) else call for call in calls
        ]
    return out


def _generation_end_ids(directory: Path) -> tuple[int, ...]:
    """Return `eos_token_id` of generation_config.json, if there is one."""
    try:
        value = json.loads((directory / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return ()
    return tuple(number for number in (value if isinstance(value, list) else [value]) if isinstance(number, int))


def _loader(directory: Path) -> Any:
    """AutoTokenizer, or the class that it would take: importing it brings every model's machinery, 2 s and 290 MB more."""
    config = directory / "tokenizer_config.json"
    named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None
    if named in GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def check_tokenizer(
    directory: str | Path, *, apply_chat_template: bool, tools: bool = False, template_options: dict[str, Any] | None = None
) -> PromptTokenizer:
    """Load a tokenizer and try its chat template on one question.

    Args:
        directory: Hugging Face model directory.
        apply_chat_template: prompts are rendered through the template.
        tools: they come with tool definitions.
        template_options: further variables of the template.

    Raises:
        ModelError: the tokenizer does not load.
        TemplateError: the template is missing, fails, exceeds its limits, or does not write tools.
    """
    tokenizer = PromptTokenizer(directory, apply_chat_template=apply_chat_template, template_options=template_options)
    if not apply_chat_template:
        return tokenizer
    if tools and "tools" not in tokenizer.template(tools=True):
        raise TemplateError(
            f"the chat template in {directory} does not write tool definitions: use a template that does, or leave out --tool-key"
        )
    [result] = tokenizer.try_render([([{"role": "user", "content": "1+1="}], None, True)])
    if isinstance(result, TemplateError):
        raise type(result)(
            f"the chat template in {directory} fails ({str(result)[:150]}): repair it, or use another one"
        ) from result
    return tokenizer


def check_vocabulary(tokenizer: PromptTokenizer, vocab_size: int, directory: str | Path) -> None:
    """Check that the model has an embedding for every token.

    Args:
        tokenizer: of the model.
        vocab_size: rows of the embedding (config.json).
        directory: named in the message.

    Raises:
        ModelError: a token id is beyond the vocabulary.
    """
    token, largest = max(tokenizer.inner.get_vocab().items(), key=lambda entry: entry[1], default=("", -1))
    if largest >= vocab_size:
        raise ModelError(
            f"the tokenizer in {directory} has token id {largest} ({token[:40]!r}), but config.json says vocab_size {vocab_size}: "
            "restore the files of one model"
        )
