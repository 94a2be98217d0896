"""What a start of a run has done, as one line and as the Markdown of the run's artifact on its Prefect page."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.storage.commit import Commit, eval_rewards

_WIDTH, _HEIGHT, _MARGIN = 720, 240, 44  # of the curve, in pixels
_COLOURS = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444")


def describe_progress(commits: Sequence[Commit], since: float = 0.0) -> str:
    """Return what was committed at or after `since` (seconds since the epoch), for instance
    "rounds 6 to 8, reward 0.650 -> 0.770, checkpoint 8".

    Args:
        commits: all commits of the run, in the order of their creation.
        since: the time of the start.
    """
    new = [commit for commit in commits if commit.created_at >= since]
    steps = [commit for commit in new if commit.kind == "step"]
    parts = []
    if steps:
        first, last = steps[0].index, steps[-1].index
        parts.append(f"round {first}" if first == last else f"rounds {first} to {last}")
        name, values = "reward", training_rewards(commits)
        if not values:  # supervised fine-tuning
            name, values = "loss", {c.index: c.summary["train/loss"] for c in steps if "train/loss" in c.summary}
        if first in values and last in values:
            parts.append(f"{name} {_change(values[first], values[last])}")
    for task, scores in evaluation_rewards(new).items():
        parts.append(f"eval {task} {_change(scores[min(scores)], scores[max(scores)])}")
    newest = {commit.kind: commit.index for commit in new}
    parts += [f"{kind} {newest[kind]}" for kind in ("checkpoint", "export") if kind in newest]
    return ", ".join(parts) or "no new stage was committed"


def training_rewards(commits: Sequence[Commit]) -> dict[int, float]:
    """Return round -> mean reward of its samples."""
    rollouts = sorted((c for c in commits if c.kind == "rollout"), key=lambda c: c.index)
    return {c.index: c.summary["rollout/raw_reward"] for c in rollouts if "rollout/raw_reward" in c.summary}


def evaluation_rewards(commits: Sequence[Commit]) -> dict[str, dict[int, float]]:
    """Return data set -> policy version -> mean reward of the evaluations."""
    scores: dict[str, dict[int, float]] = defaultdict(dict)
    for commit in sorted((c for c in commits if c.listed_kind == "eval"), key=lambda c: c.index):
        for task, reward in eval_rewards(commit).items():
            scores[task][commit.index] = reward
    return dict(scores)


def run_page(title: str, progress: str, rows: Mapping[str, str], links: Mapping[str, str], svg: str | None) -> str:
    """Return the Markdown of a run's artifact.

    Args:
        title: of the page.
        progress: what this start has done, or that it is running.
        rows: results of the whole run: title -> text.
        links: title -> URL, path or command.
        svg: curve of the rewards, or None before the first.
    """
    lines = [f"# {title}", "", progress, ""]
    if svg is not None:  # Prefect's pages show images with data URIs
        lines += [f"![reward by round](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})", ""]
    marked = {name: f"[{to}]({to})" if to.startswith("http") else f"`{to}`" for name, to in links.items() if to}
    for table in (rows, marked):
        if table:
            cells = [f"| {name} | {text.replace('|', '&#124;')} |" for name, text in table.items()]
            lines += ["| | |", "|---|---|", *cells, ""]
    return "\n".join(lines)


def reward_curve_svg(training: Mapping[int, float], evaluations: Mapping[str, Mapping[int, float]]) -> str | None:
    """Return training and evaluation rewards over the rounds as an SVG image, or None if there are none."""
    series = {"training": training} if training else {}
    series |= {f"eval {task}": scores for task, scores in evaluations.items()}
    if not series:
        return None
    rounds = [r for values in series.values() for r in values]
    rewards = [reward for values in series.values() for reward in values.values()]
    left, right, low, high = min(rounds), max(rounds), min(rewards), max(rewards)

    def place(r: int, reward: float) -> str:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * (r - left) / ((right - left) or 1)
        y = _HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * (reward - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    def text(x: float, y: float, content: str, more: str = "") -> str:
        escaped = content.replace("&", "&amp;").replace("<", "&lt;")
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escaped}</text>'

    bottom = _HEIGHT - _MARGIN
    shapes = [f'<path d="M{_MARGIN},{_MARGIN}V{bottom}H{_WIDTH - _MARGIN}" fill="none" stroke="#888"/>']
    shapes += [text(4, _MARGIN + 4, f"{high:.3g}"), text(4, bottom, f"{low:.3g}")]
    shapes += [text(_MARGIN, bottom + 18, f"round {left}"), text(_WIDTH - _MARGIN, bottom + 18, str(right))]
    for number, (name, values) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [place(r, reward) for r, reward in sorted(values.items())]
        shapes.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        circles = [point.split(",") for point in points] if name != "training" or len(points) < 3 else []
        shapes += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in circles]
        shapes.append(text(_MARGIN + 130 * number, 20, name, f'style="fill:{colour}"'))
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    style = 'font-family="sans-serif" font-size="12" fill="#666"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}{"".join(shapes)}</svg>'


def _change(first: float, last: float) -> str:
    return f"{first:.3f}" if first == last else f"{first:.3f} -> {last:.3f}"
