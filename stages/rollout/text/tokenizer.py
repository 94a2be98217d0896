"""Convert text to token ids and back with the tokenizer of a Hugging Face checkpoint.

All prompts are tokenized here. Responses are never tokenized: the engine returns their token ids.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import secrets
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from penstock.stages.rollout.text.templates import (
    CALL_FORMS,
    RENDERER,
    CallForm,
    Chat,
    Messages,
    convert_tool_calls,
    normalize_messages,
)
from penstock.storage.commit import escape_invalid_text
from penstock.storage.errors import DataError, ModelError, TemplateError, check_rules

logger = logging.getLogger(__name__)
Tools = list[dict[str, Any]] | None

# Without any of these files, AutoTokenizer silently builds an empty tokenizer from config.json (transformers 5.12).
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")
STEP_LOSS_MASK = "step_loss_mask"  # field of an assistant message in SFT rows: 0 excludes it from training
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class, which transformers 5 renamed


class PromptTokenizer:
    """The tokenizer and chat template of a checkpoint. Raises ModelError or TemplateError."""

    template_options: Mapping[str, Any] = MappingProxyType({})
    directory = Path("missing")  # of the checkpoint
    generation_end_ids: Sequence[int] = ()  # ids of the end tokens in generation_config.json

    def __init__(
        self, directory: str | Path, *, apply_chat_template: bool, template_options: dict[str, Any] | None = None
    ) -> None:
        if not any((Path(directory) / name).is_file() for name in VOCABULARIES):
            raise ModelError(
                f"{directory} has no tokenizer: add tokenizer.json and tokenizer_config.json to this directory"
            )
        try:
            _import_gguf_module()
            file = Path(directory) / "tokenizer_config.json"
            named = json.loads(file.read_text()).get("tokenizer_class") if file.is_file() else None
            # The import of AutoTokenizer loads the code of every model (2 s and 290 MB of memory).
            name = "PreTrainedTokenizerFast" if named in GENERIC_CLASSES else "AutoTokenizer"
            loader = getattr(importlib.import_module("transformers"), name)
            self.inner: Any = loader.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # transformers raises many types for broken files
            reason = str(error).strip().splitlines()[0][:150] if str(error).strip() else type(error).__name__
            raise ModelError(f"the tokenizer in {directory} does not load ({reason}): restore its files") from error
        if apply_chat_template and not self.inner.chat_template:
            raise TemplateError(
                f"the tokenizer in {directory} has no chat template: add chat_template.jinja, or omit "
                "--apply-chat-template"
            )
        self.directory = Path(directory)
        self.apply_chat_template = apply_chat_template
        self.template_options = template_options or {}
        self.generation_end_ids = read_token_ids(Path(directory) / "generation_config.json", "eos_token_id")

    @cached_property
    def end_tokens(self) -> frozenset[str]:
        """Texts of the tokens that can end a turn: special tokens, and those of generation_config.json."""
        added = self.inner.added_tokens_decoder
        texts = {token.content for token in added.values() if token.special} | {self.inner.eos_token}
        texts |= {added[number].content for number in self.generation_end_ids if number in added}
        return frozenset(text for text in texts if text)

    def render(self, prompts: Sequence[str | Messages], tools: Sequence[Tools] | None = None) -> list[str]:
        """Return prompts as text for the model. With the chat template, a plain-text prompt is rendered as one user
        message; without the template, prompts are unchanged. Raises TemplateError."""
        if not self.apply_chat_template:
            assert all(isinstance(prompt, str) for prompt in prompts), (
                "a prompt is a list of messages, which needs a chat template: give --apply-chat-template"
            )
            if not all(prompts):
                raise DataError("a prompt is empty: every prompt needs text")
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
        """Render conversations as text; `options` override `template_options`. Raises TemplateError."""
        texts = []
        all_tools = tools or [None] * len(chats)
        results = self.try_render([(chat, own, add_generation_prompt) for chat, own in zip(chats, all_tools)], options)
        for chat, result in zip(chats, results):
            if isinstance(result, str) and not result.strip():
                result = TemplateError("it renders nothing")
            if isinstance(result, TemplateError):
                raise type(result)(
                    f"the chat template fails for the conversation {json.dumps(chat, default=str)[:100]} "
                    f"({str(result)[:120]}): correct the messages, or use another template"
                ) from result
            texts.append(result)
        return texts

    def try_render(
        self, chats: Sequence[Chat], options: Mapping[str, Any] | None = None, mark: str = ""
    ) -> list[str | TemplateError]:
        """Render conversations; return the text of each, or the error that rendering it raised. `options` override
        `template_options`; `mark` is written before and after every `{% generation %}` block. Raises DataError."""
        results: list[str | TemplateError] = [""] * len(chats)
        for with_tools in (False, True):
            indices = [index for index, chat in enumerate(chats) if bool(chat[1]) == with_tools]
            if not indices:
                continue
            group = [
                (self.prepare(chats[i][0], tools=with_tools, options=options), chats[i][1] or None, chats[i][2])
                for i in indices
            ]
            template, variables = self.chat_template_source(tools=with_tools), self._variables(options)
            for index, result in zip(indices, RENDERER.render(template, group, variables, mark)):
                results[index] = result
        return results

    def prepare(self, messages: Messages, *, tools: bool = False, options: Mapping[str, Any] | None = None) -> Messages:
        """Return messages as the chat template gets them: normalized, tool calls in the form that the template expects,
        and without `step_loss_mask`, which is not for the template. Raises DataError."""
        messages = [
            {key: value for key, value in message.items() if key != STEP_LOSS_MASK}
            for message in normalize_messages(messages, keeps_places=True)
        ]
        if any("tool_calls" in message for message in messages):
            variables = json.dumps(self._variables(options), sort_keys=True, default=str)
            return convert_tool_calls(messages, _find_call_form(self.chat_template_source(tools=tools), variables))
        return messages

    def _variables(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**self.inner.special_tokens_map, **self.template_options, **(options or {})}

    def chat_template_source(self, *, tools: bool = False) -> str:
        """Return the Jinja source of the chat template. If the checkpoint has several templates, `tools` selects the
        template for tool use. Raises TemplateError."""
        templates = self.inner.chat_template
        if isinstance(templates, dict):
            templates = (templates.get("tool_use") if tools else None) or templates.get("default")
        if not templates:
            raise TemplateError("the tokenizer has no chat template: add chat_template.jinja to the checkpoint")
        return str(templates)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text. Special tokens are not added, because the chat template writes them. Lone
        surrogates, which tokenizers refuse, are escaped."""
        return self.inner(escape_invalid_text(texts), add_special_tokens=False)["input_ids"] if texts else []

    def decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of token ids."""
        return self.inner.batch_decode(list(token_ids), skip_special_tokens=skip_special_tokens)


@functools.lru_cache(maxsize=64)
def _find_call_form(template: str, variables: str) -> CallForm:
    """Return the form in which a template expects tool calls: the first of CALL_FORMS with which it writes the
    arguments of a call; without such a form, the first that it accepts."""
    word = f"argument-{secrets.token_hex(8)}"
    call = {"id": "call00000", "type": "function", "function": {"name": "function", "arguments": {word: word}}}
    probe: Messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    chats: list[Chat] = [(convert_tool_calls(probe, form), None, False) for form in CALL_FORMS]
    texts = RENDERER.render(template, chats, json.loads(variables))
    scores = [-1 if isinstance(text, TemplateError) else int(word in text) for text in texts]
    return CALL_FORMS[scores.index(max(scores))]


class _TorchOnUse(ModuleType):
    """Placeholder for torch in a module that rarely needs it: imports torch when one of its attributes is read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("torch"), name)


