"""Logged models: source models, converted models, checkpoints and exports.

A logged model is found by the tag `penstock.attempt`, the directory of its files in the store, or by `penstock.source`,
a hash of a source model's path. So runs that share a model, for instance a fork and its parent, share the logged model.
"""

from __future__ import annotations

import csv
import hashlib
import io
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from penstock.storage.refs import Commit, RunKeys, commit_key
from penstock.storage.tracking.lineage import run_of_attempt
from penstock.storage.tracking.mlflow.links import Link, link_tags
from penstock.storage.tracking.mlflow.runs import MlflowRuns
from penstock.storage.tracking.mlflow.values import model_name

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel

_MAX_PARAM = 500  # characters of a logged model's parameter
_MODEL_TYPES = {"model": "converted model", "checkpoint": "checkpoint", "export": "export"}  # by kind of commit


@dataclass
class _NewModel:
    """What a logged model is created with."""

    name: str
    type: str
    key: dict[str, str]  # tags by which it is found
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)  # file name -> content


class MlflowModels:
    """Finds and creates logged models.

    Args:
        runs: the MLflow runs of the Penstock run.
    """

    def __init__(self, runs: MlflowRuns) -> None:
        self.runs = runs
        self._models: dict[tuple[str, str], LoggedModel] = {}  # tag by which it is found -> model

    def of_commit(self, key: str, commit: Commit, source_run: str | None = None) -> LoggedModel:
        """Return the logged model of a converted model, checkpoint or export. It is created if missing.

        Args:
            key: of the commit record.
            commit: of the model's files.
            source_run: the MLflow run whose output the model is.
        """
        return self._find_or_create(self._describe_commit(key, commit), source_run)

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

    def link(self, role: str, model: LoggedModel) -> Link:
        """Return a link to the page of a logged model, for an object to which the model is `role`."""
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

    def _describe_commit(self, key: str, commit: Commit) -> _NewModel:
        run = run_of_attempt(commit)
        version = f"{commit.policy_version:06d}"
        attempt = commit.attempt or key
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
        return _NewModel(
            model_name(name),
            _MODEL_TYPES[commit.kind],
            {"penstock.attempt": attempt},
            {"penstock.commit": original_key(key, commit), "penstock.run": run},
            {name: str(value)[:_MAX_PARAM] for name, value in params.items() if value != ""},
            {"files.csv": file_table(commit), "commit.json": commit.model_dump_json(indent=1)},
        )


def short_fingerprint(key: str) -> str:
    """Return the first 8 characters of the fingerprint in the key of a converted model."""
    return PurePosixPath(key.removesuffix(commit_key(""))).name.removeprefix("megatron-")[:8]


def original_key(key: str, commit: Commit) -> str:
    """Return the key of a commit in the run that wrote its files, if `key` is that of a copy in a fork."""
    run = run_of_attempt(commit)
    return RunKeys(run).prefix + "/" + key.split("/", 2)[2] if run and key.startswith("runs/") else key


def file_table(commit: Commit) -> str:
    """Return the files of a commit as CSV, which MLflow shows as a table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "bytes", "xxh3", "rows"))
    for file in commit.files:
        path = file.path.removeprefix(f"{commit.attempt}/")
        writer.writerow((path, file.bytes, file.xxh3, "" if file.rows is None else file.rows))
    return text.getvalue()
