"""Escape text that is not valid Unicode, which files and services refuse."""

from __future__ import annotations

from typing import Any


def escape_invalid_text(value: Any) -> Any:
    """Return a value in whose strings, at any depth, lone surrogates are escaped: "\\ud800" becomes "\\\\ud800"."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {escape_invalid_text(name): escape_invalid_text(item) for name, item in value.items()}
    return [escape_invalid_text(item) for item in value] if isinstance(value, list | tuple) else value
