"""Settings of the libraries around us that must stand in the environment before they are imported. Nothing here overrides the user."""

from __future__ import annotations

import os

QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the terminal is ours; the Prefect page keeps every line
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",  # models and data are given as directories; nothing is fetched behind the user's back
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def prepare(*, verbose: bool = False) -> None:
    """Set what is not set yet. With `verbose` the libraries' own log lines stay."""
    for name, value in QUIET.items():
        if not (verbose and "LOGGING" in name):
            os.environ.setdefault(name, value)
