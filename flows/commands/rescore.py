"""`penstock eval --rescore RUN`: grade the stored samples of a run's evaluations again. Starts neither engines
nor a flow.

stages/eval/rescoring.py does the grading; this file parses the request and prints the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.flows.config import PostTrainConfig, flag_of_field, validate_config
from penstock.flows.options import flags
from penstock.flows.options.argv import check_run_name, parse_integer, short_repr, split_args
from penstock.flows.options.paths import with_function_names
from penstock.flows.runtime.display import print_table
from penstock.flows.runtime.runs import code_version, open_store, read_flow_and_config
from penstock.flows.terminal.lines import format_with_interval
from penstock.storage.errors import OptionError, RunError
from penstock.storage.refs import Commit, RunKeys, commit_key
from penstock.storage.store import Store
from penstock.storage.tracking.lineage import eval_rewards

if TYPE_CHECKING:
    from penstock.stages.eval.rescoring import Scoring

USAGE = """penstock eval --rescore RUN [--version V] [--dataset NAME] [scoring options] [--store URI ...]

  Grades the stored responses of a run's evaluations again and commits the result under
  <data set>@<hash>; existing commits do not change. Nothing is generated and no engine starts. Options that are not
  given default to the run's.

  --version V       only this policy version
  --dataset NAME    only this data set

  Scoring options, which replace the run's: --eval-rm-type (or --rm-type), --custom-rm-path, --rm-model-path, --rm-url,
  --eval-reward-key (or --reward-key), --rm-evaluated-integers, --pass-threshold, --log-passrate, --reward-timeout,
  --reward-start-timeout, --reward-workers, --allow-row-code.
  They take precedence over the data sets of --eval-config. In the metadata of a row, custom_rm_path takes precedence
  over --custom-rm-path and --eval-rm-type, and rm_type over --eval-rm-type."""

_SCORING = {  # section -> options that are accepted
    "rollout": (
        *("rm_type", "custom_rm_path", "rm_model_path", "rm_url", "reward_key", "reward_timeout"),
        *("reward_start_timeout", "reward_workers", "allow_row_code", "rm_evaluated_integers"),
    ),
    "eval": ("eval_rm_type", "eval_reward_key", "pass_threshold", "log_passrate"),
    "run": ("store", "store_options", "store_single_writer"),
}


def main(argv: list[str]) -> int:
    """Run the command. Return 0.

    Raises:
        InputError: the run, version or data set does not exist, an option does not affect scoring, or the reward is
        invalid.
    """
    positional, own, rest = split_args(argv, {"--rescore": True, "--version": True, "--dataset": True})
    if positional:
        raise OptionError(
            f"{short_repr(positional[0])} is not an option: "
            "penstock eval --rescore RUN [--version V] [--dataset NAME] [scoring options]"
        )
    given, run = parse_scoring_options(rest), check_run_name(own["--rescore"], "--rescore")
    _, config = read_flow_and_config(given.run, run)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    chosen = select_evaluations(store, keys, own.get("--version"), own.get("--dataset"))
    rows = []
    for version, name in chosen:
        old = store.committed(keys.eval_prefix(version, name))
        assert old is not None, "`select_evaluations` returns committed ones"
        new = rescore_evaluation(store, keys, config, given, version, name)
        task = next(iter(eval_rewards(new)))
        passing = (
            format_with_interval(new.summary, f"eval/{task}-pass@1") if f"eval/{task}-pass@1" in new.summary else "-"
        )
        was, now = format_with_interval(old.summary, f"eval/{name}"), format_with_interval(new.summary, f"eval/{task}")
        rows.append((str(version), name, was, now, passing, f"{new.summary[f'eval/{task}-failed_ratio']:.3f}", task))
    print(f"{run} in {store.uri}, scored again, with 95 % confidence intervals of the mean")
    print_table(("version", "data set", "before", "now", "pass@1", "failed", "committed as"), rows)
    return 0


def parse_scoring_options(argv: list[str]) -> PostTrainConfig:
    """Return the config given on the command line. Raises OptionError for an option that does not affect scoring."""
    values = flags.parse_values(argv)
    for section, entries in values.items():
        if other := next((name for name in entries if name not in _SCORING.get(section, ())), None):
            raise OptionError(f"{flag_of_field(other)} has no effect on scoring stored samples: leave it out")
    given = validate_config(values)
    if given.eval.eval_rm_type and given.rollout.custom_rm_path:
        raise OptionError(
            f"--eval-rm-type {given.eval.eval_rm_type} and --custom-rm-path {given.rollout.custom_rm_path} "
            "are both given: leave one out"
        )
    return given


def select_evaluations(store: Store, keys: RunKeys, version: str | None, data_set: str | None) -> list[tuple[int, str]]:
    """Return a run's evaluations as (policy version, data set), except rescored ones.

    Args:
        store: the run's store.
        keys: the run's keys.
        version: only this policy version; None for all.
        data_set: only this data set; None for all.

    Raises:
        RunError: no evaluation matches.
    """
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
    """Return the scoring settings of a data set, and the rollout config for `make_grader`: the values of the run,
    replaced by the scoring options of the command line (`given_config`)."""
    from penstock.stages.eval.rescoring import Scoring

    evals, options = run_config.eval, given_config.rollout
    rollout = run_config.rollout_with_args.model_copy(
        update=evals.rollout_overrides(dict(evals.eval_prompt_data).get(data_set, ""), data_set)
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
    from penstock.stages.eval.rescoring import StoredEval, rescore_stage
    from penstock.stages.rewards.grading import check_reward_options
    from penstock.stages.rollout.group import make_grader

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
