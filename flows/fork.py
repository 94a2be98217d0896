"""`penstock fork RUN --at N --name NEW [options]`: a new run that shares the first N rounds of another and goes its own way from there.

Shared means by reference: the new run gets copies of the small commit records, and the files they name stay where they are. Its own
record comes last, by one conditional create, so a run that `penstock resume` finds is whole; a killed fork is finished by the same
command, or removed by `penstock gc`. The record's `parent` says where the run comes from:

    run, at        the parent, and the first round that is not shared
    restart_data   the data begins anew at round `at` (first epoch, first row), while prompts are numbered on
    restarts       all rounds at which it did, those of the parent's own past included
    config         the parent's config, with which the rounds before `at` were trained
    parent         the parent's own `parent`, if it was a fork too
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flows import flags
from flows.config import SECTIONS, PostTrainConfig, RunConfig, flag, part, validated
from flows.paths import absolute
from flows.runs import create_record, open_store, read_record, recorded, with_options
from flows.words import command, run_name, taken, whole_number
from storage.disk import in_parallel
from storage.errors import OptionError, RunError, StoreError
from storage.refs import Commit, RunKeys, commit_key, is_unchanged, parsed
from storage.removal import being_removed, is_removed
from storage.retention import fork_key
from storage.store import Store, committed_prefixes

USAGE = """penstock fork RUN --at N --name NEW [options to change] [--store URI ...]

  Makes the run NEW out of the first N rounds of RUN: its rollouts and steps before N, its checkpoints and evaluations up to N. Nothing is
  computed and no large file is copied. Options given here are changed in the new run, also those that a run otherwise keeps for life.
  `penstock resume NEW` then goes on with round N.

  --at     the first round that the new run does itself; all before it must be trained
  --name   of the new run

  With --prompt-data, or another order or other columns of the data, the data begins anew at round N."""

_SHARED = {"rollouts": -1, "steps": -1, "checkpoints": 0, "evals": 0}  # directory -> the last shared index, relative to `at`
_DATA_ORDER = ("input_key", "label_key", "metadata_key", "rollout_shuffle", "rollout_seed")
_NUM_COPIES = 16  # at a time


def main(words: list[str]) -> int:
    """The command. Returns 0.

    Raises:
        RunError: no such run or round, or a name that is taken.
        OptionError: an option does not fit.
    """
    alone, own, rest = taken(words, {"--at": True, "--name": True})
    if len(alone) != 1 or own.keys() != {"--at", "--name"}:
        raise OptionError("penstock fork needs a run, a round and a name: penstock fork RUN --at N --name NEW")
    run_name(alone[0])
    at, name, given = whole_number("--at", own["--at"]), run_name(own["--name"], "--name"), flags.values_of(rest)
    where = validated({"run": {key: value for key, value in given.get("run", {}).items() if key.startswith("store")}}).run
    flow, parent = recorded(where, alone[0])
    store = open_store(where, probe=False)
    _check_trained(store, RunKeys(alone[0]), at)
    config = changed(parent, rest, name, at)
    if store.read(RunKeys(name).record) is None:
        open_store(where)  # the probe: something will be written
    shared = fork(store, flow, parent, config, at, restart_data=begins_anew(parent, config, given))
    print(f"run {name} begins at round {at} of {alone[0]}; shared by reference: {shared}")
    for field, before, after in differences(parent, config):
        print(f"  {flag(field)}: {before!r} -> {after!r}")
    options = f" --store {where.store}" if where.store != RunConfig().store else ""
    print(f"to continue: {command()} resume {name}{options}")
    return 0


def fork(store: Store, flow: str, parent: PostTrainConfig, config: PostTrainConfig, at: int, *, restart_data: bool) -> str:
    """Make the run `config.run.run` out of the first `at` rounds of `parent.run.run`. Safe to call again after a kill.

    Returns:
        in words, what is shared.

    Raises:
        RunError: those rounds are not all trained, the name is taken by something else, or the parent is being removed.
        StoreError: a record of the parent has changed since it was written.
    """
    parent, config = absolute(parent), absolute(config)
    old, new = RunKeys(parent.run.run), RunKeys(config.run.run)
    entry = _parent_entry(store, parent, at, restart_data)
    plan = {"flow": flow, "config": _plain(config), "parent": entry}
    _claim(store, old, new, plan, at)
    if is_removed(store, old) or being_removed(store, old):
        store.delete([fork_key(new)])
        raise RunError(f"run {old.run!r} is being removed: it cannot be forked")
    if not store.read(new.record):
        prefixes = [prefix for prefix in committed_prefixes(store, old) if _is_shared(old, prefix, at)]
        in_parallel(lambda prefix: _share(store, old, new, prefix), prefixes, _NUM_COPIES)
        beside = parent.train.models_beside.items() & config.train.models_beside.items()
        for name in ("base", *dict(beside)):
            if model := store.read(old.origin(name)):  # missing if the parent has not even converted its model
                store.create(new.origin(name), model)
        create_record(store, flow, config, parent=entry)
    store.delete([fork_key(new)])
    shared = [prefix.split("/")[2] for prefix in committed_prefixes(store, new) if _is_shared(new, prefix, at)]
    return ", ".join(f"{shared.count(kind)} {kind}" for kind in _SHARED)


def config_of_round(record: dict[str, Any], rollout_id: int) -> PostTrainConfig:
    """The config with which a round was generated and trained: the run's own, or that of the ancestor it is shared with."""
    config, parent = record["config"], record.get("parent")
    while parent is not None and rollout_id < parent["at"]:
        config, parent = parent["config"], parent.get("parent")
    return validated(config)


