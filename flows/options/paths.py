"""Complete the paths in a run's options: make local paths absolute, so that `penstock resume` works from any directory,
and add the names of functions to paths of user-defined functions.

URIs are not changed, and neither are functions of modules (`pkg.module:name`), which Python finds in sys.path.
A command without --store looks for stores around the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.engines.backends import engine_backend
from penstock.flows.config import PostTrainConfig, option_value, with_options
from penstock.stages.plugins import DEFAULT_NAMES, with_function_name
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.train.config import TrainConfig
from penstock.storage.commit import RunKeys

FILES = {  # section -> options that name a file or a directory, or a list or table of them
    section: names.split()
    for section, names in {
        "run": "store save_hf update_weight_disk_dir tb_dir wandb_dir",
        "convert": "hf_checkpoint load convert_save",
        "rollout": "prompt_data data_cache image_roots rm_model_path",
        "train": "ref_load",
        "train.opd": "opd_teacher_load",
        "train.opd.engine": "opd_teacher_engine",
        "train.lora": "lora_load",
        "debug": "save_debug_rollout_data load_debug_rollout_data save_debug_train_data dump_details profile_dir "
        "memory_snapshot_dir ci_save_grad_norm ci_load_grad_norm",
    }.items()
}
CHAMPION = "champion:"  # `--hf-checkpoint champion:MODEL`
FUNCTIONS = {  # section -> options that name a function: file.py, file.py:name, pkg.module:name or pkg.module.name
    "convert": ("model_family_path",),  # file.py or pkg.module
    "rollout": tuple(name for name in DEFAULT_NAMES if name in RolloutConfig.model_fields),
    "train": tuple(name for name in DEFAULT_NAMES if name in TrainConfig.model_fields),
}


def with_function_names(config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with the name of the function in every path of a user-defined function (`rewards.py` becomes
    `rewards.py:reward_func`), so that the plan, the run's record and every process refer to the same function. The path
    of a file that does not exist is not changed; `preflight` reports it."""
    from penstock.stages.rewards.grading import check_reward_options  # loads pyarrow and jinja2

    for section in ("rollout", "train"):
        options = getattr(config, section)
        paths = {name: getattr(options, name) for name in FUNCTIONS[section]}
        bare = {name: path for name, path in paths.items() if path and path.endswith(".py") and Path(path).exists()}
        reward = {"custom_rm_path": check_reward_options(options)} if bare.pop("custom_rm_path", None) else {}
        named = {name: with_function_name(path, DEFAULT_NAMES[name]) for name, path in bare.items()}
        config = with_options(config, section, named | reward)
    return config


def with_absolute_paths(config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with every local path made absolute, relative to the current directory."""
    return _map_paths(config, os.path.abspath)


def with_relative_paths(config: PostTrainConfig, directory: str) -> PostTrainConfig:
    """Return the config with the absolute paths below `directory` made relative to `directory`.

    In this form, configs recorded before and after the directory was moved are equal.
    """
    prefix = directory.rstrip("/") + "/"
    return _map_paths(config, lambda path: path.removeprefix(prefix))


def _map_paths(config: PostTrainConfig, change: Callable[[str], str]) -> PostTrainConfig:
    """Return the config with `change` applied to every local path."""

    def change_file_path(value: Any) -> Any:
        if isinstance(value, list):
            return [change_file_path(path) for path in value]
        if isinstance(value, dict):
            return {name: change_file_path(path) for name, path in value.items()}
        return change(value) if value and "://" not in value and not value.startswith(("~", CHAMPION)) else value

    def change_function_path(value: str | None) -> str | None:
        if not value:
            return value
        path, colon, name = (value, "", "") if value.endswith(".py") else value.rpartition(":")
        return change_file_path(path) + colon + name if path.endswith(".py") else value

    changed = config
    for table, change_path in ((FILES, change_file_path), (FUNCTIONS, change_function_path)):
        for section, names in table.items():
            values = {name: change_path(option_value(config, section, name)) for name in names}
            changed = with_options(changed, section, values)
    of_paths = engine_backend(config.rollout.engine).path_flags
    engine_options = {
        name: change_file_path(value) if name in of_paths else value
        for name, value in config.rollout.engine_options.items()
    }
    changed = with_options(changed, "rollout", {"engine_options": engine_options})
    evals = config.eval
    new: dict[str, Any] = {
        "eval_prompt_data": [(name, change_file_path(path)) for name, path in evals.eval_prompt_data]
    }
    if evals.eval_config is not None:
        data_sets = [
            data_set.model_copy(update={"path": change_file_path(data_set.path)})
            for data_set in evals.eval_config.datasets
        ]
        new["eval_config"] = evals.eval_config.model_copy(update={"datasets": data_sets})
    result: PostTrainConfig = with_options(changed, "eval", new)
    return result


# ---- stores around the working directory -----------------------------------------------------------------------------

MAX_DEPTH = 3  # levels of directories below the working directory
MAX_DIRECTORIES = 5000  # that are searched
_SKIPPED = {"node_modules", "site-packages", "__pycache__"}


def find_nearby_stores(directory: Path | None = None) -> list[str]:
    """Return the paths of the store that contains a directory (default: the working directory) and of the stores below
    it. Stores below it have paths relative to the directory. Hidden directories and symbolic links are skipped, and
    upper levels are searched first."""
    start = (directory or Path.cwd()).absolute()
    stores: list[Path] = []
    level, num_searched = [start], 0
    for depth in range(MAX_DEPTH + 1):
        level = level[: MAX_DIRECTORIES - num_searched]
        num_searched += len(level)
        of_level = [path for path in level if _is_store(path)]
        stores += of_level
        if depth < MAX_DEPTH:
            level = [
                child for path in level if path == start or path not in of_level for child in _subdirectories(path)
            ]
    around = [path for path in start.parents if _is_store(path)][:1]
    found = around + sorted(stores)
    return [os.path.relpath(path, start) if path.is_relative_to(start) else str(path) for path in found]


def names_no_store(argv: Sequence[str]) -> bool:
    """Return whether a command line has none of the flags that say where the store is."""
    return not {argument.partition("=")[0].replace("_", "-") for argument in argv} & {"--store", "--config", "--save"}


def stores_with_run(run: str) -> list[str]:
    """Return the paths of the stores around the working directory that have a run named `run`."""
    return [store for store in find_nearby_stores() if (Path(store) / RunKeys(run).record).is_file()]


def _subdirectories(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # not readable
        return []
    return [path / name for name in sorted(names) if name[0] != "." and name not in _SKIPPED]


def _is_store(path: Path) -> bool:
    """Return whether a directory has the record of a run."""
    try:
        return any((run / "run.json").is_file() for run in _subdirectories(path / "runs"))
    except OSError:
        return False
