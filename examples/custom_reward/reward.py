"""A reward with several named scores: `--custom-rm-path examples/custom_reward/reward.py --reward-key score`.

A correct number gives reward 1. Correct digits and a short response give a little more, so that the rewards differ even
in a group whose answers are all wrong.
"""

import re

USUAL_LENGTH = 8  # characters; longer responses get less for `brief`


def reward_func(args, sample) -> dict[str, float]:
    """Grade a response. Training uses `score` (--reward-key); all scores are logged as `rollout/rewards/<name>`."""
    numbers = re.findall(r"-?\d+", sample.response)
    answer = numbers[-1] if numbers else ""
    right = float(answer == sample.label)
    digits = sum(a == b for a, b in zip(answer, sample.label)) / max(len(answer), len(sample.label), 1)
    brief = min(1.0, USUAL_LENGTH / max(len(sample.response), 1))
    return {"score": right + 0.2 * digits + 0.1 * brief, "right": right, "digits": digits, "brief": brief}
