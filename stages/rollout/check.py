"""Preflight: every function of the user's that a rollout would call loads and can be called as it will be."""

from __future__ import annotations

from types import SimpleNamespace

from stages.rollout.config import RolloutConfig
from stages.rollout.custom_generation import check_generate_function
from stages.rollout.custom_source import load_buffer_filter, load_data_source
from stages.rollout.filters import load_filter
from stages.rollout.hooks import check_hooks


def check_functions(config: RolloutConfig, *, evaluation: bool = False) -> None:
    """Raises ValueError for the first that does not; it names the function. An evaluation generates, and has none of the others."""
    if config.custom_generate_function_path:
        check_generate_function(config.custom_generate_function_path)
    if evaluation:
        return
    if config.dynamic_sampling_filter_path:
        load_filter(config.dynamic_sampling_filter_path, SimpleNamespace(**config.model_dump()))
    if config.data_source_path:
        load_data_source(config.data_source_path)
    if config.buffer_filter_path:
        load_buffer_filter(config.buffer_filter_path)
    check_hooks(config)
