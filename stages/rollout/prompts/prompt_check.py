"""Check prompt data before the run starts: parse every row, and render some rows of every entry of --prompt-data."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence

from penstock.stages.rewards.reward_preflight import RewardRow, check_reward_rows
from penstock.stages.rollout.config import GenerationConfig, PromptConfig, RolloutConfig
from penstock.stages.rollout.prompts.data_source import add_hint
from penstock.stages.rollout.prompts.prompt_files import parse_slice, read_entry, read_prompt_files
from penstock.stages.rollout.prompts.prompt_images import PromptImages
from penstock.stages.rollout.prompts.prompt_rows import FIRST_ROW_KEYS, parse_canonical_row
from penstock.stages.rollout.prompts.source import Prompt, max_prompt_tokens
from penstock.stages.rollout.text.loss_masks import Piece, check_messages_are_written, join_pieces, split_trained_text
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import DataError, OptionError, TemplateError

NUM_TRIED_ROWS = 64  # approximate number of rows of each entry of --prompt-data that are rendered as a test


def check_prompt_data(
    config: GenerationConfig,
    *,
    is_sft: bool = False,
    grading: RolloutConfig | None = None,
    tokenizer: PromptTokenizer | None = None,
    max_seq_len: int | None = None,
    hint_template: str | None = None,
) -> int:
    """Parse all rows of --prompt-data, check every prompt, and return the number of rows.

    With `grading`, every row needs a reward, and a label if its reward compares responses with labels. With
    `tokenizer`, up to 97 rows of each entry are rendered; with `max_seq_len`, a prompt plus the longest response must
    not exceed it. `is_sft`: rows are conversations to train on, not prompts to answer. With `hint_template`, every
    prompt needs a hint.
    """
    if config.tool_key and not (config.apply_chat_template or is_sft):
        raise OptionError(
            f"--tool-key {config.tool_key} has no effect without a chat template: give --apply-chat-template"
        )
    num_rows = 0
    for entry in read_prompt_files(config):
        chat, unanswered = (entry.first[key] for key in FIRST_ROW_KEYS)
        problem = None
        if is_sft and unanswered is not None:
            problem = (
                f"row {unanswered}: column {config.input_key!r} is not a conversation with an assistant message, and "
                "SFT trains only on assistant messages: name the column of messages with --input-key"
            )
        elif not is_sft and chat is not None and not config.apply_chat_template:
            problem = (
                f"row {chat}: column {config.input_key!r} holds chat messages, which need a chat template: give "
                "--apply-chat-template"
            )
        if problem is not None:
            raise DataError(f"{entry.name} {problem}")
        if grading is not None:
            check_reward_rows(grading, _reward_rows(entry.name, entry.rows))
        if tokenizer is not None:
            number = config.prompt_data.index(entry.name)
            check_rendered_rows(number, entry.rows, config, tokenizer, is_sft, max_seq_len, hint_template)
        num_rows += len(entry.rows)
    return num_rows


def check_rendered_rows(
    file: int,
    rows: Sequence[bytes],
    config: GenerationConfig,
    tokenizer: PromptTokenizer,
    is_sft: bool = False,
    max_seq_len: int | None = None,
    hint_template: str | None = None,
) -> None:
    """Render some rows of an entry of --prompt-data, the one with the number `file`, as a check: the first 32 rows, 33
    rows evenly spaced from first to last, and the 32 longest rows. Their images are decoded. The other arguments are
    those of `check_prompt_data`."""
    path, images = config.prompt_data[file], PromptImages(config, tokenizer.directory)
    half, last = NUM_TRIED_ROWS // 2, len(rows) - 1
    longest = heapq.nlargest(half, range(len(rows)), key=lambda number: len(rows[number]))
    for number in sorted({*range(min(half, len(rows))), *(last * i // half for i in range(half + 1)), *longest}):
        content, label, metadata, tools, sources = parse_canonical_row(rows[number])
        prompt = Prompt(-1, 0, file, number, content, label, metadata, tools, sources)
        uses_template = is_sft or config.apply_chat_template
        try:
            if tools and uses_template and "tools" not in tokenizer.chat_template_source(tools=True):
                raise TemplateError(
                    "the chat template does not render tool definitions: use a template that does, or ignore the tools "
                    "with --tool-key ''"
                )
            if hint_template is not None:
                add_hint(prompt, hint_template)
            if is_sft:
                pieces = split_trained_text(content, tokenizer, tools)
                encoded = tokenizer.encode([text for text, _ in pieces])
                join_pieces(pieces, images.expand(images.load([prompt])[0], encoded), max_seq_len)
                continue
            text = content
            if config.apply_chat_template:
                chat = [{"role": "user", "content": content}] if isinstance(content, str) else content
                [text] = tokenizer.render_chats([chat], add_generation_prompt=True, tools=[tools])
                check_messages_are_written(chat, tokenizer, tools)
            [token_ids] = images.expand(images.load([prompt])[0], tokenizer.encode([text]))
        except DataError as error:  # includes TemplateError
            raise type(error)(f"{path} row {number}: {error}") from error
        limit, context = max_prompt_tokens(config), config.rollout_max_context_len
        is_skipped = limit is not None and len(token_ids) > limit  # by the rollout
        total = len(token_ids) + config.rollout_max_response_len
        total = total if context is None else min(total, context)
        if max_seq_len is not None and total > max_seq_len and not is_skipped:
            raise OptionError(
                f"--rollout-max-response-len {config.rollout_max_response_len} and the prompt of {len(token_ids)} "
                f"tokens in {path} row {number} are together longer than the model's maximum sequence length of "
                f"{max_seq_len} tokens: reduce --rollout-max-response-len, or give --rollout-max-context-len "
                f"{max_seq_len} (long prompts then get shorter responses)"
            )


def read_first_rows(config: PromptConfig) -> list[RewardRow]:
    """Return the first 64 rows of each entry of --prompt-data."""
    return [row for path in config.prompt_data for row in _reward_rows(path, _read_start(config, path, NUM_TRIED_ROWS))]


def _reward_rows(path: str, rows: Sequence[bytes]) -> Iterator[RewardRow]:
    """Yield the fields that a reward reads, from rows in canonical JSON; messages become JSON text."""
    for number, row in enumerate(rows):
        content, label, metadata, *_ = parse_canonical_row(row)
        text = content if isinstance(content, str) else json.dumps(content)
        yield RewardRow(f"{path} row {number}", label, metadata, text)


def render_first_prompt(config: PromptConfig, tokenizer: PromptTokenizer) -> tuple[str, str]:
    """Return the first prompt of --prompt-data as the model gets it, and its label."""
    content, label, _, tools, _ = parse_canonical_row(_read_start(config, config.prompt_data[0], 1)[0])
    [text] = tokenizer.render([content], [tools])
    return text, label


def split_first_conversation(config: PromptConfig, tokenizer: PromptTokenizer) -> list[Piece]:
    """Return the first conversation of --prompt-data as (text, whether it is trained) pieces."""
    content, _, _, tools, _ = parse_canonical_row(_read_start(config, config.prompt_data[0], 1)[0])
    return split_trained_text(content, tokenizer, tools)


def _read_start(config: PromptConfig, path: str, num_rows: int) -> Sequence[bytes]:
    """Return the first rows of an entry of --prompt-data in canonical JSON, without the cache of --streaming-data."""
    part = path if parse_slice(path)[1:] != (None, None) else f"{path}@[:{num_rows}]"
    return read_entry(part, config.model_copy(update={"streaming_data": False})).rows[:num_rows]
