"""Everything that can be known to be wrong before a process starts: seconds here instead of minutes later.

Each check raises ValueError with one sentence: found -> needed -> do.
"""

from __future__ import annotations

import socket
from functools import cache
from typing import TYPE_CHECKING

from flows.config import PostTrainConfig, check_secrets
from flows.runs import check_run, open_store
from stages.train.config import TrainConfig
from storage.errors import EngineError

if TYPE_CHECKING:
    from engines.megatron.shape import ModelShape

GENERATING = ("post_train", "evaluate")  # flows that need engines


def preflight(flow: str, config: PostTrainConfig) -> None:
    """Check a config for a flow. The second time in a process it costs nothing.

    Raises:
        ValueError: the request is wrong.
        StoreError: the store cannot hold a run.
    """
    _checked(flow, config.model_dump_json())


@cache
def _checked(flow: str, config_json: str) -> None:
    from engines.megatron.fit import check_fit
    from engines.megatron.model_options import contradictions
    from engines.megatron.shape import ModelShape

    config = PostTrainConfig.model_validate_json(config_json)
    check_secrets(config)
    if flow != "convert" and not config.run.run:
        raise ValueError("--run is missing: name the run, the same name resumes it")
    if not config.convert.hf_checkpoint:
        raise ValueError(
            "--hf-checkpoint is missing: give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
        )
    shape, train = ModelShape.from_hf(config.convert.hf_checkpoint), config.train
    contradictions(shape, train.megatron)
    _check_algorithm(train, shape)
    check_fit(
        shape,
        train.tensor_model_parallel_size,
        train.expert_model_parallel_size,
        train.expert_tensor_parallel_size,
        train.sequence_parallel,
    )
    if flow == "convert" and config.convert.convert_save and not config.convert.convert_load:
        return  # from one directory into another: no store is touched
    store = open_store(config.run)
    if flow != "convert":
        check_run(store, flow, config)
        _check_data(flow, config, shape)
    if flow in GENERATING:
        _check_engines(config)


def _positions(config: PostTrainConfig, shape: ModelShape) -> int:
    """Return how many tokens an engine takes: the model's positions, or --sglang-context-length."""
    served = config.rollout.sglang.get("context_length")
    return served if isinstance(served, int) else shape.max_position_embeddings


def _check_data(flow: str, config: PostTrainConfig, shape: ModelShape) -> None:
    from stages.rewards.grading import check_reward_of
    from stages.rollout.check import check_functions
    from stages.rollout.prompts.source import check_prompt_data
    from stages.rollout.tokenizer import check_tokenizer, check_vocabulary

    demonstrations = flow == "sft"
    if demonstrations != (config.train.loss_type == "sft_loss") and flow != "evaluate":
        raise ValueError(
            f"--loss-type {config.train.loss_type} does not go with `{flow}`: `penstock sft` trains on demonstrations (sft_loss), "
            "`penstock train` on graded samples (policy_loss)"
        )
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
        raise ValueError("--group-rm compares the samples of a prompt, which an evaluation cannot do: give --eval-rm-type")
    for rollout in [*([] if flow == "sft" else [config.rollout]), *evaluated]:
        check_reward_of(rollout)
    if flow == "evaluate" and not config.eval.eval_prompt_data:
        raise ValueError("--eval-prompt-data is missing: give NAME PATH, any number of times, or data sets with --eval-config")
    for rollout in evaluated:
        check_prompt_data(rollout, tokenizer=tokenizer, num_positions=positions)


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
            raise ValueError(
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


def _check_engines(config: PostTrainConfig) -> None:
    from engines.sglang.args import check_router_args, check_sglang_args, returning_experts
    from engines.sglang.external import url_of
    from engines.sglang.sampling import check_sampling, check_seeds

    rollout = config.rollout
    check_sglang_args(rollout.sglang)
    routed = rollout.use_router or bool(rollout.router)
    if routed:
        check_router_args(rollout.router)
    check_sampling(rollout.rollout_sampling, routed=routed)
    check_seeds(rollout.rollout_sampling_seeds, rollout.rollout_sampling, rollout.sglang)
    for address in rollout.rollout_external_engine_addrs:
        url_of(address)
    if rollout.rollout_external_engine_addrs and (started := sorted(set(rollout.sglang) - {"api_key"})):
        raise EngineError(
            f"--sglang-{started[0].replace('_', '-')} says how an engine is started, but those of "
            "--rollout-external-engine-addrs are started already: give it to them, and leave it out here"
        )
    if config.train.use_rollout_routing_replay:
        returning_experts(rollout.sglang)
        if routed:
            raise ValueError(
                "--use-rollout-routing-replay does not pass SGLang's router, which drops the request for experts: leave --use-router out"
            )
    if port := rollout.sglang_port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise ValueError(
                    f"port {port} is taken: give --sglang-port another one, or leave it out and a free one is found"
                ) from None
