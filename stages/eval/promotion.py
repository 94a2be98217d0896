"""The gate of a promotion: is a candidate better than the champion on one data set, and not worse on others?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.stages.eval.compare import check_same_data, compare_rewards, rewards_by_prompt
from penstock.storage.champions import Condition
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError
from penstock.storage.store import Store

Evaluations = Mapping[str, Commit]  # name of a data set -> commit of a policy's evaluation on it


@dataclass(frozen=True)
class Gate:
    """The conditions of a promotion."""

    data_set: str
    margin: float = 0.0  # the candidate must be better by more than this: lower bound of the difference's 95 % interval
    guards: Mapping[str, float] = field(default_factory=dict)  # data set -> by how much the candidate may be worse
    min_reward: float | None = None  # the mean reward of the first champion must be above this


def check_gate(store: Store, gate: Gate, candidate: Evaluations, champion: Evaluations | None) -> list[Condition]:
    """Return every condition of a promotion with its numbers.

    Args:
        store: of the evaluations.
        gate: the conditions.
        candidate: evaluations of the candidate.
        champion: evaluations of the champion; None if there is none.

    Raises:
        DataError: the candidate or the champion was not evaluated on a data set of the gate, or on other rows.
    """
    required = {gate.data_set: gate.margin} | {name: -tolerance for name, tolerance in gate.guards.items()}
    for title, evaluations in (("candidate", candidate), ("champion", champion)):
        if evaluations is not None and (missing := [name for name in required if name not in evaluations]):
            raise DataError(
                f"the {title} was evaluated on {', '.join(evaluations) or 'nothing'}, not on {', '.join(missing)}: "
                "evaluate both on the data sets of the conditions"
            )
    if champion is None:
        mean = candidate[gate.data_set].summary[f"eval/{gate.data_set}"]
        holds = gate.min_reward is None or mean > gate.min_reward
        return [Condition(data_set=gate.data_set, required=gate.min_reward, holds=holds, candidate_mean=mean)]
    return [compare_on(store, name, least, candidate[name], champion[name]) for name, least in required.items()]


def compare_on(store: Store, data_set: str, required: float, candidate: Commit, champion: Commit) -> Condition:
    check_same_data(data_set, champion, candidate)
    comparison = compare_rewards(rewards_by_prompt(store, champion), rewards_by_prompt(store, candidate))
    return Condition(
        data_set=data_set,
        required=required,
        holds=comparison.low > required,
        candidate_mean=comparison.mean_b,
        champion_mean=comparison.mean_a,
        low=comparison.low,
        high=comparison.high,
        num_prompts=comparison.num_prompts,
    )
