"""Checks of a reward before anything starts: on the first rows of the data, and by trying it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from stages.rewards.dapo import normalized_label
from stages.rewards.gpqa import has_answer
from stages.rewards.grading import Grader, RewardOptions, check_built_in
from stages.rewards.hub import BOXED
from stages.rewards.ifbench import instructions_of
from stages.rewards.outcome import Outcome, row_code_of
from storage.errors import InputError, RewardError
from storage.sample import Sample, Status

NUM_TRIED = 3  # samples
_CONNECT_TIMEOUT = 5.0  # seconds
_WITHOUT_LABEL = ("random", "remote_rm", "ifbench", "gpqa")  # gpqa may have its answer in the metadata


@dataclass(frozen=True)
class Row:
    """A row of prompt data, as far as a reward sees it."""

    where: str  # file and row, for messages
    label: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""


class RowOptions(RewardOptions, Protocol):
    """The same, and the column of labels."""

    label_key: str | None


def check_rows(options: RowOptions, rows: Sequence[Row]) -> None:
    """Check that every row has a reward that exists, that it may name, and that finds the label it compares with.

    Raises:
        RewardError: no reward, an unknown `rm_type`, or no label; it names the row.
        PluginError: a row's `custom_rm_path` is not allowed by --allow-row-code.
    """
    for row in rows:
        try:
            _check_row(options, row)
        except InputError as error:
            raise type(error)(f"{row.where}: {error}") from None


def _check_row(options: RowOptions, row: Row) -> None:
    if row_code_of(row.metadata, options.allow_row_code) or options.custom_rm_path:
        return
    name = str(row.metadata.get("rm_type") or "").strip() or options.rm_type
    if name is None:
        raise RewardError("there is no reward: give --rm-type or --custom-rm-path, or an rm_type in the metadata of every row")
    check_built_in(name, options.rm_url, options.reward_key)
    bare = name.removeprefix(BOXED)
    if bare == "ifbench":
        instructions_of(row.metadata)
    if (bare not in _WITHOUT_LABEL and not row.label.strip()) or (bare == "gpqa" and not has_answer(row.label, row.metadata)):
        column = (
            f"the column {options.label_key!r} of --label-key is empty"
            if options.label_key
            else "name its column with --label-key"
        )
        raise RewardError(f"the row has no label, and the reward {name} compares with one: {column}")
    if bare == "dapo":
        normalized_label(row.label)


def try_reward(options: RewardOptions, rows: Sequence[Row], arguments: dict[str, Any] | None = None) -> list[str]:
    """Run user-defined rewards on made samples of the first rows, and connect to --rm-url, before anything is generated.

    A made response is empty, the label, or the label in a box. Built-in rewards are not run: `check_rows` says what they need.

    Args:
        options: the configuration.
        rows: of the data; the first three are used, and with --group-rm the first one alone.
        arguments: attributes of the `args` that the function gets: `config.model_dump()`.

    Returns:
        Why some of the samples have no reward, if others have one: perhaps only because they are made.

    Raises:
        RewardError: no sample got a finite number: it raised, took too long, ended its process, or returned something else; or
            nothing listens at --rm-url.
        PluginError: the function does not load or cannot be called.
    """
    samples = _made_samples(rows, same_row=options.group_rm)
    if not samples:
        return []
    names = {str(sample.metadata.get("rm_type") or options.rm_type or "").removeprefix(BOXED) for sample in samples}
    is_custom = options.custom_rm_path or any(sample.metadata.get("custom_rm_path") for sample in samples)
    if not is_custom:
        if "remote_rm" in names:
            _check_connection(options.rm_url or "")
        return []
    with Grader.from_options(options, 1, arguments) as grader:
        futures = grader.submit_group(samples) if options.group_rm else [grader.submit(sample) for sample in samples]
        outcomes: list[Outcome] = [future.result() for future in futures]
    if wrong := next((outcome.wrong for outcome in outcomes if outcome.wrong is not None), None):
        raise RewardError(wrong)
    reasons = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(reasons) == len(outcomes):
        raise RewardError(
            f"the reward gives no number for any of {len(reasons)} made samples, first {reasons[0]:.200}: repair it"
        )
    return reasons


def _made_samples(rows: Sequence[Row], *, same_row: bool) -> list[Sample]:
    """NUM_TRIED samples with tokens as in a finished rollout: 4 of the prompt, one a character of the response."""
    chosen = [rows[0 if same_row else index % len(rows)] for index in range(NUM_TRIED)] if rows else []
    samples = []
    for index, row in enumerate(chosen):
        response = ("", row.label, rf"\boxed{{{row.label}}}")[index % 3]
        num_tokens = max(1, len(response))
        samples.append(
            Sample(
                f"preflight-{index}",
                f"preflight-{0 if same_row else index}",
                f"preflight-{index}",
                0,
                prompt=row.prompt,
                response=response,
                label=row.label,
                token_ids=[1] * (4 + num_tokens),
                loss_mask=[0] * 4 + [1] * num_tokens,
                rollout_logprobs=[0.0] * (4 + num_tokens),
                status=Status.COMPLETED,
                metadata=dict(row.metadata),
            )
        )
    return samples


def _check_connection(url: str) -> None:
    """Connect to a reward server once. It is refused if nothing listens: a wrong address is likelier than one that is about to start."""
    try:
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        host = urlsplit(url).hostname if "@" in url else url
        raise RewardError(
            f"--rm-url {host} does not answer ({reason:.100}): start the reward server first, or correct it"
        ) from None
