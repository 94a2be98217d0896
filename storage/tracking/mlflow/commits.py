"""Log the commits of a run: rollouts in the main run; checkpoints, evaluations and exports in child runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mlflow.entities import LoggedModelInput, LoggedModelOutput, Param
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from penstock.storage.refs import Commit
from penstock.storage.tracking.lineage import Lineage
from penstock.storage.tracking.mlflow.datasets import (
    Rows,
    dataset_input,
    preview_table,
    prompt_dataset,
    prompt_files,
    read_preview,
    shards_dataset,
)
from penstock.storage.tracking.mlflow.links import Link
from penstock.storage.tracking.mlflow.models import MlflowModels
from penstock.storage.tracking.mlflow.registry import MlflowRegistry
from penstock.storage.tracking.mlflow.run_page import RunPage
from penstock.storage.tracking.mlflow.runs import MlflowRuns
from penstock.storage.tracking.mlflow.traces import MlflowTraces
from penstock.storage.tracking.mlflow.values import MAX_DATASETS, MAX_METRICS, MAX_PARAMS, chunks, to_mlflow
from penstock.storage.tracking.points import metric_points
from penstock.storage.tracking.tracker import Committed

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, LoggedModel, Run

_MAX_TABLES = 50  # tables listed on a run's page; the list is stored in a tag of at most 8,000 characters
_MAX_SHARD_LINKS = 20  # previews of shards that a train run links to, the newest


class MlflowCommits:
    """Logs commits as MLflow objects.

    Args:
        runs: the MLflow runs of the Penstock run.
        models: its logged models.
        run_page: what the main run shows besides commits.
    """

    def __init__(self, runs: MlflowRuns, models: MlflowModels, run_page: RunPage) -> None:
        self.client = runs.client
        self.runs = runs
        self.models = models
        self.run_page = run_page
        self.registry = MlflowRegistry(runs, models)
        self.traces = MlflowTraces(runs)
        self._previews: dict[str, Rows] = {}  # prompt file -> its first rows
        self._logged_tables: set[tuple[str, str]] = set()  # MLflow run and artifact path

    def log(self, main_run: str, key: str, commit: Commit, lineage: Lineage) -> list[DatasetInput]:
        """Log a commit, except for what the caller logs in the main run together with that of other commits: its
        metrics, and the returned data sets."""
        if lineage.is_copy(key, commit):  # its artifacts are MLflow objects of the fork's parent
            return []
        self.run_page.log_origins(main_run, lineage)
        part = lineage.child_run_name(key, commit)
        text = commit.model_dump_json(indent=1)
        if commit.kind == "model":
            return []
        if not part:
            self.client.log_text(main_run, text, f"commits/{key.removeprefix(f'runs/{self.runs.run.name}/')}")
            return self._log_rollout(main_run, key, commit, lineage) if commit.kind == "rollout" else []
        start_time = int((commit.created_at - sum(commit.seconds.values())) * 1000)
        tags = {"mlflow.parentRunId": main_run, "penstock.commit": key}
        child = self.runs.find_or_create_part(part, part, start_time, tags)
        links = [Link("part of", self.runs.run.name, self.runs.url("runs", main_run))]
        match commit.kind:
            case "checkpoint":
                links += self._log_checkpoint(main_run, child, key, commit, lineage)
            case "eval":
                links += self._log_eval(child, key, commit, lineage)
            case "export":
                links += self._log_export(main_run, child, key, commit, lineage)
        self.client.log_text(child, text, "commit.json")
        self.runs.add_links(child, links)
        self.client.set_terminated(child, "FINISHED", int(commit.created_at * 1000))
        if commit.kind in ("checkpoint", "eval"):
            self.registry.register_evaluated(commit.policy_version, commit.created_at, lineage)
        return []

    # ---- kinds of commits --------------------------------------------------------------------------------------------

    def _log_rollout(self, main_run: str, key: str, commit: Commit, lineage: Lineage) -> list[DatasetInput]:
        """Log previews of a rollout's samples and prompt files. Return its data sets: shards and prompt files."""
        inputs, previews = self._prompt_inputs(commit)
        if rows := commit.state.get("shown"):
            previews[_samples_path(commit)] = rows
        listed = [f"samples/{index:06d}.json" for index in sorted(lineage.rounds_with_samples())]
        self._log_tables(main_run, previews, listed)
        if commit.files:
            shards = shards_dataset(key, commit, self.runs.run.store_uri)
            inputs.append(dataset_input(shards, "rollout", commit))
            checkpoint = lineage.latest_checkpoint(commit.policy_version, commit.created_at)
            model = self.models.of_commit(*checkpoint) if checkpoint else self.run_page.base_model
            self.traces.log_round(main_run, commit, shards.name, model)
        return inputs

    def _log_checkpoint(self, main_run: str, child: str, key: str, commit: Commit, lineage: Lineage) -> list[Link]:
        """Log a checkpoint: the train run with its metrics, parameters and shards, and the model. Return the links of
        the train run."""
        rollouts = lineage.consumed_rollouts(commit.index)
        inputs = [dataset_input(shards_dataset(k, c, self.runs.run.store_uri), "training", c) for k, c in rollouts]
        for datasets in chunks(inputs, MAX_DATASETS):
            self.client.log_inputs(child, datasets=datasets)
        steps = [Committed(key, step.created_at, step) for key, step in lineage.steps(commit.index)]
        points = [point for step in steps for point in metric_points(step)]
        for metrics in chunks(to_mlflow(points), MAX_METRICS):
            self.client.log_batch(child, metrics=metrics)
        params = self.client.get_run(main_run).data.params.items()
        for some in chunks([Param(k, v) for k, v in params if k.startswith("train.")], MAX_PARAMS):
            self.client.log_batch(child, params=some)

        model = self.models.of_commit(key, commit, child)
        self._log_output(child, model, commit.index)
        self._log_output(main_run, model, commit.index)
        name = f"{self.runs.run.name}/{lineage.child_run_name(key, commit)}"
        here = self.runs.url("runs", child)
        self.models.add_links(model, [Link("made by", name, here), self._main_link(main_run)])
        links = [self.models.link("output", model)]
        previewed = [c for k, c in rollouts if c.state.get("shown") and not lineage.is_copy(k, c)]
        for rollout in previewed[-_MAX_SHARD_LINKS:]:
            page = self.runs.url("runs", main_run, f"/artifacts/{_samples_path(rollout)}")
            links.append(Link("samples of the rollouts", f"{rollout.index:06d}", page))
        if before := self._policy(lineage.previous_checkpoint(commit.index), lineage):
            self.client.log_inputs(child, models=[LoggedModelInput(before.model_id)])
            self.models.add_links(before, [Link("trained in", name, here)])
            links.append(self.models.link("input", before))
        for evaluation in lineage.evaluations(commit.index):
            if early := self._find_part(evaluation, lineage):  # it was logged before the checkpoint
                link = self._log_scores(early.info.run_id, early.info.run_name, *evaluation, model)
                self.runs.add_links(early.info.run_id, [link])
        for evaluation in lineage.evaluations_without_checkpoint(commit.index):
            other = self._find_part(evaluation, lineage)
            links += self._link_parts(child, name, "evaluated during training in", other, "policy trained in")
        return links

    def _log_eval(self, child: str, key: str, commit: Commit, lineage: Lineage) -> list[Link]:
        """Log an evaluation: its prompts, samples and metrics, which belong to the evaluated model, too. Return the
        links of the child run."""
        inputs, previews = self._prompt_inputs(commit)
        if rows := commit.state.get("shown"):
            previews[_samples_path(commit)] = rows
        self._log_tables(child, previews, list(previews))
        name = f"{self.runs.run.name}/{lineage.child_run_name(key, commit)}"
        links = []
        if original := lineage.scored_again(commit):
            inputs.append(
                dataset_input(shards_dataset(*original, self.runs.run.store_uri), "scored again", original[1])
            )
            other = self._find_part(original, lineage)
            links = self._link_parts(child, name, "scores the samples of", other, "scored again in")
        if commit.files:
            inputs.append(dataset_input(shards_dataset(key, commit, self.runs.run.store_uri), "samples", commit))
        if inputs:
            self.client.log_inputs(child, datasets=inputs)
        if model := self._policy(commit.policy_version, lineage):
            links.append(self._log_scores(child, lineage.child_run_name(key, commit), key, commit, model))
        else:
            points = metric_points(Committed(key, commit.created_at, commit))
            self.client.log_batch(child, metrics=to_mlflow(points))
            if later := lineage.next_checkpoint(commit.policy_version):
                other = self._find_part(later, lineage)
                links += self._link_parts(child, name, "policy trained in", other, "evaluated during training in")
        return links

    def _log_scores(self, child: str, part: str, key: str, commit: Commit, model: LoggedModel) -> Link:
        """Log the metrics of an evaluation as those of the evaluated model, too, and link the model with the child run
        `child`, whose name is `part`. Return the link to the model."""
        about = {"run_id": child, "model_id": model.model_id}
        if inputs := self._prompt_inputs(commit)[0]:
            about |= {"dataset_name": inputs[0].dataset.name, "dataset_digest": inputs[0].dataset.digest}
        points = metric_points(Committed(key, commit.created_at, commit))
        self.client.log_batch(child, metrics=to_mlflow(points, about))
        self.client.log_inputs(child, models=[LoggedModelInput(model.model_id)])
        name = f"{self.runs.run.name}/{part}"
        self.models.add_links(model, [Link("evaluated in", name, self.runs.url("runs", child))])
        return self.models.link("evaluated model", model)

    def _log_export(self, main_run: str, child: str, key: str, commit: Commit, lineage: Lineage) -> list[Link]:
        """Log an export as a model of its own, linked with its checkpoint. Return the links of the child run."""
        model = self.models.of_commit(key, commit, child)
        self._log_output(child, model, commit.index)
        self._log_output(main_run, model, commit.index)
        name = f"{self.runs.run.name}/{lineage.child_run_name(key, commit)}"
        here = self.runs.url("runs", child)
        links = [Link("made by", name, here), self._main_link(main_run)]
        checkpoint = self._policy(commit.policy_version, lineage)
        if checkpoint:
            self.client.log_inputs(child, models=[LoggedModelInput(checkpoint.model_id)])
            self.models.add_links(checkpoint, [self.models.link("exported as", model), Link("exported in", name, here)])
            links.append(self.models.link("exported from", checkpoint))
        self.models.add_links(model, links)
        return [self.models.link("output", model), *([self.models.link("input", checkpoint)] if checkpoint else [])]

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _policy(self, version: int, lineage: Lineage) -> LoggedModel | None:
        """Return the logged model of a policy version: a checkpoint, or the base model for version 0."""
        if checkpoint := lineage.checkpoint(version):
            return self.models.of_commit(*checkpoint)
        return self.run_page.base_model if version == 0 else None

    def _prompt_inputs(self, commit: Commit) -> tuple[list[DatasetInput], dict[str, Rows]]:
        """Return the prompt files of a commit as data sets, and their previews by artifact path."""
        inputs, previews = [], {}
        for index, path in enumerate(prompt_files(commit)):
            rows = self._previews.setdefault(path, read_preview(path))
            dataset = prompt_dataset(commit, index, path, rows)
            inputs.append(dataset_input(dataset, "prompts"))
            if rows:
                previews[f"prompts/{dataset.name}-{dataset.digest}.json"] = rows
        return inputs, previews

    def _log_tables(self, run_id: str, tables: dict[str, Rows], listed: list[str]) -> None:
        """Log tables by artifact path, and list them and the last of `listed` as tables on the run's page.

        `log_table` is not used, since it would append to an existing table.
        """
        for path, rows in tables.items():
            if (run_id, path) not in self._logged_tables:
                self.client.log_text(run_id, preview_table(rows), path)
                self._logged_tables.add((run_id, path))
        if tables:
            paths = list(dict.fromkeys([*tables, *listed[-_MAX_TABLES:]]))
            text = json.dumps([{"path": path, "type": "table"} for path in sorted(paths)])
            self.client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, text)

    def _log_output(self, run_id: str, model: LoggedModel, step: int) -> None:
        """Log a model as an output of an MLflow run, once."""
        outputs = self.client.get_run(run_id).outputs
        if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])

    def _find_part(self, of: tuple[str, Commit], lineage: Lineage) -> Run | None:
        """Return the child run of a commit (key, commit), or None if MLflow does not have it yet, or if it belongs to a
        fork's parent."""
        return self.runs.find_part(lineage.child_run_name(*of))

    def _link_parts(self, child: str, name: str, role: str, other: Run | None, role_here: str) -> list[Link]:
        """Link another child run to a child run. Return the links in the other direction.

        Args:
            child: id of the child run.
            name: its title, with the name of the run.
            role: what the other child run is to this one.
            other: the other child run; None: MLflow does not have it.
            role_here: what this child run is to the other one.
        """
        if other is None:
            return []
        self.runs.add_links(other.info.run_id, [Link(role_here, name, self.runs.url("runs", child))])
        title = f"{self.runs.run.name}/{other.info.run_name}"
        return [Link(role, title, self.runs.url("runs", other.info.run_id))]

    def _main_link(self, main_run: str) -> Link:
        return Link("run", self.runs.run.name, self.runs.url("runs", main_run))


def _samples_path(commit: Commit) -> str:
    return f"samples/{commit.index:06d}.json"
