"""What a run looks like in MLflow.

    <run>                              every metric over the rounds, the config as parameters, commit records, the reward curve,
                                       a table of some samples of every round
      convert                          -> model `base`
      train-000000-000019              data sets: the rollout shards it consumed; model in -> model out `checkpoint-000020`
      eval-000020-<task>               scores, linked to the model and to the data set
      export-000020                    model in, where the export lies

Telling the same line twice changes nothing: time stamps come from the line, runs and models are found again by tags. (MLflow's
own key of a metric point is run, name, step, time and value.)
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.refs import Commit
from storage.secrets import is_secret_name, redact_url

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mlflow.entities import Dataset, LoggedModel, Metric

_FINAL = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}  # MLflow's codes for what no second try can mend
_PLAIN = re.compile(r"[^\w\-./: ]")  # what MLflow refuses in names, "@" among it
_MAX_BATCH = {"metrics": 1000, "params": 100, "datasets": 100}  # of one MLflow request
_MAX_PARAM = 6000  # characters of a parameter's value
_MAX_TABLES = 50  # that a run's page lists as tables; their list is a tag, of which MLflow takes 8,000 characters
_SHARD_COLUMNS = ("prompt", "response", "label", "reward")


class Lineage:
    """One pipeline run's runs, models and data sets in MLflow. Raises whatever the client raises; the caller tries again."""

    def __init__(self, tracking_uri: str, experiment: str, run: str, store_uri: str) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the outbox is what tries again
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines for every part of the run
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic", "sqlalchemy", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(
                logging.CRITICAL
            )  # tracebacks of what is raised as well; the tracker says it in one line
        self.run = run
        self.store_uri = store_uri
        self.identity = hashlib.sha256(f"{store_uri}\n{run}".encode()).hexdigest()[:16]
        self.tracking_uri = tracking_uri
        self.client = MlflowClient(tracking_uri)
        self.experiment = experiment
        self._experiment_id: str | None = None
        self._runs: dict[str, str] = {}  # part of the run -> MLflow run id
        self._models: dict[int, LoggedModel] = {}  # policy version -> model
        self._history: dict[str, dict[int, tuple[str, Commit]]] = defaultdict(dict)  # kind -> index -> key, commit
        self._evals: dict[str, Commit] = {}  # by key: several data sets share an index

    @property
    def page(self) -> str | None:
        """The run's page, if MLflow is a server and knows the run."""
        if not self.tracking_uri.startswith("http") or "" not in self._runs:
            return None
        where = f"experiments/{self._experiment_id}/runs/{self._runs['']}"
        return f"{redact_url(self.tracking_uri).rstrip('/')}/#/{where}?workflowType=machine_learning"

    def remember(self, line: dict[str, Any]) -> None:
        """Take note of a line without telling MLflow; later lines refer to it."""
        if line["type"] == "commit":
            commit = Commit.model_validate(line["commit"])
            commit.state["shown"] = bool(commit.state.get("shown"))  # of all rounds their texts would be hundreds of megabytes
            self._history[commit.kind][commit.index] = (line["key"], commit)
            if commit.kind == "eval":
                self._evals[line["key"]] = commit

    def tell(self, lines: Sequence[dict[str, Any]]) -> None:
        """Tell MLflow all of the lines. Twice is as good as once."""
        points: list[Metric] = []
        curve = False
        for line in lines:
            if line["type"] == "start":
                self._start(line)
            elif line["type"] == "metrics":
                points += _points(line["metrics"], line["step"], line["at"])
            elif line["type"] == "commit":
                commit = Commit.model_validate(line["commit"])
                points += self._tell_commit(line["key"], commit)
                curve |= commit.kind in ("checkpoint", "eval")
        for some in _chunks(points, _MAX_BATCH["metrics"]):
            self.client.log_batch(self._main_run(lines[0]), metrics=some)
        ends = [line for line in lines if line["type"] == "end"]
        if (curve or ends) and (figure := self._curve()):
            self.client.log_figure(self._main_run(lines[0]), figure, "reward.png")
        if ends and lines[-1] is ends[-1]:  # a start after it means that the run goes on
            self.client.set_terminated(self._main_run(lines[0]), ends[-1]["status"], int(ends[-1]["at"] * 1000))

    def _curve(self) -> Figure | None:
        training = {
            index: commit.summary.get("rollout/raw_reward") for index, (_, commit) in sorted(self._history["rollout"].items())
        }
        evals: dict[str, dict[int, float]] = defaultdict(dict)
        for commit in sorted(self._evals.values(), key=lambda commit: commit.index):
            for task, reward in eval_rewards(commit).items():
                evals[task][commit.index] = reward
        points = {index: reward for index, reward in training.items() if reward is not None}
        return reward_curve(self.run, points, evals) if points or evals else None

    # ---- the run itself -------------------------------------------------------------------------------------------------

    def _start(self, line: dict[str, Any]) -> None:
        run_id = self._main_run(line)
        run = self.client.get_run(run_id)
        if run.info.status != "RUNNING":
            self.client.update_run(run_id, status="RUNNING")
        values = dict(flatten(line["config"]))
        known = run.data.params  # a parameter of MLflow never changes; a run's schedule may: the last value becomes a tag
        for some in _chunks([(name, value) for name, value in values.items() if name not in known], _MAX_BATCH["params"]):
            from mlflow.entities import Param

            self.client.log_batch(run_id, params=[Param(name, value) for name, value in some])
        for name, value in values.items():
            if known.get(name, value) != value:
                self.client.set_tag(run_id, f"changed.{name}", value)

    def _main_run(self, line: dict[str, Any]) -> str:
        return self._run("", self.run, int(line.get("at", 0) * 1000) or None, {"penstock.store": self.store_uri})

    def _run(self, part: str, name: str, start_time: int | None, tags: dict[str, str]) -> str:
        """The MLflow run for a part of this run ("" = all of it), found by its tags or created."""
        if part not in self._runs:
            marks = {"penstock.run": self.run, "penstock.identity": self.identity, "penstock.part": part or "run"}
            where = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in marks.items())
            found = self.client.search_runs(
                [self._experiment_of_run()], where, max_results=1, order_by=["attributes.start_time ASC"]
            )
            if found:
                self._runs[part] = found[0].info.run_id
            else:
                created = self.client.create_run(self._experiment_of_run(), start_time, {**marks, **tags}, name)
                self._runs[part] = created.info.run_id
        return self._runs[part]

    def _experiment_of_run(self) -> str:
        if self._experiment_id is None:
            found = self.client.get_experiment_by_name(self.experiment)
            location = None  # a server has its own place for artifacts; a bare database would use the current directory
            if self.tracking_uri.startswith("sqlite:///"):
                location = (Path(self.tracking_uri.removeprefix("sqlite:///")).parent / "artifacts" / self.experiment).as_uri()
            self._experiment_id = found.experiment_id if found else self.client.create_experiment(self.experiment, location)
        return self._experiment_id

    # ---- commits --------------------------------------------------------------------------------------------------------

    def _tell_commit(self, key: str, commit: Commit) -> list[Metric]:
        """Everything about one commit but the points of the main run, which are returned to travel together."""
        at = commit.created_at
        text = commit.model_dump_json(indent=1)
        start = {"at": at}
        if commit.kind in ("rollout", "step"):
            name = key.removeprefix(f"runs/{self.run}/")
            self.client.log_text(self._main_run(start), text, f"commits/{name}")
            self._show(self._main_run(start), commit)
            points = _points(commit.summary, commit.index, at)
            return points + _points(
                {f"seconds/{commit.kind}_{stage}": s for stage, s in commit.seconds.items()}, commit.index, at
            )
        part = self._part(key, commit)
        begin = int((at - sum(commit.seconds.values())) * 1000)
        tags = {"mlflow.parentRunId": self._main_run(start), "penstock.commit": key}
        child = self._run(part, part, begin, tags)
        {"model": self._model, "checkpoint": self._checkpoint, "eval": self._eval, "export": self._export}[commit.kind](
            child, key, commit
        )
        self.client.log_text(child, text, "commit.json")
        self.client.set_terminated(child, "FINISHED", int(at * 1000))
        return _points(eval_metrics(key, commit) if commit.kind == "eval" else commit.summary, commit.index, at)

    def _show(self, run_id: str, commit: Commit) -> None:
        """Some samples of a commit as a table, in the form of MLflow's `log_table`, which would append to what is there already."""
        from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

        rows = commit.state.get("shown")
        if not rows:
            return
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        self.client.log_text(run_id, json.dumps(table, ensure_ascii=False), f"samples/{commit.index:06d}.json")
        rounds = self._history["rollout"].items() if commit.kind == "rollout" else ()
        indices = sorted({commit.index, *(index for index, (_, other) in rounds if other.state.get("shown"))})
        listed = [{"path": f"samples/{index:06d}.json", "type": "table"} for index in indices[-_MAX_TABLES:]]
        self.client.set_tag(run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps(listed))

    def _part(self, key: str, commit: Commit) -> str:
        """Name of the child run; equal for equal commits."""
        if commit.kind == "model":
            return "convert"
        if commit.kind == "checkpoint":
            return f"train-{self._previous_version(commit.index):06d}-{max(commit.index - 1, 0):06d}"
        if commit.kind == "eval":
            return f"eval-{commit.index:06d}-{_task(key)}"
        return f"{commit.kind}-{commit.index:06d}"

    def _previous_version(self, version: int) -> int:
        """Policy version of the checkpoint before `version`; 0 is the base model."""
        return max((index for index in self._history["checkpoint"] if index < version), default=0)

    def _model(self, child: str, key: str, commit: Commit) -> None:
        self._output(child, 0, "base", key, commit)

    def _checkpoint(self, child: str, key: str, commit: Commit) -> None:
        from mlflow.entities import DatasetInput, InputTag

        first = self._previous_version(commit.index)
        consumed = [self._history["rollout"][r] for r in range(first, commit.index) if r in self._history["rollout"]]
        inputs = [DatasetInput(self._shards(*pair), [InputTag("mlflow.data.context", "training")]) for pair in consumed]
        for some in _chunks(inputs, _MAX_BATCH["datasets"]):
            self.client.log_inputs(child, datasets=some)
        self._input(child, first)
        self._output(child, commit.index, f"checkpoint-{commit.index:06d}", key, commit)

    def _eval(self, child: str, key: str, commit: Commit) -> None:
        from mlflow.entities import DatasetInput, InputTag

        data = self._eval_data(key, commit)
        self.client.log_inputs(child, datasets=[DatasetInput(data, [InputTag("mlflow.data.context", "eval")])])
        model = self._find_model(commit.policy_version)
        self.client.log_batch(
            child, metrics=_points(eval_metrics(key, commit), commit.index, commit.created_at, child, data, model)
        )
        self._show(child, commit)

    def _export(self, child: str, key: str, commit: Commit) -> None:
        self._input(child, commit.policy_version)
        self.client.set_tag(child, "penstock.uri", self._where(commit))

    # ---- models ---------------------------------------------------------------------------------------------------------

    def _input(self, child: str, version: int) -> None:
        from mlflow.entities import LoggedModelInput

        if model := self._find_model(version):
            self.client.log_inputs(child, models=[LoggedModelInput(model.model_id)])

    def _output(self, child: str, version: int, name: str, key: str, commit: Commit) -> None:
        from mlflow.entities import LoggedModelOutput

        model = self._find_model(version)
        if model is None:
            tags = {"penstock.identity": self.identity, "penstock.version": str(version), "penstock.commit": key}
            params = {"uri": self._where(commit), "policy_version": str(version), "format": "torch_dist"}
            model = self.client.create_logged_model(self._experiment_of_run(), name, child, tags, params, "checkpoint")
            self._models[version] = model
        self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(child).outputs
        if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.client.log_outputs(child, [LoggedModelOutput(model.model_id, version)])

    def _find_model(self, version: int) -> LoggedModel | None:
        if version not in self._models:
            where = f"tags.`penstock.identity` = '{self.identity}' and tags.`penstock.version` = '{version}'"
            found = self.client.search_logged_models([self._experiment_of_run()], where, max_results=1)
            if not found:
                return None
            self._models[version] = found[0]
        return self._models[version]

    # ---- data sets ------------------------------------------------------------------------------------------------------

    def _where(self, commit: Commit) -> str:
        return f"{self.store_uri.rstrip('/')}/{commit.attempt}"

    def _shards(self, key: str, commit: Commit) -> Dataset:
        """The committed shards of a rollout as an MLflow data set."""
        profile = {"num_rows": commit.num_samples(), "num_files": len(commit.files)}
        digest = hashlib.sha256("".join(file.xxh3 for file in commit.files).encode()).hexdigest()[:8]
        types = {"reward": "double"}
        columns = [{"type": types.get(name, "string"), "name": name, "required": True} for name in _SHARD_COLUMNS]
        return _dataset(
            f"rollout-{commit.index:06d}", digest, self._where(commit), json.dumps({"mlflow_colspec": columns}), profile
        )

    def _eval_data(self, key: str, commit: Commit) -> Dataset:
        """The prompts of an evaluation: the same data set for every version of the policy, so that MLflow can compare them."""
        path = commit.inputs.get("prompt_data/0") or self._where(commit)
        digest = hashlib.sha256(path.encode()).hexdigest()[:8]
        return _dataset(_task(key), digest, path, None, {})


