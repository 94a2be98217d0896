"""A bigram model in place of the training engine, and the process group that a training step needs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.stages.train.batching import PackedMicrobatch

VOCABULARY, LR = 60, 5.0


class BigramEngine:
    """The logits of the next token are the row of the current token in a table, which SGD trains."""

    data_parallel_rank_and_size = (0, 1)
    tensor_group = context_group = lora = peak_flops = None
    device = torch.device("cpu")
    shape = SimpleNamespace(train_flops=lambda tokens, *_, **__: float(tokens))

    def __init__(self) -> None:
        self.table = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.passes: list[tuple[bool, list[PackedMicrobatch], list[torch.Tensor]]] = []

    def pack_stream(self, packed: PackedMicrobatch) -> Any:
        return SimpleNamespace(pack_slice=slice(0, len(packed.token_ids)))

    def hidden_of(self, packed: PackedMicrobatch) -> torch.Tensor:
        return self.table[packed.token_ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def zero_grad(self) -> None:
        self.table.grad = None

    def forward_backward(
        self, microbatches: list[PackedMicrobatch], loss_fn: Any, *, forward_only: bool = False, routing: Any = None
    ) -> list[dict[str, Any]]:
        self.zero_grad()
        outputs = []
        olds = [packed.fields.old_logprobs for packed in microbatches if packed.fields is not None]
        self.passes.append((forward_only, microbatches, [old for old in olds if old is not None]))
        for packed in microbatches:
            with torch.set_grad_enabled(not forward_only):
                loss, output = loss_fn(self.hidden_of(packed), self.head, packed)
            if loss is not None:
                loss.backward()
            outputs.append(output)
        return outputs

    def optimizer_step(self) -> tuple[bool, float, list[float]]:
        assert self.table.grad is not None
        with torch.no_grad():
            self.table -= LR * self.table.grad
        return True, float(self.table.grad.norm()), [LR]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process, unless another test has made one."""
    if dist.is_initialized():
        yield
        return
    file = tmp_path_factory.mktemp("group") / "meet"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
