"""`penstock eval --compare` and `--rescore`: compare or grade again the stored samples of evaluations.

stages/eval/ computes differences, intervals and scores; this file parses the requests and prints the tables.
"""

from __future__ import annotations

from typing import Any

from penstock.flows.config import SECTIONS, PostTrainConfig, validate_config
from penstock.flows.options import flags
from penstock.flows.options.argv import check_run_name, flag_of_field, parse_integer, short_repr, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.options.paths import with_function_names
from penstock.flows.runtime.runs import code_version, open_store, read_flow_and_config
from penstock.flows.terminal.console import print_table
from penstock.flows.terminal.lines import format_with_interval
from penstock.stages.eval.rescoring import Scoring, StoredEval, rescore_stage
from penstock.stages.eval.scores import check_same_data, compare_rewards, rewards_by_prompt
from penstock.stages.rewards.grading import check_reward_options
from penstock.stages.rollout.group import make_grader
from penstock.storage.commit import Commit, RunKeys, commit_key, eval_rewards
from penstock.storage.errors import DataError, OptionError, RunError
from penstock.storage.store import Store

COMPARE_USAGE = """penstock eval --compare A B [--store URI ...]

  A and B are RUN/VERSION, or RUN for its newest evaluated version: two versions of one run, or of two runs in the same
  store. For every data set that both were evaluated on, prints both mean rewards, their difference with its 95 %
  confidence interval (paired over the prompts), and on how many prompts B is better than A, worse, and equal.
  Evaluations that were scored again are data sets named <data set>@<hash>: score both in the same way before comparing
  them. Fails if data sets of the same name have different rows."""
RESCORE_USAGE = """penstock eval --rescore RUN [--version V] [--dataset NAME] [scoring options] [--store URI ...]

  Grades the stored responses of a run's evaluations again and commits the result under
  <data set>@<hash>; existing commits do not change. Nothing is generated and no engine starts. Options that are not
  given default to the run's.

  --version V       only this policy version
  --dataset NAME    only this data set

  Scoring options, which replace those of the run: --eval-rm-type (or --rm-type), --custom-rm-path, --rm-model-path,
  --rm-url, --eval-reward-key (or --reward-key), --rm-evaluated-integers, --pass-threshold, --log-passrate,
  --reward-timeout, --reward-start-timeout, --reward-workers, --allow-row-code. They take precedence over the data sets
  of --eval-config. In the metadata of a row, custom_rm_path takes precedence over --custom-rm-path and --eval-rm-type,
  and rm_type over --eval-rm-type."""


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare_main(argv: list[str]) -> int:
    """Run `penstock eval --compare`. Return 0."""
    positional, _, rest = split_args(argv, {"--compare": False})
    if len(positional) != 2:
        found = f"; found {short_repr(' '.join(positional))}" if positional else ""
        raise OptionError(
            f"penstock eval --compare needs two policies: RUN/VERSION, or RUN for its newest evaluated version{found}"
        )
    store = open_store(parse_store_options(rest, "eval --compare"), probe=False)
    (title_a, a), (title_b, b) = (find_evaluations_of_version(store, policy) for policy in positional)
    common = sorted(a.keys() & b.keys())
    if not common:
        raise DataError(
            f"{title_a} was evaluated on {', '.join(sorted(a))} and {title_b} on {', '.join(sorted(b))}, "
            "without a common data set: evaluate both on the same data set"
        )
    print(f"A = {title_a}, B = {title_b}, in {store.uri}")
    titles = ("data set", "prompts", "A", "B", "B - A", "95 %", "B better", "B worse", "equal")
    rows = []
    for name in common:
        check_same_data(name, a[name], b[name])
        comparison = compare_rewards(rewards_by_prompt(store, a[name]), rewards_by_prompt(store, b[name]))
        means = f"{comparison.mean_a:.3f}", f"{comparison.mean_b:.3f}", f"{comparison.difference:+.3f}"
        interval = f"{comparison.low:+.3f} to {comparison.high:+.3f}"
        counts = str(comparison.wins), str(comparison.losses), str(comparison.ties)
        rows.append((name, str(comparison.num_prompts), *means, interval, *counts))
    print_table(titles, rows, numeric=True)
    for title, only in ((title_a, a.keys() - b.keys()), (title_b, b.keys() - a.keys())):
        if only:
            print(f"only {title} was evaluated on {', '.join(sorted(only))}")
    return 0