def is_final(error: Exception) -> bool:
    """Whether MLflow will say the same again, whenever it is asked."""
    return getattr(error, "error_code", None) in _FINAL


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested config as MLflow parameters: dotted names, text values, no secrets."""
    for name, value in values.items():
        full = plain(f"{prefix}{name}")
        if name == "store_options" or is_secret_name(name):
            continue
        if isinstance(value, dict):
            yield from flatten(value, f"{full}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield full, text[:_MAX_PARAM]


def eval_metrics(key: str, commit: Commit) -> dict[str, float]:
    """Return an evaluation's metrics under `eval/`: its `perf/*` and `rollout/*` become `eval/<task>/perf/*` and `eval/<task>/rollout/*`.

    The rollout of the same step has metrics of these names on the main run, and several tasks share one checkpoint.
    """
    return {name if name.startswith("eval/") else f"eval/{_task(key)}/{name}": value for name, value in commit.summary.items()}


def eval_rewards(commit: Commit) -> dict[str, float]:
    """Task -> mean reward of an evaluation's commit: `eval/<task>`, without `eval/<task>-pass@4` and the like."""
    names = [name for name in commit.summary if name.startswith("eval/") and name.count("/") == 1]
    tasks = [name for name in names if not any(name.startswith(f"{other}-") for other in names)]
    return {name.removeprefix("eval/"): commit.summary[name] for name in tasks}


