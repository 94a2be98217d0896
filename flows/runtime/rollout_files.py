"""--save-debug-rollout-data and --load-debug-rollout-data: samples of rounds in files that other tools read.

Dumps are exports: they are written after the commit, from the commit, and again when a start visits a round again; a
dump that cannot be written is printed only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.flows.config import PostTrainConfig
from penstock.flows.runtime.display import Display
from penstock.stages.rollout.data_rounds import load_rollout_file, save_rollout_file
from penstock.stages.torch_files import fill_template
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError, PenstockError
from penstock.storage.store import Store


def dump_samples(
    config: PostTrainConfig, store: Store, commit: Commit, rollout_id: int | str, display: Display
) -> None:
    """With --save-debug-rollout-data or --dump-details, write the samples of a commit to a file."""
    template = config.debug.rollout_dump
    if template is None:
        return
    path = fill_template(template, rollout_id=rollout_id)
    try:
        save_rollout_file(store, commit, path, rollout_id)
        display.note(f"wrote the samples of rollout {rollout_id} to {path}")
    except (OSError, PenstockError) as error:  # the run does not depend on the file
        display.warn(f"the samples of rollout {rollout_id} are not written to {path} ({error}); continuing")


def rollout_file(config: PostTrainConfig, rollout_id: int) -> Path:
    """Return the path of --load-debug-rollout-data for round `rollout_id`."""
    template = config.debug.load_debug_rollout_data
    assert template is not None, "--load-debug-rollout-data is not given"
    return fill_template(template, rollout_id=rollout_id)


def loading_options(config: PostTrainConfig) -> dict[str, Any]:
    """Return the keyword arguments of `load_rollout_file` that options determine."""
    return {
        "num_in_step": config.train.global_batch_size,
        "fraction": config.debug.load_debug_rollout_data_subsample,
    }


def check_rollout_files(config: PostTrainConfig, first: int) -> None:
    """Check that --load-debug-rollout-data names a file for every round from `first` on, and that the samples of the
    first file can be trained on. Raises DataError."""
    rounds = range(first, config.run.num_rollout)
    missing = [r for r in rounds if not rollout_file(config, r).is_file()]
    if missing:
        raise DataError(
            f"{rollout_file(config, missing[0])} of --load-debug-rollout-data does not exist, but round {missing[0]} "
            f"of --num-rollout {config.run.num_rollout} needs it: correct the path, or lower --num-rollout"
        )
    if rounds:
        load_rollout_file(rollout_file(config, first), config.rollout, **loading_options(config))
