"""Logged models (source models, converted models, checkpoints, exports), and registered models, with their aliases.

A logged model is found by a tag: `penstock.attempt`, the directory of its files in the store, or, for a source model,
`penstock.source`, a hash of its path. So runs that share a model (a fork and its parent) share the logged model.

Each run has a registered model with the run's name. Its versions are the evaluated checkpoints, and the alias
`candidate` names the newest version. A model with a champion (storage/champions.py) is a registered model, too: its
versions are the policies that the decisions name, in order, and the aliases `champion` and `candidate` follow the last
decision.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils import mlflow_tags

from penstock.storage.champions import Decision, Policy, list_models, policies_of, read_decisions
from penstock.storage.commit import Commit, commit_key, eval_rewards
from penstock.storage.tracking.mlflow.mlflow_runs import Link, MlflowRuns, link_tags, model_name
from penstock.storage.tracking.tracker import RunCommits

_MAX_PARAM = 500  # characters of a logged model's parameter
_MODEL_TYPES = {"model": "converted model", "checkpoint": "checkpoint", "export": "export"}  # by kind of commit


@dataclass
class _NewModel:
    """A logged model to find by the tag `key`, or to create with these contents."""

    name: str
    type: str
    key: dict[str, str]  # the one tag by which the model is found
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)  # file name -> content


class MlflowModels:
    """Finds and creates logged models."""

    def __init__(self, runs: MlflowRuns) -> None:
        self.runs = runs
        self._models: dict[tuple[str, str], LoggedModel] = {}  # tag by which it is found -> model

    def of_commit(self, key: str, commit: Commit, source_run: str | None = None) -> LoggedModel:
        """Return the logged model of a converted model, checkpoint or export, whose commit record is at `key`. It is
        created if missing, with the MLflow run `source_run` (an id) as its origin."""
        run = commit.writer
        version = f"{commit.policy_version:06d}"
        attempt = commit.attempt or key
        # If `key` is that of a copy in a fork: the key in the run that wrote the files.
        original = f"runs/{run}/{key.split('/', 2)[2]}" if run and key.startswith("runs/") else key
        if commit.kind == "model":
            name = f"base-{short_fingerprint(key)}"
        else:
            name = f"{run or self.runs.run.name}/{version}" + ("/export" if commit.kind == "export" else "")
        params: dict[str, Any] = {
            "uri": f"{self.runs.run.store_uri.rstrip('/')}/{attempt}",
            "format": "hf" if commit.kind == "export" else "torch_dist",
            "policy_version": commit.policy_version,
            "num_files": len(commit.files),
            "num_bytes": sum(file.bytes for file in commit.files),
            "code_version": commit.code_version,
            "config_hash": commit.config_hash,
        }
        new = _NewModel(
            model_name(name),
            _MODEL_TYPES[commit.kind],
            {"penstock.attempt": attempt},
            {"penstock.commit": original, "penstock.run": run},
            {name: str(value)[:_MAX_PARAM] for name, value in params.items() if value != ""},
            {"files.csv": file_table(commit), "commit.json": commit.model_dump_json(indent=1)},
        )
        return self._find_or_create(new, source_run)

    def of_source(self, path: str) -> LoggedModel:
        """Return the logged model of a source model outside of the store. It is created if missing."""
        name = model_name(f"source-{PurePosixPath(path).name}")
        id = hashlib.sha256(path.encode()).hexdigest()[:16]
        new = _NewModel(name, "source model", {"penstock.source": id}, params={"uri": path[:_MAX_PARAM]})
        return self._find_or_create(new, None)

    def of_attempt(self, attempt: str) -> LoggedModel | None:
        """Return the logged model of the files in `attempt`, a directory in the store, or None if neither MLflow nor
        the store has the model."""
        if model := self._find("penstock.attempt", attempt):
            return model
        store, prefix = self.runs.run.store, attempt.rpartition("/")[0]
        commit = store.committed(prefix) if store else None
        return self.of_commit(commit_key(prefix), commit) if commit else None

    def add_links(self, model: LoggedModel, links: list[Link]) -> None:
        """Add links to the page of a logged model."""
        tags = link_tags(self.runs.client.get_logged_model(model.model_id).tags, links)
        if tags:
            self.runs.client.set_logged_model_tags(model.model_id, tags)

    def log_output(self, run_id: str, model: LoggedModel, step: int = 0) -> None:
        """Log a model as an output of an MLflow run, unless it already is one. `step` is the model's policy version."""
        outputs = self.runs.client.get_run(run_id).outputs
        if model.model_id not in [output.model_id for output in (outputs.model_outputs if outputs else [])]:
            self.runs.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])

    def link(self, role: str, model: LoggedModel) -> Link:
        """Return a link to the page of a logged model; `role` is the relation of the model to the object with the
        link."""
        return Link(role, model.name, self.runs.url("models", model.model_id))

    def _find_or_create(self, new: _NewModel, source_run: str | None) -> LoggedModel:
        [(tag, value)] = new.key.items()
        model = self._find(tag, value)
        client = self.runs.client
        if model is None:
            model = client.create_logged_model(
                self.runs.experiment_id, new.name, source_run, {**new.key, **new.tags}, new.params, new.type
            )
        if str(model.status) != "READY":  # also if the process was killed after it had created the model
            if new.artifacts:
                with tempfile.TemporaryDirectory() as directory:
                    for name, content in new.artifacts.items():
                        Path(directory, name).write_text(content, encoding="utf-8")
                    client.log_model_artifacts(model.model_id, directory)
            model = client.finalize_logged_model(model.model_id, "READY")
        self._models[tag, value] = model
        return model

    def _find(self, tag: str, value: str) -> LoggedModel | None:
        if (tag, value) not in self._models:
            order = [{"field_name": "creation_timestamp", "ascending": True}]
            models = self.runs.client.search_logged_models(
                [self.runs.experiment_id], f"tags.`{tag}` = '{value}'", max_results=1, order_by=order
            )
            if not models:
                return None
            self._models[tag, value] = models[0]
        return self._models[tag, value]


