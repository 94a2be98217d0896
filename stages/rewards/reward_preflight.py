"""Check the reward before a run starts: validate the rows of the prompt data, and call user-defined rewards on
test responses.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from penstock.stages.rewards.custom_reward import describe_reward_function
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.hub import (
    BOXED_PREFIX,
    builtin_reward_name,
    get_builtin_reward,
    get_checked_builtin_reward,
    row_reward_path,
)
from penstock.stages.rewards.outcome import Outcome
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import InputError, RewardError, check_rules
from penstock.storage.samples.sample import Sample, Status

_CONNECT_TIMEOUT = 5.0  # seconds


@dataclass(frozen=True)
class RewardRow:
    """The fields of a prompt data row that a reward reads."""

    where: str  # file and row, for error messages
    label: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""


def check_reward_rows(options: RolloutConfig, rows: Iterable[RewardRow]) -> None:
    """Check that the reward of every row exists and is allowed, and that the row has a label if its reward needs one.
    Errors name the row."""
    for row in rows:
        try:
            if row_reward_path(row.metadata, options.allow_row_code) or options.custom_rm_path:
                continue
            name = builtin_reward_name(row.metadata, options.rm_type)
            reward = get_checked_builtin_reward(name, options.rm_url, options.reward_key)
            answers = (row.label, *map(row.metadata.get, reward.answer_fields))
            column = f"fill its column {options.label_key!r}, or name another column with --label-key"
            fix = column if options.label_key else "name the column with the labels with --label-key"
            rules = [
                (
                    reward.compares_label and not any(str(answer or "").strip() for answer in answers),
                    f"the row has no label, which the reward {name} needs: {fix}",
                ),
                (
                    reward.compares_label and _is_json_of_texts(row.label),
                    f"the label {row.label:.100} is a JSON value with several texts, but the reward {name} compares "
                    "only one text: name an entry of the column with --label-key COLUMN.ENTRY, or use --custom-rm-path",
                ),
            ]
            check_rules(rules, RewardError)
            reward.check_row(row.label, row.metadata)
        except InputError as error:
            raise type(error)(f"{row.where}: {error}") from None


def _is_json_of_texts(label: str) -> bool:
    """Return whether a label is a JSON object, or a JSON array with texts: the label of a column that holds
    dictionaries or lists."""
    try:
        value = json.loads(label) if label.strip()[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(part, str | dict) for part in value))


def _rows_with_builtin_reward(options: RolloutConfig, rows: Sequence[RewardRow]) -> list[tuple[RewardRow, str]]:
    """Return the rows that a built-in reward grades, each with the name of its reward."""
    return [
        (row, builtin_reward_name(row.metadata, options.rm_type)) for row in rows if not _is_user_defined(options, row)
    ]


def unrequested_format_warning(options: RolloutConfig, rows: Sequence[RewardRow], template: str = "") -> str | None:
    r"""Return a warning if a built-in reward grades only the answer in \boxed{} (`dapo`: after "Answer:"), but neither
    the prompts nor the chat template (whose default system message may) ask for it. Otherwise return None."""
    graded = _rows_with_builtin_reward(options, rows)
    for name in dict.fromkeys(name for _, name in graded):
        text = get_builtin_reward(name).graded_format
        prompts = [row.prompt for row, reward in graded if reward == name]
        if text and not any(text.lstrip("\\") in source for source in [template, *prompts]):
            return (
                f"the reward {name} grades only the answer that a response has in {text}, but none of the first "
                f"{len(prompts)} prompts contains {text}: unless the model writes it without being asked, all rewards "
                "will be equal and nothing will be learned; ask for it in the prompts, or use another reward"
            )
    return None


def unrewarded_labels_warning(options: RolloutConfig, rows: Sequence[RewardRow]) -> str | None:
    """Return a warning if a built-in reward gives the lowest reward in every row, even to a response that consists of
    the label. Otherwise return None."""
    graded = [
        (row, name) for row, name in _rows_with_builtin_reward(options, rows) if get_builtin_reward(name).compares_label
    ]
    if not graded or any(_is_rewarded(name.removeprefix(BOXED_PREFIX), row) for row, name in graded):
        return None
    row, name = graded[0]
    return (
        f"the reward {name} rewards none of the first {len(graded)} labels, not even if the response is the label "
        f"itself (the first is {row.label[:100]!r} in {row.where}): name the column of the answers with --label-key, "
        "or use another reward"
    )


def _is_rewarded(name: str, row: RewardRow) -> bool:
    """Return whether a response that states the label, in one of the graded formats, gets more than the lowest
    reward."""
    for response in (row.label, rf"</think>\boxed{{{row.label}}}", f"Answer: {row.label}"):
        value = get_builtin_reward(name).function(
            Sample("preflight", "preflight", "preflight", 0, response=response, label=row.label, metadata=row.metadata)
        )
        if max(value.values() if isinstance(value, dict) else [value]) > 0:
            return True
    return False


def try_reward_on_test_samples(
    options: RolloutConfig, rows: Sequence[RewardRow], arguments: dict[str, Any] | None = None
) -> list[tuple[str, Outcome]]:
    """Check the reward: call it on test samples made from the first row (the response is empty, the label, or the label
    in \\boxed{}), or connect to the server at --rm-url. Return the response and the outcome of each test sample, or
    nothing if a server computes the reward. Some outcomes may be errors, because test samples may differ from real
    ones; RewardError is raised if all are errors. `arguments`: attributes of the `args` of a user-defined reward."""
    if not rows:
        return []
    row = rows[0]
    samples = []
    for index, response in enumerate(("", row.label, rf"\boxed{{{row.label}}}")):
        num_tokens = max(1, len(response))  # after 4 prompt tokens
        samples.append(
            Sample(
                f"preflight-{index}",
                f"preflight-{0 if options.group_rm else index}",
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
    if not _is_user_defined(options, row):
        names = {str(sample.metadata.get("rm_type") or options.rm_type or "") for sample in samples}
        if "remote_rm" in {name.removeprefix(BOXED_PREFIX) for name in names}:
            _check_connection(options.rm_url or "")
            return []
    with Grader.from_options(options, 1, arguments) as grader:
        futures = grader.submit_group(samples) if options.group_rm else [grader.submit(sample) for sample in samples]
        outcomes: list[Outcome] = [future.result() for future in futures]
    for sample, outcome in zip(samples, outcomes, strict=True):
        outcome.apply(sample)  # raises RewardError if the settings of the reward are wrong
    reasons = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(reasons) == len(outcomes):
        form = f"; {describe_reward_function(options.group_rm)}" if _is_user_defined(options, row) else ""
        label = "" if row.label.strip() else f", or name the column of its labels {_label_key(options)}"
        raise RewardError(
            f"the reward failed on all {len(reasons)} test samples, the first with {reasons[0]:.200}: fix the reward"
            f"{label}{form}"
        )
    return [(sample.response, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]


def _is_user_defined(options: RolloutConfig, row: RewardRow) -> bool:
    """Return whether a user-defined reward grades a row."""
    return bool(options.custom_rm_path or row.metadata.get("custom_rm_path"))


def _label_key(options: RolloutConfig) -> str:
    """Return "with --label-key", and the column that this option names now, for messages."""
    return f"with --label-key (now {options.label_key!r})" if options.label_key else "with --label-key"


def missing_label_warning(
    options: RolloutConfig, row: RewardRow, tried: Sequence[tuple[str, Outcome]], columns: Sequence[str]
) -> str | None:
    """Return a warning if the row of the test samples has no label, and a user-defined reward gave all of them the same
    reward. Otherwise return None. Built-in rewards that need a label refuse a row without one. `columns`: of the row.
    """
    rewards = {outcome.reward for _, outcome in tried if outcome.error is None}
    if row.label.strip() or len(rewards) != 1 or not _is_user_defined(options, row):
        return None
    return (
        f"{row.where} has no label, and the reward gives {rewards.pop()} to every test response: if the reward reads "
        f"labels, name their column {_label_key(options)}; the columns are {', '.join(map(repr, columns))}"
    )


def _check_connection(url: str) -> None:
    """Check that a TCP connection to the reward server succeeds. The check does not retry, because a wrong address is
    more likely than a server that is still starting. Raises RewardError."""
    try:
        parts = urlsplit(url)
        address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection(address, timeout=_CONNECT_TIMEOUT).close()
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        host = urlsplit(url).hostname if "@" in url else url
        raise RewardError(
            f"--rm-url {host} does not answer ({reason:.100}): start the reward server first, or correct the URL"
        ) from None
