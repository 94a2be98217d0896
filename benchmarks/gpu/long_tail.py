"""Generate responses with a long tail of lengths, for scaling.py: `--custom-generate-function-path
benchmarks/gpu/long_tail.py`. The lengths are log-normal with a median of 512 tokens and a 99th percentile of 8,192, and
depend only on the indices of prompt and sample, so that runs of different modes generate the same ones."""

import math
import random

MEDIAN, PERCENTILE_99 = 512, 8192
SIGMA = math.log(PERCENTILE_99 / MEDIAN) / 2.3263  # 2.3263: 99th percentile of the standard normal distribution


async def generate(args, sample, sampling_params, engine):
    normal = random.Random(f"{sample.group_index} {sample.index}").gauss(0, SIGMA)
    length = round(MEDIAN * math.exp(normal))
    await engine.generate(sample, max_new_tokens=min(max(length, 1), PERCENTILE_99))
    return sample
