"""Read the YAML file of --custom-config-path."""

from __future__ import annotations

from typing import Any

from penstock.flows.config import read_config_text
from penstock.stages.eval.data_sets import parse_yaml
from penstock.storage.errors import OptionError


def read_yaml(path: str) -> dict[str, Any]:
    """Return option name (with underscores) -> value of a YAML file.

    Raises:
        OptionError: the file cannot be read, or is not a mapping of names to values.
    """
    import yaml

    text = read_config_text(path, "--custom-config-path", "YAML")
    try:
        values = parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:150]
        raise OptionError(f"--custom-config-path {path} is not valid YAML ({reason}): correct it") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise OptionError(
            f"--custom-config-path {path} is not a mapping: write one `option_name: value` on each line, without dashes"
        )
    return {name.removeprefix("--").replace("-", "_"): value for name, value in values.items()}
