"""Open data files so that reading them ends: pipes and devices are refused, and so are decompression bombs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from fsspec.utils import infer_compression

from penstock.storage.errors import DataError

MAX_RATIO = 200  # decompressed bytes per byte of the file; text has up to 20, a bomb 1,000 and more
FREE_BYTES = 256 << 20  # decompressed bytes from which on the ratio is checked


@contextmanager
def open_data_file(fs: Any, path: str, name: str) -> Iterator[BinaryIO]:
    """Open the file `path` of an fsspec file system, decompressed according to its suffix. `name` is for messages.

    Raises:
        DataError: it is not a file; or, while it is read, it is damaged or a decompression bomb.
    """
    info, compression = fs.info(path), infer_compression(path)
    if info["type"] == "other":
        raise DataError(f"{name} is a pipe or a device instead of a file: copy its content into a file")
    with fs.open(path, "rb", compression=compression) as opened:
        yield cast(BinaryIO, _Decompressed(opened, name, info["size"])) if compression else opened


class _Decompressed(io.RawIOBase):
    """A decompressed file. Reading it raises DataError where the compressed file is damaged, and in a bomb."""

    def __init__(self, file: Any, name: str, compressed_bytes: int) -> None:
        self._file, self._name, self._num_bytes = file, name, 0
        self._limit = max(FREE_BYTES, MAX_RATIO * compressed_bytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:  # decompressors have their own error types
            raise DataError(
                f"{self._name} is damaged after {self._num_bytes} decompressed bytes ({error}): restore the file"
            ) from None
        self._num_bytes += len(data)
        if self._num_bytes > self._limit:
            raise DataError(
                f"{self._name} has more than {self._limit} bytes when decompressed, {MAX_RATIO} times its size: "
                "decompress it yourself if that is right"
            )
        buffer[: len(data)] = data
        return len(data)
