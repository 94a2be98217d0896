"""`penstock eval --rescore RUN`: grade the stored samples of a run's evaluations again. No engine, no generation, no flow.

What is graded how is in stages/eval/rescore.py; here are the words, the options and the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from flows import flags
from flows.config import PostTrainConfig, flag, validated
from flows.display import with_interval
from flows.runs import code_version, open_store, recorded
from flows.words import run_name, shown, taken, whole_number
from storage.errors import OptionError, RunError
from storage.refs import Commit, RunKeys, commit_key
from storage.store import Store

if TYPE_CHECKING:
    from stages.eval.rescore import Scoring

USAGE = """penstock eval --rescore RUN [--version V] [--dataset NAME] [options of scoring] [--store URI ...]

  Grades the stored responses of a run's evaluations again and commits the outcome beside the old one, under <data set>@<hash>; what is
  committed never changes. Nothing is generated and no engine starts. What is not said is as in the run.

  --version V       of this policy version alone
  --dataset NAME    of this data set alone

  What says how to score, in place of the run's: --eval-rm-type (or --rm-type), --custom-rm-path, --rm-model-path, --rm-url,
  --eval-reward-key (or --reward-key), --rm-evaluated-integers, --pass-threshold, --log-passrate; --reward-timeout,
  --reward-start-timeout, --reward-workers, --allow-row-code.
  They go before what the data sets of --eval-config say. A row that names a reward of its own keeps it."""

_SCORING = {
    "rollout": (
        "rm_type", "custom_rm_path", "rm_model_path", "rm_url", "reward_key", "reward_timeout", "reward_start_timeout", "reward_workers",
        "allow_row_code", "rm_evaluated_integers",
    ),
    "eval": ("eval_rm_type", "eval_reward_key", "pass_threshold", "log_passrate"),
    "run": ("store", "store_options", "store_single_writer"),
}  # fmt: skip


def main(words: list[str]) -> int:
    """The command. Returns 0.

    Raises:
        InputError: no such run, version or data set, an option that is not about scoring, or a wrong reward.
    """
    alone, own, rest = taken(words, {"--rescore": True, "--version": True, "--dataset": True})
    if alone:
        raise OptionError(
            f"{shown(alone[0])} is not an option: penstock eval --rescore RUN [--version V] [--dataset NAME] [options of scoring]"
        )
    given, run = scoring_options(rest), run_name(own["--rescore"], "--rescore")
    _, config = recorded(given.run, run)
    store, keys = open_store(config.run, probe=False), RunKeys(run)
    chosen = evaluations(store, keys, own.get("--version"), own.get("--dataset"))
    rows = [(version, name, *_rescored(store, keys, config, given, version, name)) for version, name in chosen]
    print(f"{run} in {store.uri}, scored again; intervals hold the mean with a probability of 95 %")
    _print(rows)
    return 0


def scoring_options(words: list[str]) -> PostTrainConfig:
    """The options of the command line, each known to be about scoring. Raises OptionError."""
    values = flags.values_of(words)
    for section, entries in values.items():
        if other := next((name for name in entries if name not in _SCORING.get(section, ())), None):
            raise OptionError(f"{flag(other)} has no effect on scoring, and the samples exist already: leave it out")
    given = validated(values)
    if given.eval.eval_rm_type and given.rollout.custom_rm_path:
        raise OptionError(
            f"--eval-rm-type {given.eval.eval_rm_type} and --custom-rm-path {given.rollout.custom_rm_path} are both given: leave one out"
        )
    return given


def evaluations(store: Store, keys: RunKeys, version: str | None, name: str | None) -> list[tuple[int, str]]:
    """The chosen evaluations of a run: (policy version, data set), those that were scored again left out. Raises RunError if there
    are none."""
    if version is not None:
        version = str(whole_number("--version", version))
    suffix = commit_key("")
    found = [
        (int(index), entry.removesuffix(suffix))
        for index in store.list(f"{keys.prefix}/evals")
        for entry in store.list(f"{keys.prefix}/evals/{index}")
        if entry.endswith(suffix) and "@" not in entry
    ]
    chosen = [(v, n) for v, n in found if version in (None, str(v)) and name in (None, n)]
    if not chosen:
        there = ", ".join(f"{v} {n}" for v, n in found) or "none"
        raise RunError(
            f"run {keys.run!r} has no such evaluation (it has: {there}): choose one of these with --version and --dataset"
        )
    return chosen


def scoring_of(config: PostTrainConfig, given: PostTrainConfig, name: str) -> tuple[Scoring, Any]:
    """How a data set is scored: as in the run, but for what is given. Also the rollout config that a grader is made of."""
    from stages.eval.rescore import Scoring

    evals, said = config.eval, given.rollout
    rollout = config.rollout.model_copy(update=evals.overrides(dict(evals.eval_prompt_data).get(name, ""), name))
    update: dict[str, Any] = {key: getattr(said, key) for key in said.model_fields_set}
    if rm_type := given.eval.eval_rm_type or said.rm_type:
        update |= {"rm_type": rm_type, "custom_rm_path": None}
    elif said.custom_rm_path:
        update["rm_type"] = None
    if given.eval.eval_reward_key:
        update["reward_key"] = given.eval.eval_reward_key
    rollout = rollout.model_copy(update=update)
    threshold = given.eval.pass_threshold
    scoring = Scoring(
        rm_type=rollout.rm_type,
        custom_rm_path=rollout.custom_rm_path,
        reward_key=rollout.reward_key,
        rm_model_path=rollout.rm_model_path,
        rm_url=rollout.rm_url,
        evaluated_integers=rollout.rm_evaluated_integers,
        pass_threshold=evals.settings(name).get("pass_threshold") if threshold is None else threshold,
    )
    return scoring, rollout


def _rescored(
    store: Store, keys: RunKeys, config: PostTrainConfig, given: PostTrainConfig, version: int, name: str
) -> tuple[Commit, Commit]:
    """The evaluation as it was, and as it is scored now."""
    from stages.eval.rescore import rescore_stage
    from stages.rewards.grading import check_reward_of
    from stages.rollout.rollout import grader_of

    scoring, rollout = scoring_of(config, given, name)
    check_reward_of(rollout)
    with grader_of(rollout) as grader:
        new = rescore_stage(
            store,
            keys,
            version,
            name,
            scoring,
            grader,
            max_response_len=rollout.rollout_max_response_len,
            require_pass_rate=given.eval.log_passrate,
            code_version=code_version(),
        )
    old = store.committed(keys.eval(version, name))
    assert old is not None, "it was just read"
    return old, new


def _print(rows: list[tuple[int, str, Commit, Commit]]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("version", "data set", "was", "is", "pass@1", "failed", "committed as"):
        table.add_column(title)
    for version, name, old, new in rows:
        task = _task(new)
        passing = with_interval(new.summary, f"eval/{task}-pass@1") if f"eval/{task}-pass@1" in new.summary else "-"
        was = with_interval(old.summary, f"eval/{name}")
        failed = f"{new.summary[f'eval/{task}-failed_ratio']:.3f}"
        table.add_row(str(version), name, was, with_interval(new.summary, f"eval/{task}"), passing, failed, task)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width of its own
    console.print(table)


def _task(commit: Commit) -> str:
    from storage.tracking.lineage import eval_rewards

    return next(iter(eval_rewards(commit)))
