"""A reward with parts: `--custom-rm-path examples/custom_reward/reward.py --reward-key score`.

A right number counts most; where the digits are nearly right, or the answer is short, that counts a little, so that a
group whose answers are all wrong still has something to learn from.
"""

import re

USUAL_LENGTH = 8  # characters of a good answer


def reward_func(args, sample) -> dict[str, float]:
    """`score` is what is trained for; the others are shown as `rollout/rewards/<name>`."""
    numbers = re.findall(r"-?\d+", sample.response)
    answer = numbers[-1] if numbers else ""
    right = float(answer == sample.label)
    digits = sum(a == b for a, b in zip(answer, sample.label)) / max(len(answer), len(sample.label), 1)
    brief = min(1.0, USUAL_LENGTH / max(len(sample.response), 1))
    return {"score": right + 0.2 * digits + 0.1 * brief, "right": right, "digits": digits, "brief": brief}
