"""References to secrets. A configuration holds references, which may be stored and displayed, instead of the secrets:

    env:NAME            the environment variable NAME
    secret-file:PATH    the content of a file that only its owner can read

`hide_literal_secrets` replaces literal secrets by `env:PENSTOCK_SECRET_...` and keeps their values in this process;
`resolve_secrets` returns the secrets to which references refer.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from penstock.storage.disk import read_file
from penstock.storage.errors import OptionError
from penstock.storage.secrets import ENV, FILE, has_credentials, is_reference, is_secret_name, register_secret

PREFIX = "PENSTOCK_SECRET_"
_MAX_SECRET_BYTES = 1 << 20
_hidden: dict[str, str] = {}  # name in the reference -> literal secret, in this process only


def hide_literal_secrets(path: str, value: Any) -> Any:
    """Return the value of the option `path` with its literal secrets, at any depth, replaced by references. Only this
    process can resolve the references; their names contain `path`."""
    if isinstance(value, dict):
        return {name: hide_literal_secrets(f"{path}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide_literal_secrets(path, item) for item in value]
    if not isinstance(value, str) or not value or is_reference(value):
        return value
    if not (is_secret_name(path.rpartition(".")[2]) or has_credentials(value)):
        return value
    name = base = PREFIX + re.sub(r"\W", "_", path).upper()
    number = 1
    while _hidden.setdefault(name, value) != value:  # the name already refers to another secret in this process
        name, number = f"{base}_{number + 1}", number + 1
    register_secret(value)
    return ENV + name


def contains_hidden_secret(value: Any) -> bool:
    """Return whether a value contains a reference from `hide_literal_secrets`, which only this process can resolve."""
    if isinstance(value, dict | list | tuple):
        return any(contains_hidden_secret(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value.startswith(ENV) and value.removeprefix(ENV) in _hidden


def resolve_secrets(value: Any) -> Any:
    """Return a config value with references to secrets (env:NAME, secret-file:PATH) replaced by the secrets."""
    if isinstance(value, dict):
        return {name: resolve_secrets(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_secrets(item) for item in value]
    if not isinstance(value, str) or not is_reference(value):
        return value
    if value.startswith(FILE):
        path = Path(value.removeprefix(FILE)).expanduser()
        try:
            if path.stat().st_mode & 0o077:
                raise OptionError(f"{value} can be read by other users: chmod 600 {value.removeprefix(FILE)}")
            return register_secret(read_file(path, _MAX_SECRET_BYTES).decode("utf-8").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{value} cannot be read ({type(error).__name__}): check the path") from error
    name = value.removeprefix(ENV)
    secret = _hidden.get(name) or os.environ.get(name)
    if not secret:
        raise OptionError(
            f"the configuration refers to the secret env:{name}, but the environment variable {name} is not set: "
            "set it, or pass the option with the secret again"
        )
    return register_secret(secret)
