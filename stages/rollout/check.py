"""Preflight of a rollout: user-defined functions load and can be called, and a sample of the rows can be rendered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from stages.rollout.config import RolloutConfig
from stages.rollout.custom_generation import check_generate_function
from stages.rollout.custom_source import load_buffer_filter, load_data_source
from stages.rollout.filters import load_filter
from stages.rollout.hooks import check_hooks
from stages.rollout.loss_masks import split_pieces
from stages.rollout.prompts.files import parse_slice, read_entry
from stages.rollout.prompts.lengths import prompt_limit
from stages.rollout.tokenizer import PromptTokenizer
from storage.errors import DataError, OptionError, TemplateError

NUM_TRIED_ROWS = 64  # of each entry of --prompt-data


def check_functions(config: RolloutConfig, *, evaluation: bool = False) -> None:
    """Raises ValueError for the first that does not; it names the function. An evaluation generates, and has none of the others."""
    if config.custom_generate_function_path:
        check_generate_function(config.custom_generate_function_path)
    if evaluation:
        return
    if config.dynamic_sampling_filter_path:
        load_filter(config.dynamic_sampling_filter_path, SimpleNamespace(**config.model_dump()))
    if config.data_source_path:
        load_data_source(config.data_source_path)
    if config.buffer_filter_path:
        load_buffer_filter(config.buffer_filter_path)
    check_hooks(config)


def check_rows(
    path: str,
    rows: Sequence[bytes],
    config: RolloutConfig,
    tokenizer: PromptTokenizer,
    *,
    demonstrations: bool = False,
    num_positions: int | None = None,
) -> None:
    """Render a sample of the rows of an entry: the first ones, and some at equal distances up to the last.

    Args:
        path: the entry of --prompt-data, for messages.
        rows: as `read_entry` gives them.
        config: of the rollout.
        tokenizer: of the model.
        demonstrations: rows are conversations to train on.
        num_positions: of the model; None: lengths are not checked.

    Raises:
        TemplateError: the template fails for a row.
        DataError: a row cannot be trained on.
        OptionError: a prompt and the longest response have more tokens than the model has positions.
    """
    half, last = NUM_TRIED_ROWS // 2, len(rows) - 1
    for number in sorted({*range(min(half, len(rows))), *(last * i // half for i in range(half + 1))}):
        content, _, _, *rest = json.loads(rows[number])
        tools = rest[0] if rest else None
        try:
            if tools and (demonstrations or config.apply_chat_template) and "tools" not in tokenizer.template(tools=True):
                raise TemplateError("the chat template does not write tool definitions: use one that does, or give --tool-key ''")
            if demonstrations:
                split_pieces(content, tokenizer, tools)
                continue
            text = content
            if config.apply_chat_template:
                chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
                [text] = tokenizer.render_chats([chat], add_generation_prompt=True, tools=[tools])
        except DataError as error:  # TemplateErrors among them
            raise type(error)(f"{path} row {number}: {error}") from error
        if num_positions is not None:
            _check_room(f"{path} row {number}", len(tokenizer.encode([text])[0]), config, num_positions)


def first_rows(config: RolloutConfig) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Return (file and row, prompt, label, metadata) of the first rows of each entry of --prompt-data; chat messages as JSON text."""
    rows = []
    for path in config.prompt_data:
        part = path if parse_slice(path)[1:] != (None, None) else f"{path}@[:{NUM_TRIED_ROWS}]"
        for number, line in enumerate(
            read_entry(part, config.model_copy(update={"streaming_data": False})).rows[:NUM_TRIED_ROWS]
        ):
            content, label, metadata, *_ = json.loads(line)
            rows.append((f"{path} row {number}", content if isinstance(content, str) else json.dumps(content), label, metadata))
    return rows


def _check_room(where: str, num_tokens: int, config: RolloutConfig, num_positions: int) -> None:
    limit, context = prompt_limit(config), config.rollout_max_context_len
    if limit is not None and num_tokens > limit:
        return  # it is skipped
    total = num_tokens + config.rollout_max_response_len
    if (total if context is None else min(total, context)) > num_positions:
        raise OptionError(
            f"--rollout-max-response-len {config.rollout_max_response_len} and the prompt of {num_tokens} tokens in {where} need more than the "
            f"model's {num_positions} positions: give less, or --rollout-max-context-len {num_positions}"
        )
