"""Generate a trajectory by running an agent: `--custom-generate-function-path examples/openai_agent/generate.py`."""

import sys
from pathlib import Path

from openai import OpenAI

sys.path.append(str(Path(__file__).parent))
from agent import solve


def generate(args, sample, sampling_params, engine):
    with engine.openai(sample) as session, OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        solve(client, sample.prompt, args.max_turns)
    return session.samples()
