"""Check prompt data before the run starts: read every row, and render some rows of every file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.stages.rollout.config import GenerationConfig, PromptConfig
from penstock.stages.rollout.prompts.files import PromptEntry, column_names, parse_slice, read_entry, read_prompt_files
from penstock.stages.rollout.prompts.lengths import prompt_limit
from penstock.stages.rollout.prompts.rows import FIRST
from penstock.stages.rollout.text.loss_masks import split_pieces
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import DataError, OptionError, TemplateError

NUM_TRIED_ROWS = 64  # rows of each entry of --prompt-data that are rendered


def check_prompt_data(
    config: GenerationConfig,
    *,
    demonstrations: bool = False,
    labels: bool = False,
    tokenizer: PromptTokenizer | None = None,
    num_positions: int | None = None,
) -> int:
    """Read all rows, check every prompt, and render some of the rows. Return the number of rows.

    Args:
        config: names the files and columns.
        demonstrations: rows are conversations to train on (SFT), not prompts to answer.
        labels: every row needs a label, because the reward compares responses with labels.
        tokenizer: renders up to about 64 rows of each entry of --prompt-data; None: no row is rendered.
        num_positions: maximum sequence length of the model, which a prompt with the longest response must not exceed;
            None: lengths are not checked.

    Raises:
        OptionError: options contradict each other or the rows.
        DataError: the first invalid row.
        TemplateError: the chat template fails for a row.
    """
    if config.tool_key and not (config.apply_chat_template or demonstrations):
        raise OptionError(
            f"--tool-key {config.tool_key} has no effect without a chat template: give --apply-chat-template"
        )
    num_rows = 0
    for entry in read_prompt_files(config):
        _check_entry(entry, config, demonstrations=demonstrations, labels=labels)
        if tokenizer is not None:
            check_rows(
                entry.name,
                entry.rows,
                config,
                tokenizer,
                demonstrations=demonstrations,
                num_positions=num_positions,
            )
        num_rows += len(entry.rows)
    return num_rows


def check_rows(
    path: str,
    rows: Sequence[bytes],
    config: GenerationConfig,
    tokenizer: PromptTokenizer,
    *,
    demonstrations: bool = False,
    num_positions: int | None = None,
) -> None:
    """Render some rows of an entry of --prompt-data: the first 32, and 33 that are spread evenly from first to last.

    Args:
        path: the entry, for messages.
        rows: rows of the entry, as returned by `read_entry`.
        config: options of the rollout.
        tokenizer: tokenizer of the model.
        demonstrations: rows are conversations to train on (SFT).
        num_positions: maximum sequence length of the model; None: lengths are not checked.

    Raises:
        TemplateError: the template fails for a row.
        DataError: a row cannot be trained on.
        OptionError: a prompt and the longest response have more tokens than the model has positions.
    """
    half, last = NUM_TRIED_ROWS // 2, len(rows) - 1
    for number in sorted({*range(min(half, len(rows))), *(last * i // half for i in range(half + 1))}):
        content, _, _, *rest = json.loads(rows[number])
        tools = rest[0] if rest else None
        uses_template = demonstrations or config.apply_chat_template
        try:
            if tools and uses_template and "tools" not in tokenizer.template(tools=True):
                raise TemplateError(
                    "the chat template does not write tool definitions: use a template that does, or ignore the tools "
                    "with --tool-key ''"
                )
            if demonstrations:
                split_pieces(content, tokenizer, tools)
                continue
            text = content
            if config.apply_chat_template:
                chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
                [text] = tokenizer.render_chats([chat], add_generation_prompt=True, tools=[tools])
        except DataError as error:  # includes TemplateError
            raise type(error)(f"{path} row {number}: {error}") from error
        if num_positions is not None:
            _check_room(f"{path} row {number}", len(tokenizer.encode([text])[0]), config, num_positions)


def first_rows(config: PromptConfig) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return (file and row, prompt, label, metadata) of the first rows of each entry of --prompt-data. A prompt of chat
    messages is returned as JSON text."""
    config = config.model_copy(update={"streaming_data": False})
    rows = []
    for path in config.prompt_data:
        part = path if parse_slice(path)[1:] != (None, None) else f"{path}@[:{NUM_TRIED_ROWS}]"
        for number, line in enumerate(read_entry(part, config).rows[:NUM_TRIED_ROWS]):
            content, label, metadata, *_ = json.loads(line)
            text = content if isinstance(content, str) else json.dumps(content)
            rows.append((f"{path} row {number}", text, label, metadata))
    return rows


def _check_entry(entry: PromptEntry, config: PromptConfig, *, demonstrations: bool, labels: bool) -> None:
    chat, unanswered, unlabelled = (entry.first[key] for key in FIRST)
    if demonstrations and unanswered is not None:
        raise DataError(
            f"{entry.name} row {unanswered}: column {config.input_key!r} is not a conversation with an assistant "
            "message, and SFT trains only on assistant messages: name the column of messages with --input-key"
        )
    if not demonstrations and chat is not None and not config.apply_chat_template:
        raise DataError(
            f"{entry.name} row {chat}: column {config.input_key!r} holds chat messages, which need a chat template: "
            "give --apply-chat-template"
        )
    if labels and config.label_key is None:
        columns = ", ".join(map(repr, column_names(entry.name)))[:120]
        raise DataError(
            f"{entry.name} is read without labels, but the reward needs them: name the column of labels with "
            f"--label-key; it has {columns}"
        )
    if labels and unlabelled is not None:
        raise DataError(
            f"{entry.name} row {unlabelled}: column {config.label_key!r} is empty, but the reward needs a label: "
            "add the label, remove the row, or name another column with --label-key"
        )


def _check_room(where: str, num_tokens: int, config: GenerationConfig, num_positions: int) -> None:
    limit, context = prompt_limit(config), config.rollout_max_context_len
    if limit is not None and num_tokens > limit:
        return  # the prompt is skipped
    total = num_tokens + config.rollout_max_response_len
    if (total if context is None else min(total, context)) > num_positions:
        raise OptionError(
            f"--rollout-max-response-len {config.rollout_max_response_len} and the prompt of {num_tokens} tokens in "
            f"{where} exceed the model's maximum sequence length of {num_positions} tokens: reduce "
            f"--rollout-max-response-len, or give --rollout-max-context-len {num_positions}"
        )
