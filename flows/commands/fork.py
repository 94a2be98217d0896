"""`penstock fork RUN --at N --name NEW [options]`: create a new run that shares the first N rounds of another, and with
--reuse-rollouts also the rollouts of the later rounds, which it trains again.

Sharing is by reference: the small commit records are copied to the new run, and the large files that they refer to stay
in the parent's directory. The new run's own record is written last, by one conditional create, so a run that `penstock
resume` finds is complete. If a fork is killed, the same command finishes it, or `penstock gc` removes it. The field
`parent` of the record says from which run and round the new run was forked (storage/history/run_record.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.flows.config import (
    OPTIONS,
    Flow,
    Plan,
    PostTrainConfig,
    RunConfig,
    options_by_mutability,
    with_options,
)
from penstock.flows.options.adapters import describe_other_base
from penstock.flows.options.argv import check_run_name, flag_of_field, parse_integer, penstock_command, split_args
from penstock.flows.options.flags import parse_values, store_options_from_values, update_config_from_argv
from penstock.flows.options.paths import with_absolute_paths
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import (
    config_of_round,
    create_run_record,
    open_store,
    read_existing_record,
    read_flow_and_config,
)
from penstock.storage.commit import Commit, RunKeys, commit_key, decode_record, has_matching_digest
from penstock.storage.config import entries_of
from penstock.storage.disk import map_in_threads
from penstock.storage.errors import OptionError, RunError, StoreError, check_rules
from penstock.storage.history.run_record import (
    ForkRecord,
    ParentRecord,
    RecordedConfig,
    RunRecord,
    read_run_record,
)
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.maintenance.deletion import describe_removing_process, is_removed
from penstock.storage.store import Store, committed_prefixes

USAGE = """penstock fork RUN --at N --name NEW [options to change] [--store URI ...]
penstock fork RUN --reuse-rollouts --name NEW [--at N] [training options to change] [--store URI ...]

  Creates the run NEW from the first N rounds of RUN: its rollouts and steps before N, its checkpoints and evaluations
  up to N. Nothing is computed and no large file is copied. The options given here replace the parent's, including those
  that a resumed run cannot change. `penstock resume NEW` then continues with round N.

  --at     the first round that is not shared; all rounds before it must be trained
  --name   name of the new run
  --reuse-rollouts
           also share the rollouts from round N on (default 0). `penstock resume NEW` trains on them again, without
           engines, with other training options, such as loss, estimator or learning rate. --num-rollout ends it
           earlier, and --min-effective-sample-size stops it where the stored samples say little about the policy

  `penstock fork --help-all` lists the options. If --prompt-data is given, or the order or the columns of the data
  change, round N starts at the first row. If an option of the rollout changes, groups that RUN has started before round
  N but not trained are generated again."""

_LAST_SHARED = {"rollouts": -1, "steps": -1, "regrades": -1, "checkpoints": 0, "evals": 0}  # last shared index - N
_DATA_ORDER = (
    *("input_key", "label_key", "metadata_key", "opd_teacher_key", "opd_hint_key"),
    *("rollout_shuffle", "rollout_seed"),
)
_GENERATING = ("rollout.", "convert.", "train.opd.hinted.opd_hint_template")  # options that decide stored samples
_NUM_COPIES = 16  # commit records copied in parallel
_NO_ENGINES: dict[str, Any] = {  # options of a run that trains on stored rollouts only
    "debug_train_only": True,
    "debug_rollout_only": False,
    "check_weight_update_equal": False,
    "num_epoch": None,
    "num_rollout_per_start": None,
}
_CREDENTIALS = {"run": {"store_options"}}  # options that are not recorded, because they may contain credentials
_LOADS_FILES = ("load_debug_rollout_data", "load_debug_rollout_data_subsample")


def main(argv: list[str]) -> int:
    """Run `penstock fork`. Return 0."""
    positional, own, rest = split_args(argv, {"--at": True, "--name": True, "--reuse-rollouts": False})
    reuses = "--reuse-rollouts" in own
    if len(positional) != 1 or "--name" not in own or not (reuses or "--at" in own):
        raise OptionError(
            "penstock fork needs a run, a round and a name: penstock fork RUN --at N --name NEW; with --reuse-rollouts "
            "--at may be left out"
        )
    old = check_run_name(positional[0])
    at, name = parse_integer("--at", own.get("--at", "0")), check_run_name(own["--name"], "--name")
    given = parse_values(rest)
    where = store_options_from_values(given)
    flow, parent = read_flow_and_config(where, old)
    store = open_store(where, probe=False)
    for kind in ("steps", "rollouts"):
        indices = store.committed_indices(f"{RunKeys(old).prefix}/{kind}")
        if (trained := _num_consecutive(indices)) < at:
            problem = f"run {old!r} has {trained} trained rounds, but --at is {at}: give at most {trained}"
            if trained < max(indices, default=-1):
                missing = commit_key(f"{RunKeys(old).prefix}/{kind}/{trained:06d}")
                problem = (
                    f"{missing} is missing, but a fork at round {at} shares it: restore it from a backup, or give --at "
                    f"{trained}"
                )
            raise RunError(problem)
    config = plan_fork(store, flow, parent, rest, name, at, reuses=reuses)
    if store.read(RunKeys(name).record) is None:
        open_store(where)  # check that the store can be written
    # If --prompt-data is given, the data starts again, even if the paths are the same: the rows may have changed.
    restart_data = "prompt_data" in given.get("rollout", {})
    restart_data |= any(getattr(parent.rollout, name) != getattr(config.rollout, name) for name in _DATA_ORDER)
    num_reused = config.run.num_rollout - at if reuses else 0
    shared = create_fork(store, parent, config, at, restart_data=restart_data and not reuses, num_reused=num_reused)
    print(f"run {name} starts from round {at} of {old}; shared by reference: {shared}")
    for field, before, after in changed_options(parent, config):
        print(f"  {flag_of_field(field)}: {before!r} -> {after!r}")
    options = f" --store {where.store}" if where.store != RunConfig().store else ""
    print(f"to continue: {penstock_command()} resume {name}{options}")
    return 0


def create_fork(
    store: Store, parent: PostTrainConfig, config: Plan, at_round: int, *, restart_data: bool, num_reused: int = 0
) -> str:
    """Create the run `config.run.run` from the first `at_round` rounds of `parent.run.run`, and with `num_reused`
    further rounds that it trains on the parent's rollouts. With `restart_data` it reads its prompt data from the first
    row again. After a kill, the same call finishes the fork. Return how many commits of each kind are shared, as
    text."""
    old, new = RunKeys(parent.run.run), RunKeys(config.run.run)
    # A fork at round 0 with other initial weights shares nothing: the parent's version 0 is another model.
    shares_start = at_round > 0 or parent.start_weights == config.start_weights
    entry = make_parent_record(store, parent, config, at_round, restart_data, num_reused)
    has_engines = config.flow.has_rollouts and not (config.run.debug_rollout_only or config.run.debug_train_only)
    publish = config.train.lora and config.train.lora.lora_publish
    if has_engines and publish == "adapter" and (reason := describe_other_base(config, entry)):
        raise OptionError(f"--lora-publish adapter is not possible: {reason}; use --lora-publish merged")
    recorded = config.model_dump(mode="json", exclude=_CREDENTIALS)
    reserve_run_name(store, new, ForkRecord(flow=config.flow, config=recorded, parent=entry))
    if is_removed(store, old) or describe_removing_process(store, old):
        store.delete([new.fork])
        raise RunError(f"run {old.run!r} is being removed and cannot be forked: give another run")
    if not store.read(new.record):
        lease = Lease(store, new_driver_lease_key(new)).take()  # `penstock gc` keeps the unfinished fork
        try:
            # `penstock gc` may have removed the unfinished fork before the lease existed. Check first whether a removal
            # is in progress: if it ends between the two checks, the second check finds it.
            is_being_removed = describe_removing_process(store, new) is not None
            if is_being_removed or is_removed(store, new) or not store.exists(new.fork):
                raise RunError(f"`penstock gc` has removed the unfinished fork {new.run!r}: repeat the command")
            if shares_start:
                copy_records_to_fork(store, parent, config, entry)
            create_run_record(store, config, parent=entry)
        finally:
            lease.release()
    store.delete([new.fork])
    prefixes = [prefix for prefix in committed_prefixes(store, new) if _fork_shares_commit(new, prefix, entry)]
    shared = [commit.listed_kind for commit in map_in_threads(store.committed, prefixes, _NUM_COPIES) if commit]
    names = ("rollout", "step", "checkpoint", "eval", *(["regrade"] if "regrade" in shared else []))
    return ", ".join(f"{(n := shared.count(kind))} {kind}{'s' * (n != 1)}" for kind in names)


# ---- the new run's plan ----------------------------------------------------------------------------------------------


def plan_fork(
    store: Store,
    flow: str,
    parent: PostTrainConfig,
    argv: Sequence[str],
    name: str,
    at_round: int,
    *,
    reuses: bool = False,
) -> Plan:
    """Return the plan of a fork: the options of the parent, replaced by those in `argv`. Raises OptionError if they
    cannot change at round `at_round`, or in a fork that reuses rollouts (`reuses`)."""
    given = parse_values(argv)
    bound = RunConfig.model_fields["min_effective_sample_size"].default
    rules = (
        ("run" in given.get("run", {}), "penstock fork takes the new run's name as --name: leave out --run"),
        (
            not reuses and given.get("run", {}).get("min_effective_sample_size", bound) != bound,
            "--min-effective-sample-size has no effect without --reuse-rollouts: add it, or omit both",
        ),
    )
    check_rules(rules)
    record, options = read_run_record(store, RunKeys(parent.run.run)), dict[str, Any]()
    if reuses:
        options = _NO_ENGINES | {"num_rollout": count_reusable_rounds(store, Flow(flow), parent, given, name, at_round)}
    elif record and record.parent and record.parent.num_reused:
        options = {"debug_train_only": False}
    config = with_options(parent, "run", {"min_effective_sample_size": bound} | options)
    if reuses:
        config = with_options(config, "debug", dict.fromkeys(_LOADS_FILES))
    config = with_options(update_config_from_argv(config, argv), "run", {"run": name})
    config = resolve(flow, config, store)
    if reuses:
        check_rules(reuse_rules(parent, config, options["num_rollout"], at_round))
    check_rules(fork_rules(parent, config, at_round))
    return config


def fork_rules(parent: PostTrainConfig, config: Plan, at_round: int) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for each rule about the options of a fork at round `at_round`."""
    before, after = parent.train, config.train
    for name in ("freeze_params_name_list", "only_train_params_name_list", "freeze_vision"):
        yield (
            at_round > 0 and getattr(after, name) != getattr(before, name),
            f"{flag_of_field(name)} cannot change at round {at_round}, because the optimizer has no state of "
            "frozen parameters: fork at round 0, or start a new run with --load",
        )
    yield (
        at_round > 0 and before.lora and (after.lora is None or after.lora.adapters != before.lora.adapters),
        f"the options of --lora-rank cannot change at round {at_round}, because the adapters of {parent.run.run} "
        "were trained with them: keep them, fork at round 0, or export the run and start a new one with --load",
    )
    yield (
        config.run.num_rollout < at_round,
        f"--num-rollout {config.run.num_rollout} is less than the {at_round} shared rounds: give at least {at_round}",
    )


