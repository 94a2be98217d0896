"""`penstock bisect RUN --metric eval/NAME --below X`: find the first policy version at which an evaluation fell, and
rank the groups of the round that trained it.

The policy versions between two checkpoints are restored by replay, as after a kill, and sent to engines, which evaluate
them. The evaluations are committed to the run like those of a round, so a killed search continues with the same
command. The process drives the run during the search (`driver_lease`). The search itself is in
stages/eval/bisection.py, the influence of the groups in stages/train/influence.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.engines.cluster import check_ray_answers, translate_ray_errors
from penstock.flows.config import (
    Plan,
    PostTrainConfig,
    changed_flag,
    training_options,
    validate_config,
    with_options,
)
from penstock.flows.debug_config import DebugConfig
from penstock.flows.options.argv import (
    parse_integer,
    parse_run_argument,
    penstock_command,
    short_repr,
    split_args,
)
from penstock.flows.options.flags import parse_values, store_options_from_values, update_config_from_argv
from penstock.flows.replay import read_initial_weights
from penstock.flows.runtime.preflight import plan_of, preflight
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.publishing import PolicyEngines, evaluate_policy
from penstock.flows.runtime.runs import ActiveRun, driver_lease, open_store, read_flow_and_config
from penstock.flows.runtime.signals import stop_signals
from penstock.flows.terminal.console import print_table
from penstock.flows.terminal.lines import format_with_interval
from penstock.stages.eval.bisection import (
    NoFallError,
    RankedGroup,
    find_fall,
    largest_cost,
    list_falls,
    next_version,
    rank_groups,
    reward_contrast,
)
from penstock.stages.eval.scores import check_same_data
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import InputError, OptionError, RunError, StoreError, check_rules
from penstock.storage.history.run_record import read_completion, read_run_record, record_completion
from penstock.storage.preemption import Preempted, StopRequest
from penstock.storage.samples.shards import read_table
from penstock.storage.secrets import redact
from penstock.storage.store import Store

USAGE = """penstock bisect RUN --metric eval/NAME --below X [--from A] [--to B] [--dry-run] [--store URI]

  Finds the first policy version at which an evaluation fell below X, with a number of evaluations that grows with the
  logarithm of the number of versions. Versions without a checkpoint are restored by replay from the nearest earlier
  one. Then it ranks the groups of the round that trained this version by how much they have contributed to the fall.

  RUN        a run of `penstock train` that is not running
  --metric   eval/NAME for the mean reward on the data set NAME, or another metric of its evaluations, such as
             eval/NAME-pass@1
  --below X  a version is low if its value is below X
  --from A, --to B
             range of policy versions; default: the first and the last one with a stored evaluation on NAME
  --dry-run  only print how much the search takes

  Stored evaluations are used. Others are run, and stored in the run, so the same command continues a search that was
  stopped. If the values cross X several times, the search finds the first fall that they show. Engines and GPUs may
  differ from the run's: `penstock resume --help-all` lists the placement options."""

_OWN = {**dict.fromkeys(("--metric", "--below", "--from", "--to"), True), "--dry-run": False}
_NUM_PRINTED = 10  # groups


@dataclass(frozen=True)
class Search:
    """A request, checked."""

    store: Store
    keys: RunKeys
    plan: Plan  # of the run, with the placement of this command
    metric: str
    data_set: str
    bound: float
    first: int
    last: int
    stored: dict[int, Commit]  # stored evaluations on the data set in the range, by policy version

    def value(self, commit: Commit) -> float:
        """Return the metric of an evaluation. Raises OptionError if the evaluation does not have it."""
        if self.metric not in commit.summary:
            names = [name for name in commit.summary if name.startswith("eval/") and "-ci_" not in name]
            raise OptionError(
                f"--metric {short_repr(self.metric)} is not a metric of the evaluation of version {commit.index}: give "
                f"one of {', '.join(names)}"
            )
        return commit.summary[self.metric]


def main(argv: list[str]) -> int:
    """Run `penstock bisect`. Return the exit code: 0 if the fall was found, 1 if the search failed."""
    positional, own, rest = split_args(argv, _OWN)
    run = parse_run_argument("bisect", positional)
    search = plan_search(run, own, rest)
    values = {version: search.value(commit) for version, commit in search.stored.items()}
    checkpoints = search.store.committed_indices(f"{search.keys.prefix}/checkpoints")
    cost = largest_cost(search.first, search.last, values, search.bound, checkpoints)
    print(
        f"bisecting {run}: {search.metric} below {search.bound:g}, versions {search.first} to {search.last}, "
        f"{len(values)} of them with a stored evaluation\n"
        f"at most {cost.evaluations} evaluations and {cost.rounds} replayed rounds; then, to rank the groups, a "
        "checkpoint of the version before the fall, and twice four optimizer steps on the samples of two evaluations",
        flush=True,
    )
    if "--dry-run" in own:
        return 0
    next_version(search.first, search.last, values, search.bound)  # raises NoFallError before anything starts
    try:
        with driving(search) as (processes, evaluate):
            before = run_search(search, values, evaluate)
            print_ranking(search, before, rank_round(search, processes, before))
    except (InputError, StoreError):
        raise
    except Exception as error:
        failure = redact(f"{type(error).__name__}: {error}")
        print(f"\npenstock: bisect failed: {failure}; the same command continues the search", file=sys.stderr)
        return 1
    return 0


