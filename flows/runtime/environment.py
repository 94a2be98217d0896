"""Environment variables that configure libraries and must be set before their import. Variables that the user has set
are not changed."""

from __future__ import annotations

import os

CONSOLE_LEVEL = "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"

QUIET = {
    CONSOLE_LEVEL: "CRITICAL",  # log lines are on the Prefect page
    "PREFECT_LOGGING_COLORS": "false",  # with --verbose, Prefect's own console prints no control codes
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_SERVER_VERSION_CHECK_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",  # models and data are local directories: download nothing implicitly
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def set_default_variables(*, verbose: bool = False) -> None:
    """Set the variables of QUIET that are not set. With `verbose` keep Prefect's log lines on the terminal."""
    for name, value in QUIET.items():
        if not (verbose and "LOGGING" in name):
            os.environ.setdefault(name, value)
