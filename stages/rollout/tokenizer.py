"""Text to token ids and back, by the tokenizer of the Hugging Face checkpoint.

Prompts are tokenised here and nowhere else; responses never are, their ids come from the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from stages.rollout.prompts.source import Messages

Tools = list[dict[str, Any]] | None

# Without any of these AutoTokenizer makes an empty tokenizer from config.json's model_type and says nothing (transformers 5.12).
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class; transformers 5 renamed it


class PromptTokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        directory: Hugging Face model directory.
        apply_chat_template: render prompts through the template.

    Raises:
        ValueError: no tokenizer, or no chat template although one is needed.
    """

    def __init__(self, directory: str | Path, *, apply_chat_template: bool) -> None:
        if not any((Path(directory) / name).is_file() for name in VOCABULARIES):
            raise ValueError(f"{directory} has no tokenizer: put tokenizer.json and tokenizer_config.json beside the weights")
        try:
            self.inner: Any = _loader(Path(directory)).from_pretrained(str(directory), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ValueError(f"the tokenizer in {directory} does not load ({reason}): restore its files") from error
        if apply_chat_template and not self.inner.chat_template:
            raise ValueError(
                f"the tokenizer in {directory} has no chat template: add chat_template.jinja, or leave out --apply-chat-template"
            )
        self.apply_chat_template = apply_chat_template

    @property
    def end_token_id(self) -> int | None:
        """The token that ends a turn."""
        return self.inner.eos_token_id

    def render(self, prompts: Sequence[str | Messages], tools: Sequence[Tools] | None = None) -> list[str]:
        """Prompts as the text that the model sees. Plain text is one user message if the template is applied, else itself.

        Args:
            prompts: any number.
            tools: definitions that each of them may use; None: no prompt has any.

        Raises:
            ValueError: the template refuses a conversation.
        """
        if not self.apply_chat_template:
            assert all(isinstance(prompt, str) for prompt in prompts), "check_prompt_data refuses messages without a template"
            return [str(prompt) for prompt in prompts]
        chats = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        return self.render_chats(chats, add_generation_prompt=True, tools=tools)

    def render_chats(
        self, chats: Sequence[Messages], *, add_generation_prompt: bool, tools: Sequence[Tools] | None = None
    ) -> list[str]:
        """Conversations through the template; with a generation prompt they end where the assistant begins to write.

        Raises:
            ValueError: the template refuses a conversation.
        """
        texts = []
        for index, chat in enumerate(chats):
            try:
                texts.append(
                    self.inner.apply_chat_template(
                        chat, tools=tools[index] if tools else None, tokenize=False, add_generation_prompt=add_generation_prompt
                    )
                )
            except TemplateError as error:
                raise ValueError(
                    f"the chat template refuses the conversation {json.dumps(chat, default=str)[:120]} ({error}): repair the row, "
                    "or use another template"
                ) from error
        return texts

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Texts as token ids, nothing added: a template writes its own special tokens."""
        return self.inner(list(texts), add_special_tokens=False)["input_ids"] if texts else []

    def decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Token ids as text."""
        return self.inner.batch_decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _loader(directory: Path) -> Any:
    """AutoTokenizer, or the class that it would take: importing it brings every model's machinery, 2 s and 290 MB more."""
    config = directory / "tokenizer_config.json"
    named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None
    if named in GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def check_tokenizer(directory: str | Path, *, apply_chat_template: bool, tools: bool = False) -> None:
    """Preflight: load it.

    Args:
        directory: Hugging Face model directory.
        apply_chat_template: prompts are rendered through the template.
        tools: they come with tool definitions.

    Raises:
        ValueError: it does not load, or its template would leave the tools out without a word.
    """
    tokenizer = PromptTokenizer(directory, apply_chat_template=apply_chat_template)
    template = tokenizer.inner.chat_template  # text, or several of them by name
    if tools and "tools" not in (template if isinstance(template, str) else " ".join((template or {}).values())):
        raise ValueError(
            f"the chat template in {directory} does not write tool definitions: use a template that does, or leave out --tool-key"
        )
