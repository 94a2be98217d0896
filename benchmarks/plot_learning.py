"""Draw the training of several runs as SVG: mean reward of a round, and accuracy on held-out rows.

    python benchmarks/plot_learning.py [FILE ...] [--methods grpo trl] [--peer trl] [--output FILE.svg]

FILE is JSON with reports of gpu/real_model.py under `runs`, by name; by default results/smollm2-h100.json. Names that
differ only in `-seedN` are seeds of one method and get one color. Lines of methods whose names begin with the name in
--peer are dashed. Without --methods all are drawn. The background is white, so that the picture is readable on a dark
page as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "docs" / "scripts"))
from pictures import AMBER, BLUE, GREY, IMAGES, RED, TEAL, Picture

RESULTS = Path(__file__).parent / "results" / "smollm2-h100.json"

Style = tuple[str, str]  # color, further attributes of the line
COLORS = (TEAL, BLUE, AMBER, RED, "#6a3d9a", GREY, "#8d4e2a", "#ad1457")
MEANS = re.compile(r"means of (\d+) rounds")
Point = tuple[float, float]


class Panel:
    """Axes of one curve in a picture. Both start at 0.

    Args:
        picture: the picture in which the axes are drawn.
        left, top, width, height: the area between the axes.
        limits: last round, and largest value.
    """

    def __init__(self, picture: Picture, left: float, top: float, width: float, height: float, *, limits: Point):
        self.picture, self.left, self.top, self.width, self.height = picture, left, top, width, height
        limits = limits[0], limits[1] or 1.0
        steps = [tick_step(limit, count) for limit, count in zip(limits, (width // 60, 4), strict=True)]
        self.limits = limits[0], math.ceil(limits[1] / steps[1] - 1e-9) * steps[1]
        for value in multiples(steps[0], self.limits[0]):
            picture.text(self.place((value, 0))[0], top + height + 16, f"{value:g}", size=12, color=GREY)
        for value in multiples(steps[1], self.limits[1]):
            y = self.place((0, value))[1]
            picture.line(left, y, left + width, y, color="#cfd8dc", width=1)
            picture.text(left - 6, y + 4, f"{value:g}", size=12, color=GREY, anchor="end")

    def place(self, point: Point) -> Point:
        """Return the coordinates of a round and a value."""
        x, y = (value / limit for value, limit in zip(point, self.limits, strict=True))
        return round(self.left + x * self.width, 1), round(self.top + (1 - y) * self.height, 1)

    def connect(self, points: Iterable[Point], style: Style, more: str = 'stroke-width="1.8"') -> None:
        """Draw a line through points."""
        path = " ".join(f"{x},{y}" for x, y in map(self.place, points))
        color, dash = style
        self.picture.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"{dash} {more}/>')


def tick_step(limit: float, count: float) -> float:
    """Return the distance between ticks: the smallest 1, 2 or 5 times a power of ten that divides the range from 0 to
    `limit` into at most `count` parts."""
    power = 10.0 ** math.floor(math.log10(limit / count))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= limit / count - 1e-12)


def multiples(step: float, limit: float) -> Iterator[float]:
    """Yield 0, `step`, ... up to `limit`."""
    return (step * i for i in range(math.floor(limit / step + 1e-9) + 1))


def reward_points(run: dict[str, Any]) -> list[Point]:
    """Return the mean reward of each block of rounds, at the middle of the block."""
    [(size, curves)] = [
        (int(match[1]), value) for name, value in run["rounds"].items() if (match := MEANS.fullmatch(name))
    ]
    return [((i + 0.5) * size, value) for i, value in enumerate(curves["rollout/raw_reward"])]


def accuracies(run: dict[str, Any], task: str) -> list[tuple[int, float, float, float]]:
    """Return (trained rounds, accuracy, lower and upper end of its interval) for each evaluation on a task."""
    evaluations = run["held out"].get(task, {}).items()
    return sorted((int(rounds), entry["accuracy"], *entry["interval"]) for rounds, entry in evaluations)


def method_of(name: str) -> str:
    """Return the name of a run without its seed."""
    return re.sub(r"-seed\d+$", "", name)


def draw(runs: dict[str, dict[str, Any]], peer: str) -> Picture:
    """Return the picture of runs by name: legend, rewards, then two tasks in a row."""
    seeds = Counter(map(method_of, runs))
    dashes = {method: ' stroke-dasharray="5 3"' if method.startswith(peer) else "" for method in seeds}
    styles = dict(zip(seeds, zip(itertools.cycle(COLORS), dashes.values())))
    tasks = list(dict.fromkeys(task for run in runs.values() for task in run["held out"]))
    rewards = {name: reward_points(run) for name, run in runs.items()}
    last_round = max(point[0] for run in runs.values() for task in tasks for point in accuracies(run, task))
    top = 54 + 20 * -(-len(seeds) // 3)
    picture = Picture(
        top - 20 + 188 + 208 * -(-len(tasks) // 2),
        "Reward of training rollouts, and right answers on held-out rows with 95 % intervals, by round",
    )
    for i, (method, number) in enumerate(seeds.items()):
        x, y, (color, dash) = 40 + i % 3 * 148, 24 + i // 3 * 20, styles[method]
        picture.parts.append(f'<path d="M{x},{y} h24" stroke="{color}" stroke-width="3"{dash}/>')
        picture.text(x + 30, y + 5, f"{method}, {number} seeds" if number > 1 else method, size=13, anchor="start")
    picture.text(40, top - 10, "reward of training rollouts by round, means", size=14, anchor="start", bold=True)
    highest = max(value for points in rewards.values() for _, value in points)
    panel = Panel(picture, 40, top, 424, 140, limits=(last_round, highest))
    for name, points in rewards.items():
        panel.connect(points, styles[method_of(name)])
    for i, task in enumerate(tasks):
        left, at = 40 + i % 2 * 230, top + 188 + i // 2 * 208
        picture.text(left, at - 10, f"{task}: right answers", size=14, anchor="start", bold=True)
        curves = {name: accuracies(run, task) for name, run in runs.items() if task in run["held out"]}
        highest = max(high for points in curves.values() for *_, high in points)
        panel = Panel(picture, left, at, 194, 160, limits=(last_round, highest))
        for name, points in curves.items():
            style = styles[method_of(name)]
            for rounds, _, low, high in points:
                panel.connect([(rounds, low), (rounds, high)], (style[0], ""), 'opacity="0.45"')
            panel.connect([(rounds, accuracy) for rounds, accuracy, *_ in points], style)
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", default=[RESULTS])
    parser.add_argument("--methods", nargs="+", help="names of the methods to draw, without seeds")
    parser.add_argument("--peer", default="trl", help="name of the methods that are dashed (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=IMAGES / "smollm2-curve.svg")
    options = parser.parse_args()
    runs = {name: run for file in options.files for name, run in json.loads(file.read_text())["runs"].items()}
    if options.methods:
        runs = {name: run for name, run in runs.items() if method_of(name) in options.methods}
    draw(runs, options.peer).save(options.output)


if __name__ == "__main__":
    main()