def _import_gguf_module() -> None:
    """Import transformers' module for GGUF files with a placeholder for torch, so that torch is imported only when a
    GGUF file is read. It is the only module of the tokenizers that imports torch, which takes seconds."""
    if "transformers.modeling_gguf_pytorch_utils" in sys.modules:
        return
    importlib.import_module("transformers.tokenization_utils_base")  # its imports must find that torch is available
    transformers_utils: Any = importlib.import_module("transformers.utils")
    is_available = transformers_utils.is_torch_available
    transformers_utils.is_torch_available = lambda: False
    try:
        module: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    finally:
        transformers_utils.is_torch_available = is_available
    module.torch = _TorchOnUse("torch")


def check_tokenizer(
    directory: str | Path,
    *,
    apply_chat_template: bool,
    tools: bool = False,
    template_options: dict[str, Any] | None = None,
) -> PromptTokenizer:
    """Load a tokenizer, and render one question with its chat template. Raises TemplateError if the template is
    missing, fails, exceeds a limit (RenderLimits), or with `tools` does not write tool definitions."""
    tokenizer = PromptTokenizer(directory, apply_chat_template=apply_chat_template, template_options=template_options)
    if not apply_chat_template:
        return tokenizer
    if tools and "tools" not in tokenizer.chat_template_source(tools=True):
        raise TemplateError(
            f"the chat template in {directory} does not render tool definitions: use a template that does, or omit "
            "--tool-key"
        )
    [result] = tokenizer.try_render([([{"role": "user", "content": "1+1="}], None, True)])
    if isinstance(result, TemplateError):
        raise type(result)(
            f"the chat template in {directory} fails ({str(result)[:150]}): repair it, or use another one"
        ) from result
    return tokenizer


