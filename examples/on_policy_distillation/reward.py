"""A reward that is always 0, so that only the teacher changes the model. `right` reports whether the answer is right:
`--custom-rm-path examples/on_policy_distillation/reward.py --reward-key reward`."""

import re


def reward_func(args, sample) -> dict[str, float]:
    """Return reward 0, and `right`, 1 if the last integer of the response is the label."""
    numbers = re.findall(r"-?\d+", sample.response)
    return {"reward": 0.0, "right": float(bool(numbers) and numbers[-1] == sample.label)}
