"""Check the addresses of services, in options and environment variables, before anything connects to them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from penstock.flows.config import PostTrainConfig
from penstock.flows.options.argv import short_repr
from penstock.storage.errors import OptionError
from penstock.storage.secret_references import resolve_secrets

HTTP = ("http", "https")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
MLFLOW = (*HTTP, *DATABASES, "file", "databricks", "databricks-uc", "uc", "")  # "": a directory
_RAY = re.compile(r"auto|local|(ray://)?(\[[\da-fA-F:.]+\]|[\w.-]+):(?P<port>\d{1,5})", re.ASCII)


def check_addresses(config: PostTrainConfig) -> None:
    """Check the addresses of Prefect, MLflow, W&B, Ray and of servers that grade samples, and the port for Prometheus.
    Raises OptionError."""
    run, rollout = config.run, config.rollout
    check_url("PREFECT_API_URL", os.environ.get("PREFECT_API_URL"), HTTP)
    check_url("--mlflow-tracking-uri", run.mlflow_tracking_uri, MLFLOW)
    if not run.mlflow_tracking_uri:
        check_url("MLFLOW_TRACKING_URI", os.environ.get("MLFLOW_TRACKING_URI"), MLFLOW)
    check_url("--wandb-host", run.wandb_host, HTTP)
    check_url("--rm-url", rollout.rm_url, HTTP)
    for name, url in (config.train.opd.opd_teacher_url if config.train.opd else {}).items():
        check_url(f"--opd-teacher-url {name}".rstrip(), url, HTTP)
    of_ray = {"--ray-address": run.ray_address}
    if run.ray_address == "auto":
        of_ray["RAY_ADDRESS"] = os.environ.get("RAY_ADDRESS")
    for name, address in of_ray.items():
        match = _RAY.fullmatch(address or "auto")
        if match is None or not 0 < int(match["port"] or 1) < 1 << 16:
            raise OptionError(
                f"{name} {short_repr(address or '')} is not an address: give auto, HOST:PORT or ray://HOST:PORT"
            )
    if run.prometheus_port is not None:
        try:
            socket.create_server(("127.0.0.1", run.prometheus_port)).close()
        except OSError as error:
            raise OptionError(
                f"--prometheus-port {run.prometheus_port} cannot be used ({error.strerror}): give another port, or 0 "
                "for a free one"
            ) from None


def check_url(name: str, value: str | None, schemes: Sequence[str]) -> None:
    """Check that the value of the option or variable `name`, if it is set, is a URL with one of the schemes and, for
    HTTP, with a host and a valid port. Raises OptionError."""
    url = resolve_secrets(value) or ""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.partition("+")[0]
        valid = scheme in schemes and (scheme not in HTTP or (bool(parts.hostname) and parts.port != 0))
    except ValueError:
        valid = False
    if url and not (valid and url.isprintable() and " " not in parts.netloc):
        raise OptionError(
            f"{name} {short_repr(value or '')} is not a URL: give one that begins with "
            f"{' or '.join(f'{scheme}://' for scheme in schemes if scheme)}, with a host and, if needed, a port"
        )
