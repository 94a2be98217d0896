"""MLflow runs of one Penstock run: created once, and found again by their tags."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.storage.tracking.mlflow.artifact_paths import ARTIFACTS, update_artifact_paths
from penstock.storage.tracking.tracker import TrackedRun

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

    from penstock.storage.tracking.mlflow.links import Link

VIEW = "workflowType=machine_learning"  # MLflow's view "Model training"; its default is for traces of applications


class MlflowRuns:
    """Finds and creates the experiment and the MLflow runs of one Penstock run.

    Args:
        client: of the MLflow server or database.
        uri: of the MLflow server or database.
        run: the Penstock run.
    """

    def __init__(self, client: MlflowClient, uri: str, run: TrackedRun) -> None:
        self.client = client
        self.uri = uri
        self.run = run
        self.main_run_id: str | None = None  # id of the MLflow run of the run itself, once it is known
        self._experiment_id: str | None = None
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

    def find_main_run(self, run: TrackedRun) -> Run | None:
        """Return the MLflow run of a Penstock run, or None if MLflow does not have it."""
        return self.find(_part_tags(run, ""))

    def find_or_create_main_run(self, started_at: float) -> str:
        """Return the id of the MLflow run of the run itself. `started_at`, in seconds since the epoch, is its start
        time if it is created."""
        self.main_run_id = self.find_or_create_part("", self.run.name, int(started_at * 1000) or None)
        return self.main_run_id

    def find_or_create_part(
        self, part: str, name: str, start_time: int | None, tags: dict[str, str] | None = None
    ) -> str:
        """Return the id of the MLflow run for the run or one of its child runs. The MLflow run is created if missing.

        Args:
            part: name of the child run, "" for the run itself; the tag by which the MLflow run is found.
            name: shown in the UI.
            start_time: milliseconds since the epoch, of a new MLflow run.
            tags: further tags of a new MLflow run.
        """
        key = _part_tags(self.run, part)
        return self.find_or_create(key, name, start_time, {"penstock.store": self.run.store_uri, **(tags or {})})

    def find_part(self, part: str) -> Run | None:
        """Return a child run of the run, or None if MLflow does not have it."""
        return self.find(_part_tags(self.run, part))

    def find_or_create(self, key: dict[str, str], name: str, start_time: int | None, tags: dict[str, str]) -> str:
        """Return the id of the MLflow run with the tags `key`. It is created with these and with `tags` if missing."""
        cached = tuple(key.values())
        if cached not in self._ids:
            run = self.find(key)
            if run is None:
                run = self.client.create_run(self.experiment_id, start_time, {**key, **tags}, name)
            self._ids[cached] = run.info.run_id
        return self._ids[cached]

    def find(self, key: dict[str, str]) -> Run | None:
        """Return the oldest MLflow run with the given tags, or None."""
        return next(iter(self.find_all(key, max_results=1)), None)

    def find_all(self, key: dict[str, str], max_results: int = 100) -> list[Run]:
        """Return the MLflow runs with the given tags, the oldest first."""
        experiment = self._find_experiment()
        if experiment is None:
            return []
        where = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in key.items())
        order = ["attributes.start_time ASC"]
        return self.client.search_runs([experiment], where, max_results=max_results, order_by=order)

    def url(self, kind: str, id: str, path: str = "") -> str:
        """Return the URL of a page, relative to the server: of a run (kind "runs") or model ("models")."""
        return f"#/experiments/{self.experiment_id}/{kind}/{id}{path}?{VIEW}"

    def add_links(self, run_id: str, links: list[Link], text: str | None = None) -> None:
        """Add links to the page of an MLflow run, and `text` to its description if it does not have one."""
        from mlflow.entities import RunTag

        from penstock.storage.tracking.mlflow.links import link_tags

        tags = link_tags(self.client.get_run(run_id).data.tags, links, text)
        if tags:
            self.client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])

    @property
    def _database(self) -> Path | None:
        path = self.uri.removeprefix("sqlite:///")
        return None if path == self.uri else Path(path).absolute()

    def _find_experiment(self) -> str | None:
        """Return the id of the run's experiment, or None if MLflow does not have it."""
        if self._experiment_id is None:
            if self._database is not None:
                update_artifact_paths(self._database, self.run.experiment)
            existing = self.client.get_experiment_by_name(self.run.experiment)
            self._experiment_id = existing.experiment_id if existing else None
        return self._experiment_id


def _part_tags(run: TrackedRun, part: str) -> dict[str, str]:
    return {"penstock.run": run.name, "penstock.identity": run.identity, "penstock.part": part or "run"}
