"""Secrets in a configuration: which values are secret, where they come from, and what may be shown of them.

What leaves this process (run.json, Prefect's parameters, MLflow, the outbox, the terminal) holds references, never values:

    env:NAME            the environment variable NAME
    secret-file:PATH    the content of a file that only its owner can read

`hide` replaces secrets that were given literally by `env:PENSTOCK_SECRET_...`, and remembers them in this process. `reveal` resolves references
where a value is used. `redact` removes credentials from text for people.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

PREFIX = "PENSTOCK_SECRET_"
_ENV, _FILE = "env:", "secret-file:"
# Names of options that hold a secret: api_key, aws_secret_access_key, sas_token, control_plane_api_keys; not input_key or max_tokens.
_SECRET_NAME = re.compile(
    r"^(key|auth|pkey)$|(^|[_.])((api|access|account|private|shared|secret)_keys?(_id)?|secret|token|password|passwd|passphrase|"
    r"credentials?|authorization|cookie|connection_string)$"
)
_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s@/?#]*:[^\s@?#]+@")
_QUERY = re.compile(r"(?P<name>[?&][^=&\s]*(key|secret|token|password|signature|sig|credential)=)[^&\s#]+", re.IGNORECASE)
_SHORTEST = 6  # characters: what is shorter would be replaced inside ordinary words
_given: dict[str, str] = {}  # of this process: name of the reference -> secret
_revealed: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Return whether an option of this name holds a secret."""
    return _SECRET_NAME.search(name.lower().replace("-", "_")) is not None


def has_credentials(url: str) -> bool:
    """Return whether a URL carries a password or a key."""
    return "://" in url and redact_url(url) != url


def redact_url(text: str) -> str:
    """Return the text with the credentials of all URLs in it replaced by `***`."""
    return _QUERY.sub(r"\g<name>***", _USER.sub(r"\g<scheme>***@", text))


def redact(text: str) -> str:
    """Return the text without credentials in URLs and without any secret that this process has used."""
    for secret in sorted(_revealed, key=len, reverse=True):
        text = text.replace(secret, "***")
    return redact_url(text)


def protect(secret: str) -> str:
    """Let `redact` remove this secret from now on. Returns it."""
    if len(secret) >= _SHORTEST:
        _revealed.add(secret)
    return secret


def hide(path: str, value: Any) -> Any:
    """Return a config value with its literal secrets replaced by references that `reveal` resolves in this process.

    Args:
        path: name of the option, for instance `store_options`; the reference is named after it.
        value: text, or nested lists and tables.
    """
    if isinstance(value, dict):
        return {name: hide(f"{path}.{name}", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [hide(path, item) for item in value]
    if not isinstance(value, str) or not value or _is_reference(value):
        return value
    if not (is_secret_name(path.rpartition(".")[2]) or has_credentials(value)):
        return value
    name = base = PREFIX + re.sub(r"\W", "_", path).upper()
    number = 1
    while _given.setdefault(name, value) != value:  # another run of this process has another secret there
        name, number = f"{base}_{number + 1}", number + 1
    protect(value)
    return _ENV + name


def is_hidden(value: Any) -> bool:
    """Return whether a value holds a reference that only this process can resolve: the secret was given literally."""
    if isinstance(value, dict | list | tuple):
        return any(is_hidden(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and value.startswith(_ENV) and value.removeprefix(_ENV) in _given


def reveal(value: Any) -> Any:
    """Return a config value with its references replaced by what they refer to.

    Raises:
        OptionError: the environment variable is not set; the file is missing, or others can read it.
    """
    if isinstance(value, dict):
        return {name: reveal(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [reveal(item) for item in value]
    if not isinstance(value, str) or not _is_reference(value):
        return value
    return protect(
        _from_environment(value.removeprefix(_ENV)) if value.startswith(_ENV) else _from_file(value.removeprefix(_FILE))
    )


def masked(value: Any, name: str = "") -> Any:
    """Return nested values with secrets replaced by `***`; references stay."""
    if isinstance(value, dict):
        return {key: masked(item, key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, name) for item in value]
    if not isinstance(value, str) or _is_reference(value):
        return value
    return "***" if value and is_secret_name(name) else redact(value)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, at once or not at all; its directory is made, for this user alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def _is_reference(value: str) -> bool:
    return value.startswith((_ENV, _FILE))


def _from_environment(name: str) -> str:
    from storage.errors import OptionError

    value = _given.get(name) or os.environ.get(name)
    if not value:
        raise OptionError(
            f"the configuration refers to the secret env:{name}, but this environment variable is not set: set it, or give the option again"
        )
    return value


def _from_file(name: str) -> str:
    from storage.errors import OptionError

    path = Path(name).expanduser()
    try:
        if path.stat().st_mode & 0o077:
            raise OptionError(f"secret-file:{name} can be read by other users: chmod 600 {name}")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"secret-file:{name} cannot be read ({type(error).__name__}): check the path") from error
