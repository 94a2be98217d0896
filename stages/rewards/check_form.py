"""Look at a user-defined reward in a process of its own: importing it may hang, crash or end the process, and must not end the driver.

`python -m stages.rewards.check_form FD` reads nothing but its arguments and writes JSON to the file descriptor FD.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from storage.errors import PluginError


@lru_cache
def is_class_reward(
    path: str, *, group_rm: bool = False, rm_model_path: str | None = None, within: str | None = None, timeout: float = 300.0
) -> bool:
    """Check a reward as `find_form` does and return whether it is a class; asked again, the same answer.

    Raises:
        PluginError: it does not load, ends its process, takes more than `timeout` seconds, or cannot be called as its form demands.
    """
    read, write = os.pipe()
    options = {"path": path, "group_rm": group_rm, "rm_model_path": rm_model_path, "within": within}
    search = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with os.fdopen(read, encoding="utf-8") as answers:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "stages.rewards.check_form", str(write), json.dumps(options)],
                pass_fds=[write],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            )
        finally:
            os.close(write)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise PluginError(
                f"{path} takes more than {timeout:g} s to import: make it faster, or raise --reward-start-timeout"
            ) from None
        answer = answers.read()
    if not answer:
        raise PluginError(
            f"{path} ends its process with exit code {code} while it is imported: remove os._exit, or repair what crashes"
        )
    result = json.loads(answer)
    if "error" in result:
        raise PluginError(result["error"])
    return bool(result["is_class"])


def main() -> None:
    """Write `{"is_class": ...}` or `{"error": sentence}`."""
    from stages.rewards.forms import find_form

    options = json.loads(sys.argv[2])
    try:
        result: dict[str, bool | str] = {"is_class": find_form(options.pop("path"), **options).is_class}
    except PluginError as error:
        result = {"error": str(error)}
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:
        json.dump(result, answers)
    sys.stdout.flush()
    os._exit(0)  # threads that the module has started do not keep it


if __name__ == "__main__":
    main()
