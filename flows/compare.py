"""`penstock eval --compare RUN/20 RUN/40`: two evaluated policies side by side, from their stored samples. Changes nothing.

How the difference and its interval come about is in stages/eval/compare.py; here are the words and the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flows.flags import parse_store
from flows.runs import open_store
from flows.words import run_name, shown, taken
from storage.errors import DataError, OptionError, RunError
from storage.refs import Commit, RunKeys, commit_key
from storage.store import Store

if TYPE_CHECKING:
    from stages.eval.compare import Comparison

USAGE = """penstock eval --compare A B [--store URI ...]

  A and B are RUN/VERSION, or RUN for its newest evaluated version: two versions of one run, or of two runs in the same store. For every
  data set that both were evaluated on: both mean rewards, their difference with an interval that holds it with a probability of 95 %
  (over the prompts, paired), and on how many prompts B is better than A, worse, and equal. Evaluations that were scored again appear as
  data sets of their own, <data set>@<hash>: score both alike before you compare them. Refuses data sets of the same name with other rows."""


def main(words: list[str]) -> int:
    """The command. Returns 0.

    Raises:
        InputError: no such run or version, no data set in common, or one that differs.
    """
    alone, _, rest = taken(words, {"--compare": False})
    if len(alone) != 2:
        hint = f"; found {shown(' '.join(alone))}" if alone else ""
        raise OptionError(
            f"penstock eval --compare needs two policies: RUN/VERSION, or RUN for its newest evaluated version{hint}"
        )
    store = open_store(parse_store(rest, "eval --compare"), probe=False)
    (title_a, a), (title_b, b) = (evaluated(store, word) for word in alone)
    common = sorted(a.keys() & b.keys())
    if not common:
        raise DataError(
            f"{title_a} was evaluated on {', '.join(sorted(a))} and {title_b} on {', '.join(sorted(b))}, which have nothing in common: "
            "evaluate both on the same data set"
        )
    found = {name: _compared(store, name, a[name], b[name]) for name in common}
    print(f"A = {title_a}, B = {title_b}, in {store.uri}")
    _print(found)
    for title, only in ((title_a, a.keys() - b.keys()), (title_b, b.keys() - a.keys())):
        if only:
            print(f"only {title} was evaluated on {', '.join(sorted(only))}")
    return 0


def evaluated(store: Store, word: str) -> tuple[str, dict[str, Commit]]:
    """What `RUN/VERSION` or `RUN` names: its title, and its evaluations by data set. Raises RunError if there are none."""
    run, slash, version = word.partition("/")
    keys = RunKeys(run_name(run, "--compare"))
    if store.read(keys.record) is None:
        raise RunError(
            f"store {store.uri} has no run {run!r} (it has: {', '.join(store.list('runs')) or 'none'}): check the name"
        )
    versions = [int(name) for name in store.list(f"{keys.prefix}/evals") if name.isdecimal()]
    if not versions:
        raise RunError(f"run {run!r} has no evaluations: give it --eval-prompt-data")
    if slash and version not in map(str, versions):
        raise RunError(f"run {run!r} has no evaluation of version {shown(version)} (it has: {', '.join(map(str, versions))})")
    chosen = int(version) if slash else max(versions)
    directory, suffix = f"{keys.prefix}/evals/{chosen:06d}", commit_key("")
    names = [name.removesuffix(suffix) for name in store.list(directory) if name.endswith(suffix)]
    found = {name: commit for name in names if (commit := store.committed(keys.eval(chosen, name)))}
    if not found:
        raise RunError(f"the evaluation of version {chosen} of run {run!r} is not finished: `penstock resume {run}` continues it")
    return f"{run}/{chosen}", found


def _compared(store: Store, name: str, a: Commit, b: Commit) -> Comparison:
    from stages.eval.compare import check_same_data, compare, rewards_by_prompt

    check_same_data(name, a, b)
    return compare(rewards_by_prompt(store, a), rewards_by_prompt(store, b))


def _print(found: dict[str, Comparison]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("data set", "prompts", "A", "B", "B - A", "95 %", "B better", "B worse", "equal"):
        table.add_column(title, justify="left" if title == "data set" else "right")
    for name, one in found.items():
        table.add_row(
            name,
            str(one.num_prompts),
            f"{one.mean_a:.3f}",
            f"{one.mean_b:.3f}",
            f"{one.difference:+.3f}",
            f"{one.low:+.3f} to {one.high:+.3f}",
            str(one.wins),
            str(one.losses),
            str(one.ties),
        )
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width of its own
    console.print(table)
