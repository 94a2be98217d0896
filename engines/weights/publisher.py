"""How a trainer hands a policy version to the engines: one interface, one small file per transport.

    tensor    the engines copy from the trainer's memory: CUDA IPC on the same GPU, shared memory on CPU. Same host, same torch.
    disk      the trainer writes a Hugging Face directory, the engines read it. Anywhere both can see.

A publisher runs inside the trainer's rank 0. It gets full tensors under Hugging Face names, one after another; gathering them is
the trainer's business, and so is that its other ranks take part while rank 0 iterates.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from storage.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

Transport = Literal["tensor", "disk"]
BUCKET_BYTES = 512 << 20


class WeightPublisher(Protocol):
    """Makes every engine serve given weights under a given name."""

    def publish(self, named: Iterable[tuple[str, Tensor]], version: str) -> None:
        """Load the tensors into all engines; when it returns, each of them reports `version` with everything it generates.

        Raises:
            ConnectionError: an engine is gone. The others keep their weights under the name `updating:<version>`: publish again.
            RuntimeError: an engine refused.
        """
        ...


def make_publisher(
    urls: list[str], transport: Transport = "tensor", *, model_path: str = "", directory: str = ""
) -> WeightPublisher:
    """The publisher for a transport.

    Args:
        urls: the engines.
        model_path: for "disk", a Hugging Face directory with the config that belongs to the weights.
        directory: for "disk", where to write; the engines must see it under the same path.

    Raises:
        EngineError: "tensor" without SGLang in this interpreter, or "disk" without its directories.
    """
    if transport == "tensor":
        from importlib.util import find_spec

        if find_spec("sglang") is None:
            raise EngineError("SGLang is not installed in the trainer's interpreter: install it, or publish over disk")
        from engines.weights.tensor import TensorPublisher

        return TensorPublisher(urls)
    from engines.weights.disk import DiskPublisher

    if not (model_path and directory):
        raise EngineError("weights are to go over disk, but no model directory or no directory to write to was given: name both")
    return DiskPublisher(urls, Path(model_path), Path(directory))
