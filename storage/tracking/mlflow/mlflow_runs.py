"""MLflow runs of one Penstock run, created once and found again by their tags; names, values, links between pages, and
what the pages show first.

Delivery is idempotent: MLflow objects are found by their tags, and MLflow identifies a metric point by run, name, step,
time and value, which are all equal when a record is sent again.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.storage.commit import eval_rewards, evaluation_rewards, training_rewards
from penstock.storage.tracking.tracker import Committed, MetricPoint, Record, RunCommits, TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

T = TypeVar("T")


# ---- names, parameters and metrics in the form that MLflow accepts ---------------------------------------------------


MAX_METRICS, MAX_PARAMS, MAX_DATASETS = 1000, 100, 100  # MLflow's limits per request
_FORBIDDEN = re.compile(r"[^\w\-./: ]")  # characters that MLflow rejects in names, for instance "@"


def replace_forbidden_characters(name: str) -> str:
    """Replace the characters that MLflow rejects in names: `eval/aime/pass@8` becomes `eval/aime/pass_at_8`."""
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))


def to_mlflow(points: Sequence[MetricPoint], links: dict[str, str] | None = None) -> list[Metric]:
    """Return metric points as MLflow metrics, linked to a model and a data set if `links` is given."""
    from mlflow.entities import Metric

    return [
        Metric(replace_forbidden_characters(point.name), point.value, int(point.at * 1000), point.step, **(links or {}))
        for point in points
    ]


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive parts of `items` with at most `size` items each."""
    return (items[start : start + size] for start in range(0, len(items), size))


# ---- paths of artifacts ----------------------------------------------------------------------------------------------
# MLflow's database, which is in the store by default, contains absolute paths of artifacts. If the paths were not
# updated after the store was moved, pages would lack their artifacts, and new artifacts would be written to the old
# place.

ARTIFACTS = "artifacts"  # directory next to the database
_TIMEOUT = 30.0  # seconds to wait for other writers of the database
_COLUMNS = (
    "experiments.artifact_location runs.artifact_uri logged_models.artifact_location model_versions.source "
    "model_versions.storage_location trace_tags.value"
)


def update_artifact_paths(database: Path, experiment: str) -> bool:
    """Make an MLflow database refer to the directory `artifacts` next to it, if this directory contains the artifacts
    of `experiment`, and the database refers to another place. Return whether the database was changed."""
    if not database.exists():
        return False
    with closing(sqlite3.connect(database, timeout=_TIMEOUT)) as connection, connection:

        def has_column(table: str, column: str) -> bool:
            return column in [row[1] for row in connection.execute(f"pragma table_info({table})")]

        if not has_column("experiments", "artifact_location"):
            return False
        row = connection.execute("select artifact_location from experiments where name = ?", (experiment,)).fetchone()
        old, _, name = (row[0] if row else "").rstrip("/").rpartition("/")
        root = (database.absolute().parent / ARTIFACTS).as_uri()
        if old in ("", root) or not (database.parent / ARTIFACTS / name).is_dir():
            return False
        for table, column in (name.split(".") for name in _COLUMNS.split()):
            if has_column(table, column):
                values = (f"{root}/", len(old) + 2, len(old) + 1, f"{old}/")
                change = f"update {table} set {column} = ? || substr({column}, ?) where substr({column}, 1, ?) = ?"
                connection.execute(change, values)
        return True


# ---- links between pages ---------------------------------------------------------------------------------------------
# Each link is a tag of an MLflow object. The object's description, which MLflow shows as Markdown, lists the links; in
# a run's description they follow its results. Text that a user wrote above results and links is kept.

_NOTE = "mlflow.note.content"  # tag of the description
_TAG = "mlflow.penstock.link."  # MLflow does not list tags that begin with "mlflow."
_HEADING = "#### Links"
RESULTS = "**Results:**"  # beginning of a run's results
_MAX_LINKS = 25  # listed links of one role, the last ones by title; fewer if the description would be too long
_MAX_TEXT = 8000  # characters of a description; MLflow cuts longer ones of runs


class Link(NamedTuple):
    """A link to another MLflow page."""

    role: str  # relation of the other object to this one, e.g. "evaluated in"
    title: str
    url: str


def link_tags(tags: Mapping[str, str], links: list[Link], results: str | None = None) -> dict[str, str]:
    """Return the tags that add `links` to an object with the tags `tags`; {} if it already has them. `results`, a text
    that begins with RESULTS, replaces the description's text from RESULTS to the links."""
    new = {replace_forbidden_characters(f"{_TAG}{link.role}/{link.title}")[:250]: link.url for link in links}
    text = tags.get(_NOTE, "").partition(_HEADING)[0].strip()
    if results is not None:
        text = "\n\n".join(part for part in (text.partition(RESULTS)[0].strip(), results) if part)
    roles: dict[str, list[str]] = defaultdict(list)
    for name, url in sorted({**tags, **new}.items()):
        if name.startswith(_TAG):
            role, _, title = name.removeprefix(_TAG).partition("/")
            roles[role].append(f"[{title}]({url})")
    description = ""
    for num_links in range(_MAX_LINKS, 0, -1):
        lines = []
        for role, pages in sorted(roles.items()):
            more = f"{len(pages) - num_links} more, " if len(pages) > num_links else ""
            lines.append(f"- {role}: {more}{', '.join(pages[-num_links:])}")
        description = "\n\n".join(part for part in (text, "\n".join([_HEADING, "", *lines]) if lines else "") if part)
        if len(description) <= _MAX_TEXT:
            break
    changed = {name: url for name, url in new.items() if tags.get(name) != url}
    return changed | ({_NOTE: description} if description != tags.get(_NOTE, "") else {})


