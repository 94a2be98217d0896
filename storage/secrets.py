"""Detection of secrets by option name and in URLs, and removal of secrets from text.

run.json, Prefect's parameters, MLflow, the tracking outbox and the terminal never receive a secret. A configuration
holds references to secrets instead of their values; secret_references.py creates and resolves the references.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ENV, FILE = "env:", "secret-file:"  # prefixes of references
# Words at the end of the name of an option with a secret, perhaps followed by a word such as `url`: api_key,
# aws_access_key_id, sas_token, control_plane_api_keys, sentry_dsn, webhook_url; but not input_key or max_tokens.
_SECRET_NAME = re.compile(
    r"""^(key|auth|pkey|sig|pin)$|(^|[_.])(
        (api|access|account|private|shared|secret|encryption|signing|master|auth|license)_?(keys?|tokens|codes?)
        |secrets?|token|pass|passwords?|passwd|passphrase|pwd|credentials?|creds?|authorization|bearer|cookies?|jwt|sas
        |signature|dsn|webhooks?|connection_?string)(_(id|url|uri|json|string|value|b64|base64|header))*$""",
    re.VERBOSE,
)
_URL = re.compile(r"""(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,30})?://(?P<rest>[^\s'"<>`]+)""")
_PASSWORD = re.compile(r"[^:\[]*:(?!\d*$)")  # a URL's authority with a colon that does not precede a port
_PARAMETER = re.compile(r"([?&;#])([^?&;#]*)")
_CONTAINER_SCHEMES = ("abfs", "abfss", "wasb", "wasbs")  # of Azure: the part before "@" names a container
_HARMLESS_NAMES = {"workflowType", "sslmode", "charset", "project", "entity", "group", "mode", "dir"}
_HARMLESS_VALUE = re.compile(r"\d{0,3}|true|false|\*\*\*", re.IGNORECASE)  # too short for a secret
_MIN_LENGTH = 6  # characters; shorter secrets also occur in ordinary words, so `redact` does not replace them
_protected: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Return whether an option's name (`api_key`, `sas_token`) says that the option's value is a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)  # from camelCase
    return _SECRET_NAME.search(words.lower().replace("-", "_")) is not None


def is_reference(value: str) -> bool:
    """Return whether a config value is a reference to a secret (env:NAME or secret-file:PATH)."""
    return value.startswith((ENV, FILE))


def has_credentials(url: str) -> bool:
    """Return whether a URL contains what may be a secret (`redact_url`)."""
    return "://" in url and redact_url(url) != url


def redact_url(text: str) -> str:
    """Return the text with everything in its URLs that may be a secret replaced by `***`: the user part, and each value
    in a query or fragment that is not known to be harmless."""
    return _URL.sub(lambda url: "".join("***" if secret else part for part, secret in _split_url(url)), text)


def _split_url(url: re.Match[str]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a URL, each with whether it may be a secret."""
    scheme, rest = url["scheme"] or "", url["rest"]
    yield f"{scheme}://", False
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    # A password may contain "/", "?", "#" and "@": it ends at the last "@".
    has_user = "@" in authority or ("@" in rest and _PASSWORD.match(authority))
    if has_user and scheme.lower() not in _CONTAINER_SCHEMES:
        user, _, rest = rest.rpartition("@")
        yield user, True
        yield "@", False
    start = min((rest.index(mark) for mark in "?#;" if mark in rest), default=len(rest))
    yield rest[:start], False
    for mark, parameter in _PARAMETER.findall(rest[start:]):
        yield mark, False
        name, equals, value = parameter.partition("=")
        if not re.search(r"[\w*]", value):  # no value: an anchor, a page's path, or a base64 token that ends with "="
            yield parameter, not (_HARMLESS_VALUE.fullmatch(name) or (mark == "#" and name.startswith("/")))
        else:
            yield name + equals, False
            yield value, not (name in _HARMLESS_NAMES or _HARMLESS_VALUE.fullmatch(value))


def redact(text: str) -> str:
    """Return the text with credentials in URLs, and all secrets given to `register_secret`, replaced by `***`."""
    for secret in sorted(_protected, key=len, reverse=True):
        text = text.replace(secret, "***")
    return redact_url(text)


def register_secret(secret: str) -> str:
    """Register a secret so that `redact` replaces it in this process. Return the secret."""
    if len(secret) >= _MIN_LENGTH:
        _protected.add(secret)
    return register_credentials(secret)


def register_credentials(url: str) -> str:
    """Register the parts of a URL that may be secrets, so that `redact` replaces them in this process: error messages
    of clients may quote parts of a URL. Return the URL."""
    for match in _URL.finditer(url):
        for part, secret in _split_url(match):
            password = part.partition(":")[2]
            # A user name or a query value is often an ordinary word, which `redact` must not replace everywhere.
            texts = [text for text, length in ((password, _MIN_LENGTH), (part, 2 * _MIN_LENGTH)) if len(text) >= length]
            if secret:
                _protected.update(form for text in texts for form in (text, unquote(text)))
    return url


def mask_secrets(value: Any, name: str = "") -> Any:
    """Return a config value with its secrets replaced by `***`. References to secrets are kept."""
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
