"""The number of rounds of a run: from the length of the data (`--num-epoch`), or N more rounds in every start
(`--num-rollout-per-start`), for example each night.

With --num-rollout-per-start, each start has one target: the total number of trained rounds at which it ends. The target
is recorded before training as `num_rollout` (in run.json by the first start, in `changes/` by later ones), so a start
that resumes a killed one keeps the target of the killed one, and retries do not add rounds.
"""

from __future__ import annotations

from penstock.flows.config import PostTrainConfig
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError
from penstock.storage.history.run_record import read_completion, read_run_record
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.store import Store

TARGET, PER_START = "run.num_rollout", "run.num_rollout_per_start"


def with_rounds_of_epochs(flow: str, config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with `num_rollout` set to the rounds of --num-epoch, or unchanged without this option.

    Raises:
        OptionError: the number of rows is unknown or too small, or another option sets another number of rounds.
        DataError: a file of --prompt-data is missing or malformed.
    """
    from penstock.stages.rollout.prompts.source import PromptSource

    run, rollout = config.run, config.rollout
    if run.num_epoch is None or flow not in ("post_train", "sft"):
        return config
    unfit = {
        "--data-source-path": rollout.data_source_path,
        "--prompt-data-weights": rollout.prompt_data_weights,
        "--num-rollout-per-start": run.num_rollout_per_start,
    }
    for flag in (flag for flag, value in unfit.items() if value):
        raise OptionError(f"--num-epoch cannot be combined with {flag}: give --num-rollout instead, or omit {flag}")
    rows = len(PromptSource.open(rollout)) if rollout.prompt_data else 0
    rounds = run.num_epoch * rows // rollout.rollout_batch_size
    text = (
        f"--num-epoch {run.num_epoch} x {rows} rows of --prompt-data // --rollout-batch-size "
        f"{rollout.rollout_batch_size} = {rounds} rounds"
    )
    if rounds == 0:
        raise OptionError(f"{text}: give more data, more epochs or a smaller batch")
    if run.num_rollout not in (0, rounds):
        raise OptionError(f"{text}, but --num-rollout is {run.num_rollout}: omit one of them (--num-epoch none)")
    return config.model_copy(update={"run": run.model_copy(update={"num_rollout": rounds})})


def with_target_rounds(store: Store, config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with `num_rollout` set to this start's target, or unchanged without --num-rollout-per-start."""
    if config.run.num_rollout_per_start is None:
        return config
    run = config.run.model_copy(update={"num_rollout": target_rounds(store, RunKeys(config.run.run), config)})
    return config.model_copy(update={"run": run})


def target_rounds(store: Store, keys: RunKeys, config: PostTrainConfig) -> int:
    """Return the total number of trained rounds at which this start of a run ends.

    If the previous start did not finish, its target is returned; otherwise the number of trained rounds plus
    --num-rollout-per-start.
    """
    per_start = config.run.num_rollout_per_start
    assert per_start is not None, "only runs with --num-rollout-per-start have targets"
    trained = len(store.committed_indices(f"{keys.prefix}/steps"))
    before = _previous_target_rounds(store, keys, per_start)
    if before is not None:
        # The export is the last stage of a start.
        exported = before == 0 or store.committed(keys.export_prefix(before)) is not None
        if trained < before or not exported:
            return before
    return trained + per_start


def _previous_target_rounds(store: Store, keys: RunKeys, rounds_per_start: int) -> int | None:
    """Return the target of the latest start with --num-rollout-per-start, None if there was no such start."""
    from penstock.flows.runtime.runs import latest_schedule_options

    record = None if is_removed(store, keys) else read_run_record(store, keys)
    if record is None:
        return None
    # A fork that was never started: its record has the parent's schedule.
    if record.parent and not store.list(f"{keys.prefix}/changes"):
        return record.parent.at + rounds_per_start
    schedule = latest_schedule_options(store, keys)
    return schedule[TARGET] if schedule.get(PER_START) else None


def is_complete(flow: str, config: PostTrainConfig) -> bool:
    """Return whether the run's last start has completed it with the options of `config`, and its copies of checkpoints
    (--save-hf) exist: nothing is left to do."""
    from penstock.flows.runtime.runs import completion_of, keys_of_run, open_store
    from penstock.stages.convert.targets import is_published

    store, keys = open_store(config.run, probe=False), keys_of_run(config.run.run)
    config = with_target_rounds(store, config)
    completed = read_completion(store, keys)
    if completed is None:  # before `completion_of`, which creates the directory of the trackers
        return False
    now = completion_of(flow, store, config)
    if completed.options != now.options or not now.outputs.items() <= completed.outputs.items():
        return False
    versions = store.committed_indices(f"{keys.prefix}/checkpoints") if config.run.save_hf else []
    return all(is_published(config.run.hf_path(version), store.options) for version in versions)
