"""The tracker for MLflow. A Penstock run is an MLflow run with child runs (lineage.py), a checkpoint is a logged
model, rollout shards and evaluation prompts are MLflow data sets.

Delivery is idempotent: MLflow runs and models are found by their tags, and MLflow identifies a metric point by run,
name, step, time and value, which are all equal when a record is sent again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from penstock.storage.refs import Commit
from penstock.storage.secrets import redact_url
from penstock.storage.tracking.lineage import Lineage, eval_name_from_key
from penstock.storage.tracking.points import MetricPoint, flatten_config, metric_points
from penstock.storage.tracking.tracker import Committed, Record, ReportWritten, RunEnded, RunStarted, TrackedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import Dataset, LoggedModel, Metric

T = TypeVar("T")

_FINAL = {
    "INVALID_PARAMETER_VALUE",
    "BAD_REQUEST",
    "MALFORMED_REQUEST",
}  # MLflow error codes for which retrying is useless
_FORBIDDEN = re.compile(r"[^\w\-./: ]")  # characters that MLflow rejects in names, for instance "@"
_MAX_METRICS, _MAX_PARAMS, _MAX_DATASETS = 1000, 100, 100  # MLflow's limits per request
_MAX_PARAM = 6000  # characters of a parameter's value
_MAX_TABLES = 50  # tables listed on a run's page; the list is stored in a tag of at most 8,000 characters
_CURVE_KINDS = ("checkpoint", "eval")  # kinds of commits after which the reward curve is redrawn
_SHARD_COLUMNS = ("prompt", "response", "label", "reward")


class MlflowTracker:
    """The tracker for MLflow, for one Penstock run."""

    name: ClassVar[str] = "MLflow"
    resend_all: ClassVar[bool] = False

    def __init__(self, uri: str, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox retries
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault(
            "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"
        )  # MLflow would print two lines for every child run
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(
                logging.CRITICAL
            )  # their errors are also raised, and logged by delivery.py
        self.uri = uri
        self.run = run
        self.client = MlflowClient(uri)
        self._experiment_id: str | None = None
        self._identity: str | None = None  # in the tags of the MLflow runs, once it is known
        self._run_ids: dict[str, str] = {}  # name of the child run ("" for the run itself) -> MLflow run id
        self._models: dict[int, LoggedModel] = {}  # policy version -> model

    @property
    def page(self) -> str | None:
        """Return the URL of the run's page, or None if MLflow is a database without a server."""
        if not self.uri.startswith("http") or "" not in self._run_ids:
            return None
        where = f"experiments/{self._experiment_id}/runs/{self._run_ids['']}"
        return f"{redact_url(self.uri).rstrip('/')}/#/{where}?workflowType=machine_learning"

    def deliver(self, records: Sequence[Record], lineage: Lineage) -> None:
        """Send records to MLflow in the given order. Metrics of the main run are collected into few requests."""
        points: list[Metric] = []
        for record in records:
            match record:
                case RunStarted():
                    self._log_start(record)
                case Committed():
                    self._log_commit(record.key, record.commit, lineage)
                case ReportWritten():
                    if content := self.run.read_file(record.store_key):
                        self.client.log_text(self._find_or_create_main_run(record.at), content.decode(), "report.html")
            points += _to_mlflow(metric_points(record))
        main_run = self._find_or_create_main_run(records[0].at)
        for chunk in _chunks(points, _MAX_METRICS):
            self.client.log_batch(main_run, metrics=chunk)
        ends = [record for record in records if isinstance(record, RunEnded)]
        changed = any(isinstance(record, Committed) and record.commit.kind in _CURVE_KINDS for record in records)
        if (changed or ends) and (figure := reward_curve(self.run.name, lineage)):
            self.client.log_figure(main_run, figure, "reward.png")
        if ends and records[-1] is ends[-1]:  # otherwise a start follows the end: the run was resumed
            self.client.set_terminated(main_run, ends[-1].status, int(ends[-1].at * 1000))

    def is_permanent_refusal(self, error: Exception) -> bool:
        """Return whether `error`, raised by `deliver`, means that MLflow would refuse the same record again."""
        return getattr(error, "error_code", None) in _FINAL

    # ---- runs --------------------------------------------------------------------------------------------------------

    def _log_start(self, record: RunStarted) -> None:
        from mlflow.entities import Param

        run_id = self._find_or_create_main_run(record.at)
        run = self.client.get_run(run_id)
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        if run.data.tags.get("penstock.store") != self.run.store_uri:  # the store was moved
            self.client.set_tag(run_id, "penstock.store", self.run.store_uri)
        params = dict(flatten_params(record.config))
        known = run.data.params  # MLflow parameters are immutable, so a value changed on resume becomes a tag
        new = [Param(name, value) for name, value in params.items() if name not in known]
        for chunk in _chunks(new, _MAX_PARAMS):
            self.client.log_batch(run_id, params=chunk)
        for name, value in params.items():
            if known.get(name, value) != value:
                self.client.set_tag(run_id, f"changed.{name}", value)

    def _find_or_create_main_run(self, started_at: float) -> str:
        return self._find_or_create_run(
            "", self.run.name, int(started_at * 1000) or None, {"penstock.store": self.run.store_uri}
        )

    def _find_or_create_run(self, part: str, name: str, start_time: int | None, tags: dict[str, str]) -> str:
        """Return the id of the MLflow run for the run or one of its child runs. The MLflow run is created if missing.

        Args:
            part: name of the child run, "" for the run itself; the tag by which the MLflow run is found.
            name: shown in the UI.
            start_time: milliseconds since the epoch, of a new MLflow run.
            tags: further tags of a new MLflow run.
        """
        if part not in self._run_ids:
            key = self._key_tags(self._find_identity(), part)
            run_id = self._find_run(key)
            if run_id is None:
                experiment = self._find_or_create_experiment()
                run_id = self.client.create_run(experiment, start_time, {**key, **tags}, name).info.run_id
            self._run_ids[part] = run_id
        return self._run_ids[part]

    def _find_identity(self) -> str:
        """Return the identity in the tags of the MLflow run: one of an earlier release if such an MLflow run exists."""
        if self._identity is None:
            known = (i for i in self.run.identities if self._find_run(self._key_tags(i, "")))
            self._identity = next(known, self.run.identities[0])
        return self._identity

    def _key_tags(self, identity: str, part: str) -> dict[str, str]:
        return {"penstock.run": self.run.name, "penstock.identity": identity, "penstock.part": part or "run"}

    def _find_run(self, key: dict[str, str]) -> str | None:
        where = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in key.items())
        experiment = self._find_or_create_experiment()
        runs = self.client.search_runs([experiment], where, max_results=1, order_by=["attributes.start_time ASC"])
        return str(runs[0].info.run_id) if runs else None

    def _find_or_create_experiment(self) -> str:
        if self._experiment_id is None:
            name, location = self.run.experiment, None
            if self.uri.startswith(
                "sqlite:///"
            ):  # without a server, MLflow would write artifacts to the current directory
                location = (Path(self.uri.removeprefix("sqlite:///")).parent / "artifacts" / name).as_uri()
            existing = self.client.get_experiment_by_name(name)
            self._experiment_id = existing.experiment_id if existing else self.client.create_experiment(name, location)
        return self._experiment_id

    # ---- commits -----------------------------------------------------------------------------------------------------

    def _log_commit(self, key: str, commit: Commit, lineage: Lineage) -> None:
        """Log a commit, except for its metrics in the main run; the caller logs them together with those of other
        commits."""
        main_run = self._find_or_create_main_run(commit.created_at)
        text = commit.model_dump_json(indent=1)
        part = lineage.child_run_name(key, commit)
        if not part:
            self.client.log_text(main_run, text, f"commits/{key.removeprefix(f'runs/{self.run.name}/')}")
            self._log_samples(main_run, commit, lineage)
            return
        start_time = int((commit.created_at - sum(commit.seconds.values())) * 1000)
        child = self._find_or_create_run(
            part, part, start_time, {"mlflow.parentRunId": main_run, "penstock.commit": key}
        )
        match commit.kind:
            case "model":
                self._log_model_output(child, 0, "base", key, commit)
            case "checkpoint":
                self._log_checkpoint(child, key, commit, lineage)
            case "eval":
                self._log_eval(child, key, commit, lineage)
            case "export":
                self._log_model_input(child, commit.policy_version)
                self.client.set_tag(child, "penstock.uri", self._attempt_uri(commit))
        self.client.log_text(child, text, "commit.json")
        self.client.set_terminated(child, "FINISHED", int(commit.created_at * 1000))

    def _log_samples(self, run_id: str, commit: Commit, lineage: Lineage) -> None:
        """Log a commit's sample preview as a table. `log_table` is not used, since it would append to an existing
        table."""
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        rows = commit.state.get("shown")
        if not rows:
            return
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self.client.log_text(run_id, json.dumps(table, ensure_ascii=False), f"samples/{commit.index:06d}.json")
        indices = {commit.index} | (lineage.rounds_with_samples() if commit.kind == "rollout" else set())
        tables = [{"path": f"samples/{i:06d}.json", "type": "table"} for i in sorted(indices)[-_MAX_TABLES:]]
        self.client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(tables))

    def _log_checkpoint(self, child: str, key: str, commit: Commit, lineage: Lineage) -> None:
        from mlflow.entities import DatasetInput, InputTag

        training = InputTag("mlflow.data.context", "training")
        rollouts = [rollout for _, rollout in lineage.consumed_rollouts(commit.index)]
        inputs = [
            DatasetInput(_shards_dataset(rollout, self._attempt_uri(rollout)), [training]) for rollout in rollouts
        ]
        for chunk in _chunks(inputs, _MAX_DATASETS):
            self.client.log_inputs(child, datasets=chunk)
        self._log_model_input(child, lineage.previous_checkpoint(commit.index))
        self._log_model_output(child, commit.index, f"checkpoint-{commit.index:06d}", key, commit)

    def _log_eval(self, child: str, key: str, commit: Commit, lineage: Lineage) -> None:
        from mlflow.entities import DatasetInput, InputTag

        # The same MLflow data set for all policy versions, so that MLflow can compare them.
        path = commit.inputs.get("prompt_data/0")
        digest = hashlib.sha256((path or commit.attempt or key).encode()).hexdigest()[:8]  # the same in a moved store
        data = _dataset(eval_name_from_key(key), digest, path or self._attempt_uri(commit), None, {})
        self.client.log_inputs(child, datasets=[DatasetInput(data, [InputTag("mlflow.data.context", "eval")])])
        links = {"dataset_name": data.name, "dataset_digest": data.digest, "run_id": child}
        if model := self._find_model(commit.policy_version):
            links["model_id"] = model.model_id
        points = metric_points(Committed(key, commit.created_at, commit))
        self.client.log_batch(child, metrics=_to_mlflow(points, links))
        self._log_samples(child, commit, lineage)

    # ---- models ------------------------------------------------------------------------------------------------------

    def _log_model_input(self, child: str, version: int) -> None:
        from mlflow.entities import LoggedModelInput

        if model := self._find_model(version):
            self.client.log_inputs(child, models=[LoggedModelInput(model.model_id)])

    def _log_model_output(self, child: str, version: int, name: str, key: str, commit: Commit) -> None:
        """Log a policy version as an output of a child run."""
        from mlflow.entities import LoggedModelOutput

        model = self._find_model(version)
        if model is None:
            identity = self._find_identity()
            tags = {"penstock.identity": identity, "penstock.version": str(version), "penstock.commit": key}
            params = {"uri": self._attempt_uri(commit), "policy_version": str(version), "format": "torch_dist"}
            model = self.client.create_logged_model(
                self._find_or_create_experiment(), name, child, tags, params, "checkpoint"
            )
            self._models[version] = model
        self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(child).outputs
        if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(child, [LoggedModelOutput(model.model_id, version)])

    def _find_model(self, version: int) -> LoggedModel | None:
        if version not in self._models:
            where = f"tags.`penstock.identity` = '{self._find_identity()}' and tags.`penstock.version` = '{version}'"
            models = self.client.search_logged_models([self._find_or_create_experiment()], where, max_results=1)
            if not models:
                return None
            self._models[version] = models[0]
        return self._models[version]

    def _attempt_uri(self, commit: Commit) -> str:
        return f"{self.run.store_uri.rstrip('/')}/{commit.attempt}"


