"""Decide whether a run's engines get LoRA adapters or merged weights (--lora-publish)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.engines.backends import engine_backend
from penstock.engines.families import read_shape
from penstock.engines.generation import PublishedAdapter
from penstock.engines.lora import adapter_targets, served_config, served_modules, served_tensors
from penstock.engines.options import ServedAdapters
from penstock.flows.config import PostTrainConfig
from penstock.stages.plugins import BUILT_IN_EVALUATION
from penstock.storage.errors import OptionError

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.options import EngineOptions
    from penstock.stages.train.config import TrainConfig
    from penstock.storage.history.run_record import ParentRecord


def with_adapters(options: EngineOptions, config: PostTrainConfig, parent: ParentRecord | None) -> EngineOptions:
    """Return the engine options with the LoRA adapters that the engines load; unchanged if they load none, for instance
    because the engines get merged weights. `parent` is the run and round from which this run was forked, None if it is
    not a fork. Raises OptionError if --lora-publish adapter is not possible."""
    train, run = config.train, config.run
    if train.lora is None or train.lora.lora_publish == "merged" or run.debug_rollout_only or run.debug_train_only:
        return options
    # Requests of user-defined functions may not name an adapter, and would then be answered by the base model.
    rollout = config.rollout
    functions = (rollout.custom_generate_function_path, rollout.rollout_function_path, rollout.eval_function_path)
    calls_engines_itself = any(path not in (None, BUILT_IN_EVALUATION) for path in functions)
    if train.lora.lora_publish is None and (options.external or calls_engines_itself):
        return options
    if reason := reason_against_adapters(config, options, parent):
        if train.lora.lora_publish == "adapter":
            raise OptionError(f"--lora-publish adapter is not possible: {reason}; use --lora-publish merged")
        return options
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    adapters = ServedAdapters(
        rank=train.lora.lora_rank,
        modules=served_modules(train.lora, shape),
        max_versions=run.max_staleness + 2 if run.streams else 1,
    )
    return replace(options, adapters=adapters, in_flight=None)


def reason_against_adapters(config: PostTrainConfig, options: EngineOptions, parent: ParentRecord | None) -> str | None:
    """Return why the engines of a run that trains adapters must get merged weights; None if they can load adapters. The
    arguments are those of `with_adapters`."""
    run, lora = config.run, config.train.lora
    assert lora is not None, "the run trains all weights"
    if reason := describe_other_base(config, parent):
        return reason
    if run.streams and options.router is not None:
        return "engines behind a router may have adapters of different versions (--async-mode streaming)"
    if run.update_weight_transport == "nccl":
        return "adapters cannot be broadcast (--update-weight-transport nccl)"
    if run.check_weight_update_equal and run.update_weight_transport == "disk":
        return "engines can compare adapters (--check-weight-update-equal) only with --update-weight-transport tensor"
    shape = read_shape(config.convert.hf_checkpoint, config.convert.model_family_path)
    targets = adapter_targets(shape, lora.lora_target_modules)
    return engine_backend(options.engine).reason_against_adapters(options, shape, targets)


def describe_other_base(config: PostTrainConfig, parent: ParentRecord | None) -> str | None:
    """Return a text that names the base model of the adapters if engines load another model at their start, else
    None."""
    ancestor = fully_trained_ancestor(parent)
    start = f"the weights that run {ancestor} has trained" if ancestor else config.start_weights
    if start == config.convert.hf_checkpoint:
        return None
    return f"the adapters are trained on {start}, but engines start with the weights of --hf-checkpoint"


def adapter_of_version(
    version: str, suffix: str, train: TrainConfig, shape: ModelShape, model_path: str, *, compare: bool = False
) -> PublishedAdapter:
    """Return what an engine must know to load the adapter of a policy version, except the matrices.

    Args:
        version: the policy version, `<run>/<number>`.
        suffix: appended to the version in the name under which engines serve the adapter (`adapter_suffix`).
        train: options of the trainer, which must train adapters.
        shape: shape of the model.
        model_path: Hugging Face directory of the model.
        compare: whether the engines check the checksum of every matrix that they receive.
    """
    assert train.lora is not None, "the run trains all weights"
    num_tensors = len(served_tensors(train.lora, shape))
    return PublishedAdapter(version + suffix, served_config(train.lora, shape, model_path), num_tensors, compare)


def fully_trained_ancestor(parent: ParentRecord | None) -> str | None:
    """Return the name of the nearest ancestor of a fork that trained all weights, which are then the base of the fork's
    LoRA adapters. Return None if there is none: the base is the model that the fork starts from. `parent` is the run
    and round from which it was forked."""
    while parent is not None and parent.at > 0:
        if parent.config.get("train", {}).get("lora") is None:
            return parent.run
        parent = parent.parent
    return None
