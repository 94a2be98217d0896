"""Which model a run starts from: --load, else --ref-load, else --hf-checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.engines.weights.hf_headers import block_size
from penstock.flows.config import PostTrainConfig
from penstock.stages.convert.targets import is_converted, megatron_directory
from penstock.storage.commit import ADAPTERS, RunKeys, is_run_name
from penstock.storage.errors import OptionError
from penstock.storage.store import Store


def starting_weights(config: PostTrainConfig) -> str:
    """Return the path of the model whose weights are policy version 0: --load if it has a checkpoint, else --ref-load,
    else --hf-checkpoint.

    Raises:
        InputError: --load names something that is not a checkpoint.
    """
    return loaded_checkpoint(config) or config.train.ref_load or config.convert.hf_checkpoint


def loaded_checkpoint(config: PostTrainConfig) -> str | None:
    """Return the directory with the weights of --load: a Hugging Face directory, a Megatron directory, or the newest or
    the given checkpoint of a run in a local store (STORE/RUN, STORE/RUN/VERSION). Return None if --load is not given or
    has no checkpoint, for instance because it names the run itself, which then resumes.

    Raises:
        InputError: --load names something that is not a checkpoint.
    """
    load = config.convert.load
    if load is None:
        return None
    path = Path(load)
    if is_converted(load) or megatron_directory(path) or (path / "config.json").is_file():
        return load
    if names_own_run(config):
        return None
    if "://" in load:
        raise OptionError(f"--load {load} is not a local directory: copy the checkpoint to a disk and give its path")
    checkpoint = _checkpoint_of_run(path) or (path.name.isdecimal() and _checkpoint_of_run(path.parent, int(path.name)))
    if checkpoint:
        return checkpoint
    if (path.is_dir() and not any(path.iterdir())) or not path.exists():
        return None
    raise OptionError(
        f"--load {load} is not a checkpoint: give a Hugging Face directory, a torch_dist directory of Megatron, or "
        "STORE/RUN, STORE/RUN/VERSION of a run"
    )


def names_own_run(config: PostTrainConfig) -> bool:
    """Return whether --load names the run itself: STORE/RUN, as --save does."""
    load, run = config.convert.load or "", config.run
    if "://" in run.store:
        return load.rstrip("/") == f"{run.store.rstrip('/')}/{run.run}"
    return bool(load) and Path(load).absolute() == Path(run.store).absolute() / run.run


def _checkpoint_of_run(path: Path, version: int | None = None) -> str | None:
    """Return the directory of a checkpoint, by default the newest, of the run `path` = STORE/RUN. None if there is no
    such run. Raises OptionError if the run has no such checkpoint."""
    keys = RunKeys(path.name) if is_run_name(path.name) else None
    if keys is None or not (path.parent / keys.record).is_file():
        return None
    store = Store(str(path.parent), probe=False)
    versions = store.committed_indices(f"{keys.prefix}/checkpoints")
    if not versions or version not in (None, *versions):
        existing = ", ".join(map(str, versions)) or "none"
        raise OptionError(f"--load {path}: the run has no such checkpoint (it has: {existing}); give one of these")
    commit = store.committed(keys.checkpoint_prefix(versions[-1] if version is None else version))
    if commit is not None and ADAPTERS in commit.state:
        raise OptionError(
            f"--load {path}: the checkpoint has only LoRA adapters; write the merged weights with `penstock export "
            f"{path.name} --output DIR`, and give DIR"
        )
    return store.path(commit.attempt) if commit is not None and commit.attempt else None


def check_start_weights(flow: str, config: PostTrainConfig) -> None:
    """Check that the flow uses --load and --ref-load. Raises InputError."""
    if config.convert.load and flow == "evaluate":
        raise OptionError("--load has no effect in the flow `evaluate`, which scores --hf-checkpoint: omit it")
    if flow == "convert":
        return
    start, flag = starting_weights(config), "--load" if loaded_checkpoint(config) else "--ref-load"
    if config.run.debug_rollout_only and start != config.convert.hf_checkpoint:
        raise OptionError(
            f"{flag} has no effect with --debug-rollout-only, which generates with the weights of --hf-checkpoint: "
            "omit one of them"
        )


def describe_start_weights(config: PostTrainConfig) -> Iterator[str]:
    """Yield warnings about --load and --ref-load that may be unintended."""
    load, train = config.convert.load, config.train
    if load and loaded_checkpoint(config) is None and not names_own_run(config):
        yield f"--load {load} has no checkpoint: the run starts from {starting_weights(config)}"
    if load and train.ref_load and not train.uses_reference and loaded_checkpoint(config):
        yield "--ref-load has no effect: the run starts from --load, and no KL to a reference is computed"


def fp8_warning(config: PostTrainConfig) -> Iterator[str]:
    """Yield a warning if --hf-checkpoint is named after fp8, but neither its weights are quantized nor do the engines
    quantize them."""
    path = Path(config.convert.hf_checkpoint).expanduser()
    if "fp8" in path.resolve().name.lower() and block_size(path) is None and not config.engine_facts.quantization:
        yield (
            f"--hf-checkpoint {config.convert.hf_checkpoint} is not quantized, so the engines do not generate in fp8: "
            "`penstock convert --load CHECKPOINT --export-dtype fp8 --save DIR` writes fp8 weights (docs/engines.md)"
        )