# ---- checks ----------------------------------------------------------------------------------------------------------


def plan_search(run: str, own: dict[str, str], rest: list[str]) -> Search:
    """Check a request. `own`: the command's own flags with their values; `rest`: options of the run."""
    usage = "penstock bisect RUN --metric eval/NAME --below X"
    check_rules((flag not in own, f"{flag} is missing: {usage}") for flag in ("--metric", "--below"))
    flow, recorded = read_flow_and_config(store_options_from_values(parse_values(rest)), run)
    if not flow.has_rollouts:
        raise RunError(f"run {run!r} is one of `{flow}`, but bisect needs a run of `penstock train`: give another run")
    config = update_config_from_argv(recorded, rest)
    flag = changed_flag(recorded, config, "identity", "schedule")
    try:
        bound = float(own["--below"])
    except ValueError:
        bound = math.nan
    rules = (
        (flag, f"{flag} cannot change in a search, which restores and evaluates the run as it was: leave it out"),
        (not math.isfinite(bound), f"--below takes a number; found {short_repr(own['--below'])}"),
    )
    check_rules(rules)
    data_set, metric = find_data_set(config, own["--metric"]), own["--metric"]
    # A fork that reuses rollouts runs without engines, and debug options name files of other starts.
    config = with_options(config, "run", {"debug_train_only": False, "debug_rollout_only": False})
    plan = plan_of(flow, config.model_copy(update={"debug": DebugConfig()}))
    store, keys = open_store(plan.run, probe=False), RunKeys(run)
    versions = [int(name) for name in store.list(f"{keys.prefix}/evals") if name.isdecimal()]
    commits = {version: store.committed(keys.eval_prefix(version, data_set)) for version in versions}
    stored = {version: commit for version, commit in commits.items() if commit is not None}
    first, last = find_range(store, keys, plan, data_set, own, stored)
    stored = {version: commit for version, commit in stored.items() if first <= version <= last}
    return Search(store, keys, plan, metric, data_set, bound, first, last, stored)


def find_data_set(config: PostTrainConfig, metric: str) -> str:
    """Return the data set of the run to whose evaluations a metric belongs: for eval/a-b/rewards/x it is a-b, or a if
    the run has no data set a-b. Raises OptionError if there is none."""
    names = [name for name, _ in config.eval.data_sets]
    own = [name for name in names if metric == f"eval/{name}" or metric.startswith((f"eval/{name}-", f"eval/{name}/"))]
    if not own:
        existing = ", ".join(f"eval/{name}" for name in names) or "none: it was started without --eval-prompt-data"
        raise OptionError(
            f"--metric {short_repr(metric)} does not belong to a data set of the run: give eval/NAME, or another "
            f"metric of an evaluation (the run has {existing})"
        )
    return max(own, key=len)


def find_range(
    store: Store, keys: RunKeys, plan: Plan, data_set: str, own: dict[str, str], evaluated: Iterable[int]
) -> tuple[int, int]:
    """Return the first and the last policy version of the search. `evaluated`: the versions with a stored evaluation.
    Raises RunError or OptionError if the range is empty or has versions that cannot be restored."""
    trained, start = len(store.committed_indices(f"{keys.prefix}/steps")), first_restorable(store, keys, plan)
    stored = [version for version in evaluated if start <= version <= trained]
    if not stored and not {"--from", "--to"} <= own.keys():
        raise RunError(
            f"run {keys.run!r} has no evaluation on {data_set} of versions {start} to {trained}: give --from and --to"
        )
    first, last = (
        parse_integer(flag, own[flag]) if flag in own else default
        for flag, default in (("--from", min(stored, default=0)), ("--to", max(stored, default=0)))
    )
    if not start <= first < last <= trained:
        reason = f", whose versions before {start} were trained by its parent with other options" if start else ""
        raise OptionError(
            f"run {keys.run!r}{reason}, cannot be searched from version {first} to {last}: give --from and --to with "
            f"{start} <= from < to <= {trained}"
        )
    return first, last


def first_restorable(store: Store, keys: RunKeys, plan: Plan) -> int:
    """Return the first policy version that the run's own training options can restore: in a fork with other options
    that of the fork point, else 0."""
    record = read_run_record(store, keys)
    entry, end = record.parent if record else None, math.inf
    while entry is not None:
        end = min(end, entry.at)
        if training_options(validate_config(entry.config)) != training_options(plan):
            return int(end)
        entry = entry.parent
    return 0


# ---- the search ------------------------------------------------------------------------------------------------------


