"""A reward for models with random weights: a number that depends only on the text, 0 or 1 with equal frequency."""

from zlib import crc32


def reward_func(args, sample) -> dict[str, float]:
    score = float(crc32(sample.response.encode()) & 1)
    return {"score": score, "correct": score}
