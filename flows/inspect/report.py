"""`penstock report RUN`: one HTML page about a run, with curves, time line, samples and configuration. Changes nothing
in the store.

storage/report/ collects the data and builds the page. This file parses the request, adds what the storage layer cannot
import (defaults of options, the comparison of evaluations, the tokenizer), and writes the file.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from penstock.flows.config import OPTIONS, derive, validate_config
from penstock.flows.options.argv import format_bytes, parse_integer, parse_run_argument, short_repr, split_args
from penstock.flows.runtime.runs import num_planned_rounds, open_named_store, read_existing_record
from penstock.stages.eval.scores import check_same_data, compare_rewards, rewards_by_prompt
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.config import entries_of
from penstock.storage.errors import DataError, InputError, StoreError, check_rules
from penstock.storage.history.run_record import RunRecord, read_schedule_changes
from penstock.storage.report.data import OptionRow, ReportInput, collect_overview
from penstock.storage.report.page import DEFAULT_MAX_SAMPLES, GENERATOR, build_page, collect_samples
from penstock.storage.secrets import mask_secrets
from penstock.storage.store import Store

USAGE = f"""penstock report RUN [--output FILE] [--max-samples N] [--store URI ...]

  Writes one HTML page about a run: curves of all rounds, time line, evaluations, samples with their tokens, lineage,
  costs and configuration. The page needs no other file and no network. Changes nothing in the store.

  --output        the file to write (default: RUN.html); an existing file is replaced only if it is such a report
  --max-samples   show a selection of at most N samples (default: {DEFAULT_MAX_SAMPLES:,}), spread over all rounds

  `penstock report --to --help` explains how to send runs to MLflow, TensorBoard or W&B again."""


def main(argv: list[str]) -> int:
    """Run `penstock report`. Return 0."""
    positional, own, rest = split_args(argv, {"--output": True, "--max-samples": True})
    run = parse_run_argument("report", positional)
    max_samples = parse_integer("--max-samples", own.get("--max-samples", str(DEFAULT_MAX_SAMPLES)))
    output = Path(own.get("--output", f"{run}.html"))
    given = f"--output {short_repr(str(output))}"
    is_report = output.is_file() and GENERATOR.encode() in output.read_bytes()[:1000]
    check_rules(
        (
            (max_samples < 1, f"--max-samples {max_samples} is not positive: give at least 1"),
            (output.is_dir(), f"{given} is a directory: give the name of a file in it"),
            (not output.absolute().parent.is_dir(), f"{given}: its directory does not exist: create it first"),
            (
                output.exists() and not is_report,
                f"{given} exists and is not a report of this command: move it, or give another file",
            ),
        )
    )
    store = open_named_store(rest, "report")
    start = time.monotonic()
    page = make_report(store, run, max_samples).encode("utf-8")
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")  # renamed when complete
    try:
        temporary.write_bytes(page)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{output}: {format_bytes(len(page))}, written in {time.monotonic() - start:.1f} s")
    return 0


def make_report(store: Store, run: str, max_samples: int = DEFAULT_MAX_SAMPLES) -> str:
    """Return the HTML of a run's report. Raises RunError if the run does not exist."""
    keys = RunKeys(run)
    record = read_existing_record(store, keys)
    known = ReportInput(
        record=record,
        num_planned_rounds=num_planned_rounds(store, keys, record),
        options=option_rows(record.config),
        changes=read_schedule_changes(store, keys),
        compare=compare_evaluations,
    )
    overview, commits = collect_overview(store, keys, known)
    samples = collect_samples(store, commits, max_samples)
    return build_page(overview, samples, read_token_texts(store, record, commits, sorted(samples.token_ids)))


# ---- values from layers above storage --------------------------------------------------------------------------------


def option_rows(config: dict[str, Any]) -> list[OptionRow]:
    """Return all options of a recorded config with their values and defaults, in the order of `OPTIONS`. Defaults
    that are derived from other options are those of a run for which no options are given."""
    minimal = derive(validate_config({})).model_dump(mode="json")
    rows = []
    for section, name, field in OPTIONS:
        own = field.get_default(call_default_factory=True)
        default = None if own is PydanticUndefined else entries_of(minimal, section).get(name, own)
        value = entries_of(config, section).get(name, default)
        rows.append(OptionRow(section, name, mask_secrets(value, name), default))
    return rows


def compare_evaluations(store: Store, first: Commit, last: Commit) -> dict[str, Any]:
    """Return the paired comparison of two evaluations on one data set, or {"problem": why they cannot be compared}."""
    try:
        check_same_data("", first, last)
        comparison = compare_rewards(rewards_by_prompt(store, first), rewards_by_prompt(store, last))
    except DataError as error:
        return {"problem": str(error)}
    return asdict(comparison) | {"difference": comparison.difference}


def read_token_texts(
    store: Store, record: RunRecord, commits: Sequence[Commit], token_ids: Sequence[int]
) -> dict[int, str]:
    """Return the texts of tokens: id -> text. Shards contain only ids, so the texts come from the tokenizer of the
    run's newest export or of its model. Return {} without a tokenizer file."""
    exports = [commit for commit in commits if commit.kind == "export"]
    for commit in exports[-1:]:
        if f"{commit.attempt}/tokenizer.json" in [file.path for file in commit.files]:
            with suppress(StoreError):  # if the export's files are gone, the tokenizer of the model is used, its equal
                with store.reading(commit, only=["tokenizer.json"]) as directory:
                    return decode_tokens(directory / "tokenizer.json", token_ids)
    model = record.config.get("convert", {}).get("hf_checkpoint")
    path = Path(model, "tokenizer.json") if isinstance(model, str) else None
    return decode_tokens(path, token_ids) if path is not None and path.is_file() else {}


def decode_tokens(path: Path, token_ids: Sequence[int]) -> dict[int, str]:
    """Return id -> text of the tokens, from the tokenizer file `path`. A token that is only a part of a character's
    bytes has no text and is left out."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot read
        raise InputError(f"the tokenizer {path} does not load ({str(error)[:150]}): restore the file") from error
    texts = {}
    for token in token_ids:
        piece = tokenizer.id_to_token(token)
        text = tokenizer.decode([token], skip_special_tokens=False)
        if piece is not None and piece.startswith("\u2581"):  # SentencePiece: decoding one token loses its space
            text = piece.replace("\u2581", " ")
        if piece is not None and text and "\ufffd" not in text:
            texts[token] = text
    return texts
