"""A model that `penstock convert --save` has made somewhere, taken into the models of a store: a run depends on nothing outside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.convert.targets import ASSETS_DIRECTORY, RECORD, RELEASE, TRACKER, AmongModels, above, check_room, committed_in
from storage.errors import ModelError
from storage.refs import CheckpointRef, Commit
from storage.store import Store

METADATA = ".metadata"  # torch's index of a checkpoint; `engines.megatron.safe_load` has it too, but loads torch


def is_converted(directory: str) -> bool:
    """Whether a local directory was made by `penstock convert --save`."""
    return (Path(directory) / RELEASE).is_dir() and (Path(directory) / RECORD).is_file()


def megatron_directory(directory: str | Path) -> Path | None:
    """Return the directory with the index of a torch_dist checkpoint: this one, or the one below it that the tracker file names.

    Raises:
        ModelError: the tracker names nothing that is there.
    """
    path = Path(directory)
    if (path / METADATA).is_file():
        return path
    if not (path / TRACKER).is_file():
        return None
    word = (path / TRACKER).read_text().strip()
    found = path / (f"iter_{int(word):07d}" if word.isdecimal() else RELEASE)
    if not (word.isdecimal() or word == RELEASE) or not (found / METADATA).is_file():
        raise ModelError(f"{path / TRACKER} says {word[:40]!r}, but {found} is not a torch_dist checkpoint: give a complete one")
    return found


def config_directory(directory: str) -> Path | None:
    """Return where the config.json of a model is: in a Hugging Face directory, or beside a torch_dist model; None if it has none."""
    found = megatron_directory(directory)
    if found is None:
        return Path(directory)
    return found / ASSETS_DIRECTORY if (found / ASSETS_DIRECTORY / "config.json").is_file() else None


def adopt(store: Store, directory: str) -> CheckpointRef:
    """Copy a converted model into the store, unless it is there already. Every hash is checked on the way.

    Raises:
        ModelError: nothing says what lies in the directory.
    """
    source, name = above(directory)
    record = committed_in(source, name)
    if record is None or "identity" not in record.state:
        raise ModelError(
            f"{directory} was not made by `penstock convert --save`: give the Hugging Face directory, which is converted into the store"
        )
    identity = record.state["identity"]
    target = AmongModels(store, f"copy-{identity}")
    if standing := target.standing(identity):
        return standing
    check_room(store, sum(file.bytes for file in record.files))
    with source.reading(record) as files, store.writing(target.attempt) as out:
        shutil.copytree(files, out.path, dirs_exist_ok=True)
    state = {key: value for key, value in record.state.items() if key != "identity"}
    return target.publish(identity, Commit(**{**dict(record), "attempt": target.attempt, "files": out.files, "state": state}))
