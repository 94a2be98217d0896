"""`penstock samples RUN`: print samples, or compare the responses to one prompt over rounds or evaluated policy
versions. With --explain, or for the file of a round, print the arithmetic of a trained round, which
stages/train/recompute.py computes with the trainer's functions. Writes nothing to the store."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from penstock.flows.options.argv import flag_of_field, parse_integer, parse_run_argument, short_repr, split_args
from penstock.flows.runtime.runs import config_of_round, keys_of_existing_run, open_named_store, read_existing_record
from penstock.flows.terminal.console import TerminalConsole, print_table, wide_console
from penstock.storage.blobs import blob_key
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError, RunError, StoreError
from penstock.storage.history.lineage_graph import find_samples
from penstock.storage.preemption import time_limit
from penstock.storage.samples.sample import Sample, Status, from_table
from penstock.storage.samples.shards import read_samples, read_table, read_trained_tokens
from penstock.storage.store import Store

if TYPE_CHECKING:  # recompute.py imports torch, which most requests do not need
    from torch import Tensor

    from penstock.stages.train.recompute import Recomputed, StoredRound

USAGE = """penstock samples RUN [--round N] [--worst | --best] [--store URI ...]
penstock samples RUN --prompt P [--rounds 0,20,60]
penstock samples RUN --eval DATA_SET [--versions 0,20,60] [--prompt P]
penstock samples RUN --explain ID
penstock samples FILE.parquet [--explain ID]

  Prints samples of a round (the last one if not given), or the responses to one prompt side by side, with one column
  for each round. With --eval the samples are those of evaluations, and the columns policy versions.

  --prompt    row of the prompt in its file (--prompt 12; --prompt 1:12 in the second file), or the id of a sample or
              group. Without --rounds, all rounds in which the prompt was used
  --worst     lowest rewards first;  --best  highest rewards first
  --status    only samples with this status: completed, truncated, aborted, failed
  --grep      only samples whose prompt or response matches a regular expression
  --limit     number of samples (10), or of samples of each round with --prompt
  --json      one JSON object per line, with tokens and log-probs
  --explain   print the arithmetic of one trained sample, from the rewards of its group to its share in the loss, and
              the options that decided each step, without the model; what the round has not stored is named. FILE was
              written by `penstock export RUN --round R`. Exit code 1 if a number differs from the trainer's"""

_OWN = {
    **dict.fromkeys(("--round", "--rounds", "--prompt", "--eval", "--versions", "--status", "--grep", "--limit"), True),
    "--explain": True,
    **dict.fromkeys(("--worst", "--best", "--json"), False),
}


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    run: str
    data_set: str | None  # None: samples of training rounds
    numbers: tuple[int, ...] | None  # rounds, or policy versions of evaluations; None: not given
    number_name: str  # what the numbers are: "round" or "version"
    prompt: str | None
    status: str | None
    pattern: re.Pattern[str]
    sign: int  # 1: lowest rewards first, -1: highest rewards first, 0: in their order
    limit: int
    as_json: bool


def main(argv: list[str]) -> int:
    """Run `penstock samples`. Return 0."""
    positional, own, rest = split_args(argv, _OWN)
    if "--explain" in own or any(word.endswith(".parquet") for word in positional):
        return explain(positional, own, rest)
    request = parse_request(parse_run_argument("samples", positional), own)
    store = open_named_store(rest, "samples")
    keys = keys_of_existing_run(store, request.run)
    columns = select_samples(store, keys, request)
    if request.as_json:
        for sample in (sample for samples in columns.values() for sample in samples):
            values = {name: value for name, value in asdict(sample).items() if name != "routed_experts"}
            print(json.dumps(values, ensure_ascii=False))
    elif request.prompt is None:
        for number, samples in columns.items():
            print_samples(f"{request.number_name} {number} of {request.run}", samples, store)
    else:
        print_side_by_side(request.number_name, columns, store)
    return 0


