"""Convert a checkpoint outside a run: Hugging Face -> torch_dist, ready for any run, or torch_dist -> Hugging Face."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from penstock.engines.cluster import Cluster
from penstock.flows.config import Plan, PostTrainConfig, validate_config
from penstock.flows.options.argv import format_bytes
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.conversion import (
    ProgressCallback,
    copy_own_export,
    existing_conversion,
    existing_export,
    run_conversion,
    run_export,
)
from penstock.flows.runtime.prefect_api import wait_for_api
from penstock.flows.runtime.preflight import plan_of, preflight
from penstock.flows.runtime.runner import run_flow
from penstock.flows.runtime.runs import open_store, read_flow_and_config
from penstock.flows.terminal.console import TerminalConsole
from penstock.flows.terminal.panel import end_wait, show_wait
from penstock.stages.convert.targets import ASSETS_DIRECTORY, megatron_directory, open_parent_store, read_record
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key, is_run_name
from penstock.storage.errors import OptionError, check_rules

USAGE = """penstock convert --hf-checkpoint A [--save B] [--verify] [--mtp keep] [--convert-ranks N]
penstock convert --load CHECKPOINT --save B [--origin-hf-dir A] [--export-dtype fp8] [--vocab-size N]
penstock convert --load CHECKPOINT --save B [--origin-hf-dir A] --megatron-names te

  Converts a Hugging Face checkpoint to torch_dist, which Megatron loads at any parallel sizes, or a torch_dist
  checkpoint to a Hugging Face directory. The model's shape is read from config.json. If a conversion is killed, the
  same command resumes it with the files that are not finished. The result becomes visible when it is complete.

  --hf-checkpoint   Hugging Face directory; block-wise fp8 weights are converted to bf16
  --save            directory or URI for the result (in its subdirectory `release`); default: models/ in the store
  --verify          also read the result back, compare it bit for bit, and report what was compared
  --check-logits    false skips the comparison of logits with transformers (on a few tokens, with all layers of a small
                    model or a few layers of a large one)
  --megatron-names  local (default) or te: parameter names of Megatron's own layers or of TransformerEngine's; with
                    --load, write torch_dist instead of Hugging Face files
  --megatron-iteration  with --load RUN: write iter_0000020 for the checkpoint after 20 rounds, instead of release
  --mtp keep        keep the tensors of multi-token prediction layers for later exports; by default they are left out
  --convert-ranks   number of processes (default 1)

  --load            a torch_dist directory (converted, or saved by a trainer), or RUN or RUN/VERSION: a checkpoint of a
                    run in the store. If the run has exported it with the same options, that export is copied
  --save            directory or URI for the Hugging Face files
  --origin-hf-dir   directory of config.json and tokenizer; default: the one recorded by the conversion or the run
  --export-dtype    float32, bfloat16, float16, or fp8 (e4m3 in blocks of 128 x 128, for fp8 rollouts); default:
                    dtype of the checkpoint
  --vocab-size      rows of embedding and head to keep (with --hf-checkpoint: checked against config.json, like all of
                    Megatron's options)

  --model-family-path  FILE.py or module with a user-defined model family; it is executed (docs/models.md)
  --store           store of models/ and the runs (default penstock-store)

  Other spellings: --input-dir is --load, --output-dir is --save."""

SPELLINGS = {"--save": "--convert-save", "--load": "--convert-load", "--verify": "--convert-verify"}
SPELLINGS |= {"--output-dir": "--convert-save", "--input-dir": "--convert-load"}


def main(argv: list[str]) -> int:
    """Run `penstock convert`: a conversion as a Prefect flow, an export without Prefect. Return the exit code."""
    config = plan_of("convert", with_hf_checkpoint(parse_config(translate_flags(argv))))
    preflight(config)
    options, store, start = config.convert, open_store(config.run, probe=False), time.monotonic()
    existing: CheckpointRef | None = None  # the result with the same files and options that needs no conversion
    if options.convert_load is not None:
        checkpoint = find_checkpoint(config)
        existing = copy_own_export(store, checkpoint, options) or existing_export(store, checkpoint, options)
    elif options.convert_verify or (existing := existing_conversion(store, options)) is None:
        return run_flow("convert", config)
    if existing is None:
        with progress_bar(config) as report:
            ref = export_checkpoint(config, report)
    else:
        ref = existing
    print("\n".join(describe_result(config, ref, read_result_commit(config, ref), time.monotonic() - start)))
    return 0


def translate_flags(argv: Sequence[str]) -> list[str]:
    """Replace flags of `penstock convert` that have another name in the config (SPELLINGS). For example, --save is the
    output directory here (--convert-save), but STORE/RUN in `penstock train`."""
    arguments = [argument.partition("=") for argument in argv]
    exports = any(SPELLINGS.get(name, name) == "--convert-load" for name, _, _ in arguments)
    spellings = {**SPELLINGS, "--vocab-size": "--export-vocab-size"} if exports else SPELLINGS
    return [spellings.get(name, name) + equals + value for name, equals, value in arguments]


def with_hf_checkpoint(config: PostTrainConfig) -> PostTrainConfig:
    """Check the options of `penstock convert`, and return the config with `hf_checkpoint` set. For an export it is
    `origin_hf_dir`, else `hf_checkpoint`, else the Hugging Face directory that the checkpoint `convert_load` has
    recorded. Raises OptionError."""
    options = config.convert
    exports, names, vocab_size = options.convert_load is not None, options.megatron_names, options.export_vocab_size
    hf_only = {"--export-dtype": options.export_dtype, "--vocab-size": vocab_size}
    for_hf = next((flag for flag, value in hf_only.items() if value is not None), None)
    export_only = {"--origin-hf-dir": options.origin_hf_dir, "--export-vocab-size": vocab_size}
    for_export = next((flag for flag, value in export_only.items() if value is not None), None)
    rules = (
        (
            names and options.convert_save is None,
            "--megatron-names needs --save (models in the store have fixed parameter names): add --save, or leave out "
            "--megatron-names",
        ),
        (
            names and exports and for_hf,
            f"{for_hf} applies to Hugging Face files, but --megatron-names writes torch_dist: leave out {for_hf}, or "
            "--megatron-names to write Hugging Face files",
        ),
        (
            options.megatron_iteration and not (exports and names),
            "--megatron-iteration needs --load RUN and --megatron-names: add both, or leave out --megatron-iteration",
        ),
        (not exports and for_export, f"{for_export} needs --load CHECKPOINT: add --load, or leave out {for_export}"),
        (
            exports and options.convert_verify,
            "--verify needs --hf-checkpoint: a trained checkpoint has no original to compare with",
        ),
        (
            exports and options.convert_save is None,
            "--load needs --save: give the directory for the Hugging Face files",
        ),
    )
    check_rules(rules)
    if options.megatron_iteration and not isinstance(find_checkpoint(config), Commit):
        raise OptionError(
            "--megatron-iteration needs --load RUN, because a Megatron directory has its own iteration: leave it out"
        )
    if not exports:
        return config
    origin, family_path = options.origin_hf_dir or options.hf_checkpoint, options.model_family_path
    if not origin:
        origin, recorded_family_path = read_recorded_origin(config)
        family_path = family_path or recorded_family_path
    values = config.model_dump()
    changes = {"hf_checkpoint": origin, "model_family_path": family_path}
    return validate_config({**values, "convert": {**values["convert"], **changes}})


@flow(name="convert", validate_parameters=True)
def convert(config: PostTrainConfig) -> State[None]:
    """Convert from or to Hugging Face files."""
    if not isinstance(config, Plan):  # otherwise the command has made this plan and checked it
        config = plan_of("convert", with_hf_checkpoint(config))
        preflight(config)
    start = time.monotonic()
    with progress_bar(config) as report:
        if config.convert.convert_load is not None:
            ref = export_checkpoint(config, report)
        else:
            ref = convert_checkpoint(config, report)
    commit = read_result_commit(config, ref)
    wait_for_api(print)
    lines = list(describe_result(config, ref, commit, time.monotonic() - start))
    print("\n".join(lines))
    if config.convert.convert_verify:
        for title, text in verify_checkpoint(config, ref, commit):
            print(f"  {title:<8} {text}")
    return Completed(message=lines[0])


def describe_result(config: PostTrainConfig, ref: CheckpointRef, commit: Commit, seconds: float) -> Iterator[str]:
    """Yield the lines that report the result of a command that took `seconds`. A result that was committed before the
    command began is reported as an earlier one."""
    num_bytes = int(commit.summary.get("convert/num_bytes", commit.summary.get("export/num_bytes", 0)))
    write_seconds = commit.seconds.get("write")
    is_new = commit.created_at > time.time() - seconds
    speed = f", {num_bytes / write_seconds / 1e9:.2f} GB/s" if is_new and write_seconds else ""
    verb = "is" if is_new else "was already"
    source = config.convert.convert_load or config.convert.hf_checkpoint
    kind = "Hugging Face files" if ref.format == "hf" else "torch_dist"
    proof = " and verified" if "convert/num_tensors" in commit.summary else ""
    loads = ref.format == "hf" and "://" not in ref.uri and config.convert.model_family_path is None
    hint = " (AutoModelForCausalLM.from_pretrained loads it)" if loads else ""
    yield f"{source} {verb} converted{proof} ({kind}, {format_bytes(num_bytes)}{speed}): {ref.uri}{hint}"
    if is_new and "logits" in commit.state:
        yield f"logits: {commit.state['logits']}"
    skipped = commit.state.get("skipped", {})
    if skipped.get("count"):
        yield (
            f"{skipped['count']} tensors ({format_bytes(skipped['bytes'])}) that Megatron does not train, such as "
            "those of multi-token prediction layers, were left out: --mtp keep keeps them"
        )


# ---- tasks -----------------------------------------------------------------------------------------------------------


_TASK: dict[str, Any] = {  # two retries, except after a ValueError
    "retries": 2,
    "retry_delay_seconds": 2,
    "retry_condition_fn": lambda task, run, state: not isinstance(state.data, ValueError),
    "persist_result": False,
    "cache_policy": NO_CACHE,
}


@task(name="convert", **_TASK)
def convert_checkpoint(config: PostTrainConfig, report: ProgressCallback | None) -> CheckpointRef:
    """Convert Hugging Face files to torch_dist, or return the result of an earlier conversion."""
    with ray_cluster(config) as cluster:
        return run_conversion(
            cluster, open_store(config.run), config.convert, verify=config.convert.convert_verify, report=report
        )


def export_checkpoint(config: PostTrainConfig, report: ProgressCallback | None) -> CheckpointRef:
    """Convert torch_dist to Hugging Face files."""
    assert config.convert.convert_load is not None
    with ray_cluster(config) as cluster:
        return run_export(cluster, open_store(config.run), find_checkpoint(config), config.convert, report=report)


@task(name="verify", **_TASK)
def verify_checkpoint(config: PostTrainConfig, ref: CheckpointRef, commit: Commit) -> list[tuple[str, str]]:
    """Compare a converted model with its Hugging Face files. Return the lines of the report as (title, text)."""
    from penstock.stages.convert.conversion_check import verify_existing

    with ray_cluster(config) as cluster:
        options = config.convert
        store = (
            open_parent_store(ref.uri, config.run.store_options)[0] if options.convert_save else open_store(config.run)
        )
        args = (store, commit, options.hf_checkpoint, options.model_family_path)
        return list(cluster.run(verify_existing, *args, timeout=options.convert_timeout).report_rows())


@contextmanager
def ray_cluster(config: PostTrainConfig) -> Iterator[Any]:
    """Yield a Ray cluster: the one at --ray-address, or a new one that is stopped after the block."""
    cluster = Cluster.start(config.run.ray_address)
    try:
        yield cluster
    finally:
        cluster.stop()


@contextmanager
def progress_bar(config: PostTrainConfig) -> Iterator[ProgressCallback | None]:
    """Show a progress bar, and yield its callback (bytes done, total bytes). If the output is not a terminal, print
    what is converted, and yield None."""
    end_wait()  # first, because it restores sys.stdout
    console = TerminalConsole(soft_wrap=True, highlight=False)
    if not console.is_terminal:
        show_wait(f"converting {config.convert.convert_load or config.convert.hf_checkpoint}")
        try:
            yield None
        finally:
            end_wait()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task_id = bar.add_task("converting", total=None)
        yield lambda done, total: bar.update(task_id, completed=done, total=total)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def find_checkpoint(config: PostTrainConfig) -> Commit | str:
    """Return the checkpoint that --convert-load names: the path of a directory, or the commit of RUN or RUN/VERSION.
    Raises OptionError if it does not exist."""
    name = config.convert.convert_load or ""
    path = Path(name)
    if path.is_dir():
        return str((megatron_directory(path) or path).resolve())
    store, (run, _, version) = open_store(config.run, probe=False), name.partition("/")
    keys = RunKeys(run)
    versions = store.committed_indices(f"{keys.prefix}/checkpoints") if is_run_name(run) else []
    wanted = int(version) if version.isdigit() else versions[-1] if versions and not version else -1
    commit = store.committed(keys.checkpoint_prefix(wanted)) if wanted in versions else None
    if commit is None:
        existing = ", ".join(f"{run}/{number}" for number in versions) or "none of this run"
        raise OptionError(
            f"--load {name}: no such directory, and store {store.uri} has no such checkpoint (it has {existing}): "
            "give a torch_dist directory, RUN or RUN/VERSION"
        )
    return commit


def read_recorded_origin(config: PostTrainConfig) -> tuple[str, str | None]:
    """Return the Hugging Face directory and the --model-family-path that the checkpoint of --convert-load has recorded.
    Raises OptionError if it has recorded none."""
    checkpoint = find_checkpoint(config)
    if isinstance(checkpoint, Commit):
        _, recorded_config = read_flow_and_config(config.run, checkpoint.run or "")
        return recorded_config.convert.hf_checkpoint, recorded_config.convert.model_family_path
    assets = Path(checkpoint) / ASSETS_DIRECTORY
    if not (assets / "config.json").is_file():
        raise OptionError(
            f"{checkpoint} does not record its Hugging Face directory: give --origin-hf-dir, a directory with the "
            "config.json and tokenizer of this model"
        )
    return str(assets), None


def read_result_commit(config: PostTrainConfig, ref: CheckpointRef) -> Commit:
    """Return the commit of a conversion's or export's result."""
    if config.convert.convert_save is None:
        commit = open_store(config.run).committed(ref.key.removesuffix(commit_key("")))
    else:
        commit = read_record(*open_parent_store(ref.uri, config.run.store_options))
    assert commit is not None, f"{ref} is not committed"
    return commit
