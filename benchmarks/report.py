"""The command line and the JSON report of the benchmarks on GPUs: hardware, versions, settings, commit, figures."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "megatron-core", "sglang", "flash-attn-4", "triton", "ray", "prefect", "transformers", "trl")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the JSON report (default: only print it)")
    parser.add_argument("--commit", help="git commit of the report (default: that of this checkout)")
    return parser


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line. The arguments after `--` become `train_options`."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:end])
    options.train_options = arguments[end + 1 :]
    return options


def write_report(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Print a report as JSON, and write it to --output."""
    text = json.dumps(describe_setup(options) | figures, indent=1)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    print(text, flush=True)


def describe_setup(options: argparse.Namespace) -> dict[str, Any]:
    """Return hardware, software versions, settings and git commit of a measurement."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "commit", "directory")}
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = options.commit or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "hardware": f"{', '.join(gpus) or 'no GPU'}; {len(os.sched_getaffinity(0))} CPU cores",
        "software": {name: found for name in PACKAGES if (found := installed_version(name))},
        "benchmark": Path(sys.argv[0]).name,
        "settings": settings,
        "commit": commit or "unknown: give --commit",
    }


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
