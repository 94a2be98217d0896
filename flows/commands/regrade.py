"""`penstock regrade RUN`: grade the stored samples of a run's training rounds and evaluations again.

stages/eval/regrading.py grades and commits; this file parses the request, shows the progress and prints the tables.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.flows.config import SECTIONS, Flow, PostTrainConfig, validate_config
from penstock.flows.options import flags
from penstock.flows.options.argv import (
    flag_of_field,
    parse_integer,
    parse_number,
    parse_run_argument,
    short_repr,
    split_args,
)
from penstock.flows.options.paths import with_function_names
from penstock.flows.runtime.runs import (
    code_version,
    config_of_round,
    open_store,
    read_existing_record,
    read_flow_and_config,
)
from penstock.flows.terminal.console import print_table
from penstock.flows.terminal.lines import clip_line
from penstock.stages.eval.regrading import (
    DETECTORS,
    NUM_EXAMPLES,
    RIGHT_TO_WRONG,
    WRONG_TO_RIGHT,
    Metrics,
    Regrading,
    regrade_stage,
)
from penstock.stages.rewards.grading import check_reward_options
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.group import make_grader
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError, RunError, check_rules
from penstock.storage.history.run_record import RunRecord
from penstock.storage.report.data import task_of
from penstock.storage.store import Store

USAGE = f"""penstock regrade RUN [--rounds A-B] [--version V] [--dataset NAME] [scoring options] [--store URI ...]

  Grades the stored responses of a run again, and prints which rewards and verdicts change, how the advantages of its
  training rounds change, and examples. Nothing is generated and no engine starts. The result is committed, as
  regrades/<round>/<hash> or as the evaluation <data set>@<hash>; existing commits do not change. After a kill, the same
  command continues. Options that are not given default to the run's.

  --rounds A-B      only these training rounds (or --rounds A)
  --version V       only evaluations of this policy version
  --dataset NAME    only evaluations on this data set
  --detectors       also search the responses of training rounds for signs of reward hacking: {", ".join(DETECTORS)}
  --fail-above X    exit with 1 if the share of changed rewards is above X, for instance 0.01

  Scoring options, which replace those of the run and of its data sets: --rm-type, --custom-rm-path, --rm-model-path,
  --rm-url, --reward-key, --rm-evaluated-integers, --pass-threshold, --log-passrate, --group-rm, --reward-timeout,
  --reward-start-timeout, --reward-workers, --allow-row-code. In the metadata of a row, custom_rm_path takes precedence
  over --custom-rm-path, and rm_type over --rm-type."""

_OF_REWARD = {"rm_type", "custom_rm_path", "rm_model_path", "rm_url", "reward_key", "rm_evaluated_integers", "group_rm"}
_SCORING = _OF_REWARD | {  # the options of a run that the command accepts
    *("reward_timeout", "reward_start_timeout", "reward_workers", "allow_row_code", "pass_threshold", "log_passrate"),
    *("store", "store_options", "store_single_writer"),
}
_OWN = {"--rounds": True, "--version": True, "--dataset": True, "--fail-above": True, "--detectors": False}
_OWN_ADVANTAGES = (  # user-defined functions that change advantages, or the rewards from which they are computed
    *("custom_advantage_function_path", "rollout_data_postprocess_path"),
    *("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
)
Source = tuple[str, int]  # data set and policy version of an evaluation, or "" and a training round
_MAX_ROWS = 20  # of the table of rounds and evaluations
_REPORT_SECONDS = 10.0  # between two lines about the progress


def main(argv: list[str]) -> int:
    """Run `penstock regrade`. Return the exit code: 1 if more rewards have changed than --fail-above allows, else 0."""
    positional, own, rest = split_args(argv, _OWN)
    run, given = parse_run_argument("regrade", positional), parse_scoring_options(rest)
    limit, detect = parse_number("--fail-above", own.get("--fail-above", "1")), "--detectors" in own
    check_rules([(limit > 1, f"--fail-above takes a share from 0 to 1; found {limit:g}")])
    _, config = read_flow_and_config(given.run, run)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    record = read_existing_record(store, keys)
    sources = select_sources(store, keys, record, own)
    no_rounds = "--detectors reads training rounds, but none is selected: add --rounds, or omit --detectors"
    check_rules([(detect and sources[0][0], no_rounds)])
    commits = regrade_all(store, record, config, given, sources, detect)
    print(f"{run} in {store.uri}, graded again")
    print_changes(commits)
    rounds = [commit for commit in commits if commit.kind == "regrade"]
    for reason in sorted({commit.state["not_compared"] for commit in rounds} - {""}):
        print(f"advantages are not compared: {reason}")
    if detect:
        print_detectors(rounds[0], rounds[-1])
    print_examples(commits)
    names = ("num_samples", "changed", RIGHT_TO_WRONG, WRONG_TO_RIGHT)
    total, changed, worse, better = (sum(metric(commit, name) for commit in commits) for name in names)
    share = f"{changed:,.0f} of {total:,.0f} rewards changed ({changed / max(total, 1):.2%})"
    print(f"{share}: {worse:,.0f} right -> wrong, {better:,.0f} wrong -> right")
    if changed > limit * total:
        print(f"penstock: {share}, more than --fail-above {limit:g} allows", file=sys.stderr)
    return int(changed > limit * total)


# ---- the request -----------------------------------------------------------------------------------------------------


def parse_scoring_options(argv: list[str]) -> PostTrainConfig:
    """Return the command line's options as a config. Raises OptionError for one that does not affect grading."""
    values = flags.parse_values(argv)
    for section, entries in values.items():
        if other := next((name for name in entries if name not in _SCORING), None):
            inner = entries[other] if f"{section}.{other}" in SECTIONS else None
            flag = flag_of_field(next(iter(inner or ()), other))
            raise OptionError(f"{flag} has no effect on grading stored samples: leave it out")
    return validate_config(values)


