"""Registered models: every evaluated checkpoint is a version; champion and candidate are aliases.

A run has a registered model with its name, to which each evaluated checkpoint is added; `candidate` is the newest one.
A model that policies are promoted to (storage/registry.py) is a registered model, too: its versions are the policies
of the decisions, in their order, and both aliases follow the last decision.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from penstock.storage.refs import Commit, commit_key
from penstock.storage.registry import Decision, Policy, list_models, read_decisions
from penstock.storage.tracking.lineage import Lineage, eval_rewards
from penstock.storage.tracking.mlflow.models import MlflowModels
from penstock.storage.tracking.mlflow.runs import MlflowRuns

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

CHAMPION, CANDIDATE = "champion", "candidate"
_POLICY = "penstock.policy"  # tag of a version: RUN/VERSION


class MlflowRegistry:
    """Derives MLflow's registered models from commits and decisions.

    Args:
        runs: the MLflow runs of the Penstock run.
        models: its logged models.
    """

    def __init__(self, runs: MlflowRuns, models: MlflowModels) -> None:
        self.client = runs.client
        self.runs = runs
        self.models = models
        self._versions: dict[str, list[ModelVersion]] = {}  # registered model -> its versions, the oldest first

    def register_evaluated(self, version: int, at: float, lineage: Lineage) -> None:
        """Register the checkpoint of a policy version if checkpoint and an evaluation were committed up to a time.

        Args:
            version: the policy version.
            at: when the checkpoint or the evaluation that is being logged was committed, in seconds since the epoch.
                Later commits do not count, so that sending a run again gives the versions the same numbers.
            lineage: the commits of the run.
        """
        checkpoint = lineage.checkpoint(version)
        evals = [(key, commit) for key, commit in lineage.evaluations(version) if commit.created_at <= at]
        if checkpoint is None or checkpoint[1].created_at > at or not evals or lineage.is_copy(*checkpoint):
            return
        run = self.runs.run.name
        rewards = {task: reward for _, commit in evals for task, reward in eval_rewards(commit).items()}
        text = ", ".join(f"{task} {reward:.4f}" for task, reward in sorted(rewards.items()))
        model = self.models.of_commit(*checkpoint)
        created = self._find_or_create(run, f"{run}/{version}", model, f"mean reward: {text}")
        store = self.runs.run.store
        decided = bool(read_decisions(store, run)) if store else False
        if version == max(lineage.evaluated_checkpoints()) and not decided:
            self._set_alias(run, CANDIDATE, created)

    def update_models_of_run(self) -> None:
        """Update the models about which a decision in the store names a policy of the run."""
        store = self.runs.run.store
        for name in list_models(store) if store else []:
            decisions = read_decisions(store, name) if store else []
            if self.runs.run.name in {policy.run for policy in _policies(decisions)}:
                self.update_model(name)

    def update_model(self, name: str) -> None:
        """Derive the versions and aliases of a model from the decisions in the store."""
        store = self.runs.run.store
        decisions = read_decisions(store, name) if store else []
        texts = {decision.candidate.name: decision_text(decision) for decision in decisions if decision.candidate}
        versions = {policy: self._register(name, policy, texts.get(policy.name, "")) for policy in _policies(decisions)}
        candidates = [decision.candidate for decision in decisions if decision.candidate]
        chosen = {CHAMPION: decisions[-1].champion, CANDIDATE: candidates[-1]} if candidates else {}
        for alias, chosen_policy in chosen.items():
            version = versions[chosen_policy] if chosen_policy else None
            if version is not None:
                self._set_alias(name, alias, version)

    def _register(self, name: str, policy: Policy, text: str) -> ModelVersion | None:
        """Return the version of a policy, which is created if missing; None if its checkpoint expired before that."""
        store = self.runs.run.store
        commit: Commit | None = store.committed(policy.checkpoint.removesuffix(commit_key(""))) if store else None
        if commit is not None:
            return self._find_or_create(name, policy.name, self.models.of_commit(policy.checkpoint, commit), text)
        known = [version for version in self._existing(name) if version.tags[_POLICY] == policy.name]
        return known[-1] if known else None

    def _find_or_create(self, name: str, policy: str, model: LoggedModel, text: str) -> ModelVersion:
        """Return the version of a policy, with a description: `text` and a link to the logged model. It is created if
        missing."""
        text = f"{text}\n\nCheckpoint: [{model.name}]({self.runs.url('models', model.model_id)})"
        existing = self._existing(name)
        # By the model: a run that was removed and started again under its name has equal policy names.
        number = next((n for n, version in enumerate(existing) if version.source == model.artifact_location), None)
        if number is None:
            number = len(existing)
            created = self.client.create_model_version(
                name,
                model.artifact_location,  # `models:/ID` would be searched in the process's default tracking URI
                model.source_run_id or self.runs.main_run_id,  # without it, MLflow would search there, too
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
        from mlflow.exceptions import MlflowException

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
        from mlflow.utils.mlflow_tags import MLFLOW_MODEL_VERSIONS

        tags = self.client.get_logged_model(model.model_id).tags
        entries = json.loads(tags.get(MLFLOW_MODEL_VERSIONS, "[]"))
        if version.name not in [entry["name"] for entry in entries]:
            entries.append({"name": version.name, "version": version.version})
            self.client.set_logged_model_tags(model.model_id, {MLFLOW_MODEL_VERSIONS: json.dumps(entries)})

    def _set_alias(self, name: str, alias: str, version: ModelVersion) -> None:
        if str(self.client.get_registered_model(name).aliases.get(alias)) != str(version.version):
            self.client.set_registered_model_alias(name, alias, str(version.version))


def _policies(decisions: list[Decision]) -> list[Policy]:
    """Return the policies of decisions, in order, each once."""
    return list(dict.fromkeys(policy for d in decisions for policy in (d.candidate, d.champion) if policy))


def decision_text(decision: Decision) -> str:
    """Return a decision and its numbers as text."""
    conditions = "; ".join(map(str, decision.conditions))
    return f"{decision.action}{' (forced)' if decision.forced else ''}: {conditions}"
