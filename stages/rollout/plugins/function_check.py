"""Check the user-defined functions of a rollout before the run starts."""

from __future__ import annotations

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins.custom_generation import load_generate_function
from penstock.stages.rollout.plugins.filters import load_group_filter
from penstock.stages.rollout.plugins.hooks import Hooks, load_log_function, load_train_data_function
from penstock.stages.rollout.plugins.rollout_function import find_evaluation_function, load_rollout_function
from penstock.stages.rollout.prompts.data_source import load_buffer_filter, load_data_source


def check_rollout_functions(config: RolloutConfig, *, evaluation: bool = False) -> None:
    """Check that all user-defined functions of a rollout load and have the right signature. For an evaluation, check
    only the generate function, the function of --eval-function-path and its log function, because an evaluation ignores
    the other functions. Raises PluginError."""
    if config.custom_generate_function_path:
        load_generate_function(config.custom_generate_function_path)
    if config.custom_eval_rollout_log_function_path:
        load_log_function(config, is_eval=True)
    find_evaluation_function(config)
    if evaluation:
        return
    if config.rollout_function_path:
        load_rollout_function(config.rollout_function_path)
    if config.custom_rollout_log_function_path:
        load_log_function(config, is_eval=False)
    load_group_filter(config)
    if config.data_source_path:
        load_data_source(config.data_source_path)
    if config.buffer_filter_path:
        load_buffer_filter(config.buffer_filter_path)
    load_train_data_function(config)
    Hooks(config)