def bridge(store: Store, record: dict[str, Any]) -> tuple[int, PostTrainConfig] | None:
    """What must be done before a fork trains: (version, config). With that config, and no other, the version must be restored
    and saved as a checkpoint of the fork, since the shared rounds before it were trained so; from the checkpoint on, the fork's own
    config holds. None if there is nothing to do: no fork, nothing shared, trained alike, or saved already.
    """
    parent = record.get("parent")
    if parent is None or parent["at"] == 0 or store.committed(RunKeys(record["config"]["run"]["run"]).checkpoint(parent["at"])):
        return None
    before, after = config_of_round(record, parent["at"] - 1), validated(record["config"])
    return None if _training(before) == _training(after) else (parent["at"], before)


# ---- the new run's config ---------------------------------------------------------------------------------------------------


def changed(parent: PostTrainConfig, argv: Sequence[str], name: str, at: int) -> PostTrainConfig:
    """The parent's config with the options given on the command line.

    Raises:
        OptionError: an option does not fit, or fewer rounds are wanted than are shared.
    """
    given = flags.values_of(argv)
    if "run" in given.get("run", {}):
        raise OptionError("penstock fork names the new run with --name; leave out --run")
    config = with_options(parent, argv)
    config = absolute(config.model_copy(update={"run": config.run.model_copy(update={"run": name})}))
    if config.run.num_rollout < at:
        raise OptionError(f"--num-rollout {config.run.num_rollout} is less than the {at} rounds that are shared: give more")
    return config


def begins_anew(parent: PostTrainConfig, config: PostTrainConfig, given: flags.Values) -> bool:
    """Whether the fork's data starts from its first row: other files, or files said again because their rows have changed."""
    order_changed = any(getattr(parent.rollout, name) != getattr(config.rollout, name) for name in _DATA_ORDER)
    return order_changed or "prompt_data" in given.get("rollout", {})


def differences(parent: PostTrainConfig, config: PostTrainConfig) -> list[tuple[str, Any, Any]]:
    """The options that differ: (name, before, after)."""
    before, after = parent.model_dump(mode="json"), config.model_dump(mode="json")
    fields = [(section, name) for section in SECTIONS for name in before[section] if (section, name) != ("run", "run")]
    return [(name, before[s][name], after[s][name]) for s, name in fields if before[s][name] != after[s][name]]