def find_evaluations_of_version(store: Store, run_and_version: str) -> tuple[str, dict[str, Commit]]:
    """Return (RUN/VERSION, data set -> commit of its evaluation) for the text RUN/VERSION, or RUN, which means the
    newest evaluated version of the run. Raises RunError if no evaluation is finished."""
    run, slash, version = run_and_version.partition("/")
    keys = RunKeys(check_run_name(run, "--compare"))
    versions = [int(name) for name in store.list(f"{keys.prefix}/evals") if name.isdecimal()]
    problem = ""
    if store.read(keys.record) is None:
        existing = ", ".join(store.list("runs")) or "none"
        problem = f"store {store.uri} has no run {run!r} (it has: {existing}): correct the name"
    elif not versions:
        problem = f"run {run!r} has no evaluations: evaluate it with --eval-prompt-data"
    elif slash and version not in map(str, versions):
        problem = f"run {run!r} has no evaluation of version {short_repr(version)}: choose one of "
        problem += ", ".join(map(str, versions))
    if problem:
        raise RunError(problem)
    chosen = int(version) if slash else max(versions)
    directory, suffix = f"{keys.prefix}/evals/{chosen:06d}", commit_key("")
    names = [name.removesuffix(suffix) for name in store.list(directory) if name.endswith(suffix)]
    evaluations = {name: commit for name in names if (commit := store.committed(keys.eval_prefix(chosen, name)))}
    if not evaluations:
        raise RunError(
            f"no evaluation of version {chosen} of run {run!r} has finished: finish it with `penstock resume {run}`"
        )
    return f"{run}/{chosen}", evaluations


# ---- scoring again ---------------------------------------------------------------------------------------------------


_SCORING = {  # the options that `penstock eval --rescore` accepts
    *("rm_type", "custom_rm_path", "rm_model_path", "rm_url", "reward_key", "reward_timeout", "reward_start_timeout"),
    *("reward_workers", "allow_row_code", "rm_evaluated_integers"),
    *("eval_rm_type", "eval_reward_key", "pass_threshold", "log_passrate"),
    *("store", "store_options", "store_single_writer"),
}


def rescore_main(argv: list[str]) -> int:
    """Run `penstock eval --rescore`. Return 0."""
    positional, own, rest = split_args(argv, {"--rescore": True, "--version": True, "--dataset": True})
    if positional:
        raise OptionError(
            f"{short_repr(positional[0])} is not an option: "
            "penstock eval --rescore RUN [--version V] [--dataset NAME] [scoring options]"
        )
    given, run = parse_scoring_options(rest), check_run_name(own["--rescore"], "--rescore")
    _, config = read_flow_and_config(given.run, run)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    rows = []
    for version, name in select_evaluations(store, keys, own.get("--version"), own.get("--dataset")):
        old = store.committed(keys.eval_prefix(version, name))
        assert old is not None, "`select_evaluations` returns only committed evaluations"
        new = rescore_evaluation(store, keys, config, given, version, name)
        task = next(iter(eval_rewards(new)))
        at_1 = f"eval/{task}-pass@1"
        passing = format_with_interval(new.summary, at_1) if at_1 in new.summary else "-"
        was, now = format_with_interval(old.summary, f"eval/{name}"), format_with_interval(new.summary, f"eval/{task}")
        rows.append((str(version), name, was, now, passing, f"{new.summary[f'eval/{task}-failed_ratio']:.3f}", task))
    print(f"{run} in {store.uri}, scored again, with 95 % confidence intervals of the mean")
    print_table(("version", "data set", "before", "now", "pass@1", "failed", "committed as"), rows)
    return 0