def reward_curve(run: str, training: dict[int, float], evals: dict[str, dict[int, float]]) -> Figure:
    """Mean reward over rounds; evaluations (task -> policy version -> reward) as points."""
    from matplotlib.figure import Figure  # not pyplot, which belongs to the main thread

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


def _dataset(name: str, digest: str, uri: str, schema: str | None, profile: dict[str, Any]) -> Dataset:
    """A data set whose source is one of MLflow's own types (`local`, `s3`, `gs`, ...), so that its UI and clients can open it."""
    from mlflow.entities import Dataset

    source_type = uri.split("://")[0] if "://" in uri else "local"
    return Dataset(plain(name), digest, source_type, json.dumps({"uri": uri}), schema, json.dumps(profile))


def _points(
    values: dict[str, float],
    step: int,
    at: float,
    run_id: str | None = None,
    data: Dataset | None = None,
    model: LoggedModel | None = None,
) -> list[Metric]:
    from mlflow.entities import Metric

    time_ms = int(at * 1000)
    links: dict[str, str | None] = {}
    if data is not None:
        links |= {"dataset_name": data.name, "dataset_digest": data.digest, "run_id": run_id}
    if model is not None:
        links["model_id"] = model.model_id
    return [Metric(plain(name), float(value), time_ms, step, **links) for name, value in values.items()]


def plain(name: str) -> str:
    """A name as MLflow takes it: `eval/aime/pass@8` -> `eval/aime/pass_at_8`."""
    return _PLAIN.sub("_", name.replace("@", "_at_"))


def _task(key: str) -> str:
    return key.rsplit("/", 1)[-1].removesuffix(".commit.json")


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    listed = list(items)
    for start in range(0, len(listed), size):
        yield listed[start : start + size]