def _training(config: PostTrainConfig) -> dict[str, Any]:
    """Everything in a config that a trained round depends on."""
    return {name: value for name, value in part(config, "identity").items() if name.startswith("train.")} | {
        "temperature": config.rollout.rollout_temperature
    }


def _plain(config: PostTrainConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude={"run": {"store_options"}})  # they hold credentials


# ---- the new run's records --------------------------------------------------------------------------------------------------


def _parent_entry(store: Store, parent: PostTrainConfig, at: int, restart_data: bool) -> dict[str, Any]:
    record = store.read_json(RunKeys(parent.run.run).record)
    assert record is not None, "`recorded` has read it"
    earlier = record.get("parent")
    restarts = [round_ for round_ in (earlier or {}).get("restarts", []) if round_ < at]
    return {
        "run": parent.run.run,
        "at": at,
        "restart_data": restart_data,
        "restarts": [*restarts, at] if restart_data else restarts,
        "config": _plain(parent),
        "parent": earlier,
    }


def _check_trained(store: Store, keys: RunKeys, at: int) -> None:
    num_trained = len(store.committed_indices(f"{keys.prefix}/steps"))
    if at > num_trained:
        raise RunError(f"run {keys.run!r} has {num_trained} trained rounds: --at takes a number up to that; found {at}")


def _claim(store: Store, old: RunKeys, new: RunKeys, plan: dict[str, Any], at: int) -> None:
    """Take the new run's name, or find that this very fork has it."""
    _check_trained(store, old, at)
    standing = read_record(store, new)
    if is_removed(store, new):
        raise RunError(
            f"run {new.run!r} is not removed completely: `penstock gc --delete` finishes it, or give --name another name"
        )
    if standing is None:
        if store.list(new.prefix) and store.read(fork_key(new)) is None:
            raise RunError(f"something lies in {store.path(new.prefix)} that is not a fork: give --name another name")
        store.create(fork_key(new), json.dumps(plan, indent=1).encode())
        standing = store.read_json(fork_key(new)) or store.read_json(new.record) or {}
    if {key: standing.get(key) for key in plan} != json.loads(json.dumps(plan)):
        state = (
            "exists already"
            if store.read(new.record)
            else "was begun as another fork and not finished (`penstock gc` removes it)"
        )
        raise RunError(f"run {new.run!r} {state}: give --name another name")


def _is_shared(old: RunKeys, prefix: str, at: int) -> bool:
    directory, index = prefix.removeprefix(f"{old.prefix}/").split("/")[:2]
    return directory in _SHARED and int(index) <= at + _SHARED[directory]


def _share(store: Store, old: RunKeys, new: RunKeys, prefix: str) -> None:
    """One commit record for the new run: the same files, made from the same things under the new run's own names."""
    target = new.prefix + prefix.removeprefix(old.prefix)
    data = store.read(commit_key(prefix))
    if data is None:
        return  # a checkpoint that has expired since it was listed
    commit = parsed(Commit, commit_key(prefix), data)
    if is_unchanged(data) is False:  # a copy would get a digest of its own
        raise StoreError(
            f"{commit_key(prefix)} has changed since it was written: restore it from a backup (`penstock verify {old.run}`)"
        )
    inputs = {
        role: new.prefix + key.removeprefix(old.prefix) if key.startswith(f"{old.prefix}/") else key
        for role, key in commit.inputs.items()
    }
    copy = commit.model_copy(update={"run": new.run, "inputs": inputs})
    standing = store.commit(target, copy)
    assert _same(standing, copy), f"{target} is not what this fork would write, although the name was claimed for it"
    if commit.kind == "checkpoint" and store.committed(prefix) is None:
        store.delete([commit_key(target)])  # it expired meanwhile, perhaps before anybody could see that we need its files


def _same(one: Commit, other: Commit) -> bool:
    return one.model_dump_json() == other.model_dump_json()
