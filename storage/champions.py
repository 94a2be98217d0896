"""The registry: the champion (the best policy) of each named model, and every decision about it.

`registry/<model>/<number>.json` is one decision: a promotion, a refusal with its numbers, or a rollback. Decisions are
appended by conditional create, so two concurrent promotions cannot both replace the same champion. The last decision
names the champion. MLflow's model versions and aliases are derived from these records.
"""

from __future__ import annotations

import re
import time
from typing import Literal

from pydantic import Field

from penstock.storage.commit import Frozen, commit_key, is_run_name
from penstock.storage.errors import RunError
from penstock.storage.store import Store

_NAME = re.compile(r"(\d{6})\.json")


class Policy(Frozen):
    """An evaluated policy version of a run."""

    run: str
    version: int
    checkpoint: str  # key of the checkpoint's commit
    export: str = ""  # key of the export's commit

    @property
    def name(self) -> str:
        """Return `RUN/VERSION`."""
        return f"{self.run}/{self.version}"


class Condition(Frozen):
    """A condition of a promotion, and the numbers with which it was checked. `low` and `high` are the bounds of the 95
    % interval of the mean difference in reward, candidate minus champion, paired over the prompts."""

    data_set: str
    required: float | None  # `low` must exceed it (without a champion: `candidate_mean`); None: no limit
    holds: bool
    candidate_mean: float
    champion_mean: float | None = None  # None: there was no champion
    low: float | None = None
    high: float | None = None
    num_prompts: int = 0

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "does not hold"
        if self.champion_mean is None:
            required = "no champion yet" if self.required is None else f"required above {self.required:g}: {verdict}"
            return f"{self.data_set}: mean {self.candidate_mean:.4f}, {required}"
        return (
            f"{self.data_set}: {self.candidate_mean:.4f} against {self.champion_mean:.4f} of the champion on "
            f"{self.num_prompts} prompts, difference {self.low:+.4f} to {self.high:+.4f} (95 %), lower bound required "
            f"above {self.required:g}: {verdict}"
        )


class Decision(Frozen):
    """One decision about a model's champion."""

    action: Literal["promoted", "refused", "rolled back"]
    champion: Policy | None  # after this decision
    candidate: Policy | None = None  # None for a rollback
    conditions: tuple[Condition, ...] = ()
    forced: bool = False  # promoted although a condition does not hold
    at: float = Field(default_factory=time.time)

    def __str__(self) -> str:
        conditions = "; ".join(map(str, self.conditions))
        return f"{self.action}{' (forced)' if self.forced else ''}: {conditions}"


def read_decisions(store: Store, model: str) -> list[Decision]:
    """Return all decisions about a model, oldest first."""
    directory = model_prefix(model)
    keys = [f"{directory}/{name}" for name in store.list(directory) if _NAME.fullmatch(name)]
    return [decision for key in keys if (decision := store.read_record(Decision, key))]


def champion(store: Store, model: str) -> Policy | None:
    """Return the champion of a model, or None if no policy was promoted yet."""
    decisions = read_decisions(store, model)
    return decisions[-1].champion if decisions else None


def export_of_champion(store: Store, model: str) -> str:
    """Return the local directory to which a model's champion was exported."""
    policy = champion(store, model)
    problem = f"model {model!r} has no champion in {store.uri}: promote one with `penstock promote`"
    commit = None
    if policy is not None:
        commit = store.committed(policy.export.removesuffix(commit_key(""))) if policy.export else None
        problem = (
            f"{policy.name}, the champion of {model!r}, has no export in a local store: promote a policy version that "
            "was exported (the last one of a run is), or give --hf-checkpoint a directory"
        )
    if commit is None or commit.attempt is None or not store.is_local:
        raise RunError(problem)
    return store.path(commit.attempt)


def record_decision(store: Store, model: str, after: int, decision: Decision) -> None:
    """Append a decision about a model. `after` is the number of decisions that existed when it was made. Raises
    RunError if another process has recorded a decision since then."""
    key = f"{model_prefix(model)}/{after:06d}.json"
    if not store.create(key, decision.model_dump_json(indent=1).encode()):
        raise RunError(f"another process changed the champion of {model!r} during this command: run the command again")


def model_prefix(model: str) -> str:
    """Return the directory of a model's decisions in the store. Raises RunError if the model's name is invalid."""
    if not is_run_name(model):
        raise RunError(
            f"{model[:80]!r} is not a valid model name: use letters, digits, dot, dash and underscore, and begin with "
            "a letter or a digit"
        )
    return f"registry/{model}"
