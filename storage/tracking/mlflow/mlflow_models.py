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
import re
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from mlflow.entities import LoggedModel, LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.utils import mlflow_tags

from penstock.storage.champions import Policy, read_decisions
from penstock.storage.commit import Commit, attempt_in_path, commit_key, eval_rewards, is_run_name
from penstock.storage.tracking.mlflow.mlflow_runs import Link, MlflowRuns, link_tags
from penstock.storage.tracking.tracker import RunCommits

_FORBIDDEN = re.compile(r"[^\w\- ]")  # MLflow also rejects / : . % and quotes in names of logged models
_MAX_PARAM = 500  # characters of a logged model's parameter
CHAMPION, CANDIDATE = "champion", "candidate"
_POLICY = "penstock.policy"  # tag of a version: RUN/VERSION
_MODEL_TYPES = {"model": "converted model", "checkpoint": "checkpoint", "export": "export"}  # by kind of commit


class MlflowModels:
    """Finds and creates logged models, and derives the registered models from commits and decisions."""

    def __init__(self, runs: MlflowRuns) -> None:
        self.runs = runs
        self._models: dict[tuple[str, str], LoggedModel] = {}  # tag by which it is found -> model
        self._versions: dict[str, list[ModelVersion]] = {}  # registered model -> its versions, the oldest first

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
        return self._find_or_create(
            ("penstock.attempt", attempt),
            name,
            _MODEL_TYPES[commit.kind],
            {name: str(value)[:_MAX_PARAM] for name, value in params.items() if value != ""},
            tags={"penstock.commit": original, "penstock.run": run},
            artifacts={"files.csv": file_table(commit), "commit.json": commit.model_dump_json(indent=1)},
            source_run=source_run,
        )

    def of_source(self, path: str) -> LoggedModel:
        """Return the logged model of the files from which a model was converted: an export or checkpoint of a run, if
        MLflow or the store has it, else a source model outside of the store, which is created if missing."""
        if attempt := attempt_in_path(path):
            if model := self._find("penstock.attempt", attempt):
                return model
            store, prefix = self.runs.run.store, attempt.rpartition("/")[0]
            if commit := store.committed(prefix) if store else None:
                return self.of_commit(commit_key(prefix), commit)
        name = f"source-{PurePosixPath(path).name}"
        id = hashlib.sha256(path.encode()).hexdigest()[:16]
        return self._find_or_create(("penstock.source", id), name, "source model", {"uri": path[:_MAX_PARAM]})

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

    def _find_or_create(
        self,
        key: tuple[str, str],
        name: str,
        type: str,
        params: dict[str, str],
        *,
        tags: dict[str, str] | None = None,
        artifacts: dict[str, str] | None = None,
        source_run: str | None = None,
    ) -> LoggedModel:
        """Return the logged model with the tag `key` (name, value). It is created with the other arguments if missing;
        `artifacts` are file name -> content."""
        client, model = self.runs.client, self._find(*key)
        if model is None:
            all_tags = {key[0]: key[1], **(tags or {})}
            name = _FORBIDDEN.sub("_", name.replace("/", "-"))  # `my-run/000020` becomes `my-run-000020`
            model = client.create_logged_model(self.runs.experiment_id, name, source_run, all_tags, params, type)
        if str(model.status) != "READY":  # also if the process was killed after it had created the model
            if artifacts:
                with tempfile.TemporaryDirectory() as directory:
                    for file, content in artifacts.items():
                        Path(directory, file).write_text(content, encoding="utf-8")
                    client.log_model_artifacts(model.model_id, directory)
            model = client.finalize_logged_model(model.model_id, "READY")
        self._models[key] = model
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

    # ---- registered models -------------------------------------------------------------------------------------------

    def register_evaluated(self, version: int, at: float, commits: RunCommits) -> None:
        """Register the checkpoint of a policy version if both the checkpoint and an evaluation of it were committed by
        the time `at`: the commit time of the checkpoint or evaluation that is being logged.

        Later commits do not count, so the versions get the same numbers when a run is sent again.
        """
        checkpoint = commits.commits["checkpoint"].get(version)
        evals = [c for _, c in commits.evaluations(range(version, version + 1)) if c.created_at <= at]
        if checkpoint is None or checkpoint[1].created_at > at or not evals or commits.is_copy(*checkpoint):
            return
        run = self.runs.run.name
        rewards = {task: reward for commit in evals for task, reward in eval_rewards(commit).items()}
        text = ", ".join(f"{task} {reward:.4f}" for task, reward in sorted(rewards.items()))
        model = self.of_commit(*checkpoint)
        created = self._find_or_create_version(run, f"{run}/{version}", model, f"mean reward: {text}")
        evaluated = {commit.policy_version for commit in commits.evals.values()}
        own = [
            v for v, saved in commits.commits["checkpoint"].items() if v in evaluated and not commits.is_copy(*saved)
        ]
        store = self.runs.run.store
        if version == max(own) and not (store and read_decisions(store, run)):
            self._set_alias(run, CANDIDATE, created)

    def update_registered(self, name: str | None = None) -> None:
        """Update versions and aliases of the registered model `name` from the decisions in the store; default: of all
        models about which a decision names a policy of the run."""
        store = self.runs.run.store
        if store is None:
            return
        for model in [name] if name else filter(is_run_name, store.list("registry")):
            decisions = read_decisions(store, model)
            # The policies that the decisions name as candidate or champion, in order, each once.
            policies = list(dict.fromkeys(p for d in decisions for p in (d.candidate, d.champion) if p))
            if not name and self.runs.run.name not in {policy.run for policy in policies}:
                continue
            candidates = [decision.candidate for decision in decisions if decision.candidate]
            texts = {decision.candidate.name: str(decision) for decision in decisions if decision.candidate}
            versions: dict[Policy | None, ModelVersion] = {}
            for policy in policies:
                if commit := store.read_record(Commit, policy.checkpoint):
                    logged, text = self.of_commit(policy.checkpoint, commit), texts.get(policy.name, "")
                    versions[policy] = self._find_or_create_version(model, policy.name, logged, text)
                else:  # the checkpoint has expired
                    known = [version for version in self._existing(model) if version.tags[_POLICY] == policy.name]
                    versions |= {policy: known[-1]} if known else {}
            aliases = {CHAMPION: decisions[-1].champion, CANDIDATE: candidates[-1]} if candidates else {}
            for alias, chosen in aliases.items():
                if chosen in versions:
                    self._set_alias(model, alias, versions[chosen])

    def _find_or_create_version(self, name: str, policy: str, model: LoggedModel, text: str) -> ModelVersion:
        """Return the version of the registered model `name` for a policy (RUN/VERSION). Its description is `text` and a
        link to the logged model `model`. It is created if missing."""
        text = f"{text}\n\nCheckpoint: [{model.name}]({self.runs.url('models', model.model_id)})"
        existing = self._existing(name)
        # Compare the model, since a run that was removed and started again under its name has the same policy names.
        number = next((n for n, version in enumerate(existing) if version.source == model.artifact_location), None)
        if number is None:
            number = len(existing)
            created = self.runs.client.create_model_version(
                name,
                model.artifact_location,  # `models:/ID` would be searched in the process's default tracking URI
                model.source_run_id or self.runs.main_run_id,  # without it, MLflow would search that URI, too
                {_POLICY: policy},
                description=text,
                await_creation_for=0,
                model_id=model.model_id,
            )
            existing.append(created)
            # List the version on the page of the logged model, as MLflow's server does.
            tags = self.runs.client.get_logged_model(model.model_id).tags
            entries = json.loads(tags.get(mlflow_tags.MLFLOW_MODEL_VERSIONS, "[]"))
            if name not in [entry["name"] for entry in entries]:
                entries.append({"name": name, "version": created.version})
                listed = {mlflow_tags.MLFLOW_MODEL_VERSIONS: json.dumps(entries)}
                self.runs.client.set_logged_model_tags(model.model_id, listed)
        elif existing[number].description != text:
            existing[number] = self.runs.client.update_model_version(name, existing[number].version, text)
        return existing[number]

    def _existing(self, name: str) -> list[ModelVersion]:
        """Return the versions of a registered model, the oldest first. The model is created if missing."""
        if name not in self._versions:
            try:
                self.runs.client.create_registered_model(name, {"penstock.store": self.runs.run.store_uri})
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
            found = self.runs.client.search_model_versions(f"name = '{name}'", max_results=1000)
            versions = [version for version in found if _POLICY in version.tags]
            self._versions[name] = sorted(versions, key=lambda version: int(version.version))
        return self._versions[name]

    def _set_alias(self, name: str, alias: str, version: ModelVersion) -> None:
        if str(self.runs.client.get_registered_model(name).aliases.get(alias)) != str(version.version):
            self.runs.client.set_registered_model_alias(name, alias, str(version.version))


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
