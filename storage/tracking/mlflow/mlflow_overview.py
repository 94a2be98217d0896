"""What MLflow's pages show first: charts, the columns of a stored view, the results in a run's description.

MLflow 3.17 keeps the charts and columns that a user chooses in that browser. Two things can be set here:

- The order of the charts, by their names: MLflow takes the part of a metric's name before the last "/" as the section
  of its chart, and sorts sections and charts by name. So the main metrics are logged a second time as
  `at a glance/NUMBER TITLE`, and costs, which come last, are called `usage/...`.
- A view of the list of runs, stored in the experiment's tag `mlflow.sharedViewState.KEY`. MLflow lists it under
  "Views", and a link with `viewStateShareKey=KEY` opens it. The page of a single run cannot have such a view.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.storage.commit import eval_rewards, evaluation_rewards, training_rewards
from penstock.storage.tracking.mlflow.mlflow_runs import RESULTS, VIEW, replace_forbidden_characters
from penstock.storage.tracking.tracker import Committed, MetricPoint, Record, RunCommits

if TYPE_CHECKING:
    from mlflow import MlflowClient

SECTION = "at a glance"
ROUNDS = "penstock.rounds"  # tag of a run: the number of its trained rounds
_REWARD, _SPEED, _LENGTH = "1 reward", "3 tokens per second", "7 response length"
_MAIN_METRICS: dict[
    str, dict[str, tuple[str, ...]]
] = {  # kind of commit -> title of the chart -> metrics, of which the first one present is shown
    "rollout": {
        _REWARD: ("rollout/raw_reward",),
        _LENGTH: ("rollout/response_len/mean",),
        _SPEED: ("perf/tokens_per_gpu_per_sec",),
    },
    "step": {
        "4 KL": ("train/kl_loss", "train/ppo_kl"),
        "5 gap": ("train/train_rollout_logprob_abs_diff",),
        "6 entropy": ("train/entropy_loss",),
    },
    "sft step": {"1 loss": ("train/loss",), _SPEED: ("perf/actor_train_tok_per_s",)},
}


def overview_points(record: Record, commits: RunCommits) -> list[MetricPoint]:
    """Return the main metrics of a record under second names, by which MLflow shows them first."""
    if not isinstance(record, Committed):
        return []
    commit, values = record.commit, {}
    if commit.listed_kind == "eval":
        values = {f"2 evaluation {task}": reward for task, reward in eval_rewards(commit).items()}
    _, rollout = commits.commits["rollout"].get(commit.index, ("", None))
    uses_demonstrations = rollout is not None and rollout.policy_version < 0
    kind = "sft step" if commit.kind == "step" and uses_demonstrations else commit.kind
    for title, names in _MAIN_METRICS.get(kind, {}).items():
        found = [commit.summary[name] for name in names if name in commit.summary]
        values |= {title: found[0]} if found else {}
    return [MetricPoint(f"{SECTION}/{title}", commit.index, value, record.at) for title, value in values.items()]


# ---- the stored view of the list of runs -----------------------------------------------------------------------------

_VIEW_NAME = "penstock"
VIEW_TAG = f"mlflow.sharedViewState.{_VIEW_NAME}"
_COLUMN_WIDTH = 200  # pixels, enough for the name of a metric
_ROUNDS_COLUMN = f"tags.`{ROUNDS}`"
_FIRST_COLUMNS = {"attributes.`Run Name`": 220, "runDateAndNestInfo": 150}  # MLflow pins them to the left
_LAST_COLUMNS = {_ROUNDS_COLUMN: 130, "duration": 80}


def runs_url(experiment_id: str) -> str:
    """Return the URL, relative to the server, that opens the list of runs in the stored view."""
    return f"#/experiments/{experiment_id}/runs?{VIEW}&viewStateShareKey={_VIEW_NAME}"


def store_view(client: MlflowClient, experiment_id: str, metrics: Iterable[str]) -> None:
    """Store the view of an experiment's list of runs: columns for reward, evaluations, speed and rounds. `metrics` are
    names of points of `overview_points`; each evaluation among them gets a column if the view has none for it yet."""
    tag = client.get_experiment(experiment_id).tags.get(VIEW_TAG)
    shown = json.loads(json.loads(tag)["state"])["selectedColumns"] if tag else []
    names = [f"{SECTION}/{_REWARD}", f"{SECTION}/{_SPEED}", *(name for name in metrics if "/2 " in name)]
    columns = {f"metrics.`{replace_forbidden_characters(name)}`" for name in names} | {_ROUNDS_COLUMN, *shown}
    if columns != set(shown):
        widths = _FIRST_COLUMNS | dict.fromkeys(sorted(columns - {_ROUNDS_COLUMN}), _COLUMN_WIDTH) | _LAST_COLUMNS
        state = {"selectedColumns": sorted(columns), "columnOrder": list(widths), "columnWidths": widths}
        view = {"name": _VIEW_NAME, "createdAt": 0, "state": json.dumps(state)}
        client.set_experiment_tag(experiment_id, VIEW_TAG, json.dumps(view))


# ---- the description of a run ----------------------------------------------------------------------------------------


def describe_results(commits: RunCommits) -> str:
    """Return the results of a run in one line: the first and the newest value of each curve."""
    steps = [commit for _, (_, commit) in sorted(commits.commits["step"].items())]
    rollouts = [commit for _, commit in commits.commits["rollout"].values()]
    evaluations = evaluation_rewards(list(commits.evals.values()))
    curves = {"reward": training_rewards(rollouts)} | {
        f"evaluation {task}": rewards for task, rewards in sorted(evaluations.items())
    }
    if not curves["reward"]:  # supervised fine-tuning
        curves["loss"] = {step.index: step.summary["train/loss"] for step in steps if "train/loss" in step.summary}
    parts = [f"{len(steps)} round{'s' * (len(steps) > 1)}"] if steps else []
    for title, curve in curves.items():
        if curve:
            first, last = curve[min(curve)], curve[max(curve)]
            parts.append(f"**{title} {first:.3f} -> {last:.3f}**" if len(curve) > 1 else f"**{title} {last:.3f}**")
    return f"{RESULTS} {', '.join(parts) or 'none yet'}"
