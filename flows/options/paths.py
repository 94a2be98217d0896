"""Complete the paths in a run's options: make local ones absolute, so that `penstock resume` works from any directory,
and add the names of user-defined functions.

URIs are not changed. Functions given as `pkg.module:name` are not changed either: Python imports them from sys.path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engines.backends import engine_backend
from penstock.flows.config import PostTrainConfig
from penstock.stages.plugins import DEFAULT_NAMES, with_function_name
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.train.config import TrainConfig
from penstock.storage.config import StageConfig

FILES = {  # section -> options that name a file or a directory, or a list of them
    section: names.split()
    for section, names in {
        "run": "store save_hf update_weight_disk_dir tb_dir wandb_dir",
        "convert": "hf_checkpoint load convert_save",
        "rollout": "prompt_data data_cache rm_model_path",
        "train": "ref_load opd_teacher_load lora_load",
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
    `rewards.py:reward_func`), so that plan, record and every process mean the same function. The checks
    report files that do not exist.

    Raises:
        PluginError: a file does not load, or its function cannot be chosen.
    """
    from penstock.stages.rewards.grading import check_reward_options  # loads pyarrow and jinja2

    sections = {}
    for section in ("rollout", "train"):
        options = getattr(config, section)
        paths = {name: getattr(options, name) for name in FUNCTIONS[section]}
        bare = {name: path for name, path in paths.items() if path and path.endswith(".py") and Path(path).exists()}
        reward = {"custom_rm_path": check_reward_options(options)} if bare.pop("custom_rm_path", None) else {}
        named = {name: with_function_name(path, DEFAULT_NAMES[name]) for name, path in bare.items()}
        sections[section] = _with_changes(options, named | reward)
    return config.model_copy(update=sections)


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
        return change(value) if value and "://" not in value and not value.startswith(("~", CHAMPION)) else value

    def change_function_path(value: str | None) -> str | None:
        if not value:
            return value
        path, colon, name = (value, "", "") if value.endswith(".py") else value.rpartition(":")
        return change_file_path(path) + colon + name if path.endswith(".py") else value

    sections: dict[str, Any] = {}
    for section in ("run", "convert", "rollout", "train", "debug"):
        old = getattr(config, section)
        new = {name: change_file_path(getattr(old, name)) for name in FILES.get(section, ())}
        new |= {name: change_function_path(getattr(old, name)) for name in FUNCTIONS.get(section, ())}
        if section == "rollout":
            of_paths = engine_backend(old.engine).path_flags
            new["engine_options"] = {
                name: change_file_path(value) if name in of_paths else value
                for name, value in old.engine_options.items()
            }
        sections[section] = _with_changes(old, new)
    evals = config.eval
    new = {"eval_prompt_data": [(name, change_file_path(path)) for name, path in evals.eval_prompt_data]}
    if evals.eval_config is not None:
        data_sets = [
            data_set.model_copy(update={"path": change_file_path(data_set.path)})
            for data_set in evals.eval_config.datasets
        ]
        new["eval_config"] = evals.eval_config.model_copy(update={"datasets": data_sets})
    return config.model_copy(update=sections | {"eval": _with_changes(evals, new)})


def _with_changes(section: StageConfig, values: dict[str, Any]) -> StageConfig:
    """Return the section with `values`. Options that keep their value are not among those that are given."""
    return section.model_copy(update={name: new for name, new in values.items() if new != getattr(section, name)})