def reuse_rules(parent: PostTrainConfig, config: Plan, available: int, at_round: int) -> Iterator[tuple[object, str]]:
    """Yield (is violated, error message) for each rule about a fork with --reuse-rollouts: it must have a round to
    train of the `available` ones, and keep the options that do not apply to stored samples."""
    yield (
        not at_round < config.run.num_rollout <= available,
        f"--num-rollout {config.run.num_rollout} with --reuse-rollouts must be above --at {at_round} and at most "
        f"{available}, the number of rollouts of {parent.run.run}",
    )
    before, after = (options_by_mutability(with_absolute_paths(each), "identity") for each in (parent, config))
    generating = [name for name in after if name.startswith(_GENERATING)]
    changed = [flag_of_field(name.rpartition(".")[2]) for name in generating if after[name] != before[name]]
    if at_round == 0 and config.start_weights != parent.start_weights:
        changed.append("the model at round 0 (--hf-checkpoint, --load, --ref-load)")
    for what in changed:
        yield (
            True,
            f"{what} cannot change with --reuse-rollouts, because the stored samples were made with the old value: "
            "keep it, or fork without --reuse-rollouts, which generates new samples",
        )
    old, new = parent.train, config.train
    for flag, needs, has in (
        ("--use-rollout-routing-replay", new.use_rollout_routing_replay, old.use_rollout_routing_replay),
        ("a teacher in an engine", new.reads_teacher_logprobs, old.reads_teacher_logprobs),
        (f"--opd-top-k {new.stored_top_k}", new.stored_top_k, old.stored_top_k),
    ):
        yield (
            needs > has,
            f"{flag} needs data that are stored when samples are generated, but {parent.run.run} was started "
            f"without it: omit {flag}",
        )


