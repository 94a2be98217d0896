"""What the page of a run shows besides its commits: description, source, user, models that it started with, forks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlflow.entities import LoggedModelInput, LoggedModelOutput, RunTag
from mlflow.utils import mlflow_tags

from penstock.storage.history.run_record import RunRecord, read_run_record
from penstock.storage.history.starts import read_starts
from penstock.storage.refs import ORIGINS, CheckpointRef, Commit, RunKeys, attempt_in_path, commit_key
from penstock.storage.tracking.lineage import Lineage
from penstock.storage.tracking.mlflow.links import Link
from penstock.storage.tracking.mlflow.models import MlflowModels, short_fingerprint
from penstock.storage.tracking.mlflow.runs import MlflowRuns
from penstock.storage.tracking.mlflow.values import to_mlflow
from penstock.storage.tracking.points import metric_points
from penstock.storage.tracking.tracker import Committed, TrackedRun

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

_PARENT = "penstock.parent"  # tag of a fork: the id of its parent
_SOURCES = ("hf_checkpoint", "checkpoint", "export")  # inputs of conversions: a directory, or files of a run


class RunPage:
    """Logs what the main run of a Penstock run shows besides its commits.

    Args:
        runs: the MLflow runs of the Penstock run.
        models: its logged models.
    """

    def __init__(self, runs: MlflowRuns, models: MlflowModels) -> None:
        self.client = runs.client
        self.runs = runs
        self.models = models
        self.base_model: LoggedModel | None = None  # policy version 0, once it is known

    def update(self, main_run: str) -> None:
        """Log user, source, git commit, Prefect flow run and description, and link the run with its parent and its
        forks. All come from the records in the store; without a store nothing is logged."""
        run = self.runs.run
        record = read_run_record(run.store, RunKeys(run.name)) if run.store else None
        if run.store is None or record is None:
            return
        starts = [start for start, _ in read_starts(run.store, RunKeys(run.name))]
        tags = {
            mlflow_tags.MLFLOW_SOURCE_NAME: f"penstock {record.flow}",
            mlflow_tags.MLFLOW_SOURCE_TYPE: "LOCAL",
            mlflow_tags.MLFLOW_GIT_COMMIT: record.code_version.partition("+")[2],
            mlflow_tags.MLFLOW_USER: next((start.user for start in starts if start.user), ""),
            "penstock.flow_run": starts[-1].flow_run if starts else "",
            "penstock.code_version": record.code_version,
        }
        self.client.log_batch(main_run, tags=[RunTag(name, value) for name, value in tags.items() if value])
        links = [
            Link("Prefect flow runs", f"start {number}", start.flow_run)
            for number, start in enumerate(starts)
            if start.flow_run.startswith("http")
        ]
        self.runs.add_links(main_run, links, describe_run(run, record))
        if (parent := record.parent) and (other := read_run_record(run.store, RunKeys(parent.run))):
            self.client.set_tag(main_run, _PARENT, other.id)
            if found := self.runs.find_main_run(replace(run, name=parent.run, run_id=other.id)):
                self._link_fork(found.info.run_id, parent.run, main_run, run.name, parent.at)
        for fork in self.runs.find_all({_PARENT: record.id}):
            name = fork.data.tags["penstock.run"]
            if (of_fork := read_run_record(run.store, RunKeys(name))) and of_fork.parent:
                self._link_fork(main_run, run.name, fork.info.run_id, name, of_fork.parent.at)

    def _link_fork(self, parent_run: str, parent: str, fork_run: str, fork: str, at: int) -> None:
        """Link the MLflow runs of a fork from round `at` and of its parent."""
        link = Link("fork of", f"{parent} at round {at}", self.runs.url("runs", parent_run))
        self.runs.add_links(fork_run, [link])
        self.runs.add_links(parent_run, [Link("forks", f"{fork} at round {at}", self.runs.url("runs", fork_run))])

    # ---- models that the run started with ----------------------------------------------------------------------------

    def log_origins(self, main_run: str, lineage: Lineage) -> None:
        """Log the base, reference and teacher model of the run, as soon as the store or a commit names them."""
        store = self.runs.run.store
        if self.base_model is not None:
            return
        if store is None:
            if base := lineage.model():
                self._log_origin(main_run, "base", *base)
            return
        for role in ORIGINS:
            model = store.read_record(CheckpointRef, RunKeys(self.runs.run.name).origin_key(role))
            commit = store.committed(model.key.removesuffix(commit_key(""))) if model else None
            if model is not None and commit is not None:
                self._log_origin(main_run, role, model.key, commit)

    def _log_origin(self, main_run: str, role: str, key: str, commit: Commit) -> None:
        """Log a converted model as an input of the run, with its conversion."""
        model, sources = self._log_conversion(key, commit)
        if role == "base":
            self.base_model = model
        self.client.log_inputs(main_run, models=[LoggedModelInput(model.model_id)])
        here = Link(f"{role} model of run", self.runs.run.name, self.runs.url("runs", main_run))
        for source in (model, *sources):
            self.models.add_links(source, [here])
        links = [self.models.link(f"source of the {role} model", source) for source in sources]
        self.runs.add_links(main_run, [self.models.link(f"{role} model", model), *links])

    def _log_conversion(self, key: str, commit: Commit) -> tuple[LoggedModel, list[LoggedModel]]:
        """Log the conversion of a source model as an MLflow run, which all runs with the same model share. Return the
        converted model and its sources: a directory, or the export or a checkpoint of another run, or both if the
        directory is a copy."""
        attempt = commit.attempt or key
        name = f"convert-{short_fingerprint(key)}"
        start_time = int((commit.created_at - sum(commit.seconds.values())) * 1000)
        tags = {"penstock.commit": key, "penstock.store": self.runs.run.store_uri}
        run_id = self.runs.find_or_create({"penstock.attempt": attempt}, name, start_time, tags)
        model = self.models.of_commit(key, commit, run_id)
        outputs = self.client.get_run(run_id).outputs
        if not (outputs and outputs.model_outputs):
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, 0)])
        links = [self.models.link("output", model)]
        here = Link("converted by", name, self.runs.url("runs", run_id))
        sources = [self._source(commit.inputs[role]) for role in _SOURCES if role in commit.inputs]
        for source in sources:
            self.client.log_inputs(run_id, models=[LoggedModelInput(source.model_id)])
            self.models.add_links(source, [here, self.models.link("converted to", model)])
            links.append(self.models.link("input", source))
        self.models.add_links(model, [here, *(self.models.link("converted from", source) for source in sources)])
        self.client.log_batch(run_id, metrics=to_mlflow(metric_points(Committed(key, commit.created_at, commit))))
        self.client.log_text(run_id, commit.model_dump_json(indent=1), "commit.json")
        self.runs.add_links(run_id, links)
        self.client.set_terminated(run_id, "FINISHED", int(commit.created_at * 1000))
        return model, sources

    def _source(self, path: str) -> LoggedModel:
        """Return the source model of a conversion: that of a run if the path leads to its export or checkpoint."""
        attempt = attempt_in_path(path)
        return (self.models.of_attempt(attempt) if attempt else None) or self.models.of_source(path)


def describe_run(run: TrackedRun, record: RunRecord) -> str:
    """Return the description of a run, as Markdown."""
    command = f"`penstock {record.flow}` with Penstock {record.code_version}"
    return f"{command}, store `{run.store_uri}`; more: `penstock lineage {run.name}`, `penstock report {run.name}`"