def parse_request(run: str, own: dict[str, str]) -> Request:
    """Parse the command's own options (flag -> value). Raises OptionError."""
    problem, status = "", own.get("--status")
    for a, b in (("--round", "--rounds"), ("--worst", "--best"), ("--eval", "--round"), ("--eval", "--rounds")):
        if a in own and b in own:
            problem = f"{a} and {b} cannot be combined: give one of them"
    if "--versions" in own and "--eval" not in own:
        problem = "--versions needs --eval DATA_SET; for samples of training give --rounds"
    elif status is not None and status not in list(Status):
        problem = f"--status takes one of {', '.join(Status)}; found {short_repr(status)}"
    try:
        pattern = re.compile(own.get("--grep", ""))
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"--grep is not a regular expression ({error}): correct it"
    if problem:
        raise OptionError(problem)
    name = next((name for name in ("--round", "--rounds", "--versions") if name in own), "")
    sign = 1 if "--worst" in own else -1 if "--best" in own else 0
    limit = parse_integer("--limit", own.get("--limit", "10"))
    numbers = tuple(parse_integer(name, text.strip()) for text in own[name].split(",")) if name else None
    number_name = "version" if "--eval" in own else "round"
    prompt, as_json = own.get("--prompt"), "--json" in own
    return Request(run, own.get("--eval"), numbers, number_name, prompt, status, pattern, sign, limit, as_json)


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
    selected = {}
    try:
        with time_limit("the search"):
            for number, samples in rounds.items():
                matching = [s for s in samples if request.pattern.search(f"{s.prompt}\n{s.response}")]
                matching = [s for s in matching if request.status in (None, s.status)]
                if chosen := sorted(matching, key=lambda s: request.sign * (s.reward or 0.0))[: request.limit]:
                    selected[number] = chosen
    except TimeoutError as error:
        raise OptionError(f"--grep: {error}; give a pattern without nested repetitions") from None
    if not selected:
        where = ", ".join(map(str, request.numbers or ())) or f"0 to {max(numbers, default=-1)}"
        place = f"{request.number_name}s {where}"
        raise RunError(f"run {keys.run!r} has no such sample in {place}: change --prompt, --status or --grep")
    return selected


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


def print_samples(title: str, samples: Iterable[Sample], store: Store) -> None:
    """Print samples one below the other."""
    console = TerminalConsole(highlight=False)
    for sample in samples:
        console.rule(f"{title}, sample {escape(sample.sample_id)}", align="left")
        console.print(f"[bold]{describe_sample(sample)}[/bold]")
        console.print(sample.prompt, markup=False, style="dim")
        print_images(console, sample, store)
        console.print(sample.response, markup=False)
        if sample.label:
            console.print(f"label: {sample.label}", markup=False, style="dim")


def print_side_by_side(number_name: str, columns: dict[int, list[Sample]], store: Store) -> None:
    """Print the responses to one prompt, with one column for each round or version."""
    console = wide_console()
    prompt = next(iter(columns.values()))[0]
    console.print(prompt.prompt, markup=False, style="dim")
    print_images(console, prompt, store)
    if prompt.label:
        console.print(f"label: {prompt.label}", markup=False, style="dim")
    table = Table(*[f"{number_name} {number}" for number in columns], show_lines=True)
    for row in zip_longest(*columns.values()):
        cells = []
        for sample in row:
            reward = "" if sample is None or sample.reward is None else f"{sample.reward:.3f}, "
            cells.append(f"[bold]{reward}{sample.status.value}[/bold]\n{escape(sample.response)}" if sample else "")
        table.add_row(*cells)
    console.print(table)


def print_images(console: Console, sample: Sample, store: Store | None) -> None:
    """Print where the file of each image of a sample is: in a local store a path, which terminals open by a click, else
    a URI; without a store its key."""
    for number, digest in enumerate(sample.images, 1):
        path, link, problem = blob_key(digest), None, ""
        try:
            if store and store.size(path) is None:
                problem = " (missing: restore it)"
            elif store and store.is_local:
                link = Path(store.path(path)).as_uri()
            path = f"{store.uri.rstrip('/')}/{path}" if store else path
        except (StoreError, OSError) as error:
            problem = f" ({error})"
        console.print(Text(f"image {number}: ").append(path, Style(link=link)).append(problem), soft_wrap=True)


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


# ---- the arithmetic of a round ---------------------------------------------------------------------------------------

