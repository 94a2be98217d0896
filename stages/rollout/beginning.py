"""Where a round begins: what the commit of the round before says of the data source and of the groups that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.rollout.prompts.state import SourceState
from storage.errors import RunError
from storage.refs import BUFFER, RunKeys
from storage.sample import Sample
from storage.shards import read_samples
from storage.store import Store


@dataclass(frozen=True)
class Beginning:
    """The default is a run's first round."""

    state: dict[str, Any] | None = None  # of the data source
    buffer: Sequence[Sample] = ()  # groups that were asked for and wait to be used


def beginning_of(store: Store, keys: RunKeys, rollout_id: int) -> Beginning:
    """Where round `rollout_id` begins.

    A fork with other data begins them anew where it leaves its parent; only the numbers of the prompts go on, for ids are made of them.

    Raises:
        RunError: the round before is not committed.
    """
    if rollout_id == 0:
        return Beginning()
    previous = store.committed(keys.rollout(rollout_id - 1))
    if previous is None:
        raise RunError(
            f"round {rollout_id} begins where round {rollout_id - 1} left the data, which is not committed: do that round first"
        )
    state = previous.state["data_source"]
    parent = (store.read_json(keys.record) or {}).get("parent") or {}
    if parent.get("restart_data") and parent["at"] == rollout_id:
        return Beginning(SourceState(issued=state["issued"], segments=()).model_dump(mode="json"))
    return Beginning(state, read_samples(store, previous, BUFFER) if previous.num_samples(BUFFER) else ())
