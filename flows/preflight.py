"""Everything that can be known to be wrong before a process starts: seconds here instead of minutes later.

Each check raises an InputError with one sentence: found -> needed -> do. Cheap checks come first, and nothing is written: the store is
probed last, and a run's name is claimed by the caller after that (`runs.open_run`).
"""

from __future__ import annotations

import logging
import re
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flows.config import PostTrainConfig, check_secrets
from flows.learning_signal import GROUP_RELATIVE
from flows.runs import check_run, open_store
from stages.rollout.config import RolloutConfig
from stages.train.config import TrainConfig
from storage.errors import EngineError, ModelError, OptionError, RewardError, StoreError
from storage.secrets import reveal

if TYPE_CHECKING:
    from engines.megatron.shape import ModelShape

GENERATING = ("post_train", "evaluate")  # flows that need engines
TRAINING = ("post_train", "sft")
logger = logging.getLogger(__name__)


def preflight(flow: str, config: PostTrainConfig) -> None:
    """Check a config for a flow. The second time in a process it costs nothing.

    Raises:
        InputError: the request is wrong.
        StoreError: the store cannot hold a run.
    """
    _check_rounds(flow, config)
    _checked(flow, config.model_dump_json())


@cache
def _checked(flow: str, config_json: str) -> None:
    from engines.megatron.shape import ModelShape
    from stages.convert.source_check import check_weights

    config = PostTrainConfig.model_validate_json(config_json)
    _check_request(flow, config)
    shape = ModelShape.from_hf(config.convert.hf_checkpoint)
    _check_algorithm(config.train, shape)
    check_layout(shape, config.train)
    if not config.convert.convert_load:  # else config.json alone is taken from there
        check_weights(config.convert.hf_checkpoint, shape)
    if flow == "convert" and config.convert.convert_save and not config.convert.convert_load:
        return  # from one directory into another: no store is touched
    if flow != "convert":
        _check_recorded(flow, config)
        _check_lengths(flow, config, shape)
        _check_data(flow, config, shape)
    if flow in GENERATING:
        _check_engines(config, shape)
    open_store(config.run)  # last, for it writes a probe


def _check_recorded(flow: str, config: PostTrainConfig) -> None:
    """Check that this config may begin or continue the run of its name."""
    store = open_store(config.run, probe=False)
    try:
        check_run(store, flow, config)
    except OSError as error:
        raise StoreError(f"store {store.uri!r} cannot be read ({error.strerror}): give --store a directory or a URI") from error


def _check_request(flow: str, config: PostTrainConfig) -> None:
    """Check what needs no file but those of secrets."""
    from engines.megatron.option_values import check_option_values

    check_secrets(config)
    run, rollout, train = config.run, config.rollout, config.train
    if flow != "convert" and not run.run:
        raise OptionError("--run is missing: name the run, the same name resumes it")
    if not config.convert.hf_checkpoint:
        raise OptionError(
            "--hf-checkpoint is missing: give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
        )
    if (flow == "sft") != (train.loss_type == "sft_loss") and flow in TRAINING:
        raise OptionError(
            f"--loss-type {train.loss_type} does not go with `{flow}`: `penstock sft` trains on demonstrations (sft_loss), "
            "`penstock train` on graded samples (policy_loss)"
        )
    if flow == "post_train":
        _check_group_size(config)
    if flow == "evaluate" and not config.eval.eval_prompt_data:
        raise OptionError("--eval-prompt-data is missing: give NAME PATH, any number of times, or data sets with --eval-config")
    if run.ray_address is not None and not re.fullmatch(r"auto|local|(ray://)?[\w.\[\]:-]+:\d{1,5}", run.ray_address, re.ASCII):
        raise OptionError(f"--ray-address {run.ray_address[:80]!r} is not an address: give auto, HOST:PORT or ray://HOST:PORT")
    check_option_values(train.megatron)
    if rollout.rollout_external_engine_addrs and (started := sorted(set(rollout.sglang) - {"api_key"})):
        raise EngineError(
            f"--sglang-{started[0].replace('_', '-')} says how an engine is started, but those of "
            "--rollout-external-engine-addrs are started already: give it to them, and leave it out here"
        )


