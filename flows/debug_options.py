"""Rules about the options for finding faults: runs without a trainer or without engines, rollouts from files, profiler
traces, memory snapshots, and conditions that fail a run (`ci_...`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from penstock.engines.local_gpus import visible_gpu_bytes
from penstock.flows.config import Flow, PostTrainConfig
from penstock.flows.debug_config import DebugConfig
from penstock.flows.options.argv import flag_of_field
from penstock.storage.commit import RunKeys
from penstock.storage.errors import RunError, check_rules
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.maintenance.prompt_audit import max_staleness
from penstock.storage.store import Store


def debug_rules(flow: Flow, config: PostTrainConfig) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for each rule about runs without a trainer or without engines."""
    run = config.run
    yield from _diagnostics_rules(flow, config)
    if config.debug.load_debug_rollout_data:
        yield (
            not flow.has_rollouts,
            f"--load-debug-rollout-data has no effect in the flow `{flow}`, which trains on no rollouts: omit it",
        )
        yield (
            run.debug_rollout_only,
            "--load-debug-rollout-data replaces the engines and --debug-rollout-only the trainer: omit "
            "--debug-rollout-only to train on the file, or --load-debug-rollout-data to generate",
        )
        yield (
            run.check_weight_update_equal,
            "--check-weight-update-equal cannot be combined with --load-debug-rollout-data, which starts no engines: "
            "omit --check-weight-update-equal",
        )
        return
    yield (
        run.debug_rollout_only and run.debug_train_only,
        "--debug-rollout-only starts no trainer and --debug-train-only starts no engines: omit --debug-train-only, "
        "or give --no-debug-rollout-only",
    )
    if not (run.debug_rollout_only or run.debug_train_only) or not flow.has_run:
        return
    name = "--debug-rollout-only" if run.debug_rollout_only else "--debug-train-only"
    yield (
        not flow.has_rollouts,
        f"{name} has no effect in the flow `{flow}`, which never starts both a trainer and engines: omit it",
    )
    external = config.rollout.rollout_external_engine_addrs
    for is_given, flag, reason in (
        (run.check_weight_update_equal, "--check-weight-update-equal", "no weights are sent to engines"),
        (
            run.debug_rollout_only and external,
            "--rollout-external-engine-addrs",
            "only a trainer sends the initial weights to them",
        ),
        (
            run.debug_rollout_only and run.streams,
            "--async-mode streaming",
            "it generates as fast as the trainer trains",
        ),
        (
            run.debug_rollout_only and run.num_rollout_per_start,
            "--num-rollout-per-start",
            "it counts trained rounds",
        ),
    ):
        yield is_given, f"{flag} cannot be combined with {name}, because {reason}: omit {flag}, or {name}"


def _diagnostics_rules(flow: Flow, config: PostTrainConfig) -> Iterator[tuple[object, str]]:
    """Yield those of `debug_rules` about what the diagnostics of the trainer and the `ci_...` options need: a trainer,
    rounds and devices."""
    run, debug, plain = config.run, config.debug, DebugConfig()
    reason = "with --debug-rollout-only" if run.debug_rollout_only else f"in the flow `{flow}`"
    has_no_trainer = not flow.trains or run.debug_rollout_only
    for name in (
        "use_pytorch_profiler",
        "record_memory_history",
        "save_debug_train_data",
        "ci_save_grad_norm",
        "ci_load_grad_norm",
        "ci_test",
    ):
        yield (
            has_no_trainer and getattr(debug, name) != getattr(plain, name),
            f"{flag_of_field(name)} has no effect {reason}, which starts no trainer: omit it",
        )
    yield (
        debug.ci_test and config.train.loss_type != "policy_loss",
        f"--ci-test checks metrics that --loss-type {config.train.loss_type} does not have: omit --ci-test",
    )
    norms = debug.ci_save_grad_norm or debug.ci_load_grad_norm
    yield (
        norms and config.train.uses_critic and "{role}" not in norms,
        f"--ci-save-grad-norm or --ci-load-grad-norm {norms} does not contain {{role}}, but actor and critic have "
        "one file each: put {role} into the path",
    )
    yield (
        debug.use_pytorch_profiler and run.num_rollout and debug.profile_step_start >= run.num_rollout,
        f"--profile-step-start {debug.profile_step_start} is not below --num-rollout {run.num_rollout}, so no "
        "round is traced: lower --profile-step-start",
    )
    records = debug.memory_recorder if debug.record_memory_history and run.ray_address is None else None
    yield (
        records == "torch" and not visible_gpu_bytes(),
        "--record-memory-history needs a GPU, which this machine does not have: omit it, or give "
        "--memory-recorder memray, which records memory of the host",
    )
    yield (
        records == "memray" and importlib.util.find_spec("memray") is None,
        "--memory-recorder memray needs the package memray, which is not installed: pip install memray",
    )


def check_committed_rollouts(store: Store, config: PostTrainConfig) -> None:
    """Check that what the run has committed fits its debug options. --debug-train-only needs committed rollouts.
    --debug-rollout-only needs a run without trained rounds. With neither option, a run must not contain untrained
    rollouts of --debug-rollout-only or --load-debug-rollout-data. Raises RunError."""
    run, keys = config.run, RunKeys(config.run.run)
    removed = is_removed(store, keys)
    rollouts = [] if removed else store.committed_indices(f"{keys.prefix}/rollouts")
    trained = set() if removed else set(store.committed_indices(f"{keys.prefix}/steps"))
    untrained = [index for index in rollouts if index not in trained]
    last = store.committed(keys.rollout_prefix(max(untrained))) if untrained else None
    is_debugging = run.debug_rollout_only or run.debug_train_only
    origin = "--debug-rollout-only" if last is None or last.policy_version >= 0 else "--load-debug-rollout-data"
    rules: list[tuple[object, str]] = [
        (
            run.debug_train_only and not rollouts and not config.debug.load_debug_rollout_data,
            f"--debug-train-only trains on committed rollouts, but run {run.run!r} has none in {store.uri}: generate "
            "them with --debug-rollout-only, or correct --run or --store",
        ),
        (
            run.debug_rollout_only and trained,
            f"--debug-rollout-only generates with the initial weights, but run {run.run!r} has trained {len(trained)} "
            "rounds: give another --run, or --no-debug-rollout-only",
        ),
        (
            last is not None and last.policy_version < last.index - max_staleness(last) and not is_debugging,
            f"run {run.run!r} has {len(untrained)} untrained rollouts of {origin}: train on them with "
            "--debug-train-only, or give another --run",
        ),
    ]
    check_rules(rules, RunError)


def gpu_flow(flow: Flow, config: PostTrainConfig) -> Flow:
    """Return the flow that uses GPUs in the same way as this run: SFT, which has only a trainer, with
    --debug-train-only; EVALUATE, which has only engines, with --debug-rollout-only; else `flow`."""

    return Flow.SFT if config.run.debug_train_only else Flow.EVALUATE if config.run.debug_rollout_only else flow
