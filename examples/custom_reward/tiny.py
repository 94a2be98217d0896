"""Create a random model of 402,176 parameters and 1,699 problems, with which the example runs in minutes on a CPU."""

import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    make_tiny_model(Path(directory) / "model")
    make_tiny_data(Path(directory) / "data")["train"].rename(Path(directory) / "prompts.jsonl")


if __name__ == "__main__":
    main(sys.argv[1])