def parse_scoring_options(argv: list[str]) -> PostTrainConfig:
    """Return the options of the command line as a config. Raises OptionError for an option that does not affect
    scoring."""
    values = flags.parse_values(argv)
    for section, entries in values.items():
        if other := next((name for name in entries if name not in _SCORING), None):
            inner = entries[other] if f"{section}.{other}" in SECTIONS else None
            flag = flag_of_field(next(iter(inner or ()), other))
            raise OptionError(f"{flag} has no effect on scoring stored samples: leave it out")
    given = validate_config(values)
    if given.eval.eval_rm_type and given.rollout.custom_rm_path:
        raise OptionError(
            f"--eval-rm-type {given.eval.eval_rm_type} and --custom-rm-path {given.rollout.custom_rm_path} "
            "are both given: leave out the one that should not grade"
        )
    return given


def select_evaluations(store: Store, keys: RunKeys, version: str | None, data_set: str | None) -> list[tuple[int, str]]:
    """Return the evaluations of a run as (policy version, data set), except results of an earlier --rescore. If
    `version` or `data_set` is not None, return only those that match. Raises RunError if none does."""
    if version is not None:
        version = str(parse_integer("--version", version))
    suffix = commit_key("")
    evaluated = [
        (int(index), entry.removesuffix(suffix))
        for index in store.list(f"{keys.prefix}/evals")
        for entry in store.list(f"{keys.prefix}/evals/{index}")
        if entry.endswith(suffix) and "@" not in entry
    ]
    chosen = [(v, n) for v, n in evaluated if version in (None, str(v)) and data_set in (None, n)]
    if not chosen:
        existing = ", ".join(f"{v} {n}" for v, n in evaluated) or "none"
        raise RunError(
            f"run {keys.run!r} has no evaluation that matches --version and --dataset (it has: {existing}): choose one "
            "of its evaluations"
        )
    return chosen


def merge_scoring_settings(
    run_config: PostTrainConfig, given_config: PostTrainConfig, data_set: str
) -> tuple[Scoring, Any]:
    """Return how to score a data set: the scoring settings, and the rollout config for `make_grader`. They have the
    options of the run, replaced by the scoring options of the command line (`given_config`)."""
    evals, options = run_config.eval, given_config.rollout
    rollout = run_config.rollout_with_args.model_copy(
        update=evals.rollout_overrides(dict(evals.data_sets).get(data_set, ""), data_set)
    )
    update: dict[str, Any] = {key: getattr(options, key) for key in options.model_fields_set}
    if rm_type := given_config.eval.eval_rm_type or options.rm_type:
        update |= {"rm_type": rm_type, "custom_rm_path": None}
    elif options.custom_rm_path:
        update["rm_type"] = None
    if given_config.eval.eval_reward_key:
        update["reward_key"] = given_config.eval.eval_reward_key
    rollout = rollout.model_copy(update=update)
    threshold = given_config.eval.pass_threshold
    scoring = Scoring(
        rm_type=rollout.rm_type,
        custom_rm_path=rollout.custom_rm_path,
        reward_key=rollout.reward_key,
        rm_model_path=rollout.rm_model_path,
        rm_url=rollout.rm_url,
        evaluated_integers=rollout.rm_evaluated_integers,
        pass_threshold=evals.data_set_settings(data_set).get("pass_threshold") if threshold is None else threshold,
    )
    return scoring, rollout


def rescore_evaluation(
    store: Store, keys: RunKeys, run_config: PostTrainConfig, given_config: PostTrainConfig, version: int, data_set: str
) -> Commit:
    """Grade the stored samples of one evaluation again. Return the commit of the new scores."""
    scoring, rollout = merge_scoring_settings(run_config, with_function_names(given_config), data_set)
    check_reward_options(rollout)
    with make_grader(rollout) as grader:
        return rescore_stage(
            store,
            StoredEval(keys, version, data_set),
            scoring,
            grader,
            max_response_len=rollout.rollout_max_response_len,
            require_pass_rate=given_config.eval.log_passrate,
            code_version=code_version(),
        )
