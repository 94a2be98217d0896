"""Check a user-defined reward in a subprocess, because importing the reward's module may hang, crash or exit.

`python -m penstock.stages.rewards.check_custom_reward FD OPTIONS` writes the result as JSON to the file descriptor FD.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from penstock.storage.errors import PluginError


class CheckedReward(NamedTuple):
    """What a check of a user-defined reward returns."""

    path: str  # with the name of the function or class
    is_class: bool


@lru_cache
def check_custom_reward(
    path: str,
    *,
    group_rm: bool = False,
    rm_model_path: str | None = None,
    required_package: str | None = None,
    timeout: float = 300.0,
) -> CheckedReward:
    """Import a user-defined reward in a subprocess, and check its signature. Results are cached.
    See `load_custom_reward` for the arguments.

    Raises:
        PluginError: the reward does not load, exits at import, takes more than `timeout` seconds to import, or has the
            wrong signature.
    """
    read, write = os.pipe()
    options = {"path": path, "group_rm": group_rm, "rm_model_path": rm_model_path, "required_package": required_package}
    search_path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with os.fdopen(read, encoding="utf-8") as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.stages.rewards.check_custom_reward", str(write), json.dumps(options)],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(write)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise PluginError(
                f"{path} takes more than {timeout:g} s to import: speed up the import, or raise --reward-start-timeout"
            ) from None
        text = pipe.read()
    if not text:
        raise PluginError(
            f"importing {path} terminated Python with exit code {code}: remove calls of os._exit, or fix the crash"
        )
    result = json.loads(text)
    if "error" in result:
        raise PluginError(result["error"])
    return CheckedReward(**result)


def main() -> None:
    """Check the reward that OPTIONS (argument 2, JSON) describes; write the fields of CheckedReward, or `{"error":
    message}`, to the file descriptor FD (argument 1)."""
    from penstock.stages.plugins import DEFAULT_NAMES, with_function_name
    from penstock.stages.rewards.custom_reward import load_custom_reward

    options = json.loads(sys.argv[2])
    try:
        path = with_function_name(options.pop("path"), DEFAULT_NAMES["custom_rm_path"])
        result: dict[str, bool | str] = {"path": path, "is_class": load_custom_reward(path, **options).is_class}
    except PluginError as error:
        result = {"error": str(error)}
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as pipe:
        json.dump(result, pipe)
    sys.stdout.flush()
    os._exit(0)  # even if the imported module has started threads


if __name__ == "__main__":
    main()
