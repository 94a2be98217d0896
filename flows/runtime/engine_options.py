"""Map a run's configuration to the options of its engines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from penstock.engines.families.entries import read_config
from penstock.engines.options import EngineOptions, HealthCheck
from penstock.engines.placement import PlacementOptions
from penstock.engines.serving.server import ServerSpec
from penstock.flows.config import Flow, PostTrainConfig

TEACHER = "teacher"  # weight version that the teacher's engine reports


def engine_options(config: PostTrainConfig) -> EngineOptions:
    """Return the engine options of a config. References to secrets stay unresolved."""
    rollout, train, run = config.rollout, config.train, config.run
    num_gpus = None if run.colocate else rollout.rollout_num_gpus
    trainer_gpus = train.num_ranks
    if run.debug_rollout_only:  # without a trainer, the engines use the first GPUs
        num_gpus, trainer_gpus = None, num_gpus or trainer_gpus
    vision: Literal["frozen", "trained"] | None = None  # None: a model of text only
    if (file := Path(config.convert.hf_checkpoint) / "config.json").is_file() and "vision_config" in read_config(file):
        vision = "frozen" if train.freeze_vision else "trained"
    return EngineOptions(
        spec=ServerSpec(
            model_path=os.path.realpath(config.convert.hf_checkpoint),
            port=rollout.engine_port,
            args=rollout.engine_options,
            threads=rollout.engine_threads or 1,
            python=rollout.engine_python,
            pythonpath=rollout.engine_pythonpath,
            start_timeout=rollout.engine_start_timeout,
            network_interface=config.run.network_interface,
        ),
        engine=rollout.engine,
        params_dtype=train.params_dtype,
        num_engines=rollout.num_engines,
        num_gpus=num_gpus,
        gpus_per_engine=rollout.rollout_num_gpus_per_engine,
        trainer_gpus=trainer_gpus,
        external=tuple(rollout.rollout_external_engine_addrs),
        health=HealthCheck(
            interval=rollout.rollout_health_check_interval,
            timeout=rollout.rollout_health_check_timeout,
            failures=rollout.rollout_health_check_failures,
            max_restarts=rollout.engine_restarts if rollout.use_fault_tolerance else 0,
        ),
        transport=run.update_weight_transport,
        bucket_bytes=run.update_weight_buffer_size,
        in_flight=run.pause_generation_mode if run.streams else None,
        offload=run.offloads_engines,
        router=rollout.router if rollout.use_router or rollout.router else None,
        router_restarts=rollout.engine_restarts,
        sampling=rollout.rollout_sampling,
        sampling_seeds=rollout.rollout_sampling_seeds,
        fp32_head=train.fp32_lm_head,
        scores=train.reads_teacher_logprobs,
        compares=run.check_weight_update_equal,
        return_experts=train.use_rollout_routing_replay,
        vision=vision,
    )


def teacher_options(config: PostTrainConfig) -> EngineOptions | None:
    """Return the options of the engine that serves the model of --opd-teacher-engine; None if the run starts none."""
    train = config.train
    if train.opd is None or train.opd.engine is None:
        return None
    engines = engine_options(config)
    spec = engines.spec.model_copy(
        update={
            "model_path": os.path.realpath(train.opd.engine.opd_teacher_engine),
            "role": "teacher",
            "weight_version": TEACHER,
            "port": 0,
            "args": {},
        }
    )
    return EngineOptions(
        spec,
        engines.engine,
        params_dtype=train.params_dtype,
        num_gpus=train.opd.engine.opd_teacher_num_gpus,
        gpus_per_engine=train.opd.engine.opd_teacher_num_gpus,
        health=engines.health,
    )


def run_placement(config: PostTrainConfig) -> PlacementOptions:
    """Return how a run's trainer and engines are placed on the nodes of its Ray cluster."""
    train, run, options, teacher = config.train, config.run, engine_options(config), teacher_options(config)
    no_engines = options.external or train.loss_type == "sft_loss"
    engines = 0 if no_engines else options.num_gpus or 0
    return PlacementOptions(
        gpus_per_node=gpus_per_node(config),
        trainer_gpus=max(train.num_ranks, options.trainer_gpus),  # larger with --debug-rollout-only
        engine_gpus=engines,
        teacher_gpus=teacher.gpus_per_engine if teacher else 0,
        gpus_per_engine=config.rollout.rollout_num_gpus_per_engine,
        num_nodes=train.actor_num_nodes,
        node_timeout=run.node_timeout,
    )


def device_counts(flow: Flow, config: PostTrainConfig) -> tuple[int, int, bool]:
    """Return the number of GPUs (on a machine without GPUs: of processes) of the trainer and of the engines in a flow,
    and whether both use the same GPUs."""
    has_engines = flow.generates and not config.run.debug_train_only
    has_trainer = flow.trains and not config.run.debug_rollout_only
    options, teacher = engine_options(config), teacher_options(config)
    num_gpus = options.num_gpus or options.num_engines * options.gpus_per_engine
    num_gpus += teacher.gpus_per_engine if teacher and flow.has_rollouts else 0
    return (
        config.train.num_ranks if has_trainer else 0,
        num_gpus if has_engines else 0,
        has_engines and has_trainer and options.num_gpus is None,
    )


def gpus_per_node(config: PostTrainConfig) -> int | None:
    """Return the number of GPUs that a run uses on each node, or None for as many as the largest node has."""
    train = config.train
    return config.run.num_gpus_per_node or (train.actor_num_gpus_per_node if train.actor_num_nodes > 1 else None)