def short_fingerprint(key: str) -> str:
    """Return the first 8 characters of the fingerprint in the key of a converted model."""
    return PurePosixPath(key.removesuffix(commit_key(""))).name.removeprefix("megatron-")[:8]


def file_table(commit: Commit) -> str:
    """Return the files of a commit as CSV, which MLflow shows as a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "bytes", "xxh3", "rows"))
    for file in commit.files:
        path = file.path.removeprefix(f"{commit.attempt}/")
        writer.writerow((path, file.bytes, file.xxh3, "" if file.rows is None else file.rows))
    return text.getvalue()


# ---- registered models -----------------------------------------------------------------------------------------------

CHAMPION, CANDIDATE = "champion", "candidate"
_POLICY = "penstock.policy"  # tag of a version: RUN/VERSION


class MlflowRegistry:
    """Derives MLflow's registered models from commits and decisions."""

    def __init__(self, runs: MlflowRuns, models: MlflowModels) -> None:
        self.client = runs.client
        self.runs = runs
        self.models = models
        self._versions: dict[str, list[ModelVersion]] = {}  # registered model -> its versions, the oldest first

    def register_evaluated(self, version: int, at: float, commits: RunCommits) -> None:
        """Register the checkpoint of a policy version if both the checkpoint and an evaluation of it were committed by
        the time `at`: the commit time of the checkpoint or evaluation that is being logged.

        Later commits do not count, so the versions get the same numbers when a run is sent again.
        """
        checkpoint = commits.checkpoint(version)
        evals = [c for _, c in commits.evaluations(range(version, version + 1)) if c.created_at <= at]
        if checkpoint is None or checkpoint[1].created_at > at or not evals or commits.is_copy(*checkpoint):
            return
        run = self.runs.run.name
        rewards = {task: reward for commit in evals for task, reward in eval_rewards(commit).items()}
        text = ", ".join(f"{task} {reward:.4f}" for task, reward in sorted(rewards.items()))
        model = self.models.of_commit(*checkpoint)
        created = self._find_or_create(run, f"{run}/{version}", model, f"mean reward: {text}")
        evaluated = {commit.policy_version for commit in commits.evals.values()}
        own = [
            v for v, saved in commits.commits["checkpoint"].items() if v in evaluated and not commits.is_copy(*saved)
        ]
        if version == max(own) and not self._decisions(run):
            self._set_alias(run, CANDIDATE, created)

    def update_models_of_run(self) -> None:
        """Update the registered models for which a decision in the store names a policy of the run."""
        store = self.runs.run.store
        for name in list_models(store) if store else []:
            if self.runs.run.name in {policy.run for policy in policies_of(self._decisions(name))}:
                self.update_model(name)

    def update_model(self, name: str) -> None:
        """Update versions and aliases of the registered model `name` from the decisions in the store."""
        decisions = self._decisions(name)
        texts = {decision.candidate.name: str(decision) for decision in decisions if decision.candidate}
        versions = {
            policy: self._register(name, policy, texts.get(policy.name, "")) for policy in policies_of(decisions)
        }
        candidates = [decision.candidate for decision in decisions if decision.candidate]
        chosen = {CHAMPION: decisions[-1].champion, CANDIDATE: candidates[-1]} if candidates else {}
        for alias, chosen_policy in chosen.items():
            version = versions[chosen_policy] if chosen_policy else None
            if version is not None:
                self._set_alias(name, alias, version)

    def _decisions(self, name: str) -> list[Decision]:
        return read_decisions(self.runs.run.store, name) if self.runs.run.store else []

    def _register(self, name: str, policy: Policy, text: str) -> ModelVersion | None:
        """Return the version of the registered model `name` for a policy, with the description `text`. It is created if
        missing; None if it is missing and the policy's checkpoint has expired."""
        store = self.runs.run.store
        commit = store.read_record(Commit, policy.checkpoint) if store else None
        if commit is not None:
            return self._find_or_create(name, policy.name, self.models.of_commit(policy.checkpoint, commit), text)
        known = [version for version in self._existing(name) if version.tags[_POLICY] == policy.name]
        return known[-1] if known else None

    def _find_or_create(self, name: str, policy: str, model: LoggedModel, text: str) -> ModelVersion:
        """Return the version of the registered model `name` for a policy (RUN/VERSION). Its description is `text` and a
        link to the logged model `model`. It is created if missing."""
        text = f"{text}\n\nCheckpoint: [{model.name}]({self.runs.url('models', model.model_id)})"
        existing = self._existing(name)
        # Compare the model, since a run that was removed and started again under its name has the same policy names.
        number = next((n for n, version in enumerate(existing) if version.source == model.artifact_location), None)
        if number is None:
            number = len(existing)
            created = self.client.create_model_version(
                name,
                model.artifact_location,  # `models:/ID` would be searched in the process's default tracking URI
                model.source_run_id or self.runs.main_run_id,  # without it, MLflow would search that URI, too
                {_POLICY: policy},
                description=text,
                await_creation_for=0,
                model_id=model.model_id,
            )
            existing.append(created)
            self._list_version(model, created)
        elif existing[number].description != text:
            existing[number] = self.client.update_model_version(name, existing[number].version, text)
        return existing[number]

    def _existing(self, name: str) -> list[ModelVersion]:
        """Return the versions of a registered model, the oldest first. The model is created if missing."""
        if name not in self._versions:
            try:
                self.client.create_registered_model(name, {"penstock.store": self.runs.run.store_uri})
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self.client.search_model_versions(f"name = '{name}'", max_results=1000)
            versions = [version for version in found if _POLICY in version.tags]
            self._versions[name] = sorted(versions, key=lambda version: int(version.version))
        return self._versions[name]

    def _list_version(self, model: LoggedModel, version: ModelVersion) -> None:
        """List a version on the page of the logged model, as MLflow's server does."""
        tags = self.client.get_logged_model(model.model_id).tags
        entries = json.loads(tags.get(mlflow_tags.MLFLOW_MODEL_VERSIONS, "[]"))
        if version.name not in [entry["name"] for entry in entries]:
            entries.append({"name": version.name, "version": version.version})
            self.client.set_logged_model_tags(model.model_id, {mlflow_tags.MLFLOW_MODEL_VERSIONS: json.dumps(entries)})

    def _set_alias(self, name: str, alias: str, version: ModelVersion) -> None:
        if str(self.client.get_registered_model(name).aliases.get(alias)) != str(version.version):
            self.client.set_registered_model_alias(name, alias, str(version.version))
