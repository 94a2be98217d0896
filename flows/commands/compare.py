"""`penstock eval --compare RUN/20 RUN/40`: compare two evaluated policies by their stored samples. Writes nothing.

stages/eval/comparison.py computes the differences and intervals; this file parses the request and prints the table.
"""

from __future__ import annotations

from penstock.flows.options.argv import check_run_name, short_repr, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.runtime.display import print_table
from penstock.flows.runtime.runs import open_store
from penstock.storage.errors import DataError, OptionError, RunError
from penstock.storage.refs import Commit, RunKeys, commit_key
from penstock.storage.store import Store

USAGE = """penstock eval --compare A B [--store URI ...]

  A and B are RUN/VERSION, or RUN for its newest evaluated version: two versions of one run, or of two runs in the same
  store. For every data set that both were evaluated on, prints both mean rewards, their difference with its 95 %
  confidence interval (paired over the prompts), and on how many prompts B is better than A, worse, and equal.
  Evaluations that were scored again are data sets named <data set>@<hash>: score both in the same way before comparing
  them. Fails if data sets of the same name have different rows."""


def main(argv: list[str]) -> int:
    """Run the command. Return 0.

    Raises:
        InputError: a run or version does not exist, or the two policies were not evaluated on the same rows of a data
            set.
    """
    positional, _, rest = split_args(argv, {"--compare": False})
    if len(positional) != 2:
        hint = f"; found {short_repr(' '.join(positional))}" if positional else ""
        raise OptionError(
            f"penstock eval --compare needs two policies: RUN/VERSION, or RUN for its newest evaluated version{hint}"
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
    print_table(titles, [_comparison_row(store, name, a[name], b[name]) for name in common], numeric=True)
    for title, only in ((title_a, a.keys() - b.keys()), (title_b, b.keys() - a.keys())):
        if only:
            print(f"only {title} was evaluated on {', '.join(sorted(only))}")
    return 0


def find_evaluations_of_version(store: Store, run_and_version: str) -> tuple[str, dict[str, Commit]]:
    """Return (`RUN/VERSION`, data set name -> commit of its evaluation) for `RUN/VERSION`, or for `RUN`, which means
    its newest evaluated version.

    Raises:
        RunError: the run or the version has no finished evaluation.
    """
    run, slash, version = run_and_version.partition("/")
    keys = RunKeys(check_run_name(run, "--compare"))
    if store.read(keys.record) is None:
        raise RunError(
            f"store {store.uri} has no run {run!r} (it has: {', '.join(store.list('runs')) or 'none'}): "
            "correct the name"
        )
    versions = [int(name) for name in store.list(f"{keys.prefix}/evals") if name.isdecimal()]
    if not versions:
        raise RunError(f"run {run!r} has no evaluations: evaluate it with --eval-prompt-data")
    if slash and version not in map(str, versions):
        raise RunError(
            f"run {run!r} has no evaluation of version {short_repr(version)}: choose one of "
            f"{', '.join(map(str, versions))}"
        )
    chosen = int(version) if slash else max(versions)
    directory, suffix = f"{keys.prefix}/evals/{chosen:06d}", commit_key("")
    names = [name.removesuffix(suffix) for name in store.list(directory) if name.endswith(suffix)]
    evaluations = {name: commit for name in names if (commit := store.committed(keys.eval_prefix(chosen, name)))}
    if not evaluations:
        raise RunError(
            f"no evaluation of version {chosen} of run {run!r} has finished: finish it with `penstock resume {run}`"
        )
    return f"{run}/{chosen}", evaluations


def _comparison_row(store: Store, data_set: str, eval_a: Commit, eval_b: Commit) -> list[str]:
    """Return the cells of a data set's row in the comparison table."""
    from penstock.stages.eval.comparison import check_same_data, compare_rewards, rewards_by_prompt

    check_same_data(data_set, eval_a, eval_b)
    comparison = compare_rewards(rewards_by_prompt(store, eval_a), rewards_by_prompt(store, eval_b))
    return [
        data_set,
        str(comparison.num_prompts),
        f"{comparison.mean_a:.3f}",
        f"{comparison.mean_b:.3f}",
        f"{comparison.difference:+.3f}",
        f"{comparison.low:+.3f} to {comparison.high:+.3f}",
        str(comparison.wins),
        str(comparison.losses),
        str(comparison.ties),
    ]
