"""Read the pickled parts of a torch_dist checkpoint without running code that they name: `.metadata`, `common.pt` and byte entries.

A pickle names classes and functions and says with which arguments they are called. Here only torch's descriptions of tensors, plain
containers and `argparse.Namespace` are built. Classes that training scripts store beside them (enums and configs of Megatron, say) become
inert stand-ins, and any other name is refused before anything is called. Tensors themselves are read with `weights_only=True`.
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

from storage.errors import ModelError, PenstockError

METADATA = ".metadata"
COMMON = "common.pt"
STAND_IN = ("megatron.", "numpy.", "transformer_engine.", "torch.distributed.checkpoint.")  # modules of inert classes
STAND_IN_CLASSES = ("types.SimpleNamespace", "signal.Signals", "numpy.ndarray", "numpy.dtype")
_BUILT = (  # everything that `.metadata` may build
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
_KNOWN: dict[str, Any] = {f"{built.__module__}.{built.__qualname__}": built for built in _BUILT}
_KNOWN["pathlib._local.PosixPath"] = pathlib.PosixPath  # Python 3.13


_PLAIN: dict[str, Any] = {"argparse.Namespace": argparse.Namespace, "pathlib.PosixPath": pathlib.PosixPath}


class _StandIn:
    """An object of a class that is not imported: its arguments and state, and nothing that runs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args, self.options = args, options

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class SafeReader(dcp.FileSystemReader):
    """torch's reader of a checkpoint directory, with an index from `read_metadata`."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self.metadata = read_metadata(directory)  # here, since torch wraps errors of `read_metadata` in its own

    def read_metadata(self) -> metadata.Metadata:  # type: ignore[override]
        return self.metadata


def read_metadata(directory: str | Path) -> metadata.Metadata:
    """Return the index of a checkpoint's tensors.

    Raises:
        ModelError: the file is missing or damaged, or names a class or a place that an index does not need.
    """
    path = Path(directory) / METADATA
    try:
        with open(path, "rb") as file:
            found = _MetadataUnpickler(file, path).load()
        tensors, places = found.state_dict_metadata, found.storage_data
        names = {place.relative_path for place in places.values()}
    except PenstockError:
        raise
    except FileNotFoundError as error:
        raise ModelError(
            f"{directory} is not a torch_dist checkpoint (no {METADATA}): give a checkpoint that was saved completely"
        ) from error
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(path, error) from error
    if outside := sorted(name for name in names if not isinstance(name, str) or Path(name).name != name):
        raise ModelError(f"{path} refers to {outside[0]!r}, outside its own directory: do not use this checkpoint")
    return metadata.Metadata(tensors, storage_data=places, planner_data=getattr(found, "planner_data", None))


def read_common(directory: str | Path) -> dict[str, Any]:
    """Return what a checkpoint's ranks have in common: options, counters, hyperparameters.

    Raises:
        ModelError: the file is missing or damaged, or names a class that is not plain data.
    """
    path = Path(directory) / COMMON
    try:
        with open(path, "rb") as file:
            found = read_object(file, path)
    except FileNotFoundError as error:
        raise ModelError(f"{directory} has no {COMMON}: give a checkpoint that was saved completely") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}, not a dict: give another checkpoint")
    return found


def read_object(stream: IO[bytes], where: str | Path) -> Any:
    """Return what `torch.save` wrote into a stream: numbers, strings, containers, tensors and stand-ins.

    Args:
        stream: with the object from its beginning on.
        where: file or entry, for errors.

    Raises:
        ModelError: it is damaged, or names a class that is not plain data.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(stream)  # type: ignore[arg-type]
        if refused := sorted(name for name in named if name not in _PLAIN and not _stands_in(name)):
            raise _refused(where, refused[0])
        stream.seek(0)
        # only names that are not allowed already: torch takes away whatever is given here when the block ends
        allowed: list[Any] = [(_PLAIN.get(name) or _stand_in(name), name) for name in named]
        with torch.serialization.safe_globals(allowed):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except PenstockError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(where, error) from error


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in _KNOWN:
            return _KNOWN[full_name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if _stands_in(full_name):
            return _stand_in(full_name)
        raise _refused(self.path, full_name)


def _stands_in(name: str) -> bool:
    return name in STAND_IN_CLASSES or name.startswith(STAND_IN)


def _stand_in(name: str) -> type[_StandIn]:
    """A class of its own for every name: torch looks stand-ins up by class."""
    return type(name.rpartition(".")[2], (_StandIn,), {"__module__": __name__})


def _refused(where: str | Path, name: str) -> ModelError:
    return ModelError(
        f"{where} names {name}, which a checkpoint does not need and which could run code: nothing of it was run; do not use this file"
    )


def _damaged(where: str | Path, error: Exception) -> ModelError:
    reason = str(error).partition("\n")[0][:100]
    return ModelError(f"{where} cannot be read ({type(error).__name__}: {reason}): it is damaged, give another checkpoint")
