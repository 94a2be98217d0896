"""The flows by name, and how the command line starts one: check first, run, turn a failure into one sentence."""

from __future__ import annotations

import importlib
import sys

from flows.config import PostTrainConfig
from storage.store import StoreError

FLOWS = ("post_train", "sft", "convert", "evaluate")  # module flows/<name>.py holds the flow of that name


def start(name: str, config: PostTrainConfig) -> int:
    """Run a flow in this process. Returns the exit code: 0 done, 1 failed (the reason was printed).

    Raises:
        ValueError: the request is wrong; nothing was started.
    """
    from flows.preflight import preflight
    from flows.services import ensure_prefect_api

    assert name in FLOWS
    try:
        preflight(name, config)
    except StoreError as error:
        raise ValueError(str(error)) from error
    ensure_prefect_api()
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    try:
        flow(config)
    except ValueError:  # a wrong request that only showed on the way
        raise
    except Exception as error:  # the flow has failed for good, its tasks were retried; Prefect keeps the traceback
        print(f"\npenstock: {name} failed: {type(error).__name__}: {error}", file=sys.stderr)
        print(
            "The Prefect page has the traceback (`make up`). The same command goes on after the last committed stage.",
            file=sys.stderr,
        )
        return 1
    return 0
