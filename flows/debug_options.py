"""Checks of the options for finding faults: runs without a trainer or without engines, rollouts from files, profiler
traces, memory snapshots, and conditions that fail a run (`ci_...`)."""

from __future__ import annotations

import importlib.util

from penstock.engines.local_gpus import visible_gpu_bytes
from penstock.flows.config import Flow, PostTrainConfig
from penstock.flows.debug_config import DebugConfig
from penstock.flows.options.argv import flag_of_field
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.maintenance.prompt_audit import max_staleness
from penstock.storage.store import Store


def check_debug_options(flow: Flow, config: PostTrainConfig) -> None:
    """Check that the options for finding faults fit the flow and the other options. Raises OptionError."""
    run = config.run
    check_diagnostics(flow, config)
    if config.debug.load_debug_rollout_data:
        check_loading_options(flow, config)
        return
    if run.debug_rollout_only and run.debug_train_only:
        raise OptionError(
            "--debug-rollout-only starts no trainer and --debug-train-only starts no engines: omit --debug-train-only, "
            "or give --no-debug-rollout-only"
        )
    if not (run.debug_rollout_only or run.debug_train_only) or not flow.has_run:
        return
    name = "--debug-rollout-only" if run.debug_rollout_only else "--debug-train-only"
    if not flow.has_rollouts:
        raise OptionError(
            f"{name} has no effect in the flow `{flow}`, which never starts both a trainer and engines: omit it"
        )
    conflicts = {"--check-weight-update-equal": (run.check_weight_update_equal, "no weights are sent to engines")}
    if run.debug_rollout_only:
        external = config.rollout.rollout_external_engine_addrs
        conflicts |= {
            "--rollout-external-engine-addrs": (bool(external), "only a trainer sends the initial weights to them"),
            "--async-mode streaming": (run.streams, "it generates as fast as the trainer trains"),
            "--num-rollout-per-start": (bool(run.num_rollout_per_start), "it counts trained rounds"),
        }
    for flag, (is_given, reason) in conflicts.items():
        if is_given:
            raise OptionError(f"{flag} cannot be combined with {name}, because {reason}: omit {flag}, or {name}")


def check_loading_options(flow: Flow, config: PostTrainConfig) -> None:
    """Check that --load-debug-rollout-data fits the flow and the other options. Raises OptionError."""
    run = config.run
    if not flow.has_rollouts:
        raise OptionError(
            f"--load-debug-rollout-data has no effect in the flow `{flow}`, which trains on no rollouts: omit it"
        )
    if run.debug_rollout_only:
        raise OptionError(
            "--load-debug-rollout-data replaces the engines and --debug-rollout-only the trainer: omit "
            "--debug-rollout-only to train on the file, or --load-debug-rollout-data to generate"
        )
    if run.check_weight_update_equal:
        raise OptionError(
            "--check-weight-update-equal cannot be combined with --load-debug-rollout-data, which starts no engines: "
            "omit --check-weight-update-equal"
        )


def check_diagnostics(flow: Flow, config: PostTrainConfig) -> None:
    """Check that the run has what the given diagnostics of the trainer and the `ci_...` options need: a trainer, rounds
    and devices. Raises OptionError."""
    run, debug, plain = config.run, config.debug, DebugConfig()
    of_trainer = ("use_pytorch_profiler", "record_memory_history", "save_debug_train_data", "ci_save_grad_norm")
    given = [
        name for name in (*of_trainer, "ci_load_grad_norm", "ci_test") if getattr(debug, name) != getattr(plain, name)
    ]
    if given and (not flow.trains or run.debug_rollout_only):
        reason = "with --debug-rollout-only" if run.debug_rollout_only else f"in the flow `{flow}`"
        raise OptionError(f"{flag_of_field(given[0])} has no effect {reason}, which starts no trainer: omit it")
    if debug.ci_test and config.train.loss_type != "policy_loss":
        raise OptionError(
            f"--ci-test checks metrics that --loss-type {config.train.loss_type} does not have: omit --ci-test"
        )
    norms = debug.ci_save_grad_norm or debug.ci_load_grad_norm
    if norms and config.train.uses_critic and "{role}" not in norms:
        raise OptionError(
            f"--ci-save-grad-norm or --ci-load-grad-norm {norms} does not contain {{role}}, but actor and critic have "
            "one file each: put {role} into the path"
        )
    if debug.use_pytorch_profiler and run.num_rollout and debug.profile_step_start >= run.num_rollout:
        raise OptionError(
            f"--profile-step-start {debug.profile_step_start} is not below --num-rollout {run.num_rollout}, so no "
            "round is traced: lower --profile-step-start"
        )
    if not debug.record_memory_history or run.ray_address is not None:
        return
    if debug.memory_recorder == "torch" and not visible_gpu_bytes():
        raise OptionError(
            "--record-memory-history records memory of a GPU, but this machine has none: omit it, or give "
            "--memory-recorder memray, which records memory of the host"
        )
    if debug.memory_recorder == "memray" and importlib.util.find_spec("memray") is None:
        raise OptionError(
            "--memory-recorder memray needs the package memray, which is not installed: pip install memray"
        )


def check_committed_rollouts(store: Store, config: PostTrainConfig) -> None:
    """Check that what the run has committed fits its debug options. --debug-train-only needs committed rollouts.
    --debug-rollout-only needs a run without trained rounds. With neither option, a run must not contain untrained
    rollouts of --debug-rollout-only or --load-debug-rollout-data. Raises RunError."""
    run, keys = config.run, RunKeys(config.run.run)
    removed = is_removed(store, keys)
    rollouts = [] if removed else store.committed_indices(f"{keys.prefix}/rollouts")
    trained = set() if removed else set(store.committed_indices(f"{keys.prefix}/steps"))
    if run.debug_train_only and not rollouts and not config.debug.load_debug_rollout_data:
        raise RunError(
            f"--debug-train-only trains on committed rollouts, but run {run.run!r} has none in {store.uri}: generate "
            "them with --debug-rollout-only, or correct --run or --store"
        )
    if run.debug_rollout_only and trained:
        raise RunError(
            f"--debug-rollout-only generates with the initial weights, but run {run.run!r} has trained {len(trained)} "
            "rounds: give another --run, or --no-debug-rollout-only"
        )
    untrained = [index for index in rollouts if index not in trained]
    last = store.committed(keys.rollout_prefix(max(untrained))) if untrained else None
    is_debugging = run.debug_rollout_only or run.debug_train_only
    origin = "--debug-rollout-only" if last is None or last.policy_version >= 0 else "--load-debug-rollout-data"
    if last is not None and last.policy_version < last.index - max_staleness(last) and not is_debugging:
        raise RunError(
            f"run {run.run!r} has {len(untrained)} untrained rollouts of {origin}: train on them with "
            "--debug-train-only, or give another --run"
        )


def gpu_flow(flow: Flow, config: PostTrainConfig) -> Flow:
    """Return the flow that uses GPUs in the same way as this run: SFT, which has only a trainer, with
    --debug-train-only; EVALUATE, which has only engines, with --debug-rollout-only; else `flow`."""

    return Flow.SFT if config.run.debug_train_only else Flow.EVALUATE if config.run.debug_rollout_only else flow
