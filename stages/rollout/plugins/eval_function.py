"""User-defined rollout functions in evaluations (`--eval-function-path`):

    def generate_rollout(args, rollout_id, data_source, evaluation=True)

It returns a RolloutFnEvalOutput, the dictionary of one, or groups. The function is called once for each data set,
whose name and path are `args.eval_prompt_data`. It gets all prompts from `data_source.get_samples(n)` with
n = len(data_source.dataset), and returns all of them, so that evaluations stay comparable prompt by prompt.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from penstock.stages.plugins import DEFAULT_NAMES, load_checked_function
from penstock.stages.rollout.config import RolloutConfig
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample

BUILT_IN = "built-in"  # --eval-function-path of the built-in evaluation


def find_evaluation_function(config: RolloutConfig) -> str | None:
    """Return the path of the function that generates evaluations: --eval-function-path, by default
    --rollout-function-path if the function has the parameter `evaluation`; None: the built-in evaluation.

    Raises:
        PluginError: the function does not load, or has another signature.
    """
    path = config.eval_function_path or config.rollout_function_path
    if path in (None, BUILT_IN):
        return None
    function = load_checked_function(path, DEFAULT_NAMES["eval_function_path"], ("args", "rollout_id", "data_source"))
    is_for_evaluations = config.eval_function_path or "evaluation" in inspect.signature(function).parameters
    return path if is_for_evaluations else None


def samples_of_evaluation(returned: Any, data_set: str, name: str) -> tuple[Any, dict[int, float]]:
    """Return the samples in what a function returned from an evaluation, and the rewards given beside them.

    Args:
        returned: a RolloutFnEvalOutput, a dictionary {data set: {"samples": ..., "rewards": ...}}, or groups.
        data_set: name of the data set.
        name: of the function, for messages.

    Returns:
        The samples, perhaps in nested lists; and id() of a sample -> its reward.

    Raises:
        PluginError: the results are of another data set, or have no samples, or not one finite reward per sample.
    """
    data = getattr(returned, "data", returned)
    if not isinstance(data, Mapping):
        return getattr(returned, "samples", returned), {}
    if set(data) != {data_set}:
        raise PluginError(
            f"{name} returned results of {', '.join(map(str, data)) or 'no data set'} from the evaluation on "
            f"{data_set}: return those of the data set in args.eval_prompt_data; it is called once for each"
        )
    entry = data[data_set]
    if not isinstance(entry, Mapping) or "samples" not in entry:
        raise PluginError(
            f'{name} returned results of {data_set} without "samples", which an evaluation records: add the list of '
            "samples"
        )
    samples, rewards = entry["samples"], entry.get("rewards")
    if rewards is None:
        return samples, {}
    if len(rewards) != len(samples) or not all(isinstance(sample, Sample) for sample in samples):
        raise PluginError(
            f'{name} returned {len(rewards)} "rewards" beside {len(samples)} "samples": return one reward for each '
            "sample of a flat list, or no rewards"
        )
    return samples, {id(sample): _number(reward, name) for sample, reward in zip(samples, rewards)}


def _number(reward: Any, name: str) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise PluginError(f'{name} returned {reward!r:.80} in "rewards": return finite numbers')
    return number
