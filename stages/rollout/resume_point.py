"""Read the state that a round starts from: the data-source state and the buffered groups in the previous round's
commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.stages.rollout.prompts.data_source import group_by_group_id, resized_group
from penstock.stages.rollout.prompts.source import SourceState
from penstock.storage.commit import BUFFER, RunKeys
from penstock.storage.errors import RunError
from penstock.storage.history.run_record import read_run_record
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store


@dataclass(frozen=True)
class ResumePoint:
    """The data-source state and buffered groups that a round starts from. The defaults are for the first round of a
    run."""

    state: dict[str, Any] | None = None  # state of the data source; None: start of the data
    buffer: Sequence[Sample] = ()  # samples of the groups that earlier rounds buffered


def read_resume_point(store: Store, keys: RunKeys, rollout_id: int) -> ResumePoint:
    """Return the resume point of round `rollout_id`.

    In a run forked with new data (`restart_data`), the first round after the fork starts at the beginning of the data
    without buffered groups; only the count of issued prompts continues, because group ids are derived from this count.
    In a run forked with other options of the rollout (`discard_responses`), the buffered groups lose their responses
    and get the fork's number of samples.

    Raises:
        RunError: the previous round is not committed.
    """
    if rollout_id == 0:
        return ResumePoint()
    previous = store.committed(keys.rollout_prefix(rollout_id - 1))
    if previous is None:
        raise RunError(
            f"round {rollout_id} needs the data position of round {rollout_id - 1}, which is not committed: "
            f"run round {rollout_id - 1} first"
        )
    state = previous.state["data_source"]
    record = read_run_record(store, keys)
    fork = record.parent if record and record.parent and record.parent.at == rollout_id else None
    if fork and fork.restart_data:
        return ResumePoint(SourceState(issued=state["issued"], segments=()).model_dump(mode="json"))
    buffer = read_samples(store, previous, BUFFER) if previous.num_samples(BUFFER) else []
    if record and fork and fork.discard_responses:
        num_samples = record.config["rollout"]["n_samples_per_prompt"]
        buffer = [sample for group in group_by_group_id(buffer) for sample in resized_group(group, num_samples)]
    return ResumePoint(state, buffer)