def select_sources(store: Store, keys: RunKeys, record: RunRecord, own: Mapping[str, str]) -> list[Source]:
    """Return the training rounds that --rounds selects, then the evaluations that --version and --dataset select,
    except results of an earlier regrade. Without these flags, all are selected. Raises RunError if nothing is."""
    version = parse_integer("--version", own["--version"]) if "--version" in own else None
    bounds = re.fullmatch(r"([0-9]{1,9})(-[0-9]{1,9})?", own.get("--rounds", "0-999999999"))
    if bounds is None:
        raise OptionError(f"--rounds takes a round or a range, 3 or 3-10; found {short_repr(own['--rounds'])}")
    chosen_rounds = range(int(bounds[1]), int((bounds[2] or bounds[1]).removeprefix("-")) + 1)
    # demonstrations have no rewards
    rounds = [] if Flow(record.flow).has_demonstrations else store.committed_indices(f"{keys.prefix}/rollouts")
    evaluated = [
        (name, int(index))
        for index in store.list(f"{keys.prefix}/evals")
        for name in store.committed_names(f"{keys.prefix}/evals/{index}")
        if "@" not in name
    ]
    given = own.keys() & {"--rounds", "--version", "--dataset"}
    chosen = [("", r) for r in rounds if r in chosen_rounds and (not given or "--rounds" in given)]
    chosen += [
        (name, index)
        for name, index in sorted(evaluated)
        if version in (None, index) and own.get("--dataset") in (None, name) and given != {"--rounds"}
    ]
    if not chosen:
        existing = [f"rounds {rounds[0]} to {rounds[-1]}"] if rounds else []
        existing += [f"evaluation {index} {name}" for name, index in evaluated]
        raise RunError(
            f"run {keys.run!r} has no graded samples that match --rounds, --version and --dataset (it has: "
            f"{', '.join(existing) or 'none'}): choose among them"
        )
    return chosen


def merge_scoring_options(
    run_config: PostTrainConfig, given_config: PostTrainConfig, data_set: str
) -> tuple[dict[str, Any], RolloutConfig]:
    """Return how to grade a data set ("": training rounds): the options that determine the rewards, and the rollout
    config for `make_grader`. They are those of the run, replaced by those of the command line (`given_config`)."""
    evals, options = run_config.eval, given_config.rollout
    rollout, threshold = run_config.rollout_with_args, evals.pass_threshold
    update: dict[str, Any] = {key: getattr(options, key) for key in options.model_fields_set}
    if data_set:
        overrides = evals.rollout_overrides(dict(evals.data_sets).get(data_set, ""), data_set)
        rollout = rollout.model_copy(update=overrides)
        threshold, update["group_rm"] = evals.data_set_settings(data_set).get("pass_threshold"), False
    if options.rm_type or options.custom_rm_path:
        update |= {"rm_type": options.rm_type, "custom_rm_path": options.custom_rm_path}
    rollout = rollout.model_copy(update=update)
    given = given_config.eval.pass_threshold
    scoring = rollout.model_dump(include=_OF_REWARD) | {"pass_threshold": threshold if given is None else given}
    return scoring, rollout


# ---- grading ---------------------------------------------------------------------------------------------------------


def regrade_all(
    store: Store,
    record: RunRecord,
    config: PostTrainConfig,
    given: PostTrainConfig,
    sources: Sequence[Source],
    detect: bool,
) -> list[Commit]:
    """Grade the samples of all sources again, and return the commits of their new rewards. Print every few seconds how
    many samples, rounds and evaluations are graded."""
    commits: list[Commit] = []
    num_samples, next_line = 0, time.monotonic() + _REPORT_SECONDS

    def count_sample() -> None:
        nonlocal num_samples, next_line
        num_samples += 1
        if (now := time.monotonic()) >= next_line:
            next_line = now + _REPORT_SECONDS
            done = f"finished {len(commits):,} of {len(sources):,} rounds and evaluations"
            print(f"graded {num_samples:,} samples, {done}", file=sys.stderr, flush=True)

    given, keys = with_function_names(given), RunKeys(config.run.run)
    settings = {data_set: merge_scoring_options(config, given, data_set) for data_set in dict(sources)}
    for _, rollout in settings.values():
        check_reward_options(rollout)
    for data_set, of_set in itertools.groupby(sources, lambda source: source[0]):
        scoring, rollout = settings[data_set]
        with make_grader(rollout) as grader:
            limit, passrate = rollout.rollout_max_response_len, given.eval.log_passrate
            compare = partial(compare_advantages_of_round, record)
            how = Regrading(
                scoring, grader, limit, code_version(), count_sample, compare, require_pass_rate=passrate, detect=detect
            )
            for _, index in of_set:
                commits.append(regrade_stage(store, keys, data_set, index, how))
    return commits


