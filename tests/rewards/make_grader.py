from typing import Any

from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.hub import RewardSettings


def make_grader(
    rm_type: str | None = None, custom_rm_path: str | None = None, num_workers: int = 1, **settings: Any
) -> Grader:
    return Grader(RewardSettings(rm_type, custom_rm_path, **settings), num_workers)
