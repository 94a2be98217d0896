"""Read the pickled parts of a torch_dist checkpoint (`.metadata`, `common.pt`, and objects stored beside the tensors)
without executing code that they may contain.

A pickle contains names of classes and functions that unpickling calls. This module only builds torch's tensor metadata,
plain containers and `argparse.Namespace`. Objects of other classes that training scripts store (such as Megatron's
enums and configs) become stand-ins without behaviour; any other name raises an error before anything is called. Tensors
are loaded with `weights_only=True`.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from penstock.storage.errors import ModelError, PenstockError

METADATA = ".metadata"
COMMON = "common.pt"
# prefixes of the names of classes that are replaced by stand-ins
STAND_IN = ("megatron.", "numpy.", "transformer_engine.", "torch.distributed.checkpoint.")
STAND_IN_CLASSES = ("types.SimpleNamespace", "signal.Signals", "numpy.ndarray", "numpy.dtype")
_METADATA_CLASSES = (  # classes and functions that unpickling `.metadata` may call
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    torch.Size,
    torch.serialization._get_layout,
    collections.OrderedDict,
    pathlib.PosixPath,
    set,
)
_METADATA_NAMES: dict[str, Any] = {f"{built.__module__}.{built.__qualname__}": built for built in _METADATA_CLASSES}
_METADATA_NAMES["pathlib._local.PosixPath"] = pathlib.PosixPath  # Python 3.13


_PLAIN_CLASSES: dict[str, Any] = {"argparse.Namespace": argparse.Namespace, "pathlib.PosixPath": pathlib.PosixPath}


class _StandIn:
    """A replacement for an object whose class is not imported. It only stores constructor arguments and state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a checkpoint directory, except that the tensor index (`.metadata`) is unpickled by
    `read_metadata`, which executes no code of the file."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self.metadata = read_metadata(directory)  # read here, because torch would wrap the errors of `read_metadata`

    def read_metadata(self) -> metadata.Metadata:  # type: ignore[override]
        return self.metadata


def read_metadata(directory: str | Path) -> metadata.Metadata:
    """Return the tensor index of a checkpoint (`.metadata`).

    Raises:
        ModelError: the file is missing or damaged, contains a class that an index does not need, or refers to a file
            outside the checkpoint directory.
    """
    path = Path(directory) / METADATA
    try:
        with open(path, "rb") as file:
            index = _MetadataUnpickler(file, path).load()
        tensors, storage = index.state_dict_metadata, index.storage_data
        names = {info.relative_path for info in storage.values()}
    except PenstockError:
        raise
    except FileNotFoundError as error:
        raise ModelError(
            f"{directory} is not a torch_dist checkpoint ({METADATA} is missing): use a completely saved checkpoint"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged_error(path, error) from error
    if outside := sorted(name for name in names if not isinstance(name, str) or Path(name).name != name):
        raise ModelError(f"{path} refers to the file {outside[0]!r} outside its directory: do not use this checkpoint")
    return metadata.Metadata(tensors, storage_data=storage, planner_data=getattr(index, "planner_data", None))


def read_common(directory: str | Path) -> dict[str, Any]:
    """Return the contents of `common.pt`, which all ranks share: options, counters, hyperparameters."""
    path = Path(directory) / COMMON
    try:
        with open(path, "rb") as file:
            common = read_object(file, path)
    except FileNotFoundError as error:
        raise ModelError(f"{directory} has no {COMMON}: use a completely saved checkpoint") from error
    if not isinstance(common, dict):
        raise ModelError(f"{path} contains a {type(common).__name__} instead of a dict: use another checkpoint")
    return common


def read_object(stream: IO[bytes], where: str | Path) -> Any:
    """Return the object that `torch.save` wrote to a stream. It may consist of numbers, strings, containers and
    tensors; objects of Megatron's and other known classes become `_StandIn`s, which only store their state.

    Args:
        stream: positioned at the first byte of the object.
        where: name of the file or entry, for error messages.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(stream)  # type: ignore[arg-type]
        if refused := sorted(name for name in named if name not in _PLAIN_CLASSES and not _needs_stand_in(name)):
            raise _unsafe_name_error(where, refused[0])
        stream.seek(0)
        # `named` omits names that torch already allows; `safe_globals` would disallow those at the end of the block
        allowed: list[Any] = [(_PLAIN_CLASSES.get(name) or _stand_in_class(name), name) for name in named]
        with torch.serialization.safe_globals(allowed):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except PenstockError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged_error(where, error) from error


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of `.metadata` that accepts only dtypes and classes that a tensor index needs; other known classes
    (`_needs_stand_in`) become stand-ins without behaviour, and any other name raises ModelError."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in _METADATA_NAMES:
            return _METADATA_NAMES[full_name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if _needs_stand_in(full_name):
            return _stand_in_class(full_name)
        raise _unsafe_name_error(self.path, full_name)


def _needs_stand_in(name: str) -> bool:
    """Return whether unpickling replaces objects of the class with this full name by `_StandIn`s, which only store
    their state."""
    return name in STAND_IN_CLASSES or name.startswith(STAND_IN)


def _stand_in_class(name: str) -> type[_StandIn]:
    """Return a new stand-in class for the class `name`. Every name needs a class of its own, because torch registers
    safe globals by class."""
    return type(name.rpartition(".")[2], (_StandIn,), {"__module__": __name__})


def _unsafe_name_error(where: str | Path, name: str) -> ModelError:
    """Return the error for a file that contains a class or function which is not allowed."""
    return ModelError(
        f"{where} refers to {name}, which checkpoints do not need and which could execute code (no code was executed): "
        "do not use this file"
    )


def _damaged_error(where: str | Path, error: Exception) -> ModelError:
    """Return the error for a file that cannot be unpickled."""
    reason = str(error).partition("\n")[0][:100]
    return ModelError(
        f"{where} cannot be read ({type(error).__name__}: {reason}): the file is damaged; use another checkpoint"
    )
