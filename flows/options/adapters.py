"""Decide whether a run's engines get adapters or merged weights (--lora-publish)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.engines.backends import engine_backend
from penstock.flows.config import PostTrainConfig
from penstock.flows.options.start_weights import starting_weights
from penstock.stages.rollout.plugins.eval_function import BUILT_IN
from penstock.storage.errors import OptionError

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.generation import PublishedAdapter
    from penstock.engines.options import EngineOptions
    from penstock.engines.serving.adapters import AdapterNames
    from penstock.stages.train.config import TrainConfig


def with_adapters(options: EngineOptions, config: PostTrainConfig, record: dict[str, Any] | None) -> EngineOptions:
    """Return the engine options with the adapters that the engines load; unchanged if they get weights.

    Args:
        options: options of the engines.
        config: config of the run.
        record: the run's record; None: a new run.

    Raises:
        OptionError: --lora-publish adapter is given, but the engines cannot get adapters.
    """
    from penstock.engines.families import read_shape
    from penstock.engines.families.peft import served_modules
    from penstock.engines.options import ServedAdapters

    train, run = config.train, config.run
    if train.lora is None or train.lora_publish == "merged" or run.debug_rollout_only or run.debug_train_only:
        return options
    if train.lora_publish is None and (options.external or calls_engines_itself(config)):
        return options
    if reason := reason_against_adapters(config, options, record):
        if train.lora_publish == "adapter":
            raise OptionError(f"--lora-publish adapter is not possible: {reason}; use merged")
        return options
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    adapters = ServedAdapters(
        rank=train.lora.rank,
        modules=served_modules(train.lora, shape),
        max_versions=run.max_staleness + 2 if run.streams else 1,
    )
    return replace(options, adapters=adapters, in_flight=None)


def calls_engines_itself(config: PostTrainConfig) -> bool:
    """Return whether user-defined functions generate, which may send requests to the engines without an adapter."""
    rollout = config.rollout
    paths = (rollout.custom_generate_function_path, rollout.rollout_function_path, rollout.eval_function_path)
    return any(path is not None and path not in BUILT_IN for path in paths)


def reason_against_adapters(
    config: PostTrainConfig, options: EngineOptions, record: dict[str, Any] | None
) -> str | None:
    """Return why the engines of a run that trains adapters must get merged weights, or None. Arguments as in
    `with_adapters`."""
    from penstock.engines.families import read_shape
    from penstock.engines.lora import adapter_targets

    run, lora = config.run, config.train.lora
    assert lora is not None, "the run trains all weights"
    start = starting_weights(config)
    if record is not None and trains_on_own_checkpoint(record):
        start = "a checkpoint of the run that it continues"
    if start != config.convert.hf_checkpoint:
        return f"the adapters are trained on {start}, but engines start with the weights of --hf-checkpoint"
    if run.streams and options.router is not None:
        return "engines behind a router may have adapters of different versions (--async-mode streaming)"
    if run.update_weight_transport == "nccl":
        return "SGLang has no broadcast of adapters (--update-weight-transport nccl)"
    if run.check_weight_update_equal and run.update_weight_transport == "disk":
        return "SGLang compares adapters for --check-weight-update-equal only over --update-weight-transport tensor"
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    targets = adapter_targets(shape, lora.target_modules)
    return engine_backend().reason_against_adapters(options, shape, targets, compare=run.check_weight_update_equal)


def adapter_of_version(
    version: str, names: AdapterNames, train: TrainConfig, shape: ModelShape, model_path: str, *, compare: bool = False
) -> PublishedAdapter:
    """Return the adapter of policy `version`, `<run>/<number>`, without its matrices.

    Args:
        version: the policy version.
        names: names of the driver's adapters.
        train: options of the adapters.
        shape: shape of the model.
        model_path: Hugging Face directory of the model.
        compare: whether the engines compare checksums of the matrices.
    """
    from penstock.engines.families.peft import served_config, served_tensors
    from penstock.engines.generation import PublishedAdapter

    assert train.lora is not None, "the run trains all weights"
    num_tensors = len(served_tensors(train.lora, shape))
    return PublishedAdapter(names.name(version), served_config(train.lora, shape, model_path), num_tensors, compare)


def trains_on_own_checkpoint(record: dict[str, Any]) -> bool:
    """Return whether the base of a run's adapters is a checkpoint of an earlier run that trained all weights, which it
    continues (`penstock fork`).

    Args:
        record: the run's record.
    """
    parent = record.get("parent")
    while parent is not None and parent["at"] > 0:
        if parent["config"].get("train", {}).get("lora_rank") is None:
            return True
        parent = parent.get("parent")
    return False