def _check_rounds(flow: str, config: PostTrainConfig) -> None:
    """Check that the run does something. JSON does not tell a default from what was given, so this is asked of the config itself."""
    run = config.run
    if flow not in TRAINING or run.num_rollout or run.num_rollout_per_start:
        return
    if flow == "sft":
        raise OptionError("--num-rollout is missing: give the number of rounds to train")
    if not config.eval.eval_prompt_data or "num_rollout" not in run.model_fields_set:
        raise OptionError(
            "--num-rollout is missing: give the number of rounds to train (0 with --eval-prompt-data only evaluates)"
        )


def _check_group_size(config: PostTrainConfig) -> None:
    rollout, train = config.rollout, config.train
    compares = (
        train.loss_type == "policy_loss"
        and train.advantage_estimator in GROUP_RELATIVE
        and train.custom_advantage_function_path is None
        and not train.disable_rewards_normalization
    )
    several = rollout.custom_generate_function_path or rollout.data_source_path  # may give a prompt further samples
    if compares and rollout.n_samples_per_prompt == 1 and not several:
        raise OptionError(
            f"--n-samples-per-prompt 1 with --advantage-estimator {train.advantage_estimator}: the advantage is relative to the other "
            "samples of the prompt, so every gradient would be zero; give 2 or more, or --disable-rewards-normalization"
        )


def check_layout(shape: ModelShape, train: TrainConfig) -> None:
    """Check that a model can be trained with the parallel sizes and Megatron options of a config. Raises InputError."""
    from engines.megatron.fit import check_fit, check_pipeline
    from engines.megatron.model_options import contradictions

    contradictions(shape, train.megatron)
    check_fit(
        shape,
        train.tensor_model_parallel_size,
        train.expert_model_parallel_size,
        train.expert_tensor_parallel_size,
        train.sequence_parallel,
    )
    check_pipeline(shape, train.pipeline_model_parallel_size, train.virtual_pipeline_model_parallel_size, train.megatron)


def _check_lengths(flow: str, config: PostTrainConfig, shape: ModelShape) -> None:
    """Check that a prompt and the longest response fit the positions that the engine serves."""
    if flow not in GENERATING:
        return
    rollout, evals = config.rollout, config.eval
    limit = _positions(config, shape)
    source = "--sglang-context-length" if limit != shape.max_position_embeddings else "max_position_embeddings in config.json"
    context = rollout.rollout_max_context_len
    if context is not None and context > limit:
        raise OptionError(
            f"--rollout-max-context-len {context} is above the model's {limit} positions ({source}): give at most {limit}"
        )
    lengths = {"--rollout-max-response-len": rollout.rollout_max_response_len} if flow == "post_train" else {}
    for name, _ in evals.eval_prompt_data:
        own = evals.settings(name).get("max_response_len")
        flag_name = "--rollout-max-response-len" if own is None else f"--eval-max-response-len (max_response_len of {name})"
        lengths[flag_name] = rollout.rollout_max_response_len if own is None else own
    for name, length in lengths.items():
        if length >= limit and context is None:  # with it, responses end where the context does
            raise OptionError(
                f"{name} {length} leaves no room for a prompt: the model has {limit} positions ({source}); give less, or "
                f"--rollout-max-context-len {limit}"
            )


def _positions(config: PostTrainConfig, shape: ModelShape) -> int:
    """Return how many tokens an engine takes: the model's positions, or --sglang-context-length."""
    served = config.rollout.sglang.get("context_length")
    return served if isinstance(served, int) and served > 0 else shape.max_position_embeddings


def _check_data(flow: str, config: PostTrainConfig, shape: ModelShape) -> None:
    from stages.rollout.check import check_functions
    from stages.rollout.prompts.source import check_prompt_data
    from stages.rollout.tokenizer import check_tokenizer, check_vocabulary

    demonstrations = flow == "sft"
    tokenizer = check_tokenizer(
        config.convert.hf_checkpoint,
        apply_chat_template=config.rollout.apply_chat_template or demonstrations,
        tools=bool(config.rollout.tool_key),
        template_options=config.rollout.apply_chat_template_kwargs,
    )
    check_vocabulary(tokenizer, shape.vocab_size, config.convert.hf_checkpoint)
    positions = _positions(config, shape)
    if flow != "evaluate" and (config.run.num_rollout or config.run.num_rollout_per_start):
        check_prompt_data(config.rollout, demonstrations=demonstrations, tokenizer=tokenizer, num_positions=positions)
    evaluated = [
        config.rollout.model_copy(update=config.eval.overrides(path, name)) for name, path in config.eval.eval_prompt_data
    ]
    if flow in GENERATING:
        check_functions(config.rollout, evaluation=flow == "evaluate")
    if config.rollout.group_rm and any(rollout.custom_rm_path for rollout in evaluated):
        raise RewardError("--group-rm compares the samples of a prompt, which an evaluation cannot do: give --eval-rm-type")
    for rollout in evaluated:
        check_prompt_data(rollout, tokenizer=tokenizer, num_positions=positions)
    for rollout in [*([config.rollout] if flow == "post_train" else []), *evaluated]:
        _check_reward(rollout)


