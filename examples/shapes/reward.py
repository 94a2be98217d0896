"""A reward of 1 for the right colour: `--custom-rm-path examples/shapes/reward.py`."""


def reward_func(args, sample) -> float:
    """Compare the response with the label."""
    return float(sample.response.removesuffix("<|end|>") == sample.label)