TOLERANCE = 1e-6  # of the difference between a recomputed number and the trainer's, absolute or relative
STEPS = (  # title; name of the value in `texts_of`; options that decide it
    ("reward", "reward", "rm_type custom_rm_path reward_key"),
    ("rewards of its group", "group", ""),
    (
        "mean (baseline), of the others; std",
        "baseline",
        "disable_rewards_normalization disable_grpo_std_normalization baseline_over_trajectories",
    ),
    ("KL penalty", "kl_penalty", "kl_coef kl_loss_type"),
    ("advantage by the estimator", "estimated", "advantage_estimator gamma lambd custom_advantage_function_path"),
    ("after distillation", "distilled", "opd_kl_coef"),
    ("after whitening", "whitened", "normalize_advantages"),
    ("the trainer's advantage", "advantages", ""),
    ("log-prob of the engine", "rollout_logprobs", ""),
    ("log-prob of the trainer", "trainer_logprobs", "use_rollout_logprobs"),
    ("log-prob in the optimizer step", "step_logprobs", "keep_step_logprobs"),
    ("ratio to the old policy", "train/ois", "policy_loss"),
    ("clipped (share of the tokens)", "train/pg_clipfrac", "eps_clip eps_clip_high eps_clip_c"),
    ("importance weight", "importance", "use_tis tis_mode tis_level tis_clip tis_clip_low opsm_delta"),
    ("mask of the loss", "mask", "tis_veto custom_tis_function_path"),
    ("KL to the reference", "train/kl_loss", "use_kl_loss kl_loss_coef kl_loss_type use_unbiased_kl"),
    ("divergence from the teacher", "divergence", "opd_divergence opd_top_k opd_jsd_beta opd_kl_coef"),
    ("entropy", "train/entropy_loss", "entropy_coef"),
    ("loss of a token", "loss", "loss_type custom_loss_function_path"),
    ("denominator", "denominator", "calculate_per_token_loss global_batch_size num_steps_per_rollout"),
    ("weight of a token", "weight", "custom_pg_loss_reducer_function_path"),
    ("share in the loss of its optimizer step", "sum", ""),
)
OF_TOKENS = "rollout_logprobs trainer_logprobs step_logprobs advantages train/ois importance mask loss weight share"


def explain(positional: list[str], own: dict[str, str], rest: list[str]) -> int:
    """Run `penstock samples RUN --explain ID` or `penstock samples FILE [--explain ID]`, whose arguments `split_args`
    has split. Return 0, or 1 if a recomputed number differs from the trainer's."""
    from penstock.stages.train.recompute import read_round_file, recompute

    is_file = len(positional) == 1 and positional[0].endswith(".parquet")
    if others := [*(flag for flag in own if flag not in ("--explain", "--limit")), *(rest if is_file else ())]:
        raise OptionError(f"{others[0]} has no effect on the arithmetic of a round: leave it out")
    sample_id, limit = own.get("--explain", ""), parse_integer("--limit", own.get("--limit", "10"))
    stored: StoredRound | None = None
    store: Store | None = None
    if is_file:
        stored = read_round_file(Path(positional[0]))
    else:
        run = parse_run_argument("samples", positional)
        store = open_named_store(rest, "samples")
        keys = keys_of_existing_run(store, run)
        stage, _, index = find_samples(store, keys, "sample_id", sample_id).rpartition("/")
        if stage == f"{keys.prefix}/rollouts":
            stored = load_round(store, keys, int(index))
    ids = stored.samples["sample_id"].to_pylist() if stored else []
    if stored is None or (sample_id and sample_id not in ids):
        raise RunError(f"{positional[0]} has no sample {short_repr(sample_id)} in its rounds: give the id of one")
    result = recompute(stored)
    if sample_id:
        print_explanation(stored, result, ids.index(sample_id), limit, store)
    else:
        names = {"sample": "id", "group": "group", "advantage": "whitened", "weight": "weight", "share": "sum"}
        rows = [{"id": id} | texts_of(stored, result, index) for index, id in enumerate(ids[:limit])]
        print_table(tuple(names), [[escape(row.get(name, "-")) for name in names.values()] for row in rows])
    return 0 if print_agreement(stored, result) else 1


def load_round(store: Store, keys: RunKeys, rollout_id: int) -> StoredRound:
    """Return what the store has of a trained round. Raises RunError if the round was not trained with rewards."""
    from penstock.stages.train.recompute import StoredRound

    config = config_of_round(read_existing_record(store, keys), rollout_id)
    rollout, step = store.committed(keys.rollout_prefix(rollout_id)), store.committed(keys.step_prefix(rollout_id))
    if rollout is None or step is None or config.train.loss_type == "sft_loss":
        raise RunError(f"run {keys.run!r} has not trained a round {rollout_id} with rewards: choose another round")
    samples, trained = read_table(store, rollout), read_trained_tokens(store, step)
    about = {"run": keys.run, "round": rollout_id, "code_version": step.code_version, "steps": step.state["steps"]}
    about["reward"] = config.rollout.model_dump(include={"rm_type", "custom_rm_path", "reward_key"})
    about["fingerprint"] = step.state["fingerprint"]
    return StoredRound(samples, samples if trained is None else trained, config.train, about)