def _check_reward(rollout: RolloutConfig) -> None:
    """Check that a reward exists for the first rows and finds what it needs in them, and try a user-defined one."""
    from stages.rewards.grading import check_reward_of
    from stages.rewards.preflight import Row, check_rows, try_reward
    from stages.rollout.check import first_rows

    rollout = rollout.model_copy(update={"rm_url": reveal(rollout.rm_url)})
    check_reward_of(rollout)
    if rollout.custom_generate_function_path and not (rollout.rm_type or rollout.custom_rm_path):
        return  # it may grade its samples itself
    rows = [Row(where, label, metadata, prompt) for where, prompt, label, metadata in first_rows(rollout)]
    check_rows(rollout, rows)
    for reason in try_reward(rollout, rows, rollout.model_dump()):
        logger.warning("the reward gives no number for a made sample (%s); the run starts, for others have one", reason)


def _check_algorithm(train: TrainConfig, shape: ModelShape) -> None:
    """The models beside the policy can take its place, and the user's functions load."""
    from engines.megatron.experts import experts_format
    from stages.convert.adopt import config_directory
    from stages.plugins import load_checked

    for name, path in train.models_beside.items():
        directory = config_directory(path)
        if directory is None:
            continue  # written by Megatron: its tensors are compared with the policy's when it is copied into the store
        other = type(shape).from_hf(directory)
        mine, theirs = shape.model_dump(), other.model_dump()
        different = sorted(
            key for key in mine if mine[key] != theirs[key] and key not in ("architecture", "max_position_embeddings")
        )
        if different:
            key = different[0]
            raise ModelError(
                f"the {name} {path} has {key} {theirs[key]!r}, but the policy has {mine[key]!r}: it takes the policy's place for a pass, "
                "so give a model of the same sizes"
            )
    for path, usual_name, words in train.plugins:
        load_checked(path, usual_name, words)
    if train.use_routing_replay:
        experts_format(shape, "--use-routing-replay")
    if train.use_rollout_routing_replay:
        experts_format(shape, "--use-rollout-routing-replay")


def warnings(flow: str, config: PostTrainConfig) -> list[str]:
    """What is allowed, and perhaps not meant: one sentence each."""
    if flow != "post_train":
        return []
    from engines.sglang.sampling import inexact

    rollout = config.rollout
    cut = inexact({"top_p": rollout.rollout_top_p, "top_k": rollout.rollout_top_k, **rollout.rollout_sampling})
    if not cut:
        return []
    return [
        f"{', '.join(cut)}: tokens come from another distribution than the one that log-probs, ratios and KL are computed of, here and in "
        "the trainer, so the policy gradient is biased; sample from the whole distribution for an exact one"
    ]


def _check_engines(config: PostTrainConfig, shape: ModelShape) -> None:
    from engines.megatron.hf_config import read_config
    from engines.sglang.architectures import check_model
    from engines.sglang.args import check_router_args, check_sglang_args, returning_experts
    from engines.sglang.external import url_of
    from engines.sglang.sampling import check_sampling, check_seeds

    rollout = config.rollout
    if not rollout.rollout_external_engine_addrs and rollout.sglang_python is None:  # the SGLang installed here
        check_model(read_config(Path(config.convert.hf_checkpoint) / "config.json"))
    check_sglang_args(rollout.sglang)
    routed = rollout.use_router or bool(rollout.router)
    if routed:
        check_router_args(rollout.router)
    check_sampling(rollout.rollout_sampling, routed=routed)
    check_seeds(rollout.rollout_sampling_seeds, rollout.rollout_sampling, rollout.sglang)
    for address in rollout.rollout_external_engine_addrs:
        url_of(address)
    if config.train.use_rollout_routing_replay:
        returning_experts(rollout.sglang)
        if routed:
            raise EngineError(
                "--use-rollout-routing-replay does not pass SGLang's router, which drops the request for experts: leave --use-router out"
            )
    if port := rollout.sglang_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise EngineError(
                    f"port {port} is taken: give --sglang-port another one, or leave it out and a free one is found"
                ) from None
