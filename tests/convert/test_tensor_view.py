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


def saved(path: Path, content: object, crc: bool = True) -> tuple[mmap.mmap, int]:
    """Save an object after some other bytes, as in a checkpoint's file, and return the mapped file and its length."""
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
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), length


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("tensor", PLAIN, ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}")
def test_a_plain_tensor_is_tensor_view(tensor: Tensor, crc: bool, tmp_path: Path) -> None:
    found = tensor_view(*_placed(saved(tmp_path / "file", tensor, crc)))
    assert found is not None and found.dtype == tensor.dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
def test_other_objects_have_no_view(content: object, tmp_path: Path) -> None:
    assert tensor_view(*_placed(saved(tmp_path / "file", content))) is None


def test_damaged_bytes_have_no_view(tmp_path: Path) -> None:
    memory, length = saved(tmp_path / "file", torch.randn(100))
    assert (
        tensor_view(memory, 5, length + 1) is None
        and tensor_view(memory, 4, length) is None
        and tensor_view(memory, 5, length - 30) is None
    )


def _placed(found: tuple[mmap.mmap, int]) -> tuple[mmap.mmap, int, int]:
    return found[0], 5, found[1]
