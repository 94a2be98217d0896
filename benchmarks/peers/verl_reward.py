"""The reward under the signature of verl. It is a module of its own, because verl's workers import it by path."""

from functools import cache
from pathlib import Path
from typing import Any

from peers import load_reward

cached_reward = cache(load_reward)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], *, path: str
) -> dict[str, float]:
    return cached_reward(Path(path))(solution_str, ground_truth)
