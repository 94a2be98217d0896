"""`penstock replay RUN`: train a run's committed shards again, in a fresh trainer, and compare every step with its commit.

Nothing is generated and nothing is written to the run; all that is needed lies in the store (the model's shape and weights too), so
any clean machine can do it. Weights are compared bit for bit, and all metrics but times to the last bit, where everything that decides
the bits is as it was; the metrics within `stages.train.policy.TOLERANCE` otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.config import PostTrainConfig, RunConfig, flag, part, validated
from flows.flags import parse
from flows.runs import open_store, recorded
from flows.words import one_run, taken, whole_number
from storage.config import extra_of
from storage.errors import InputError, OptionError, RunError
from storage.refs import CheckpointRef, RunKeys, commit_key
from storage.store import Store

if TYPE_CHECKING:
    from engines.megatron.shape import ModelShape
    from stages.train.group import TrainerGroup
    from stages.train.policy import Replayed

USAGE = """penstock replay RUN [--from A] [--to B] [--json FILE] [--store URI] [placement options]

  RUN      the run to train again, from its committed shards alone
  --from A begin at policy version A (the newest checkpoint that is not beyond it is loaded); 0, the starting weights, if not given
  --to B   end at policy version B; the last committed one if not given. Round r makes version r + 1 of version r
  --json FILE
           write {round: {verdict, digest}} there, for scripts

Options that say where and how the trainer is placed (--trainer-threads, --ray-address, parallel sizes ...) replace the run's. Bit for
bit equality is expected for the placement and the hardware of the run. Exit code 1 if any round differs."""


def main(words: list[str]) -> int:
    """The command. Returns the exit code: 0 all rounds agree, 1 one differs or the replay failed.

    Raises:
        InputError: the request is wrong.
    """
    alone, own, rest = taken(words, {"--from": True, "--to": True, "--json": True})
    run, options, given = one_run("replay", alone), own_options(own), parse(rest)
    placement = placement_of(given)
    check_replay(run, given.run, placement, **options)
    from flows.prefect_api import ensure_prefect_api, leave
    from stages.train.policy import ReplayError

    ensure_prefect_api()
    try:
        replay(run, given.run, placement, **options)
    except ReplayError as error:
        print(f"\npenstock: {error}", file=sys.stderr)
        return 1
    except InputError:
        raise
    except Exception as error:  # its tasks were retried; Prefect keeps the traceback
        print(f"\npenstock: replay failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        leave()
    return 0


@flow(name="replay", flow_run_name="replay-{run}", validate_parameters=True)
def replay(
    run: str,
    where: RunConfig,
    placement: dict[str, Any] | None = None,
    first: int = 0,
    last: int | None = None,
    json_file: str | None = None,
) -> None:
    """Train committed rounds again and compare.

    Args:
        run: its name.
        where: the store (`store`, `store_options`), and `ray_address` if a standing Ray is to be used.
        placement: fields of the trainer's configuration that replace the run's; only such as change no result.
        first: policy version to begin at, or the newest checkpoint before it.
        last: policy version to end at; the last committed one if not given.
        json_file: where verdicts and digests are written.

    Raises:
        ReplayError: a round differs from its commit.
    """
    from stages.train.policy import ReplayError, newest_checkpoint

    config = _config(run, where, placement or {})
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    trained = len(store.committed_indices(f"{keys.prefix}/steps"))
    last = trained if last is None else last
    begin = newest_checkpoint(store, keys, first)
    _check(store, keys, config, first, last, trained, begin)
    print(f"replaying {run}: rounds {begin} to {last - 1}, from {f'checkpoint {begin}' if begin else 'the starting weights'}")
    found: list[Replayed] = []
    with _trainer(store, keys, config) as group:
        for rollout_id in range(begin, last):
            found.append(replay_one(store, keys, group, begin, rollout_id))
            print(_line(found[-1]), flush=True)
    if json_file:
        content = {r.rollout_id: {"verdict": r.verdict, "digest": r.digest} for r in found}
        Path(json_file).write_text(json.dumps(content, indent=1))
    differing = [r.rollout_id for r in found if r.verdict == "DIFFERS"]
    equal = sum(r.verdict == "equal bit for bit" for r in found)
    total = f"{equal} of {len(found)} rounds are equal bit for bit, {len(found) - equal - len(differing)} within tolerance"
    print(f"{total}, {len(differing)} differ")
    if differing:
        raise ReplayError(
            f"round {differing[0]} of run {run!r} does not come out as committed ({total}, {len(differing)} differ)"
        )


@task(
    name="replay",
    task_run_name="replay-{rollout_id:06d}",
    retries=2,
    retry_delay_seconds=2,
    retry_condition_fn=lambda task, run, state: not isinstance(state.data, InputError),
    persist_result=False,
    cache_policy=NO_CACHE,
)
def replay_one(store: Store, keys: RunKeys, group: TrainerGroup, begin: int, rollout_id: int) -> Replayed:
    """One round, on what the rounds before have given since `begin`. After a failure all of them are trained again."""
    from stages.train.policy import load, replay_round

    state = group.state()
    if rollout_id == begin or state is None or not state.clean or state.version != rollout_id:
        base = CheckpointRef.model_validate(store.read_json(keys.origin("base")))
        load(store, keys, group, begin, base=base)
        for before in range(begin, rollout_id):
            replay_round(store, keys, group, before)
    return replay_round(store, keys, group, rollout_id)


# ---- inside -----------------------------------------------------------------------------------------------------------------


def own_options(own: dict[str, str]) -> dict[str, Any]:
    """Return --from, --to and --json as the flow's arguments. Raises OptionError."""
    options: dict[str, Any] = {
        name: whole_number(flag_name, own[flag_name])
        for flag_name, name in (("--from", "first"), ("--to", "last"))
        if flag_name in own
    }
    if "--json" in own:
        path = Path(own["--json"])
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise OptionError(
                f"--json {own['--json']} is a directory, or lies in one that does not exist: give the name of a file"
            )
        options["json_file"] = own["--json"]
    return options


