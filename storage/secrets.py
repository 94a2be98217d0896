"""Detection of secrets by option name and in URLs, and removal of secrets from text.

run.json, Prefect's parameters, MLflow, the tracking outbox and the terminal never receive a secret. A configuration
holds references to secrets instead of their values; secret_references.py creates and resolves the references.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ENV, FILE = "env:", "secret-file:"  # prefixes of references
# Matches api_key, aws_secret_access_key, sas_token, control_plane_api_keys, but not input_key or max_tokens.
_SECRET_NAME = re.compile(
    r"^(key|auth|pkey)$|(^|[_.])((api|access|account|private|shared|secret)_keys?(_id)?|secret|token|password|passwd|passphrase|"
    r"credentials?|authorization|cookie|connection_string)$"
)
_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s@/?#]*:[^\s@?#]+@")
_QUERY = re.compile(
    r"(?P<name>[?&][^=&\s]*(key|secret|token|password|signature|sig|credential)=)[^&\s#]+", re.IGNORECASE
)
_MIN_LENGTH = 6  # characters; shorter secrets also occur in ordinary words, so `redact` does not replace them
_protected: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Return whether an option's name (`api_key`, `sas_token`) says that the option's value is a secret."""
    return _SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def is_reference(value: str) -> bool:
    """Return whether a config value is a reference to a secret (env:NAME or secret-file:PATH)."""
    return value.startswith((ENV, FILE))


def has_credentials(url: str) -> bool:
    """Return whether a URL contains a password, or a key in its query."""
    return "://" in url and redact_url(url) != url


def redact_url(text: str) -> str:
    """Return the text with the credentials in all URLs replaced by `***`."""
    return _QUERY.sub(r"\g<name>***", _USER.sub(r"\g<scheme>***@", text))


def redact(text: str) -> str:
    """Return the text with credentials in URLs, and all secrets given to `register_secret`, replaced by `***`."""
    for secret in sorted(_protected, key=len, reverse=True):
        text = text.replace(secret, "***")
    return redact_url(text)


def register_secret(secret: str) -> str:
    """Register a secret so that `redact` replaces it in this process. Return the secret."""
    if len(secret) >= _MIN_LENGTH:
        _protected.add(secret)
    return secret


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return a config value with its secrets replaced by `***`. References to secrets are kept.

    Args:
        value: a string, or nested lists and dicts.
        name: name of the option that has this value.
    """
    if isinstance(value, dict):
        return {key: mask_secrets(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_secrets(item, name) for item in value]
    if not isinstance(value, str) or is_reference(value):
        return value
    return "***" if value and is_secret_name(name) else redact(value)


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file atomically, with mode 0600. Create its directory, if missing, with mode 0700."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
