"""Checks of --debug-rollout-only (engines without a trainer) and --debug-train-only (a trainer without engines)."""

from __future__ import annotations

from penstock.flows.config import PostTrainConfig
from penstock.storage.errors import OptionError, RunError
from penstock.storage.maintenance.prompt_audit import max_staleness
from penstock.storage.maintenance.removal import is_removed
from penstock.storage.refs import RunKeys
from penstock.storage.store import Store


def check_debug_options(flow: str, config: PostTrainConfig) -> None:
    """Check that --debug-rollout-only and --debug-train-only fit the flow and the other options. Raises OptionError."""
    run = config.run
    if run.debug_rollout_only and run.debug_train_only:
        raise OptionError(
            "--debug-rollout-only starts no trainer and --debug-train-only starts no engines: omit one of them "
            "(--no-debug-rollout-only if the run was started with it)"
        )
    if not (run.debug_rollout_only or run.debug_train_only) or flow == "convert":
        return
    name = "--debug-rollout-only" if run.debug_rollout_only else "--debug-train-only"
    if flow != "post_train":
        raise OptionError(
            f"{name} has no effect in the flow `{flow}`, which never starts both a trainer and engines: omit it"
        )
    if run.check_weight_update_equal:
        raise OptionError(
            f"--check-weight-update-equal cannot be combined with {name}, which sends no weights to engines: omit one"
        )
    if run.debug_rollout_only and config.rollout.rollout_external_engine_addrs:
        raise OptionError(
            "--debug-rollout-only cannot be combined with --rollout-external-engine-addrs, because only a trainer can "
            "send the start weights to external engines: omit one of them"
        )
    if run.debug_rollout_only and run.streams:
        raise OptionError(
            "--debug-rollout-only cannot be combined with --async-mode streaming, which generates as fast as the "
            "trainer trains: omit one of them"
        )
    if run.debug_rollout_only and run.num_rollout_per_start:
        raise OptionError(
            "--debug-rollout-only cannot be combined with --num-rollout-per-start, which counts trained rounds: give "
            "--num-rollout"
        )


def check_committed_rollouts(store: Store, config: PostTrainConfig) -> None:
    """Check the run's commits: --debug-train-only needs rollouts, --debug-rollout-only needs that no round is trained,
    and a run without these options needs that no untrained rollout of --debug-rollout-only is left. Raises RunError."""
    run, keys = config.run, RunKeys(config.run.run)
    removed = is_removed(store, keys)
    rollouts = [] if removed else store.committed_indices(f"{keys.prefix}/rollouts")
    trained = set() if removed else set(store.committed_indices(f"{keys.prefix}/steps"))
    if run.debug_train_only and not rollouts:
        raise RunError(
            f"--debug-train-only trains on committed rollouts, but run {run.run!r} has none in {store.uri}: generate "
            "them with --debug-rollout-only, or correct --run or --store"
        )
    if run.debug_rollout_only and trained:
        raise RunError(
            f"--debug-rollout-only generates with the start weights, but run {run.run!r} has trained {len(trained)} "
            "rounds: give another --run, or --no-debug-rollout-only"
        )
    untrained = [index for index in rollouts if index not in trained]
    last = store.committed(keys.rollout_prefix(max(untrained))) if untrained else None
    is_debugging = run.debug_rollout_only or run.debug_train_only
    if last is not None and last.policy_version < last.index - max_staleness(last) and not is_debugging:
        raise RunError(
            f"run {run.run!r} has {len(untrained)} untrained rollouts of --debug-rollout-only, which policy "
            f"version {last.policy_version} generated: train on them with --debug-train-only, or give another --run"
        )


def gpu_flow(flow: str, config: PostTrainConfig) -> str:
    """Return the name of the flow that needs the same GPUs as this run: `sft` (only a trainer) with --debug-train-only,
    `evaluate` (only engines) with --debug-rollout-only, else `flow`."""
    return "sft" if config.run.debug_train_only else "evaluate" if config.run.debug_rollout_only else flow
