"""A reward of 0.9 for the right result and 0.1 for its form:
`--custom-rm-path examples/smollm2/reward.py --reward-key score`."""

import re

INTEGERS = re.compile(r"-?\d+(, -?\d+)*")


def reward_func(args, sample) -> dict[str, float]:
    """Grade the text after the last "=" or ":" of the last line. It has the right form if it is as many integers,
    separated by commas, as the label."""
    lines = sample.response.removesuffix("<|im_end|>").strip().splitlines()
    result = re.split("[=:]", lines[-1])[-1].strip() if lines else ""
    correct = float(result == sample.label)
    well_formed = float(bool(INTEGERS.fullmatch(result)) and result.count(",") == sample.label.count(","))
    return {"score": 0.9 * correct + 0.1 * well_formed, "correct": correct, "format": well_formed}