def texts_of(stored: StoredRound, result: Recomputed, index: int) -> dict[str, str]:
    """Return the values of STEPS for sample `index`: name -> text."""
    from penstock.stages.train.algorithms.advantages import trajectory_rewards  # imports torch, like recompute.py

    experience, trajectories = result.experience, stored.batch.trajectory_index
    mine = experience.sample_index == index
    texts = {name: describe(values[mine]) for name, values in result.values.items()}
    rewards = experience.rewards[experience.group_index == experience.group_index[index]]
    reward, graded = experience.rewards[index], rewards[~rewards.isnan()]
    texts["reward"] = describe(reward)
    if stored.config.baseline_over_trajectories and experience.trajectory_index is not None:
        means, first = trajectory_rewards(experience.rewards, experience.trajectory_index)
        reward, graded = means[index], means[first][experience.group_index[first] == experience.group_index[index]]
    others, spread = (graded.sum() - reward) / (len(graded) - 1), graded.std(correction=min(1, len(graded) - 1))
    texts |= {"group": ", ".join(f"{value:.6g}" for value in rewards.tolist())}
    texts["baseline"] = f"{graded.mean():.6g}, {others:.6g}; {spread:.6g}"
    if mine.any():
        step, of_tokens = int(result.values["step"][mine][0]), trajectories[experience.sample_index]
        in_step, in_trajectory = (result.values["step"] == step).numpy(), of_tokens == trajectories[index]
        texts["denominator"] = (
            f"{in_trajectory.sum()} trained tokens in its trajectory, {in_step.sum()} in step {step}, which has "
            f"{len(set(of_tokens[in_step]))} trajectories"
        )
        if result.step_losses:
            texts["sum"] = f"{float(result.values['share'][mine].sum()):.9g} of {result.step_losses[step]:.9g}"
    return texts


def print_explanation(stored: StoredRound, result: Recomputed, index: int, limit: int, store: Store | None) -> None:
    """Print the arithmetic of sample `index`, and at most `limit` of its trained tokens."""
    config, sample = stored.config, from_table(stored.samples.slice(index, 1))[0]
    print(f"sample {sample.sample_id}, group {sample.group_id}: {describe_sample(sample)}")
    print_images(wide_console(), sample, store)
    texts = texts_of(stored, result, index)
    options = config.model_dump() | {"policy_loss": config.policy_loss_name} | stored.about.get("reward", {})
    options |= (options["opd"] or {}) | (options["opsm"] or {})
    options = {name: str(value).lower() if isinstance(value, bool) else value for name, value in options.items()}
    rows = []
    for title, name, names in STEPS:
        decided = (f"{flag_of_field(each)} {options[each]}" for each in names.split() if options.get(each) is not None)
        rows.append([escape(cell) for cell in (title, texts.get(name, "-"), " ".join(decided))])
    print_table(("step", "this sample", "decided by"), rows)
    mine = result.experience.sample_index == index
    columns = {name: result.values[name][mine] for name in OF_TOKENS.split() if name in result.values}
    positions = (stored.batch.trained_positions[mine.numpy()] - stored.batch.offsets[index])[:limit]
    tokens = [
        [str(position), str(sample.token_ids[position]), *(f"{values[i]:.6g}" for values in columns.values())]
        for i, position in enumerate(positions)
    ]
    print(f"{len(tokens)} of {int(mine.sum())} trained tokens (--limit):")
    print_table(("position", "token", *columns), tokens, numeric=True)


def print_agreement(stored: StoredRound, result: Recomputed) -> bool:
    """Print the recomputed numbers of a round beside the trainer's. Return False if one differs by over TOLERANCE."""
    pairs = [("loss", loss, float(step["train/loss"])) for loss, step in zip(result.step_losses, stored.about["steps"])]
    own, trained = result.values.get("whitened"), result.values.get("advantages")
    if own is not None and trained is not None and len(own) and not stored.config.rollout_data_postprocess_path:
        worst = int((own - trained).abs().argmax())
        pairs.append(("the advantage that differs most", float(own[worst]), float(trained[worst])))
    print(f"round {stored.about['round']} of run {stored.about['run']}, recomputed and the trainer's:")
    agrees = [math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (a != a and b != b) for _, a, b in pairs]
    for (name, a, b), is_equal in zip(pairs, agrees):
        print(f"  {name}: {a:.9g}, {b:.9g}{'' if is_equal else ', DIFFERS'}")
    print(f"  {result.problem or 'all optimizer steps are recomputed'}")
    return all(agrees)


def describe(values: Tensor) -> str:
    """Format one number if all `values` are equal, else their range and mean."""
    if values.numel() == 0:
        return "no trained token"
    low, high = float(values.min()), float(values.max())
    return f"{low:.6g}" if not low < high else f"{low:.6g} to {high:.6g}, mean {float(values.double().mean()):.6g}"
