"""A model that `penstock convert --save` has made somewhere, taken into the models of a store: a run depends on nothing outside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from stages.convert.targets import ASSETS_DIRECTORY, RELEASE, AmongModels, above, check_room, committed_in
from storage.errors import ModelError
from storage.refs import CheckpointRef, Commit
from storage.store import Store


def is_converted(directory: str) -> bool:
    """Whether a local directory holds a converted model."""
    return (Path(directory) / RELEASE).is_dir()


def config_directory(directory: str) -> Path:
    """Where the config.json of a model lies: a Hugging Face directory, or a converted model's."""
    return Path(directory) / RELEASE / ASSETS_DIRECTORY if is_converted(directory) else Path(directory)


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
