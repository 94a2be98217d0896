"""The lines that describe a run in a terminal or a log: rounds, evaluations, samples, and the summary at the end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from penstock.storage.commit import Commit, eval_rewards, evaluation_rewards, training_rewards

MAX_COLUMNS = 100  # width of the line of a round
BLOCKS = "▁▂▃▄▅▆▇█"  # the characters of which a curve is made


@dataclass(frozen=True)
class Column:
    """A number in the line of a round."""

    label: str  # described in docs/metrics.md
    metrics: tuple[str, ...]  # the first of these metrics that the round has is shown
    style: str  # format of the number
    rank: int  # columns with a higher rank are left out first if the line is too long
    hidden_at_zero: bool = True  # the column appears only in a run in which the number has not always been 0


COLUMNS = (
    Column("reward", ("rollout/raw_reward",), ".3f", 0, hidden_at_zero=False),
    Column("loss", ("train/loss",), "z.4f", 4),  # z omits the sign of -0.0000, the usual loss of one on-policy step
    Column("p", ("train/sample_prob",), ".3f", 5),  # of a whole demonstration
    Column("value", ("train/critic-value_loss",), ".4f", 11),
    Column("kl", ("train/kl_loss", "train/ppo_kl"), ".1e", 5),
    Column("grad", ("train/grad_norm",), ".2g", 7),
    Column("gap", ("train/train_rollout_logprob_abs_diff",), ".1e", 8),  # mean |log-prob trainer - engine|
    Column("len", ("rollout/response_len/mean",), ",.1f", 3),
    Column("stale", ("rollout/staleness/mean",), ".2f", 6),
    Column("ess", ("reuse/ess_tokens",), ".3f", 4),
    Column("idle", ("perf/engine_idle_ratio",), ".0%", 10),
    Column("wait", ("perf/wait_time_ratio",), ".0%", 9),
    Column("queue", ("rollout/queue_depth",), ".0f", 12),
    Column("wasted", ("rollout/wasted_tokens",), ",.0f", 13),
    Column("tok/s", ("perf/tokens_per_gpu_per_sec", "perf/actor_train_tok_per_s"), ",.0f", 2),
)
_TIME_RANK = 1


class RoundLines:
    """Formats the lines of a run's rounds: `round 11 (12/60)  reward 0.531  kl 1.2e-3  ...  time 1.0s`.

    Rounds are counted from 0, as in the store and in every command; the number in parentheses counts trained rounds.

    Attributes:
        rollouts: commits of the rollouts that are not trained yet, by round.
        publish_seconds: durations of weight updates; the last one is counted in the time of the next round.
        overlap: metrics of an asynchronous run that are not in commits, by round.
    """

    def __init__(self, num_rounds: int) -> None:
        self.num_rounds = num_rounds
        self.rollouts: dict[int, Commit] = {}
        self.publish_seconds: list[float] = []
        self.overlap: dict[int, dict[str, float]] = {}
        self._nonzero: set[str] = set()  # labels of the columns that have not always been 0

    def add(self, numbers: Mapping[str, float]) -> dict[str, str]:
        """Return label -> formatted number of the columns that a round with the metrics `numbers` shows."""
        texts = {}
        for column in COLUMNS:
            value = next((numbers[name] for name in column.metrics if name in numbers), None)
            if value is None:
                continue
            text = short_exponent(format(value, column.style))
            if not column.hidden_at_zero or text.strip("-0.,%e"):  # a digit, or nan
                self._nonzero.add(column.label)
            if column.label in self._nonzero:
                texts[column.label] = text
        return texts

    def seconds(self, step: Commit) -> dict[str, float]:
        """Return the seconds of a round's stages: stage -> seconds."""
        rollout = self.rollouts.get(step.index)
        return seconds_by_stage([commit for commit in (rollout, step) if commit], self.publish_seconds[-1:])

    def format(self, step: Commit, width: int = MAX_COLUMNS) -> Text:
        """Return the line of a round. `step` is the commit of its training step or, in a run without training, of its
        rollout. Columns are left out until the line has at most `width` characters or only two columns."""
        rollout = self.rollouts.get(step.index)
        numbers = (rollout.summary if rollout else {}) | step.summary | self.overlap.get(step.index, {})
        texts = self.add(numbers)
        ranks = {column.label: column.rank for column in COLUMNS} | {"time": _TIME_RANK}
        if spent := self.seconds(step):
            texts["time"] = f"{sum(spent.values()):.1f}s"
        digits = len(str(self.num_rounds))
        count = f"({step.index + 1}/{self.num_rounds})"
        head = f"round {step.index:>{digits}} {count:<{2 * digits + 3}}"  # the same width in every round
        while len(texts) > 2 and len(head) + sum(len(label) + len(t) + 3 for label, t in texts.items()) > width:
            del texts[max(texts, key=ranks.__getitem__)]
        parts = [Text.assemble((f"{label} ", "dim"), text) for label, text in texts.items()]
        return Text("  ").join([Text(head), *parts])


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a curve of the finite values as at most `width` block characters, from the lowest value (▁) to the highest
    (█), each the mean of several values if there are more. If all are equal, they are drawn at half height."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    size = min(width, len(finite))
    bounds = [len(finite) * part // size for part in range(size + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[len(BLOCKS) // 2] * size
    return "".join(BLOCKS[min(int((mean - low) / (high - low) * len(BLOCKS)), len(BLOCKS) - 1)] for mean in means)


def format_duration(seconds: float) -> str:
    """Format a duration: `0:05`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def short_exponent(number: str) -> str:
    """Return a formatted number with the shortest exponent: `1.2e-05` as `1.2e-5`."""
    mantissa, e, exponent = number.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else number


def describe_commit(commit: Commit, num_rounds: int) -> str:
    """Return the line about a single commit. The line of a training step has no columns from its rollout."""
    if commit.kind in ("rollout", "step"):
        return RoundLines(num_rounds).format(commit).plain
    return EVENT_LINES[commit.kind](commit).strip()


def format_sample_preview(rollout: Commit, width: int) -> list[Text]:
    """Return the samples with the highest and the lowest reward of a rollout's preview: `prompt -> response`, each cut
    to one line of `width` terminal cells."""
    rows = [row for row in rollout.state.get("shown") or [] if row["reward"] is not None]
    lines = []
    for title, row in [("best", rows[0]), ("worst", rows[-1])][: len(rows)] if rows else []:
        label = f"{title:<9} {row['reward']:.3f}  "
        room = max(width - len(label) - 4, 2)
        response = clip_line(row["response"], room // 2)
        prompt = clip_line(row["prompt"], room - cell_len(response))
        response = clip_line(row["response"], room - cell_len(prompt))
        lines.append(Text.assemble((label, "dim"), prompt, (" -> ", "dim"), response))
    return lines


def clip_line(text: str, width: int) -> str:
    """Return a text as one line without control characters, shortened in the middle to `width` cells."""
    text = "".join(char if char.isprintable() else "\ufffd" for char in " ".join(text.split()))
    if cell_len(text) <= width:
        return text
    if width < 9:
        return set_cell_size(text, width)
    half = (width - 5) // 2
    return f"{set_cell_size(text, half)} ... {set_cell_size(text[::-1], half)[::-1]}"


def summary_rows(commits: Sequence[Commit], publish_seconds: Sequence[float], store_uri: str) -> dict[str, str]:
    """Return the results of a run and the seconds of each stage: title -> text. `publish_seconds` are the durations of
    its weight updates."""
    rows: dict[str, str] = {}
    newest = {c.kind: c for c in sorted(commits, key=lambda c: c.index)}
    if "step" in newest:
        rows["rounds"] = str(newest["step"].policy_version)
    if rewards := training_rewards(commits):
        first, last = min(rewards), max(rewards)
        rows["reward"] = f"{rewards[first]:.3f} in round {first}, {rewards[last]:.3f} in round {last}"
    for task, scores in evaluation_rewards(commits).items():
        rows[f"eval {task}"] = ", ".join(f"{reward:.3f} after {version} rounds" for version, reward in scores.items())
    rows |= {kind: f"{store_uri}/{newest[kind].attempt}" for kind in ("checkpoint", "export") if kind in newest}
    if spent := seconds_by_stage(commits, publish_seconds):
        rows["seconds"] = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in spent.items())
    return rows


def seconds_by_stage(commits: Sequence[Commit], publish_seconds: Sequence[float]) -> dict[str, float]:
    """Return stage -> seconds, in the order of the loop. `publish_seconds` are the durations of weight updates. The
    duration of a commit is its `seconds` under the name of its stage (such as `train`), else the sum of its `seconds`.
    """
    spent: dict[str, float] = {}
    for kind, stage in _STAGES.items():
        if of_kind := [c for c in commits if c.listed_kind == kind]:
            spent[stage] = sum(c.seconds.get(stage, sum(c.seconds.values())) for c in of_kind)
        if kind == "step" and publish_seconds:
            spent["publish"] = sum(publish_seconds)
    return spent


def format_eval_line(commit: Commit) -> str:
    """Return the printed line of an evaluation: every metric with its confidence interval."""
    results, summary = [], commit.summary
    for task in eval_rewards(commit):
        prefix = f"eval/{task}-"
        others = [n for n in summary if n.startswith(prefix) and not n.endswith(("-ci_low", "-ci_high"))]
        details = ", ".join(f"{n.removeprefix(prefix)} {format_with_interval(summary, n)}" for n in others)
        mean = format_with_interval(summary, f"eval/{task}")
        results.append(f"{task} {mean} ({details})" if details else f"{task} {mean}")
    return f"  evaluated after {commit.index} rounds: {', '.join(results)}"


def format_with_interval(summary: Mapping[str, float], name: str) -> str:
    """Format a metric with its confidence interval, if the summary has one: `0.500 [0.412, 0.588]`."""
    low, high = summary.get(f"{name}-ci_low"), summary.get(f"{name}-ci_high")
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{summary[name]:.3f}{interval}"


EVENT_LINES: dict[str, Callable[[Commit], str]] = {  # kind of commit -> its printed line
    "model": lambda commit: (
        f"  converted{' and verified' if 'convert/num_tensors' in commit.summary else ''} "
        f"in {sum(commit.seconds.values()):.1f}s"
    ),
    "checkpoint": lambda commit: f"  saved checkpoint {commit.index:06d} in {sum(commit.seconds.values()):.1f}s",
    "eval": format_eval_line,
    "export": lambda commit: f"  exported version {commit.policy_version} in {sum(commit.seconds.values()):.1f}s",
}

# kind of commit -> stage, in the order of the loop
_STAGES = {"model": "convert", "rollout": "rollout", "step": "train", "checkpoint": "save"}
_STAGES |= {"eval": "eval", "export": "export"}


# ---- log lines as JSON (--log-format json), with the stage and the round in which they are printed -------------------

_stage: ContextVar[str | None] = ContextVar("stage", default=None)
_round: ContextVar[int | None] = ContextVar("round", default=None)


@contextmanager
def log_context(stage: str, round_number: int | None) -> Iterator[None]:
    """Add a stage and a round (None: no round) to the JSON lines that this thread prints during the block."""
    tokens = _stage.set(stage), _round.set(round_number)
    try:
        yield
    finally:
        _stage.reset(tokens[0])
        _round.reset(tokens[1])


def json_line(level: str, run: str, message: str) -> str:
    """Return one line of JSON: time (UTC), level, run, round, stage, message."""
    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    record = {"time": time, "level": level, "run": run, "round": _round.get(), "stage": _stage.get()}
    return json.dumps(record | {"message": message}, ensure_ascii=False)


def round_of_task(name: str) -> int | None:
    """Return the number of the round to which a task run belongs, from its name: `train-000004` belongs to round 4. The
    names of weight updates, checkpoints and evaluations contain a policy version instead: `checkpoint-000005` belongs
    to round 4, too, which trained version 5. Return None for names without a number, and for version 0."""
    match = re.match(r"([a-z-]+)-(\d+)", name)
    if match is None:
        return None
    stage, number = match.groups()
    rollout_id = int(number) - (stage not in ("rollout", "train", "demonstrations"))
    return rollout_id if rollout_id >= 0 else None