# ---- runs ------------------------------------------------------------------------------------------------------------

VIEW = "workflowType=machine_learning"  # MLflow's view "Model training"; its default is for traces of applications
CHARTS = "/model-metrics"  # tab of a run's page


def part_tags(run: TrackedRun, part: str) -> dict[str, str]:
    """Return the tags by which the MLflow run of `run` itself (`part` is "") or of its child run `part` is found."""
    return {"penstock.run": run.name, "penstock.identity": run.identity, "penstock.part": part or "run"}


class MlflowRuns:
    """Finds and creates the experiment and the MLflow runs of one Penstock run."""

    def __init__(self, client: MlflowClient, uri: str, run: TrackedRun) -> None:
        self.client = client
        self.uri = uri
        self.run = run
        self.main_run_id: str | None = None  # id of the MLflow run of the run itself, once it is known
        self._experiment_id: str | None = None
        path = uri.removeprefix("sqlite:///")
        self._database = None if path == uri else Path(path).absolute()
        self._ids: dict[tuple[str, ...], str] = {}  # values of the tags by which an MLflow run is found -> its id

    @property
    def experiment_id(self) -> str:
        """Return the id of the run's experiment, which is created if missing."""
        if self._find_experiment() is None:
            tags = {"mlflow.experimentKind": "custom_model_development"}  # otherwise MLflow guesses, and asks the user
            location = None
            if self._database is not None:  # without a server, MLflow would write to the current directory
                location = (self._database.parent / ARTIFACTS / self.run.experiment).as_uri()
            self._experiment_id = self.client.create_experiment(self.run.experiment, location, tags)
        assert self._experiment_id is not None
        return self._experiment_id

    def find_or_create_part(self, part: str, start_time: int | None, tags: dict[str, str] | None = None) -> str:
        """Return the id of the MLflow run of the run itself (`part` is "") or of its child run `part`. It is created if
        missing, with further `tags`, and `start_time` in milliseconds since the epoch."""
        tags = {"penstock.store": self.run.store_uri, **(tags or {})}
        return self.find_or_create(part_tags(self.run, part), part or self.run.name, start_time, tags)

    def find_part(self, part: str, run: TrackedRun | None = None) -> Run | None:
        """Return the MLflow run of `run` (default: this run) itself, or of its child run `part`, or None if MLflow does
        not have it."""
        return next(iter(self.find_all(part_tags(run or self.run, part), max_results=1)), None)

    def find_or_create(self, key: dict[str, str], name: str, start_time: int | None, tags: dict[str, str]) -> str:
        """Return the id of the MLflow run with the tags `key`. It is created with these and with `tags` if missing."""
        cached = tuple(key.values())
        if cached not in self._ids:
            runs = self.find_all(key, max_results=1)
            runs = runs or [self.client.create_run(self.experiment_id, start_time, {**key, **tags}, name)]
            self._ids[cached] = runs[0].info.run_id
        return self._ids[cached]

    def find_all(self, key: dict[str, str], max_results: int = 100) -> list[Run]:
        """Return the MLflow runs with the given tags, the oldest first."""
        experiment = self._find_experiment()
        if experiment is None:
            return []
        where = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in key.items())
        order = ["attributes.start_time ASC"]
        return self.client.search_runs([experiment], where, max_results=max_results, order_by=order)

    def url(self, kind: str, id: str, path: str = "") -> str:
        """Return the URL, relative to the server, of the page of a run (`kind` is "runs") or a model ("models"). `path`
        selects a tab of the page."""
        return f"#/experiments/{self.experiment_id}/{kind}/{id}{path}?{VIEW}"

    def add_links(self, run_id: str, links: list[Link], results: str | None = None) -> None:
        """Add links to the page of an MLflow run, and set the results in its description (`link_tags`)."""
        from mlflow.entities import RunTag

        tags = link_tags(self.client.get_run(run_id).data.tags, links, results)
        if tags:
            self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    def _find_experiment(self) -> str | None:
        if self._experiment_id is None:
            if self._database is not None:
                update_artifact_paths(self._database, self.run.experiment)
            existing = self.client.get_experiment_by_name(self.run.experiment)
            self._experiment_id = existing.experiment_id if existing else None
        return self._experiment_id


# ---- what the pages show first ---------------------------------------------------------------------------------------
# MLflow 3.17 keeps the charts and columns that a user chooses in that browser. Two things can be set here:
#
# - The order of the charts, by their names: MLflow takes the part of a metric's name before the last "/" as the section
#   of its chart, and sorts sections and charts by name. So the main metrics are logged a second time as
#   `at a glance/NUMBER TITLE`, and costs, which come last, are called `usage/...`.
# - A view of the list of runs, stored in the experiment's tag `mlflow.sharedViewState.KEY`. MLflow lists it under
#   "Views", and a link with `viewStateShareKey=KEY` opens it. The page of a single run cannot have such a view.

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
    """Store the view of an experiment's list of runs, with columns for reward, evaluations, speed and rounds. `metrics`
    are names of metrics that `overview_points` returns; each evaluation among them that has no column yet gets one."""
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
