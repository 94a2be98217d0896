"""MLflow runs of one Penstock run, created once and found again by their tags; links between pages, names and values.

Delivery is idempotent: MLflow objects are found by their tags, and MLflow identifies a metric point by run, name, step,
time and value, which are all equal when a record is sent again.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from penstock.storage.tracking.tracker import MetricPoint, TrackedRun

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