def compare_advantages_of_round(record: RunRecord, index: int, *arrays: Any) -> tuple[list[np.ndarray], Metrics]:
    """Call `compare_advantages` for round `index`. Raises RunError if its advantages do not follow from rewards
    alone."""
    from penstock.stages.train.algorithms.advantages import compare_advantages  # loads torch

    config = config_of_round(record, index)
    options = dict(config.train) | dict(config.rollout)
    flags_in_use = [flag_of_field(name) for name in _OWN_ADVANTAGES if options[name]]
    if config.train.uses_critic or config.train.gdpo_reward_weights:  # needs values, or several rewards
        flags_in_use.insert(0, f"--advantage-estimator {config.train.advantage_estimator}")
    if flags_in_use:
        raise RunError(f"with {flags_in_use[0]} they do not follow from the rewards alone")
    return partial(compare_advantages, config=config.train)(*arrays)


# ---- tables ----------------------------------------------------------------------------------------------------------


def metric(commit: Commit, name: str, missing: float = 0.0) -> float:
    """Return a metric of a regraded round or evaluation by the end of its name."""
    return commit.summary.get(f"{'eval/' if commit.kind == 'eval' else 'regrade@'}{task_of(commit)}/{name}", missing)


def format_metrics(commit: Commit, names: Sequence[str], style: str) -> list[str]:
    """Return metrics as text, "-" for those that the commit does not have."""
    values = [metric(commit, name, math.nan) for name in names]
    return ["-" if math.isnan(value) else format(value, style) for value in values]


def source_title(commit: Commit) -> str:
    """Return what was graded again: `round 12`, or `evaluation 20 aime`."""
    data_set = task_of(commit).partition("@")[0]
    return f"evaluation {commit.index} {data_set}" if commit.kind == "eval" else f"round {commit.index}"


def print_changes(commits: Sequence[Commit]) -> None:
    """Print a line for each round and evaluation; if there are many, for those with the most changed rewards."""
    titles = ["", "samples", "reward before", "now", "changed", "right -> wrong", "wrong -> right", "failed"]
    titles += ["advantages", "signs", "cosine", "norm", "committed as"]
    counts = ("changed", RIGHT_TO_WRONG, WRONG_TO_RIGHT, "failed", "changed_advantages", "changed_signs")
    shown = sorted(range(len(commits)), key=lambda index: -metric(commits[index], "changed"))[:_MAX_ROWS]
    rows = []
    for commit in (commits[index] for index in sorted(shown)):
        cells = format_metrics(commit, ("old_reward", "reward"), ".3f") + format_metrics(commit, counts, ",.0f")
        cells += format_metrics(commit, ("gradient_cosine", "gradient_ratio"), ".3f")
        rows.append((source_title(commit), f"{commit.num_samples():,}", *cells, task_of(commit)))
    print_table(titles, rows, numeric=True)
    if len(commits) > _MAX_ROWS:
        print(f"(the {_MAX_ROWS} of {len(commits)} in which most rewards changed; `penstock query` shows all)")


def print_detectors(first: Commit, last: Commit) -> None:
    """Print a line for each detector: its mean, and its correlation with the old and the new rewards, in two rounds."""
    rows = []
    for name in DETECTORS:
        names = [f"{name}/{part}" for part in ("mean", "old_correlation", "correlation")]
        pairs = zip(*(format_metrics(commit, names, ".3f") for commit in (first, last)))
        rows.append((name, *map(" -> ".join, pairs)))
    titles = (f"rounds {first.index} -> {last.index}", "mean", "correlation with old reward", "with new reward")
    print_table(titles, rows, numeric=True)


def print_examples(commits: Sequence[Commit]) -> None:
    """Print some samples of each kind of changed verdict."""
    rows = []
    for kind in (RIGHT_TO_WRONG, WRONG_TO_RIGHT):
        examples = [(source_title(commit), each) for commit in commits for each in commit.state["examples"][kind]]
        for source, example in examples[:NUM_EXAMPLES]:
            texts = [clip_line(example[name], width) for name, width in (("label", 20), ("response", 60))]
            rewards = ["-" if example[name] is None else f"{example[name]:g}" for name in ("old_reward", "reward")]
            rows.append((kind.replace("_to_", " -> "), source, example["sample"], *rewards, *texts))
    if rows:
        print_table(("verdict", "of", "sample", "before", "now", "label", "end of the response"), rows)