def count_reusable_rounds(
    store: Store, flow: Flow, parent: PostTrainConfig, given: RecordedConfig, name: str, at_round: int
) -> int:
    """Return the number of rounds of the parent whose rollouts the fork `name` can have. Raises InputError if the fork
    cannot reuse them, or if an option in `given` has no effect in such a fork."""
    keys = RunKeys(parent.run.run)
    unused = {**dict.fromkeys(_NO_ENGINES, "run"), "prompt_data": "rollout"}  # option -> its section
    rules: list[tuple[object, str]] = [
        (
            not flow.has_rollouts,
            f"--reuse-rollouts needs a run of `penstock train`, but {keys.run} is one of `{flow}`: omit it",
        )
    ]
    for option, section in unused.items():
        problem = "{0} has no effect with --reuse-rollouts, which starts no engines: omit {0}"
        rules.append((option in given.get(section, {}), problem.format(flag_of_field(option))))
    check_rules(rules)
    available = _num_consecutive(store.committed_indices(f"{keys.prefix}/rollouts"))
    if reserved := store.read_record(ForkRecord, RunKeys(name).fork):
        available = min(available, reserved.parent.reused_rounds.stop)  # the parent has generated more since
    if available <= at_round:
        raise RunError(f"run {keys.run!r} has {available} rollouts, so none from round {at_round} on: lower --at")
    return available