def flatten_params(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values of a nested config as MLflow parameters: dotted name, text. Secrets are left out."""
    for name, value in flatten_config(values):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield replace_forbidden_characters(name), text[:_MAX_PARAM]


def replace_forbidden_characters(name: str) -> str:
    """Replace the characters that MLflow rejects in names: `eval/aime/pass@8` becomes `eval/aime/pass_at_8`."""
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))


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


def _shards_dataset(commit: Commit, uri: str) -> Dataset:
    """Return the committed shards of a rollout as an MLflow data set."""
    profile = {"num_rows": commit.num_samples(), "num_files": len(commit.files)}
    digest = hashlib.sha256("".join(file.xxh3 for file in commit.files).encode()).hexdigest()[:8]
    types = {"reward": "double"}
    columns = [{"type": types.get(name, "string"), "name": name, "required": True} for name in _SHARD_COLUMNS]
    return _dataset(f"rollout-{commit.index:06d}", digest, uri, json.dumps({"mlflow_colspec": columns}), profile)


def _dataset(name: str, digest: str, uri: str, schema: str | None, profile: dict[str, Any]) -> Dataset:
    """Return an MLflow data set. Its source has one of MLflow's types (`local`, `s3`, ...), so that the UI can open
    it."""
    from mlflow.entities import Dataset

    source_type = uri.split("://")[0] if "://" in uri else "local"
    return Dataset(
        replace_forbidden_characters(name), digest, source_type, json.dumps({"uri": uri}), schema, json.dumps(profile)
    )


def _to_mlflow(points: Sequence[MetricPoint], links: dict[str, str] | None = None) -> list[Metric]:
    """Return metric points as MLflow metrics, linked to a model and a data set if `links` is given."""
    from mlflow.entities import Metric

    return [
        Metric(replace_forbidden_characters(point.name), point.value, int(point.at * 1000), point.step, **(links or {}))
        for point in points
    ]


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
