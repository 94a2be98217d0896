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
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Return the tensor index of a checkpoint (`.metadata`)."""
    path = Path(directory) / METADATA
    with _refusing_damaged(path):
        if not path.exists():
            raise ModelError(
                f"{directory} is not a torch_dist checkpoint ({METADATA} is missing): use a completely saved checkpoint"
            )
        with open(path, "rb") as file:
            index = _MetadataUnpickler(file, path).load()
        tensors, storage = index.state_dict_metadata, index.storage_data
        names = {info.relative_path for info in storage.values()}
    if outside := sorted(name for name in names if not isinstance(name, str) or Path(name).name != name):
        raise ModelError(f"{path} refers to the file {outside[0]!r} outside its directory: do not use this checkpoint")
    return metadata.Metadata(tensors, storage_data=storage, planner_data=getattr(index, "planner_data", None))


def read_common(directory: str | Path) -> dict[str, Any]:
    """Return the contents of `common.pt`, which all ranks share: options, counters, hyperparameters."""
    path = Path(directory) / COMMON
    with _refusing_damaged(path):
        if not path.exists():
            raise ModelError(f"{directory} has no {COMMON}: use a completely saved checkpoint")
        with open(path, "rb") as file:
            common = read_object(file, path)
    if not isinstance(common, dict):
        raise ModelError(f"{path} contains a {type(common).__name__} instead of a dict: use another checkpoint")
    return common


def read_object(stream: IO[bytes], where: str | Path) -> Any:
    """Return the object that `torch.save` wrote to a stream: numbers, strings, containers and tensors. Objects of known
    classes become `_StandIn`s. Messages name the file or entry `where`."""
    with _refusing_damaged(where):
        allowed: list[Any] = []
        names = torch.serialization.get_unsafe_globals_in_checkpoint(stream)  # type: ignore[arg-type]
        for name in sorted(names):  # sorted: the error then always names the same class
            allowed.append((_PLAIN_CLASSES.get(name) or _stand_in_class(name, where), name))
        stream.seek(0)
        # At its end `safe_globals` makes torch refuse all classes in `allowed`. These do not include the classes that
        # torch allows by default, which are not in `names`.
        with torch.serialization.safe_globals(allowed):
            return torch.load(stream, map_location="cpu", weights_only=True)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of `.metadata` that accepts only dtypes and classes that a tensor index needs; other known classes
    become stand-ins without behaviour, and any other name raises ModelError."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in _METADATA_NAMES:
            return _METADATA_NAMES[full_name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        return dtype if isinstance(dtype, torch.dtype) else _stand_in_class(full_name, self.path)


def _stand_in_class(name: str, where: str | Path) -> type[_StandIn]:
    """Return a new stand-in class for the class `name`; raise ModelError if this is not a class that checkpoints are
    known to contain. Every name needs its own class, because torch registers safe globals by class."""
    if name not in STAND_IN_CLASSES and not name.startswith(STAND_IN):
        raise ModelError(
            f"{where} refers to {name}, which checkpoints do not need and which could execute code (no code was "
            "executed): do not use this file"
        )
    return type(name.rpartition(".")[2], (_StandIn,), {"__module__": __name__})


@contextmanager
def _refusing_damaged(where: str | Path) -> Iterator[None]:
    """Raise ModelError, with the name `where` of the file, if the block cannot unpickle the file."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error).partition("\n")[0][:100]
        raise ModelError(
            f"{where} cannot be read ({type(error).__name__}: {reason}): the file is damaged; use another checkpoint"
        ) from error