def changed_options(parent: PostTrainConfig, config: PostTrainConfig) -> list[tuple[str, Any, Any]]:
    """Return the options that differ between parent and fork: (name, value of the parent, value of the fork). The run's
    name and the store are left out, and a path counts as equal if it is only written differently."""
    before, after = (
        with_absolute_paths(each).model_dump(mode="json", exclude={"run": {"run", "store", "store_options"}})
        for each in (parent, config)
    )
    values = [(name, entries_of(before, s).get(name), entries_of(after, s).get(name)) for s, name, _ in OPTIONS]
    return [(name, old, new) for name, old, new in values if old != new]


# ---- the new run's records -------------------------------------------------------------------------------------------


def make_parent_record(
    store: Store, parent: PostTrainConfig, config: PostTrainConfig, at_round: int, restart_data: bool, num_reused: int
) -> ParentRecord:
    """Return the record of the run and round from which the new run is forked."""
    record = read_existing_record(store, RunKeys(parent.run.run))
    ancestor = record.parent
    while ancestor is not None and at_round <= ancestor.at:
        # All shared rounds are this ancestor's. If the parent runs on other data than the ancestor, so does the fork.
        restart_data |= ancestor.restart_data and not num_reused
        ancestor = ancestor.parent
    end = at_round + num_reused
    restarts = [round_ for round_ in (record.parent.restarts if record.parent else ()) if round_ < end]
    before = config_of_round(record, at_round - 1)
    return ParentRecord(
        run=parent.run.run,
        at=at_round,
        restart_data=restart_data,
        restarts=[*restarts, at_round] if restart_data else restarts,
        discard_responses=at_round > 0 and _response_options(before) != _response_options(config),
        num_reused=num_reused,
        config=parent.model_dump(mode="json", exclude=_CREDENTIALS),
        parent=record.parent,
    )


def _response_options(config: PostTrainConfig) -> dict[str, Any]:
    """Return the options on which the groups in the buffer of a rollout depend: name -> value. These options determine
    the samples, responses and rewards of a group, and other data of it that the trainer reads."""
    options = options_by_mutability(config, "identity")
    read = (
        "use_rollout_routing_replay",
        "opd.opd_top_k",
        "opd.engine.opd_teacher_engine",
        "opd.hinted.opd_hint_template",
    )
    train = {f"train.{name}" for name in read}
    kept = {name: value for name, value in options.items() if name.startswith("rollout.") or name in train}
    return kept | {"teacher": config.train.reads_teacher_logprobs}


def _num_consecutive(indices: Sequence[int]) -> int:
    """Return the number of consecutive indices from 0 on."""
    return min(set(range(len(indices) + 1)) - set(indices))


