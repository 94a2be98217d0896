"""`penstock samples RUN`: print samples, or compare the responses to one prompt over rounds or evaluated policy
versions. Writes nothing to the store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain

from rich.markup import escape
from rich.table import Table

from penstock.flows.options.argv import parse_integer, parse_run_argument, short_repr, split_args
from penstock.flows.options.flags import parse_store_options
from penstock.flows.runtime.runs import keys_of_existing_run, open_store
from penstock.flows.terminal.console import TerminalConsole, wide_console
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError
from penstock.storage.preemption import time_limit
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

USAGE = """penstock samples RUN [--round N] [--worst | --best] [--store URI ...]
penstock samples RUN --prompt P [--rounds 0,20,60]
penstock samples RUN --eval DATA_SET [--versions 0,20,60] [--prompt P]

  Prints samples of a round (the last one if not given), or the responses to one prompt side by side, with one column
  for each round. With --eval the samples are those of evaluations, and the columns policy versions.

  --prompt    row of the prompt in its file (--prompt 12; --prompt 1:12 in the second file), or the id of a sample or
              group. Without --rounds, all rounds in which the prompt was used
  --worst     lowest rewards first;  --best  highest rewards first
  --status    only samples with this status: completed, truncated, aborted, failed
  --grep      only samples whose prompt or response matches a regular expression
  --limit     number of samples (10), or of samples of each round with --prompt
  --json      one JSON object per line, with tokens and log-probs"""

_OWN = {
    **dict.fromkeys(("--round", "--rounds", "--prompt", "--eval", "--versions", "--status", "--grep", "--limit"), True),
    **dict.fromkeys(("--worst", "--best", "--json"), False),
}


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    run: str
    data_set: str | None  # None: samples of training rounds
    numbers: tuple[int, ...] | None  # rounds, or policy versions of evaluations; None: not given
    prompt: str | None
    choose: Callable[[list[Sample]], list[Sample]]  # applies --status, --grep, --worst, --best and --limit
    as_json: bool

    @property
    def number_name(self) -> str:
        return "round" if self.data_set is None else "version"


def main(argv: list[str]) -> int:
    """Run `penstock samples`. Return 0."""
    positional, own, rest = split_args(argv, _OWN)
    request = parse_request(parse_run_argument("samples", positional), own)
    store = open_store(parse_store_options(rest, "samples"), probe=False)
    keys = keys_of_existing_run(store, request.run)
    columns = select_samples(store, keys, request)
    if request.as_json:
        for sample in (sample for samples in columns.values() for sample in samples):
            values = {name: value for name, value in asdict(sample).items() if name != "routed_experts"}
            print(json.dumps(values, ensure_ascii=False))
    elif request.prompt is None:
        for number, samples in columns.items():
            print_samples(f"{request.number_name} {number} of {request.run}", samples)
    else:
        print_side_by_side(request.number_name, columns)
    return 0


def parse_request(run: str, own: dict[str, str]) -> Request:
    """Parse the command's own options (flag -> value). Raises OptionError."""
    for a, b in (("--round", "--rounds"), ("--worst", "--best"), ("--eval", "--round"), ("--eval", "--rounds")):
        if a in own and b in own:
            raise OptionError(f"{a} and {b} cannot be combined: give one of them")
    if "--versions" in own and "--eval" not in own:
        raise OptionError("--versions needs --eval DATA_SET; for samples of training give --rounds")
    name = next((name for name in ("--round", "--rounds", "--versions") if name in own), "")
    status = own.get("--status")
    if status is not None and status not in list(Status):
        raise OptionError(f"--status takes one of {', '.join(Status)}; found {short_repr(status)}")
    try:
        pattern = re.compile(own.get("--grep", ""))
    except (re.error, RecursionError, OverflowError) as error:
        raise OptionError(f"--grep is not a regular expression ({error}): correct it") from error
    sign = 1 if "--worst" in own else -1 if "--best" in own else 0
    limit = parse_integer("--limit", own.get("--limit", "10"))
    numbers = tuple(parse_integer(name, text.strip()) for text in own[name].split(",")) if name else None

    def choose(samples: list[Sample]) -> list[Sample]:
        with_status = [sample for sample in samples if status in (None, sample.status)]
        kept = [sample for sample in with_status if pattern.search(f"{sample.prompt}\n{sample.response}")]
        return sorted(kept, key=lambda sample: sign * (sample.reward or 0.0))[:limit]

    return Request(run, own.get("--eval"), numbers, own.get("--prompt"), choose, "--json" in own)


# ---- selecting -------------------------------------------------------------------------------------------------------