def check_replay(
    run: str, where: RunConfig, placement: dict[str, Any], first: int = 0, last: int | None = None, json_file: str | None = None
) -> None:
    """Check before anything starts that a run has what a replay needs; the arguments are `replay`'s.

    Raises:
        InputError: no such run, no such rounds, or a layout that the model does not have.
    """
    from flows.preflight import check_layout
    from stages.train.policy import newest_checkpoint

    config = _config(run, where, placement)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    trained = len(store.committed_indices(f"{keys.prefix}/steps"))
    _check(store, keys, config, first, trained if last is None else last, trained, newest_checkpoint(store, keys, first))
    check_layout(_shape(store, keys), config.train)


def placement_of(given: PostTrainConfig) -> dict[str, Any]:
    """The trainer's placement as said on the command line.

    Raises:
        OptionError: an option that belongs to the run was given: a replay trains what is recorded.
    """
    settled = {"global_batch_size", "num_steps_per_rollout"}  # filled in by the config itself
    placement = {}
    for name in given.train.model_fields_set - settled:
        if extra_of(type(given.train).model_fields[name])["change"] != "placement":
            raise OptionError(
                f"{flag(name)} is the run's own, and a replay trains what is recorded: leave it out, or fork the run"
            )
        placement[name] = getattr(given.train, name)
    return placement


def _config(run: str, where: RunConfig, placement: dict[str, Any]) -> PostTrainConfig:
    """The run's recorded configuration, placed as wanted."""
    values = recorded(where, run)[1].model_dump(mode="json")
    values["train"] |= placement
    values["run"]["ray_address"] = where.ray_address
    return validated(values)


def _check(store: Store, keys: RunKeys, config: PostTrainConfig, first: int, last: int, trained: int, begin: int) -> None:
    if not 0 <= first < last <= trained:
        raise OptionError(
            f"run {keys.run!r} has trained {trained} rounds, so it cannot be replayed from version {first} to {last}: give --from and "
            f"--to with 0 <= from < to <= {trained}"
        )
    record = store.read_json(keys.record)
    parent = (record or {}).get("parent")
    if parent and begin < parent["at"] and last > begin:
        theirs = store.read_json(RunKeys(parent["run"]).record)
        if theirs is not None and _training(validated(theirs["config"])) != _training(config):
            raise RunError(
                f"run {keys.run!r} is a fork of {parent['run']!r} at {parent['at']} with other training options; the rounds before were "
                f"trained with the parent's: replay them there (`penstock replay {parent['run']} --to {parent['at']}`), and this run "
                f"with --from {parent['at']} (needs a checkpoint of version {parent['at']})"
            )


def _training(config: PostTrainConfig) -> dict[str, Any]:
    """What of a configuration decides the weights that training a given rollout gives."""
    identity = part(config, "identity")
    decisive = {name: value for name, value in identity.items() if name.startswith("train.")}
    return decisive | {"temperature": config.rollout.rollout_temperature}


@contextmanager
def _trainer(store: Store, keys: RunKeys, config: PostTrainConfig) -> Iterator[TrainerGroup]:
    """A trainer of its own, apart from the run's if that is running on the same Ray."""
    from engines.cluster import Cluster
    from stages.train.group import TrainerGroup
    from stages.train.spec import TrainerSpec

    spec = TrainerSpec(
        run=keys.run,
        shape=_shape(store, keys),
        config=config.train,
        temperature=config.rollout.rollout_temperature,
        store=store.uri,
        store_options=store.options,
    )
    cluster = Cluster.start(config.run.ray_address, namespace=f"penstock-replay-{keys.run}")
    group = TrainerGroup(cluster, spec)
    try:
        yield group
    finally:
        group.kill()
        cluster.stop()


def _shape(store: Store, keys: RunKeys) -> ModelShape:
    """Return the shape of the model that a run trains. Raises RunError if its starting weights are not in the store."""
    from engines.megatron.shape import ModelShape

    base = store.read_json(keys.origin("base"))
    if base is None:
        raise RunError(f"run {keys.run!r} has no starting weights: it has trained nothing that could be replayed")
    model = store.committed(base["key"].removesuffix(commit_key("")))
    if model is None or "shape" not in model.state:
        raise RunError(f"{base['key']}, the starting weights of run {keys.run!r}, is not in the store: convert the model again")
    return ModelShape.model_validate(model.state["shape"])


def _line(replayed: Replayed) -> str:
    why = f": {replayed.why}" if replayed.why else ""
    return f"  round {replayed.rollout_id:>4}  {replayed.verdict}{why}"