def reserve_run_name(store: Store, new: RunKeys, fork_record: ForkRecord) -> None:
    """Reserve the name of the new run by writing `fork_record` as its fork.json. Raises RunError if the name is taken,
    except by an earlier, unfinished call for the same fork."""
    existing: RunRecord | ForkRecord | None = read_run_record(store, new)
    problem = ""
    if is_removed(store, new):
        problem = f"run {new.run!r} is not completely removed: finish it with `penstock gc --delete`, or"
    elif existing is None and store.list(new.prefix) and store.read(new.fork) is None:
        problem = f"{store.path(new.prefix)} contains files that do not belong to a fork:"
    elif existing is None:
        store.create(new.fork, fork_record.model_dump_json(indent=1).encode())
        existing = store.read_record(ForkRecord, new.fork) or read_run_record(store, new)
    if not problem and (existing is None or any(getattr(existing, name) != value for name, value in fork_record)):
        state = "is an unfinished fork with another origin or other options (`penstock gc --delete` removes it)"
        problem = f"run {new.run!r} {'exists already' if store.read(new.record) else state}:"
    if problem:
        raise RunError(f"{problem} give another --name")


def _fork_shares_commit(keys: RunKeys, prefix: str, fork: ParentRecord) -> bool:
    """Return whether parent and fork share the commit at `prefix` of either run (`keys`)."""
    directory, index = prefix.removeprefix(f"{keys.prefix}/").split("/")[:2]
    at_round = fork.reused_rounds.stop if directory == "rollouts" else fork.at
    return directory in _LAST_SHARED and int(index) <= at_round + _LAST_SHARED[directory]


def copy_records_to_fork(store: Store, parent: PostTrainConfig, config: PostTrainConfig, fork: ParentRecord) -> None:
    """Copy the commit records of the shared rounds, and the records of the models that parent and fork start with."""
    old, new = RunKeys(parent.run.run), RunKeys(config.run.run)
    for version in store.committed_indices(f"{new.prefix}/checkpoints"):  # copied by an earlier attempt that was killed
        original, copy = (store.committed(keys.checkpoint_prefix(version)) for keys in (old, new))
        if copy is not None and (original is None or original.attempt != copy.attempt):
            # The original has expired, and its files may have been deleted.
            store.delete([commit_key(new.checkpoint_prefix(version))])
    prefixes = [prefix for prefix in committed_prefixes(store, old) if _fork_shares_commit(old, prefix, fork)]
    map_in_threads(lambda prefix: copy_commit_to_fork(store, old, new, prefix), prefixes, _NUM_COPIES)
    same_auxiliary = parent.train.auxiliary_models.items() & config.train.auxiliary_models.items()
    before, now = (each.train.lora and each.train.lora.lora_load for each in (parent, config))
    adapter = ["adapter"] if before == now else []
    for name in ("base", *dict(same_auxiliary), *adapter):
        if model := store.read(old.origin_key(name)):  # missing if the parent has not converted its model yet
            store.create(new.origin_key(name), model)


def copy_commit_to_fork(store: Store, parent: RunKeys, forked: RunKeys, prefix: str) -> None:
    """Copy the commit record at `prefix` to the run `forked`. The copy names the same files as the original; input keys
    below the parent's directory are changed to the fork's directory."""
    target = forked.prefix + prefix.removeprefix(parent.prefix)
    data = store.read(commit_key(prefix))
    if data is None:
        return  # since the prefixes were listed, --keep-checkpoints has removed this checkpoint
    commit = decode_record(Commit, commit_key(prefix), data)
    if has_matching_digest(data) is False:  # the copy would get a matching digest, which would hide the damage
        raise StoreError(
            f"{commit_key(prefix)} has changed since it was written: restore it from a backup "
            f"(`penstock verify {parent.run}` lists the damage)"
        )
    inputs = {
        role: forked.prefix + key.removeprefix(parent.prefix) if key.startswith(f"{parent.prefix}/") else key
        for role, key in commit.inputs.items()
    }
    copy = commit.model_copy(update={"run": forked.run, "inputs": inputs})
    existing = store.commit(target, copy)
    assert existing.model_dump_json() == copy.model_dump_json(), f"{target} differs although this fork owns the name"
    if commit.kind == "checkpoint" and store.committed(prefix) is None:
        # The checkpoint expired while it was copied, and its files may have been deleted: remove the copy.
        store.delete([commit_key(target)])
