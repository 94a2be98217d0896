"""The reward curve of a run as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.storage.tracking.lineage import Lineage

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reward_curve(run: str, lineage: Lineage) -> Figure | None:
    """Plot mean training reward and evaluation rewards over rounds. Return None if there are no rewards."""
    from matplotlib.figure import Figure  # not pyplot, which is not thread-safe

    training, evals = lineage.training_rewards(), lineage.eval_curves()
    if not training and not evals:
        return None
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    if training:
        axes.plot(list(training), list(training.values()), label="training, mean of a round")
    for task, rewards in sorted(evals.items()):
        axes.plot(list(rewards), list(rewards.values()), marker="o", linestyle="--", label=f"evaluation {task}")
    axes.set(title=run, xlabel="rounds trained", ylabel="reward")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure
