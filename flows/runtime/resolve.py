"""Resolve a config: choose, once at each start, the values of all options that are not given.

Every command that starts or plans a run calls `resolve`; lower layers get the result, a `Plan`: a config in which every
option has its final value. A run keeps the values that its first start chose, because run.json contains the plan and
also the options as given: where a later start gives the same, it takes the values from the plan. It also applies the
options that a resumed run may change.

    --hf-checkpoint champion:MODEL   the champion's export, found when the run starts
    --load                           the directory of the checkpoint that it names; None if there is none
    --num-epoch                      the number of rounds, from the number of rows when the run starts
    --num-rollout-per-start          the number of rounds at which this start ends
    batch, group, schedule, ...      `derive` in flows/config.py
    paths, user-defined functions    absolute, with the name of the function

With --num-rollout-per-start, for example each night, each start has one target: the total number of trained rounds at
which it ends. The target is recorded before training as `num_rollout` (in run.json by the first start, in `changes/` by
later ones), so a start that resumes a killed one keeps the target of the killed one, and retries do not add rounds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from penstock.flows.config import Flow, Plan, PostTrainConfig, derive, with_options
from penstock.flows.options.paths import CHAMPION, with_absolute_paths, with_function_names
from penstock.flows.runtime.runs import completion_of, differing_option, latest_config
from penstock.stages.convert.targets import is_converted, is_published, megatron_directory
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.storage.champions import export_of_champion
from penstock.storage.commit import ADAPTERS, RunKeys, is_run_name
from penstock.storage.config import field_meta
from penstock.storage.errors import OptionError, check_rules
from penstock.storage.history.run_record import RunRecord, read_completion, read_run_record
from penstock.storage.maintenance.deletion import is_removed
from penstock.storage.store import Store


class _Existing(NamedTuple):
    """The record of a run that a start may continue."""

    record: RunRecord
    given: PostTrainConfig  # the options as given to the last start that changed the record
    config: PostTrainConfig  # the resolved options of that start
    has_changes: bool  # whether a start has changed the schedule options since the record was written


def resolve(flow: str, config: PostTrainConfig, store: Store, *, counts_rows: bool = True) -> Plan:
    """Return the plan of a flow: the config (as given, or that of a run's record with changes) with a final value for
    every option. `store` is the store of the run. `counts_rows`: whether the rows of --prompt-data are on this machine;
    otherwise --num-epoch is not resolved."""
    config = with_absolute_paths(with_function_names(config))
    given = config.model_dump(mode="json", exclude_unset=True, exclude={"run": {"store_options"}})
    flow = Flow(flow)
    existing, keys = None, RunKeys(config.run.run)
    record = read_run_record(store, keys) if flow.has_run and keys.run and not is_removed(store, keys) else None
    if record is not None:
        recorded_config, recorded_given = latest_config(store, keys, record)
        has_changes = bool(store.list(f"{keys.prefix}/changes"))
        existing = _Existing(record, recorded_given, recorded_config, has_changes)
    load, before = config.convert.load, None
    if existing and Flow(existing.record.flow) is flow:
        # The run continues if the identity options are those of its record, either as given or as resolved.
        then = derive(with_options(config, "run", {"num_rollout": existing.config.run.num_rollout}))
        for recorded, now in ((existing.given, config), (existing.config, then)):
            if differing_option(recorded, now, existing.record.directory) is None:
                before = existing
    if before:
        config = _with_recorded_decisions(config, before)
    config = _with_start_weights(config, store, decided=existing.config.convert.load if existing else None)
    flag = "--load" if config.convert.load else "--ref-load"
    has_other_start = flow.has_rollouts and config.start_weights != config.convert.hf_checkpoint
    rules = (
        (
            flow is Flow.EVALUATE and load,
            f"--load has no effect in the flow `{flow}`, which scores --hf-checkpoint: omit --load",
        ),
        (
            config.run.debug_rollout_only and has_other_start,
            f"{flag} has no effect with --debug-rollout-only, which generates with the weights of --hf-checkpoint: "
            f"omit {flag}, or --debug-rollout-only",
        ),
    )
    check_rules(rules)
    notes: tuple[str, ...] = ()
    if load and not config.convert.load and not names_own_run(config, load):
        notes = (f"--load {load} has no checkpoint: the run starts from {config.start_weights}",)
    elif load and config.convert.load and config.train.ref_load and not config.train.uses_reference:
        notes = ("--ref-load has no effect: the run starts from --load, and no KL to a reference is computed",)
    if flow.trains and config.run.num_epoch is not None:
        rounds = rounds_of_epochs(config, before, counts_rows=counts_rows)
        config = with_options(config, "run", {"num_rollout": rounds})
    config = derive(config)
    if config.run.num_rollout_per_start is not None and config.run.run:
        config = with_options(config, "run", {"num_rollout": target_rounds(store, existing, config)})
    sections = {name: getattr(config, name) for name in PostTrainConfig.model_fields}
    parent = existing.record.parent if existing else None
    return Plan.model_construct(**sections, flow=flow, given=given, parent=parent, notes=notes)


def _with_recorded_decisions(config: PostTrainConfig, existing: _Existing) -> PostTrainConfig:
    """Return the config with the values that the run chose when it was created: an option that is given with the same
    value as then gets the value that the run uses."""
    sections = {}
    for section in PostTrainConfig.model_fields:
        now, given, decided = (getattr(each, section) for each in (config, existing.given, existing.config))
        sections[section] = now.model_copy(
            update={
                name: getattr(decided, name)
                for name, field in type(now).model_fields.items()
                if name != "num_rollout"  # see `rounds_of_epochs` and `target_rounds`
                and field_meta(field).mutability != "placement"
                and getattr(now, name) == getattr(given, name) != getattr(decided, name)
                and (name in now.model_fields_set) == (name in given.model_fields_set)
            }
        )
    return config.model_copy(update=sections)


# ---- start weights ---------------------------------------------------------------------------------------------------


def _with_start_weights(config: PostTrainConfig, store: Store, decided: str | None) -> PostTrainConfig:
    """Return the config with the champion's export in place of `--hf-checkpoint champion:MODEL`, and with the directory
    of the checkpoint in place of a --load that names a run. A --load equal to `decided`, the directory that the run
    recorded, is kept."""
    convert = config.convert
    changes: dict[str, Any] = {}
    if convert.load != decided:
        changes["load"] = loaded_checkpoint(config)
    if convert.hf_checkpoint.startswith(CHAMPION):
        changes["hf_checkpoint"] = export_of_champion(store, convert.hf_checkpoint.removeprefix(CHAMPION))
    return config.model_copy(update={"convert": convert.model_copy(update=changes)})


def loaded_checkpoint(config: PostTrainConfig) -> str | None:
    """Return the directory with the weights of --load: a Hugging Face directory, a Megatron directory, or the newest or
    the given checkpoint of a run in a local store (STORE/RUN, STORE/RUN/VERSION). Return None if --load is not given or
    has no checkpoint, for instance because it names the run itself, which then resumes."""
    load = config.convert.load
    if load is None:
        return None
    path = Path(load)
    if is_converted(load) or megatron_directory(path) or (path / "config.json").is_file():
        return load
    if names_own_run(config, load):
        return None
    if "://" in load:
        raise OptionError(f"--load {load} is not a local directory: copy the checkpoint to a disk and give its path")
    checkpoint = _checkpoint_of_run(path) or (path.name.isdecimal() and _checkpoint_of_run(path.parent, int(path.name)))
    if checkpoint or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return checkpoint or None
    raise OptionError(
        f"--load {load} is not a checkpoint: give a Hugging Face directory, a torch_dist directory of Megatron, or "
        "STORE/RUN, STORE/RUN/VERSION of a run"
    )


def names_own_run(config: PostTrainConfig, load: str) -> bool:
    """Return whether --load names the run itself: STORE/RUN, as --save does."""
    run = config.run
    if "://" in run.store:
        return load.rstrip("/") == f"{run.store.rstrip('/')}/{run.run}"
    return bool(load) and Path(load).absolute() == Path(run.store).absolute() / run.run


def _checkpoint_of_run(path: Path, version: int | None = None) -> str | None:
    """Return the directory of a checkpoint, by default the newest, of the run `path` = STORE/RUN. None if there is no
    such run. Raises OptionError if the run has no such checkpoint."""
    keys = RunKeys(path.name) if is_run_name(path.name) else None
    if keys is None or not (path.parent / keys.record).is_file():
        return None
    store = Store(str(path.parent), probe=False)
    versions = store.committed_indices(f"{keys.prefix}/checkpoints")
    wanted, existing = (
        max(versions, default=-1) if version is None else version,
        ", ".join(map(str, versions)) or "none",
    )
    commit = store.committed(keys.checkpoint_prefix(wanted)) if wanted in versions else None
    rules = (
        (
            wanted not in versions,
            f"--load {path}: the run has no such checkpoint (it has: {existing}); give one of these",
        ),
        (
            commit is not None and ADAPTERS in commit.state,
            f"--load {path}: the checkpoint has only LoRA adapters; write the merged weights with `penstock export "
            f"{path.name} --output DIR`, and give DIR",
        ),
    )
    check_rules(rules)
    return store.path(commit.attempt) if commit is not None and commit.attempt else None


# ---- number of rounds ------------------------------------------------------------------------------------------------


def rounds_of_epochs(config: PostTrainConfig, existing: _Existing | None, *, counts_rows: bool = True) -> int:
    """Return the number of rounds of --num-epoch: that of the record `existing` if this start continues the run with
    the same --num-epoch, else from the number of rows; without `counts_rows` the number of rounds stays as it is."""
    run, rollout = config.run, config.rollout
    assert run.num_epoch is not None, "the run has a number of epochs"
    unfit = {
        "--data-source-path": rollout.data_source_path,
        "--prompt-data-weights": rollout.prompt_data_weights,
        "--num-rollout-per-start": run.num_rollout_per_start,
    }
    message = "--num-epoch cannot be combined with {0}: give --num-rollout instead, or omit {0}"
    check_rules((value, message.format(flag)) for flag, value in unfit.items())
    if existing and existing.config.run.num_epoch == run.num_epoch:
        decided = existing.config.run.num_rollout
        if run.num_rollout in (0, decided):
            return decided
    if not counts_rows:
        return run.num_rollout
    rows = len(PromptSource.open(rollout)) if rollout.prompt_data else 0
    rounds = run.num_epoch * rows // rollout.rollout_batch_size
    text = (
        f"--num-epoch {run.num_epoch} x {rows} rows of --prompt-data // --rollout-batch-size "
        f"{rollout.rollout_batch_size} = {rounds} rounds"
    )
    rules = (
        (rounds == 0, f"{text}: give more data, more epochs or a smaller batch"),
        (
            run.num_rollout not in (0, rounds),
            f"{text}, but --num-rollout is {run.num_rollout}: omit --num-rollout, or give --num-epoch none",
        ),
    )
    check_rules(rules)
    return rounds


def target_rounds(store: Store, existing: _Existing | None, config: PostTrainConfig) -> int:
    """Return the total number of trained rounds at which this start of a run with --num-rollout-per-start ends: that of
    the previous start if it did not finish, else the number of trained rounds plus --num-rollout-per-start."""
    per_start, keys = config.run.num_rollout_per_start, RunKeys(config.run.run)
    assert per_start is not None, "only runs with --num-rollout-per-start have targets"
    trained, before = len(store.committed_indices(f"{keys.prefix}/steps")), None
    if existing and existing.record.parent and not existing.has_changes:
        # for a fork that was never started: its record has the parent's target
        before = existing.record.parent.at + per_start
    elif existing and existing.config.run.num_rollout_per_start:
        before = existing.config.run.num_rollout
    if before is not None:
        # The export is the last stage of a start.
        exported = before == 0 or store.committed(keys.export_prefix(before)) is not None
        if trained < before or not exported:
            return before
    return trained + per_start


def is_complete(store: Store, plan: Plan) -> bool:
    """Return whether the run's last start has completed it with this plan, and its copies of checkpoints (--save-hf)
    exist: nothing is left to do."""
    keys = RunKeys(plan.run.run)
    completed = read_completion(store, keys)
    if completed is None:  # before `completion_of`, which creates the directory of the trackers
        return False
    now = completion_of(store, plan)
    if completed.options != now.options or not now.outputs.items() <= completed.outputs.items():
        return False
    versions = store.committed_indices(f"{keys.prefix}/checkpoints") if plan.run.save_hf else []
    return all(is_published(plan.run.hf_path(version), store.options) for version in versions)
