"""Validate and normalize the addresses of external engines (`--rollout-external-engine-addrs`)."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.storage.errors import EngineError
from penstock.storage.secrets import has_credentials


def engine_url(address: str) -> str:
    """Return the URL (scheme://host:port) of an engine given as host:port or as a URL.

    Raises:
        EngineError: the address is neither host:port nor a URL with a port, or it contains credentials.
    """
    url = address if "://" in address else f"http://{address}"
    if has_credentials(url):
        raise EngineError(
            "--rollout-external-engine-addrs contains credentials: give host:port there, and the engines' API key "
            "with --sglang-api-key"
        )
    parts = urlsplit(url)
    try:
        if parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.path.strip("/"):
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:  # the port is not a number
        pass
    raise EngineError(
        f"--rollout-external-engine-addrs {address} is not a valid address: give host:port, for instance 10.0.0.7:30000"
    )


def is_on_this_machine(address: str) -> bool:
    """Return whether an engine's address is a loopback address."""
    return urlsplit(engine_url(address)).hostname in ("127.0.0.1", "localhost", "::1")