def select_samples(store: Store, keys: RunKeys, request: Request) -> dict[int, list[Sample]]:
    """Return the requested samples: round, or policy version of an evaluation -> samples. Rounds without a requested
    sample are left out. Raises RunError if there are no requested samples at all."""
    numbers = request.numbers
    if numbers is None:
        committed = _committed_numbers(store, keys, request.data_set)
        numbers = tuple(committed if request.prompt is not None else committed[-1:])
    rounds = {number: _read(store, keys, request.data_set, number) for number in numbers}
    if request.prompt is not None:
        prompt = find_prompt(store, keys, request, rounds)
        rounds = {n: [sample for sample in samples if prompt_of(sample) == prompt] for n, samples in rounds.items()}
    try:
        with time_limit("the search"):
            selected = {number: request.choose(samples) for number, samples in rounds.items()}
    except TimeoutError as error:
        raise OptionError(f"--grep: {error}; give a pattern without nested repetitions") from None
    if not any(selected.values()):
        where = ", ".join(map(str, request.numbers or ())) or f"0 to {max(numbers, default=-1)}"
        place = f"{request.number_name}s {where}"
        raise RunError(f"run {keys.run!r} has no such sample in {place}: change --prompt, --status or --grep")
    return {number: samples for number, samples in selected.items() if samples}


def prompt_of(sample: Sample) -> tuple[int, int] | str:
    """Return what identifies a sample's prompt over rounds and epochs: (number of its file, row), or its text if it
    does not come from a file."""
    source = sample.metadata.get("source")
    return (source["file"], source["row"]) if isinstance(source, dict) and "row" in source else sample.prompt


def find_prompt(
    store: Store, keys: RunKeys, request: Request, rounds: dict[int, list[Sample]]
) -> tuple[int, int] | str:
    """Return the prompt that --prompt names, in the form of `prompt_of`. --prompt is a row, or the id of a sample or
    group. The id is searched for in `rounds` first, then in the other rounds of the run."""
    wanted = request.prompt or ""
    if row := re.fullmatch(r"(?:(\d+):)?(\d{1,8})", wanted):
        return int(row[1] or 0), int(row[2])
    others = (n for n in _committed_numbers(store, keys, request.data_set) if n not in rounds)
    batches = chain(rounds.values(), (_read(store, keys, request.data_set, number) for number in others))
    for sample in chain.from_iterable(batches):
        if wanted in (sample.sample_id, sample.group_id):
            return prompt_of(sample)
    raise RunError(
        f"run {keys.run!r} has no sample with the id {short_repr(wanted)}: give the id of a sample or group, or the "
        "row of a prompt (12, or 1:12 in the second file)"
    )


def _committed_numbers(store: Store, keys: RunKeys, data_set: str | None) -> list[int]:
    if data_set is None:
        return store.committed_indices(f"{keys.prefix}/rollouts")
    versions = [int(name) for name in store.list(f"{keys.prefix}/evals") if name.isdecimal()]
    return [version for version in versions if store.committed(keys.eval_prefix(version, data_set))]


def _read(store: Store, keys: RunKeys, data_set: str | None, number: int) -> list[Sample]:
    prefix = keys.rollout_prefix(number) if data_set is None else keys.eval_prefix(number, data_set)
    commit = store.committed(prefix)
    if commit is None:
        what = f"round {number}" if data_set is None else f"evaluation of version {number} on {data_set!r}"
        available = ", ".join(map(str, _committed_numbers(store, keys, data_set))) or "none"
        raise RunError(f"run {keys.run!r} has no finished {what}: choose one of {available}")
    return read_samples(store, commit)


# ---- printing --------------------------------------------------------------------------------------------------------


def print_samples(title: str, samples: Iterable[Sample]) -> None:
    """Print samples one below the other."""
    console = TerminalConsole(highlight=False)
    for sample in samples:
        console.rule(f"{title}, sample {escape(sample.sample_id)}", align="left")
        console.print(f"[bold]{describe_sample(sample)}[/bold]")
        console.print(sample.prompt, markup=False, style="dim")
        console.print(sample.response, markup=False)
        if sample.label:
            console.print(f"label: {sample.label}", markup=False, style="dim")


def print_side_by_side(number_name: str, columns: dict[int, list[Sample]]) -> None:
    """Print the responses to one prompt, with one column for each round or version."""
    console = wide_console()
    prompt = next(iter(columns.values()))[0]
    console.print(prompt.prompt, markup=False, style="dim")
    if prompt.label:
        console.print(f"label: {prompt.label}", markup=False, style="dim")
    table = Table(*[f"{number_name} {number}" for number in columns], show_lines=True)
    for row in range(max(map(len, columns.values()))):
        table.add_row(*[format_cell(samples[row]) if row < len(samples) else "" for samples in columns.values()])
    console.print(table)


def describe_sample(sample: Sample) -> str:
    """Return reward, status, length and policy versions of a sample in one line."""
    first, last = sample.policy_versions
    parts = [] if sample.reward is None else [f"reward {sample.reward:.3f}"]
    others = [(name, value) for name, value in sample.rewards.items() if (name, value) != ("reward", sample.reward)]
    parts += [f"{name} {value:.3f}" for name, value in others]
    parts += [sample.status.value, f"{sum(sample.loss_mask)} trained of {len(sample.token_ids)} tokens"]
    if first >= 0:
        parts.append(f"policy version {first}" + (f" to {last}" if last != first else ""))
    if error := sample.metadata.get("error"):
        parts.append(escape(str(error)))
    return ", ".join(parts)


def format_cell(sample: Sample) -> str:
    reward = "" if sample.reward is None else f"{sample.reward:.3f}, "
    return f"[bold]{reward}{sample.status.value}[/bold]\n{escape(sample.response)}"