def read_token_ids(path: Path, name: str) -> list[int]:
    """Return the token ids of an entry of config.json or generation_config.json: a number, a list of numbers, or null.
    The file may be missing. Raises ModelError."""
    if not path.exists():
        return []
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object ({error}): restore the file, or remove it") from None
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    least = -1 if name == "pad_token_id" else 0  # some models write -1 for "no pad token"
    if bad := [number for number in ids if type(number) is not int or number < least]:
        raise ModelError(f"{path} has {name} {bad[0]!r:.40}, which is not a token id: correct it, or use null")
    return ids


def check_vocabulary(
    tokenizer: PromptTokenizer, vocab_size: int, directory: str | Path, policy: PromptTokenizer | None = None
) -> None:
    """Check that the model has an embedding for every token of the tokenizer, and for the tokens that the model's
    configuration names, and that tokenizer.json has the ids that the tokenizer uses. With `policy`, the tokenizer is a
    teacher's, and must have every token of the policy's under the same id; it may have further tokens. Warn if the
    tokenizer's end token does not end a generation. Raises ModelError."""
    used: dict[str, int] = tokenizer.inner.get_vocab()
    token, largest = max(used.items(), key=lambda entry: entry[1], default=("", -1))
    ids = [(f"the tokenizer in {directory} has token id {largest} ({token[:40]!r})", largest)]
    end_ids = []
    for file in (Path(directory) / "config.json", Path(directory) / "generation_config.json"):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            numbers = read_token_ids(file, name)
            ids += [(f"{file} has {name} {number}", number) for number in numbers]
            end_ids += numbers if name == "eos_token_id" else []
    rules = [
        (
            number >= vocab_size,
            f"{what}, but vocab_size in config.json is {vocab_size}: use the tokenizer files and config.json of the "
            "same model",
        )
        for what, number in ids
    ]
    file = Path(directory) / "tokenizer.json"
    added = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") if file.is_file() else None
    rules += [
        (
            used.get(token, written) != written,
            f"{directory}/tokenizer.json gives the token {token[:40]!r} the id {written}, but it is loaded with "
            f"{used.get(token)}, because ids must be consecutive: restore tokenizer.json",
        )
        for token, written in ((entry["content"], entry["id"]) for entry in added or ())
    ]
    policy_rules = (
        (
            used.get(token) != id,
            f"the teacher {directory} has the id {used.get(token)} for the token {token[:40]!r}, but the policy has "
            f"{id}, so the teacher would score other tokens: give a teacher with the policy's tokenizer",
        )
        for token, id in (policy.inner.get_vocab().items() if policy else ())
    )
    check_rules(chain(rules, policy_rules), ModelError)
    if end_ids and tokenizer.inner.eos_token_id not in end_ids:
        logger.warning(
            "the tokenizer in %s ends a turn with %r (id %s), but config.json and generation_config.json name %s: "
            "responses may not end where the chat template ends a turn",
            directory,
            tokenizer.inner.eos_token,
            tokenizer.inner.eos_token_id,
            ", ".join(f"{tokenizer.inner.convert_ids_to_tokens(number)!r} (id {number})" for number in end_ids),
        )
