"""Generate a trajectory by running an agent: `--custom-generate-function-path examples/strands_agent/generate.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from strands_calculator import solve


def generate(args, sample, sampling_params, engine):
    with engine.openai(sample) as session:
        solve(session.base_url, session.api_key, sample.prompt)
    return session.samples()
