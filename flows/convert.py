"""Conversion alone: Hugging Face -> torch_dist, ready for any run, or torch_dist -> Hugging Face. It belongs to no run, so it needs no name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from flows.config import PostTrainConfig, validated
from flows.conversion import Report, converted, exported
from flows.prefect_api import wait_for_api
from flows.preflight import preflight
from flows.runs import open_store, recorded
from flows.words import size
from stages.convert.adopt import megatron_directory
from stages.convert.config import ConvertConfig
from stages.convert.targets import ASSETS_DIRECTORY, above, committed_in
from storage.errors import OptionError
from storage.keys import is_run_name
from storage.refs import CheckpointRef, Commit, RunKeys, commit_key
from storage.store import Store

USAGE = """penstock convert --hf-checkpoint A [--save B] [--verify] [--mtp keep] [--convert-ranks N]
penstock convert --load CHECKPOINT --save B [--origin-hf-dir A] [--export-dtype fp8] [--vocab-size N] [--convert-ranks N]
penstock convert --load CHECKPOINT --save B [--origin-hf-dir A] --megatron-names te

  Makes a Hugging Face checkpoint into torch_dist, which Megatron loads at any parallel sizes, or a torch_dist checkpoint into a Hugging Face
  directory. The model's shape is read from config.json. What a killed conversion has finished is not done again; nothing is visible
  before it is whole.

  --hf-checkpoint   Hugging Face directory; fp8 weights in blocks become bf16 on the way in
  --save            directory or URI for the result (Megatron's `release` in it). Without it: models/ in the store, where runs look (--store)
  --verify          also read the result back bit for bit, and report what was compared
  --check-logits    false: do not compare logits with transformers' (a few tokens, the whole of a small model, a few layers of a large one)
  --megatron-names  local (default) or te: names of Megatron's own layers, or TransformerEngine's; with --load, write torch_dist and not
                    Hugging Face files
  --mtp keep        carry the tensors of multi-token prediction layers through to every export; they are left out otherwise
  --convert-ranks   processes that share the work (default 1)

  --load            a torch_dist directory (converted, or saved by a trainer), or RUN or RUN/VERSION: a checkpoint of a run in the store
  --save            directory or URI for the Hugging Face files
  --origin-hf-dir   whose config.json and tokenizer they get; a converted model and a run know it themselves
  --export-dtype    float32, bfloat16, float16, or fp8 (e4m3 in blocks of 128 x 128, for fp8 rollouts); by default as stored
  --vocab-size      rows of embedding and head to keep (with --hf-checkpoint: checked against config.json, like all of Megatron's options)

  --store           where models/ and the runs lie (default penstock-store); `penstock train --help` lists what else may be said

  Other spellings: --input-dir is --load, --output-dir is --save."""

SPELLINGS = {"--save": "--convert-save", "--load": "--convert-load", "--verify": "--convert-verify"}
SPELLINGS |= {"--output-dir": "--convert-save", "--input-dir": "--convert-load"}


def flags_of(words: Sequence[str]) -> list[str]:
    """The words of this command as options of the config: here `--save` is the result's place, and not a trainer's."""
    given = [word.partition("=") for word in words]
    backwards = any(SPELLINGS.get(name, name) == "--convert-load" for name, _, _ in given)
    spellings = {**SPELLINGS, "--vocab-size": "--export-vocab-size"} if backwards else SPELLINGS
    return [spellings.get(name, name) + equals + value for name, equals, value in given]


def completed(config: PostTrainConfig) -> PostTrainConfig:
    """A config in which `hf_checkpoint` says whose config.json counts, also where `convert_load` knows it itself.

    Raises:
        OptionError: no option names it, or options contradict each other.
    """
    options = config.convert
    if options.convert_save and "://" not in options.convert_save:
        options.convert_save = str(Path(options.convert_save).resolve())  # processes elsewhere have other working directories
    if options.megatron_names:
        _check_megatron_names(options)
    if options.convert_load is None:
        if unfit := [name for name in ("origin_hf_dir", "export_vocab_size") if getattr(options, name) is not None]:
            raise OptionError(f"--{unfit[0].replace('_', '-')} goes with --load CHECKPOINT: add it, or leave this out")
        return config
    if options.convert_verify:
        raise OptionError("--verify goes with --hf-checkpoint: a checkpoint that was trained has no original to be compared with")
    if options.convert_save is None:
        raise OptionError("--load needs --save: say where the Hugging Face directory is to be")
    origin = options.origin_hf_dir or options.hf_checkpoint or _own_origin(config)
    values = config.model_dump()
    return validated({**values, "convert": {**values["convert"], "hf_checkpoint": origin}})


def _check_megatron_names(options: ConvertConfig) -> None:
    if options.convert_save is None:
        raise OptionError("--megatron-names is for --save, and the store has names of its own: add --save, or leave it out")
    hf_only = {"--export-dtype": options.export_dtype, "--vocab-size": options.export_vocab_size}
    if options.convert_load and (unfit := [flag for flag, value in hf_only.items() if value is not None]):
        raise OptionError(
            f"{unfit[0]} is for Hugging Face files, and --megatron-names asks for torch_dist: leave one of them out"
        )


@flow(name="convert", validate_parameters=True)
def convert(config: PostTrainConfig) -> None:
    """Convert one way or the other.

    Args:
        config: only `convert` and where the store is are used.
    """
    config = completed(config)
    preflight("convert", config)
    start = time.monotonic()
    with _bar() as report:
        if config.convert.convert_load is not None:
            ref = export_checkpoint(config, report)
        else:
            ref = convert_checkpoint(config, report)
    commit = _commit(config, ref)
    wait_for_api(print)
    for line in told(config, ref, commit, time.monotonic() - start):
        print(line)
    if config.convert.convert_verify:
        for title, text in verify_checkpoint(config, ref, commit):
            print(f"  {title:<8} {text}")


def told(config: PostTrainConfig, ref: CheckpointRef, commit: Commit, seconds: float) -> Iterator[str]:
    """What came out, in sentences."""
    num_bytes = int(commit.summary.get("convert/num_bytes", commit.summary.get("export/num_bytes", 0)))
    taken = commit.seconds.get("write")
    was_made = commit.created_at > time.time() - seconds
    speed = f", {num_bytes / taken / 1e9:.2f} GB/s" if was_made and taken else ""
    verb = "is" if was_made else "was already"
    source = config.convert.convert_load or config.convert.hf_checkpoint
    kind = "Hugging Face files" if ref.format == "hf" else "torch_dist"
    proof = " and verified" if "convert/num_tensors" in commit.summary else ""
    yield f"{source} {verb} converted{proof} ({kind}, {size(num_bytes)}{speed}): {ref.uri}"
    if was_made and "logits" in commit.state:
        yield f"logits: {commit.state['logits']}"
    skipped = commit.state.get("skipped", {})
    if skipped.get("count"):
        yield (
            f"{skipped['count']} tensors ({size(skipped['bytes'])}) that Megatron does not train, such as those of multi-token prediction "
            "layers, were left out: --mtp keep carries them along"
        )


# ---- the work -----------------------------------------------------------------------------------------------------------------


def _worth_retrying(task: Any, run: TaskRun, state: State[Any]) -> bool:
    """A wrong request stays wrong."""
    return not isinstance(state.data, ValueError)


def _task(name: str) -> Any:
    return task(
        name=name,
        retries=2,
        retry_delay_seconds=2,
        retry_condition_fn=_worth_retrying,
        persist_result=False,
        cache_policy=NO_CACHE,
    )


@_task("convert")
def convert_checkpoint(config: PostTrainConfig, report: Report | None) -> CheckpointRef:
    """Hugging Face -> torch_dist; a model that was converted before is only looked up."""
    with _ray(config) as cluster:
        return converted(cluster, _store(config), config.convert, verify=config.convert.convert_verify, report=report)


@_task("export")
def export_checkpoint(config: PostTrainConfig, report: Report | None) -> CheckpointRef:
    """torch_dist -> Hugging Face."""
    assert config.convert.convert_load is not None
    with _ray(config) as cluster:
        return exported(cluster, _store(config), found_checkpoint(config), config.convert, report=report)


@_task("verify")
def verify_checkpoint(config: PostTrainConfig, ref: CheckpointRef, commit: Commit) -> list[tuple[str, str]]:
    """What is known of a converted model, as title and text."""
    from stages.convert.verify import verify_standing

    with _ray(config) as cluster:
        place = above(ref.uri, config.run.store_options)[0] if config.convert.convert_save else _store(config)
        return cluster.run(
            verify_standing, place, commit, config.convert.hf_checkpoint, timeout=config.convert.convert_timeout
        ).rows()


@contextmanager
def _ray(config: PostTrainConfig) -> Iterator[Any]:
    from engines.cluster import Cluster

    cluster = Cluster.start(config.run.ray_address)
    try:
        yield cluster
    finally:
        cluster.stop()


def _store(config: PostTrainConfig) -> Store:
    return open_store(config.run)


@contextmanager
def _bar() -> Iterator[Report | None]:
    """A bar with GB/s on a terminal; nothing elsewhere."""
    console = Console(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        shown = bar.add_task("converting", total=None)
        yield lambda done, total: bar.update(shown, completed=done, total=total)


# ---- which checkpoint ---------------------------------------------------------------------------------------------------------


def found_checkpoint(config: PostTrainConfig) -> Commit | str:
    """What `convert_load` names: a directory, or the commit of a run's checkpoint.

    Raises:
        OptionError: neither is there.
    """
    named = config.convert.convert_load or ""
    path = Path(named)
    if path.is_dir():
        return str((megatron_directory(path) or path).resolve())
    store, (run, _, version) = open_store(config.run, probe=False), named.partition("/")
    keys = RunKeys(run)
    versions = store.committed_indices(f"{keys.prefix}/checkpoints") if is_run_name(run) else []
    wanted = int(version) if version.isdigit() else versions[-1] if versions and not version else -1
    commit = store.committed(keys.checkpoint(wanted)) if wanted in versions else None
    if commit is None:
        there = ", ".join(f"{run}/{number}" for number in versions) or "none of a run of this name"
        raise OptionError(
            f"--load {named}: no such directory, and store {store.uri} has no such checkpoint (it has {there}): give a torch_dist "
            "directory, RUN or RUN/VERSION"
        )
    return commit


def _own_origin(config: PostTrainConfig) -> str:
    """The Hugging Face directory that a checkpoint itself names."""
    checkpoint = found_checkpoint(config)
    if isinstance(checkpoint, Commit):
        _, recorded_config = recorded(config.run, checkpoint.run or "")
        return recorded_config.convert.hf_checkpoint
    own = Path(checkpoint) / ASSETS_DIRECTORY
    if not (own / "config.json").is_file():
        raise OptionError(
            f"{checkpoint} does not say whose model it is: give --origin-hf-dir, a Hugging Face directory of this model"
        )
    return str(own)


def _commit(config: PostTrainConfig, ref: CheckpointRef) -> Commit:
    """The record of what was made."""
    if config.convert.convert_save is None:
        commit = _store(config).committed(ref.key.removesuffix(commit_key("")))
    else:
        commit = committed_in(*above(ref.uri, config.run.store_options))
    assert commit is not None, f"{ref} is not committed"
    return commit
