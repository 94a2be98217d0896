"""A tensor inside a file that `torch.save` wrote, seen where it lies: no copy, and no memory of its own.

`torch.load` reads every tensor into new memory, which costs more than all the rest of an export (three quarters of its time, measured).
What it wrote is a zip archive of uncompressed members: a pickle that says type, shape and strides, and the bytes. The pickle is read here
without running any code that it names; whatever is not a plain contiguous tensor is left to `torch.load`.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import struct
import zipfile
from typing import Any

import torch
from torch import Tensor

_LOCAL_HEADER = 30  # bytes of a zip member's own header, before its name and extra field


def seen(memory: mmap.mmap, start: int, length: int) -> Tensor | None:
    """The tensor that was saved into these bytes of a file, as a view of them; None if `torch.load` must see to it.

    Args:
        memory: the file; a private map, so that nobody writes into the file through the tensor.
        start: first byte of what `torch.save` wrote.
        length: how much it wrote.
    """
    if start + length > len(memory):
        return None
    try:
        with zipfile.ZipFile(_Window(memory, start, length)) as archive:
            described = next(member for member in archive.infolist() if member.filename.endswith("/data.pkl"))
            at = start + _first_byte(memory, start, described)
            found = _Reader(io.BytesIO(memory[at : at + described.file_size])).load()
            member = archive.getinfo(f"{described.filename.removesuffix('data.pkl')}data/{found.storage}")
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        StopIteration,
        LookupError,
        AttributeError,
        TypeError,
        ValueError,
        EOFError,
    ):
        return None
    count = math.prod(found.size)
    plain = found.offset == 0 and found.stride == _contiguous(found.size) and member.compress_type == zipfile.ZIP_STORED
    if not plain or count == 0 or member.file_size != count * found.dtype.itemsize:
        return None
    at = start + _first_byte(memory, start, member)
    return torch.frombuffer(memory, dtype=found.dtype, count=count, offset=at).view(found.size)


def _first_byte(memory: mmap.mmap, start: int, member: zipfile.ZipInfo) -> int:
    """Where a member's content begins in its archive. `ZipFile.read` would look at its CRC, which torch writes only if it is told to."""
    header = start + member.header_offset
    name_length, extra_length = struct.unpack("<HH", memory[header + 26 : header + _LOCAL_HEADER])
    return member.header_offset + _LOCAL_HEADER + name_length + extra_length


class _Found:
    """What the pickle says of a tensor."""

    def __init__(self, storage: tuple[Any, ...], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> None:
        self.storage, self.dtype = storage
        self.offset, self.size, self.stride = offset, size, stride


class _Reader(pickle.Unpickler):
    """Reads a tensor's pickle: three names may stand in it, and none of them is called but ours."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Found
        if (module, name) == ("collections", "OrderedDict"):
            return dict  # of backward hooks, always empty
        dtype = getattr(torch, name.removesuffix("Storage").lower(), None) if module == "torch" else None  # FloatStorage, ...
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> tuple[str, torch.dtype]:
        _, dtype, key, _, _ = pid
        return key, dtype


def _contiguous(size: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


class _Window(io.RawIOBase):
    """A part of a map as a file."""

    def __init__(self, memory: mmap.mmap, start: int, length: int) -> None:
        self.memory, self.start, self.length, self.at = memory, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        end = self.length if size < 0 else min(self.at + size, self.length)
        data = self.memory[self.start + self.at : self.start + end]
        self.at = end
        return data