@contextmanager
def driving(search: Search) -> Iterator[tuple[Processes, Callable[[int], Commit]]]:
    """Drive the run during the block: check that it can start, and yield its processes and a function that evaluates a
    policy version. Trainer and engines start on first use and are stopped at the end."""
    store, keys, plan = search.store, search.keys, search.plan
    with driver_lease(store, keys) as lease:
        preflight(plan, own_lease=lease.key)
        if plan.run.ray_address is not None:
            with translate_ray_errors(plan.run.ray_address):
                check_ray_answers(plan.run.ray_address)
        run, stop = ActiveRun(store, keys, plan.flow, plan, lease.key), StopRequest()
        completion = read_completion(store, keys)
        failure: BaseException | None = None
        processes = Processes(run, lambda text: print(f"  · {redact(text)}", flush=True))
        processes.base_checkpoint, _ = read_initial_weights(store, keys)
        tokenizer = PromptTokenizer(
            plan.convert.hf_checkpoint,
            apply_chat_template=plan.rollout.apply_chat_template,
            template_options=plan.rollout.apply_chat_template_kwargs,
        )
        engines = PolicyEngines(processes, lambda *published: None)

        def evaluate(version: int) -> Commit:
            stop.raise_if_requested()
            print(f"  · evaluating version {version}", flush=True)
            return evaluate_policy(engines, tokenizer, stop, version, search.data_set)

        run.record_start("")
        with stop_signals.session(stop, plan.run.grace_period):
            try:
                yield processes, evaluate
            except BaseException as error:
                failure = None if isinstance(error, NoFallError) else error
                raise
            finally:
                stop_signals.begin_cleanup()
                joules = processes.used_joules()
                processes.stop()
                # The run is as far as before: complete, or stopped.
                run.record_end(failure or (None if completion else Preempted()), joules)
                if completion and failure is None:
                    record_completion(store, keys, run.start, completion)


def run_search(search: Search, values: dict[int, float], evaluate: Callable[[int], Commit]) -> int:
    """Evaluate versions until the fall is between two consecutive ones, and return the first of these. Print every
    value, the fall that was found, and which others the values show."""

    def value_of(version: int) -> float:
        commit = evaluate(version)
        value = search.value(commit)
        print(f"  version {version:>5}  {format_with_interval(commit.summary, search.metric)}", flush=True)
        return value

    for version, commit in sorted(search.stored.items()):
        print(f"  version {version:>5}  {format_with_interval(commit.summary, search.metric)}  (stored)")
    before, after = find_fall(search.first, search.last, values, search.bound, value_of)
    print(
        f"{search.metric} fell below {search.bound:g} at version {after}: {values[before]:.4g} at version {before}, "
        f"{values[after]:.4g} at version {after}. Round {before} trained it"
    )
    if later := list_falls(values, search.bound)[1:]:
        places = ", ".join(f"{a} and {b}" for a, b in later)
        print(f"this is the first of {len(later) + 1} falls that the values show; others are between versions {places}")
    return before


def rank_round(search: Search, processes: Processes, before: int) -> list[RankedGroup]:
    """Return the groups of the round that trained version `before + 1`, the most harmful first; [] if the evaluations
    do not say which were. Saves a checkpoint of version `before`, from which the ranking starts twice."""
    store, keys = search.store, search.keys
    commits = [processes.run.read_commit(keys.eval_prefix(v, search.data_set)) for v in (before, before + 1)]
    check_same_data(search.data_set, *commits)
    contrast = reward_contrast([read_table(store, commit) for commit in commits])
    if not contrast.any():
        return []
    policy = processes.policy_restorer()
    if before:
        policy.save_checkpoint(before)
    influence = policy.influence_of_samples(before, commits, contrast.tolist())
    rollout = processes.run.read_commit(keys.rollout_prefix(before))
    return rank_groups(read_table(store, rollout), influence) if any(influence) else []


def print_ranking(search: Search, before: int, ranked: list[RankedGroup]) -> None:
    """Print the groups with the largest contribution to the fall, and commands to look further."""
    if not ranked:
        print("its groups cannot be ranked: no reward of the two evaluations differs, or the learning rate was 0")
        return
    rows: list[tuple[str, ...]] = []
    for group in ranked[:_NUM_PRINTED]:
        graded = [reward for reward in group.rewards if not math.isnan(reward)]
        mean = f"{sum(graded) / len(graded):.3f}" if graded else "-"
        rows.append((group.group_id, f"{group.influence:+.1%}", mean, str(len(graded)), short_repr(group.prompt, 60)))
    print_table(("group", "influence", "mean reward", "graded", "prompt"), rows)
    print(f"influence: share of the group in the first-order change of the rewards that fell ({len(ranked)} groups)")
    command, run, where = penstock_command(), search.keys.run, f" --store {search.store.uri}"
    print(f"to read it: {command} samples {run} --round {before} --prompt {ranked[0].group_id}{where}")
    print(f"to continue before it: {command} fork {run} --at {before} --name NEW{where}")
