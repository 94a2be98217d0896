"""The tracker for MLflow: receives the records of a run, and logs each as MLflow objects.

A Penstock run is one MLflow run, the main run, with rollouts, description, source, user, links to the models that it
started with and to forks, and the reward curve. Its checkpoints, evaluations and exports are child runs.

A fork contains copies of its parent's commits. Their metrics are logged for the fork, too, but their artifacts are
MLflow objects of the parent only.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from matplotlib.figure import Figure  # not pyplot, which is not thread-safe
from mlflow import MlflowClient
from mlflow.entities import LoggedModelInput, Param, RunTag
from mlflow.utils import mlflow_tags

from penstock.storage.commit import (
    CheckpointRef,
    Commit,
    RunKeys,
    evaluation_rewards,
    training_rewards,
)
from penstock.storage.history.run_record import read_run_record, read_starts
from penstock.storage.secrets import redact_url
from penstock.storage.store import origin_roles
from penstock.storage.tracking.mlflow.mlflow_models import MlflowModels, short_fingerprint
from penstock.storage.tracking.mlflow.mlflow_runs import (
    CHARTS,
    MAX_DATASETS,
    MAX_METRICS,
    MAX_PARAMS,
    ROUNDS,
    SECTION,
    Link,
    MlflowRuns,
    chunks,
    describe_results,
    overview_points,
    replace_forbidden_characters,
    runs_url,
    store_view,
    to_mlflow,
)
from penstock.storage.tracking.mlflow.mlflow_samples import (
    MlflowTraces,
    Rows,
    dataset_input,
    prompt_dataset,
    read_preview,
    shards_dataset,
)
from penstock.storage.tracking.tracker import (
    Committed,
    Record,
    ReportWritten,
    RunCommits,
    RunEnded,
    RunStarted,
    TrackedRun,
    Tracker,
    flatten_config,
    metric_points,
)
from penstock.storage.web.login import with_login

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, LoggedModel, Metric, Run

# MLflow's error codes for which retrying is useless.
_FINAL = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}
_MAX_PARAM = 6000  # characters of a parameter's value
Page = tuple[str, str]  # title and URL of a page of MLflow
_MAX_TABLES = 50  # tables listed on a run's page; the list is stored in a tag of at most 8,000 characters
_MAX_SHARD_LINKS = 20  # the newest sample previews, to which the child run of a checkpoint links
_PARENT = "penstock.parent"  # tag of a fork's main run: `id` in run.json of the parent
_SOURCES = ("hf_checkpoint", "checkpoint", "export")  # roles of a conversion's inputs: a directory, or files of a run


class RunPage:
    """Logs what the main run shows besides commits: its source and user, results, links, the models it started with."""

    def __init__(self, runs: MlflowRuns, models: MlflowModels) -> None:
        self.client = runs.client
        self.runs = runs
        self.models = models
        self.base_model: LoggedModel | None = None  # policy version 0, once it is known

    def update(self, main_run: str) -> None:
        """Log user, source, git commit and Prefect flow run in the MLflow run `main_run`, and link it with the MLflow
        runs of its parent and its forks. All come from records in the store; without a store nothing is logged."""
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
            for number, start in enumerate(starts, 1)
            if start.flow_run.startswith("http")
        ]
        self.runs.add_links(main_run, links)
        if (parent := record.parent) and (other := read_run_record(run.store, RunKeys(parent.run))):
            self.client.set_tag(main_run, _PARENT, other.id)
            if found := self.runs.find_part("", replace(run, name=parent.run, run_id=other.id)):
                self._link_fork(found.info.run_id, parent.run, main_run, run.name, parent.at)
        for fork in self.runs.find_all({_PARENT: record.id}):
            name = fork.data.tags["penstock.run"]
            if (of_fork := read_run_record(run.store, RunKeys(name))) and of_fork.parent:
                self._link_fork(main_run, run.name, fork.info.run_id, name, of_fork.parent.at)

    def describe(self, main_run: str, commits: RunCommits) -> None:
        """Write the results of the run and links to its pages at the beginning of its description, and tag the run with
        the number of its rounds."""
        pages = {"charts": CHARTS, "samples": "/traces", "files": "/artifacts"}
        links = [f"[{title}]({self.runs.url('runs', main_run, tab)})" for title, tab in pages.items()]
        links.append(f"[all runs]({runs_url(self.runs.experiment_id)})")
        name, store = self.runs.run.name, shlex.quote(self.runs.run.store_uri)
        commands = f"`penstock show {name} --store {store}`, `penstock lineage {name} --store {store}`"
        text = f"{describe_results(commits)}\n\n{', '.join(links)}\n\nIn a terminal: {commands}"
        self.runs.add_links(main_run, [], text)
        self.client.set_tag(main_run, ROUNDS, str(len(commits.commits["step"])))

    def _link_fork(self, parent_run: str, parent: str, fork_run: str, fork: str, at: int) -> None:
        """Link the MLflow runs of a fork (id `fork_run`, name `fork`) and of its parent to each other. The fork begins
        at round `at`."""
        link = Link("fork of", f"{parent} at round {at}", self.runs.url("runs", parent_run))
        self.runs.add_links(fork_run, [link])
        self.runs.add_links(parent_run, [Link("forks", f"{fork} at round {at}", self.runs.url("runs", fork_run))])

    # ---- models that the run started with ----------------------------------------------------------------------------

    def log_origins(self, main_run: str, commits: RunCommits) -> None:
        """Log the models that the run started with (`origin_roles`), unless they are logged or not known yet."""
        store = self.runs.run.store
        if self.base_model is not None:
            return
        if store is None:
            if base := commits.commits["model"].get(0):
                self._log_origin(main_run, "base", *base)
            return
        for role in origin_roles(store, RunKeys(self.runs.run.name)):
            model = store.read_record(CheckpointRef, RunKeys(self.runs.run.name).origin_key(role))
            commit = store.read_record(Commit, model.key) if model else None
            if model is not None and commit is not None:
                self._log_origin(main_run, role, model.key, commit)

    def _log_origin(self, main_run: str, role: str, key: str, commit: Commit) -> None:
        """Log a converted model, which has the given role in the run, as an input of the run, and its conversion."""
        model, sources = self._log_conversion(main_run, key, commit)
        if role == "base":
            self.base_model = model
        self.client.log_inputs(main_run, models=[LoggedModelInput(model.model_id)])
        here = Link(f"{role} model of run", self.runs.run.name, self.runs.url("runs", main_run))
        for source in (model, *sources):
            self.models.add_links(source, [here])
        links = [self.models.link(f"source of the {role} model", source) for source in sources]
        self.runs.add_links(main_run, [self.models.link(f"{role} model", model), *links])

    def _log_conversion(self, main_run: str, key: str, commit: Commit) -> tuple[LoggedModel, list[LoggedModel]]:
        """Log the conversion of a source model as an MLflow run. All runs with the same model share it; it is a child
        of the first of these runs. Return the converted model and its sources: a directory, the export or a checkpoint
        of another run, or both if the directory is a copy."""
        attempt = commit.attempt or key
        name = f"convert-{short_fingerprint(key)}"
        tags = {"penstock.commit": key, "penstock.store": self.runs.run.store_uri, "mlflow.parentRunId": main_run}
        run_id = self.runs.find_or_create({"penstock.attempt": attempt}, name, int(commit.started_at * 1000), tags)
        model = self.models.of_commit(key, commit, run_id)
        self.models.log_output(run_id, model)
        links = [self.models.link("output", model)]
        here = Link("converted by", name, self.runs.url("runs", run_id))
        sources = [self.models.of_source(commit.inputs[role]) for role in _SOURCES if role in commit.inputs]
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


class MlflowTracker(Tracker):
    """The connection of one Penstock run to MLflow. `connect_mlflow` makes it."""

    def __init__(self, uri: str, run: TrackedRun) -> None:
        # These libraries also raise the errors that they log; delivery.py logs the raised errors.
        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.uri = uri
        self.run = run
        self.client = MlflowClient(with_login(uri))
        self.runs = MlflowRuns(self.client, uri, run)
        self.wants_all = self.runs.find_part("") is None
        self.models = MlflowModels(self.runs)
        self.run_page = RunPage(self.runs, self.models)
        self.traces = MlflowTraces(self.runs)
        self._previews: dict[str, Rows] = {}  # prompt file -> its first rows
        self._logged_tables: set[tuple[str, str]] = set()  # MLflow run and artifact path
        self._in_view: set[str] = set()  # metrics for which the stored view has columns

    def deliver(self, records: Sequence[Record], commits: RunCommits) -> None:
        """Send records to MLflow in the given order. Metrics and data sets of the main run are sent together, in few
        requests."""
        points: list[Metric] = []
        inputs: list[DatasetInput] = []
        main_run = self.runs.find_or_create_part("", int(records[0].at * 1000) or None)
        self.runs.main_run_id = main_run
        page = f"{redact_url(self.uri).rstrip('/')}/{self.runs.url('runs', main_run, CHARTS)}"
        self.page = page if self.uri.startswith("http") else None  # None: MLflow is a database without a server
        for record in records:
            match record:
                case RunStarted():
                    self._log_start(main_run, record)
                case Committed():
                    inputs += self._log_commit(main_run, record.key, record.commit, commits)
                case ReportWritten() if self.run.store and (content := self.run.store.read(record.store_key)):
                    self.client.log_text(main_run, content.decode(), "report.html")
            points += to_mlflow([*overview_points(record, commits), *metric_points(record)])
        for chunk in chunks(points, MAX_METRICS):
            self.client.log_batch(main_run, metrics=chunk)
        for datasets in chunks(inputs, MAX_DATASETS):
            self.client.log_inputs(main_run, datasets=datasets)
        kinds = {record.commit.kind for record in records if isinstance(record, Committed)}
        if kinds:
            self.run_page.describe(main_run, commits)
        if new := {point.key for point in points if point.key.startswith(f"{SECTION}/")} - self._in_view:
            store_view(self.client, self.runs.experiment_id, new)
            self._in_view |= new
        ends = [record for record in records if isinstance(record, RunEnded)]
        if (ends or kinds & {"checkpoint", "eval"}) and (figure := reward_curve(self.run.name, commits)):
            self.client.log_figure(main_run, figure, "reward.png")
        if ends:
            self.run_page.log_origins(main_run, commits)
            self.run_page.update(main_run)
            self.models.update_registered()
            if records[-1] is ends[-1]:  # otherwise a start follows the end: the run was resumed
                self.client.set_terminated(main_run, ends[-1].status, int(ends[-1].at * 1000))

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return whether `error`, raised by `deliver`, means that MLflow would refuse the same record again."""
        return getattr(error, "error_code", None) in _FINAL

    def _log_start(self, run_id: str, record: RunStarted) -> None:
        run = self.client.get_run(run_id)
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        if run.data.tags.get("penstock.store") != self.run.store_uri:  # the store was moved
            self.client.set_tag(run_id, "penstock.store", self.run.store_uri)
        params: dict[str, str] = {}
        for name, value in flatten_config(record.config):
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            params[replace_forbidden_characters(name)] = text[:_MAX_PARAM]
        known = run.data.params  # MLflow parameters are immutable, so a value changed on resume becomes a tag
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for chunk in chunks(new, MAX_PARAMS):
            self.client.log_batch(run_id, params=chunk)
        for name, value in params.items():
            if known.get(name, value) != value:
                self.client.set_tag(run_id, f"changed.{name}", value)
        self.run_page.update(run_id)

    def _log_commit(self, main_run: str, key: str, commit: Commit, commits: RunCommits) -> list[DatasetInput]:
        """Log a commit, except its metrics and data sets in the main run, which the caller logs for several commits
        together. Return these data sets."""
        if commits.is_copy(key, commit):  # the artifacts of a copy are MLflow objects of the fork's parent
            return []
        self.run_page.log_origins(main_run, commits)
        if commit.kind == "model":
            return []
        text = commit.model_dump_json(indent=1)
        if not (part := commits.child_run_name(key, commit)):
            self.client.log_text(main_run, text, f"commits/{key.removeprefix(f'runs/{self.run.name}/')}")
            return self._log_rollout(main_run, key, commit, commits) if commit.kind == "rollout" else []
        tags = {"mlflow.parentRunId": main_run, "penstock.commit": key}
        child = self.runs.find_or_create_part(part, int(commit.started_at * 1000), tags)
        here = f"{self.run.name}/{part}", self.runs.url("runs", child)
        links = [Link("part of", self.run.name, self.runs.url("runs", main_run))]
        match commit.kind:
            case "checkpoint":
                links += self._log_checkpoint(main_run, child, here, key, commit, commits)
            case "eval":
                links += self._log_eval(child, here, key, commit, commits)
            case "export":
                links += self._log_export(main_run, child, here, key, commit, commits)
        self.client.log_text(child, text, "commit.json")
        self.runs.add_links(child, links)
        self.client.set_terminated(child, "FINISHED", int(commit.created_at * 1000))
        if commit.kind in ("checkpoint", "eval"):
            self.models.register_evaluated(commit.policy_version, commit.created_at, commits)
        return []

    # ---- kinds of commits --------------------------------------------------------------------------------------------
    # `child` is the id of the commit's child run, and `here` are the title and the URL of its page.

    def _log_rollout(self, main_run: str, key: str, commit: Commit, commits: RunCommits) -> list[DatasetInput]:
        """Log previews of a rollout's samples and prompt files. Return its data sets: shards and prompt files."""
        inputs, previews = self._prompt_inputs(commit)
        rollouts = [saved for _, saved in sorted(commits.commits["rollout"].items())]
        listed = [_samples_path(c) for k, c in rollouts if c.state["shown"] and not commits.is_copy(k, c)]
        self._log_tables(main_run, previews, listed)
        if commit.files:
            shards = shards_dataset(key, commit, self.run.store_uri)
            inputs.append(dataset_input(shards, "rollout", commit))
            saved = [c for v, c in commits.commits["checkpoint"].items() if v <= commit.policy_version]
            earlier = [c for c in saved if c[1].created_at <= commit.created_at]
            latest = max(earlier, key=lambda c: c[1].index, default=None)
            model = self.models.of_commit(*latest) if latest else self.run_page.base_model
            self.traces.log_round(main_run, commit, shards.name, model)
        return inputs

    def _log_checkpoint(
        self, main_run: str, child: str, here: Page, key: str, commit: Commit, commits: RunCommits
    ) -> list[Link]:
        """Log a checkpoint as a model, and the training up to it in its child run: metrics, parameters and shards.
        Return the links of the child run."""
        rollouts = commits.since_previous_checkpoint("rollout", commit.index)
        inputs = [dataset_input(shards_dataset(k, c, self.run.store_uri), "training", c) for k, c in rollouts]
        for datasets in chunks(inputs, MAX_DATASETS):
            self.client.log_inputs(child, datasets=datasets)
        steps = [
            Committed(key, step.created_at, step)
            for key, step in commits.since_previous_checkpoint("step", commit.index)
        ]
        points = [point for step in steps for point in metric_points(step)]
        for metrics in chunks(to_mlflow(points), MAX_METRICS):
            self.client.log_batch(child, metrics=metrics)
        params = self.client.get_run(main_run).data.params.items()
        for some in chunks([Param(k, v) for k, v in params if k.startswith("train.")], MAX_PARAMS):
            self.client.log_batch(child, params=some)

        model = self._log_model(main_run, child, here, key, commit)
        links = [self.models.link("output", model)]
        previewed = [c for k, c in rollouts if c.state.get("shown") and not commits.is_copy(k, c)]
        for rollout in previewed[-_MAX_SHARD_LINKS:]:
            table = self.runs.url("runs", main_run, f"/artifacts/{_samples_path(rollout)}")
            links.append(Link("samples of the rollouts", f"{rollout.index:06d}", table))
        if before := self._policy(commits.previous_checkpoint(commit.index), commits):
            self.client.log_inputs(child, models=[LoggedModelInput(before.model_id)])
            self.models.add_links(before, [Link("trained in", *here)])
            links.append(self.models.link("input", before))
        for evaluation in commits.evaluations(range(commit.index, commit.index + 1)):
            part = commits.child_run_name(*evaluation)
            if early := self.runs.find_part(part):  # the evaluation was logged before the checkpoint
                page = f"{self.run.name}/{part}", self.runs.url("runs", early.info.run_id)
                self.runs.add_links(early.info.run_id, [self._log_scores(early.info.run_id, page, *evaluation, model)])
        for evaluation in commits.evaluations(range(commits.previous_checkpoint(commit.index) + 1, commit.index)):
            other = self.runs.find_part(commits.child_run_name(*evaluation))
            links += self._link_parts(here, "evaluated during training in", other, "policy trained in")
        return links

    def _log_eval(self, child: str, here: Page, key: str, commit: Commit, commits: RunCommits) -> list[Link]:
        """Log an evaluation in its child run: prompts, samples and metrics, which are also logged for the evaluated
        model. Return the links of the child run."""
        inputs, previews = self._prompt_inputs(commit)
        self._log_tables(child, previews, list(previews))
        links = []
        original_key = commit.inputs.get("samples", "")
        if original := commits.evals.get(original_key):
            inputs.append(
                dataset_input(shards_dataset(original_key, original, self.run.store_uri), "scored again", original)
            )
            other = self.runs.find_part(commits.child_run_name(original_key, original))
            links = self._link_parts(here, "scores the samples of", other, "scored again in")
        if commit.files:
            inputs.append(dataset_input(shards_dataset(key, commit, self.run.store_uri), "samples", commit))
        if inputs:
            self.client.log_inputs(child, datasets=inputs)
        if model := self._policy(commit.policy_version, commits):
            links.append(self._log_scores(child, here, key, commit, model))
        else:
            points = metric_points(Committed(key, commit.created_at, commit))
            self.client.log_batch(child, metrics=to_mlflow(points))
            checkpoints = commits.commits["checkpoint"]
            if later := [version for version in checkpoints if version > commit.policy_version]:
                other = self.runs.find_part(commits.child_run_name(*checkpoints[min(later)]))
                links += self._link_parts(here, "policy trained in", other, "evaluated during training in")
        return links

    def _log_scores(self, child: str, here: Page, key: str, commit: Commit, model: LoggedModel) -> Link:
        """Log the metrics of an evaluation in its child run, and for the evaluated model. Link the model to the child
        run, and return the link to the model."""
        about = {"run_id": child, "model_id": model.model_id}
        if inputs := self._prompt_inputs(commit)[0]:
            about |= {"dataset_name": inputs[0].dataset.name, "dataset_digest": inputs[0].dataset.digest}
        points = metric_points(Committed(key, commit.created_at, commit))
        self.client.log_batch(child, metrics=to_mlflow(points, about))
        self.client.log_inputs(child, models=[LoggedModelInput(model.model_id)])
        self.models.add_links(model, [Link("evaluated in", *here)])
        return self.models.link("evaluated model", model)

    def _log_export(
        self, main_run: str, child: str, here: Page, key: str, commit: Commit, commits: RunCommits
    ) -> list[Link]:
        """Log an export as a model, and link it with the exported checkpoint. Return the links of its child run."""
        model = self._log_model(main_run, child, here, key, commit)
        links = [self.models.link("output", model)]
        if checkpoint := self._policy(commit.policy_version, commits):
            self.client.log_inputs(child, models=[LoggedModelInput(checkpoint.model_id)])
            self.models.add_links(checkpoint, [self.models.link("exported as", model), Link("exported in", *here)])
            self.models.add_links(model, [self.models.link("exported from", checkpoint)])
            links.append(self.models.link("input", checkpoint))
        return links

    def _log_model(self, main_run: str, child: str, here: Page, key: str, commit: Commit) -> LoggedModel:
        """Log a checkpoint or an export as a model, an output of the run and of its child run, and link it to both."""
        model = self.models.of_commit(key, commit, child)
        for run in (child, main_run):
            self.models.log_output(run, model, commit.index)
        main = Link("run", self.run.name, self.runs.url("runs", main_run))
        self.models.add_links(model, [Link("made by", *here), main])
        return model

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _policy(self, version: int, commits: RunCommits) -> LoggedModel | None:
        """Return the logged model of a policy version: a checkpoint, or the base model for version 0."""
        if checkpoint := commits.commits["checkpoint"].get(version):
            return self.models.of_commit(*checkpoint)
        return self.run_page.base_model if version == 0 else None

    def _prompt_inputs(self, commit: Commit) -> tuple[list[DatasetInput], dict[str, Rows]]:
        """Return the prompt files of a commit as data sets, and the previews of these files and of the commit's samples
        by artifact path."""
        inputs, previews = [], {}
        paths = [path for role, path in sorted(commit.inputs.items()) if role.startswith("prompt_data/")]
        for index, path in enumerate(paths):
            rows = self._previews.setdefault(path, read_preview(path))
            dataset = prompt_dataset(commit, index, path, rows)
            inputs.append(dataset_input(dataset, "prompts"))
            if rows:
                previews[f"prompts/{dataset.name}-{dataset.digest}.json"] = rows
        if shown := commit.state.get("shown"):
            previews[_samples_path(commit)] = shown
        return inputs, previews

    def _log_tables(self, run_id: str, tables: dict[str, Rows], listed: list[str]) -> None:
        """Log `tables` (artifact path -> rows), and make the run's page show them and the last paths of `listed`.

        MLflow's `log_table` would append the rows to an existing table.
        """
        for path, rows in tables.items():
            if (run_id, path) not in self._logged_tables:
                columns = list(dict.fromkeys(name for row in rows for name in row))
                data = [[row.get(name, "") for name in columns] for row in rows]
                table = json.dumps({"columns": columns, "data": data}, ensure_ascii=False)
                self.client.log_text(run_id, table, path)
                self._logged_tables.add((run_id, path))
        if tables:
            paths = list(dict.fromkeys([*tables, *listed[-_MAX_TABLES:]]))
            text = json.dumps([{"path": path, "type": "table"} for path in sorted(paths)])
            self.client.set_tag(run_id, mlflow_tags.MLFLOW_LOGGED_ARTIFACTS, text)

    def _link_parts(self, here: Page, role: str, other: Run | None, role_here: str) -> list[Link]:
        """Add a link to the page of the child run `other` (None: MLflow does not have it) that opens the page `here`.
        Return a list with the link in the other direction. `role` is what `other` is to the run of the page `here`,
        e.g. "policy trained in"; `role_here` is what this run is to `other`."""
        if other is None:
            return []
        self.runs.add_links(other.info.run_id, [Link(role_here, *here)])
        title = f"{self.run.name}/{other.info.run_name}"
        return [Link(role, title, self.runs.url("runs", other.info.run_id))]


def reward_curve(run: str, commits: RunCommits) -> Figure | None:
    """Plot mean training reward and evaluation rewards over rounds. Return None if there are no rewards."""
    training = training_rewards([commit for _, commit in commits.commits["rollout"].values()])
    evals = evaluation_rewards(list(commits.evals.values()))
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


def _samples_path(commit: Commit) -> str:
    return f"samples/{commit.index:06d}.json"
