"""Views of tensors in what `torch.save` wrote: equal to what `torch.load` returns; None unless plain and contiguous."""

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.stages.convert.torch_dist_files import tensor_view

PLAIN = [
    torch.randn(3, 4),
    torch.randn(2, 1, 5).bfloat16(),
    torch.randn(7).half(),
    torch.randn(2, 2).double(),
    torch.arange(5),
    torch.tensor(1.5),
]
OTHERS = {
    "transposed": torch.randn(3, 4).t(),
    "part": torch.randn(10)[2:5],
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(torch.randn(2)),
    "no tensor": [1, 2],
}


def saved(path: Path, content: object, crc: bool = True) -> tuple[Path, mmap.mmap, int, int]:
    """Save an object after some other bytes, as in a checkpoint's file; return the path, the mapped file, and the start
    and the length of the object."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(crc)
    try:
        with path.open("wb") as file:
            file.write(b"other")
            torch.save(content, file)
            length = file.tell() - 5
    finally:
        torch.serialization.set_crc32_options(before)
    with path.open("rb") as file:
        return path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), 5, length


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("tensor", PLAIN, ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}")
def test_a_plain_tensor_is_tensor_view(tensor: Tensor, crc: bool, tmp_path: Path) -> None:
    found = tensor_view(*saved(tmp_path / "file", tensor, crc))
    assert found is not None and found.dtype == tensor.dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_other_objects_have_no_view(content: object, tmp_path: Path) -> None:
    assert tensor_view(*saved(tmp_path / "file", content)) is None


def test_damaged_bytes_have_no_view(tmp_path: Path) -> None:
    path, memory, _, length = saved(tmp_path / "file", torch.randn(100))
    for start, size in ((5, length + 1), (4, length), (5, length - 30)):
        assert tensor_view(path, memory, start, size) is None
