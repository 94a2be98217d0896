from typing import Any

from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.hub import RewardSettings
from penstock.storage.samples.sample import Sample, Status


def make_grader(
    rm_type: str | None = None, custom_rm_path: str | None = None, num_workers: int = 1, **settings: Any
) -> Grader:
    return Grader(RewardSettings(rm_type, custom_rm_path, **settings), num_workers)


def samples(*responses: str, **fields: Any) -> list[Sample]:
    """Return finished samples of one group."""
    fields |= {"status": Status.COMPLETED}
    return [Sample(f"{i}", "g", f"{i}", 0, response=response, **fields) for i, response in enumerate(responses)]
