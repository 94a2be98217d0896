"""`penstock eval --compare`: compare the stored samples of two evaluated policies.

stages/eval/ computes differences and intervals; this file parses the request and prints the tables.
"""

from __future__ import annotations

from penstock.flows.options.argv import check_run_name, short_repr, split_args
from penstock.flows.runtime.runs import open_named_store, read_existing_record
from penstock.flows.terminal.console import print_table
from penstock.stages.eval.scores import check_same_data, compare_rewards, rewards_by_prompt
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import DataError, OptionError, RunError, check_rules
from penstock.storage.store import Store

COMPARE_USAGE = """penstock eval --compare A B [--store URI ...]

  A and B are RUN/VERSION, or RUN for its newest evaluated version: two versions of one run, or of two runs in the same
  store. For every data set that both were evaluated on, prints both mean rewards, their difference with its 95 %
  confidence interval (paired over the prompts), and on how many prompts B is better than A, worse, and equal.
  Evaluations that were graded again are data sets named <data set>@<hash>: grade both in the same way before comparing
  them (`penstock regrade`). Fails if data sets of the same name have different rows."""


def compare_main(argv: list[str]) -> int:
    """Run `penstock eval --compare`. Return 0."""
    positional, _, rest = split_args(argv, {"--compare": False})
    if len(positional) != 2:
        found = f"; found {short_repr(' '.join(positional))}" if positional else ""
        raise OptionError(
            f"penstock eval --compare needs two policies: RUN/VERSION, or RUN for its newest evaluated version{found}"
        )
    store = open_named_store(rest, "eval --compare")
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
    read_existing_record(store, keys)  # raises RunError if there is none
    versions = [int(name) for name in store.list(f"{keys.prefix}/evals") if name.isdecimal()]
    existing = ", ".join(map(str, versions))
    rules = (
        (not versions, f"run {run!r} has no evaluations: evaluate it with --eval-prompt-data"),
        (
            slash and version not in map(str, versions),
            f"run {run!r} has no evaluation of version {short_repr(version)}: choose one of {existing}",
        ),
    )
    check_rules(rules, RunError)
    chosen = int(version) if slash else max(versions)
    names = store.committed_names(f"{keys.prefix}/evals/{chosen:06d}")
    evaluations = {name: commit for name in names if (commit := store.committed(keys.eval_prefix(chosen, name)))}
    if not evaluations:
        raise RunError(
            f"no evaluation of version {chosen} of run {run!r} has finished: finish it with `penstock resume {run}`"
        )
    return f"{run}/{chosen}", evaluations
