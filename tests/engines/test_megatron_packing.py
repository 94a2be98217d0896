"""Buckets, the split of packs over context-parallel ranks, and attention over both compared with a naive loop."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distributions
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.megatron.compat import import_megatron
from penstock.storage.errors import OptionError
from tests.engines.megatron_reference import LENGTHS, make_pack

import_megatron()

from penstock.engines.megatron.model import attention, transformer_config  # noqa: E402
from penstock.engines.megatron.model.attention import bucketed_attention, causal_attention, packed_attention  # noqa: E402
from penstock.engines.megatron.model.transformer_config import FA4, AttentionKernel, choose_attention_kernel  # noqa: E402
from penstock.engines.megatron.packing import make_buckets, pack_stream  # noqa: E402

CPU = torch.device("cpu")


def random_lengths(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [
        generator.choice([1, 2, 3, generator.randint(1, 20), generator.randint(1, 130)])
        for _ in range(generator.randint(1, 12))
    ]


def naive_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Compute attention for one query at a time."""
    out, start = [], 0
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    for length in lengths:
        for last in range(start, start + length):
            scores = torch.einsum("hd,khd->hk", query[last], key[start : last + 1]) * 0.25
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[start : last + 1]))
        start += length
    return torch.stack(out)


def heads(num_tokens: int, seed: int = 0, num_heads: int = 4, num_groups: int = 2) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for size in (num_heads, num_groups, num_groups):
        yield torch.randn(num_tokens, size, 16, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("seed", range(5))
def test_bucketed_attention_equals_naive_attention(seed: int) -> None:
    lengths = random_lengths(seed)
    starts = make_pack(lengths).cu_seqlens.tolist()
    results = []
    for attend in (
        lambda q, k, v: bucketed_attention(q, k, v, make_buckets(starts, CPU), 0.25),
        lambda q, k, v: naive_attention(q, k, v, lengths),
    ):
        inputs = list(heads(sum(lengths)))
        out = attend(*inputs)
        out.pow(2).sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, naive in zip(*results):
        torch.testing.assert_close(ours, naive)


@pytest.mark.parametrize("seed", range(8))
def test_buckets_have_every_token_once_and_little_padding(seed: int) -> None:
    lengths = random_lengths(seed)
    starts = make_pack(lengths).cu_seqlens.tolist()
    buckets = make_buckets(starts, CPU)
    assert sorted(torch.cat([bucket.rows for bucket in buckets]).tolist()) == list(range(sum(lengths)))
    for bucket in buckets:
        num_places = bucket.num_sequences * bucket.max_seqlen
        assert len(set(bucket.places.tolist())) == len(bucket.places)
        assert bucket.places.max() < num_places
        assert len(bucket.rows) > num_places / 2 or bucket.max_seqlen <= 16


class ThreadGroup:
    """A process group whose ranks are threads, with a differentiable all-to-all."""

    def __init__(self, size: int) -> None:
        self._sent: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def size(self) -> int:
        return len(self._sent)

    def all_to_all(self, rank: int, sent: Tensor) -> Tensor:
        self._sent[rank] = sent
        self._barrier.wait(60)
        received = torch.stack([other[rank] for other in self._sent])
        self._barrier.wait(60)
        return received


# 6 heads over 4 ranks and 7 over 2: heads of zeros are added; one group of 4 heads: each rank gets a copy
@pytest.mark.parametrize(
    ("context", "tensor", "num_heads"),
    [(2, 1, (4, 2)), (4, 2, (4, 4)), (4, 1, (4, 1)), (4, 1, (6, 3)), (2, 2, (7, 1)), (2, 1, (12, 6)), (4, 2, (4, 2))],
    ids=str,
)
def test_attention_over_context_parallel_ranks_equals_one_rank(
    context: int, tensor: int, num_heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients. The padding has large values, so that any use of it is noticed."""
    pack, group, ranks = make_pack(LENGTHS), ThreadGroup(context), threading.local()
    monkeypatch.setattr(attention, "all_to_all", lambda group, sent: group.all_to_all(ranks.rank, sent))
    inputs = list(heads(len(pack.token_ids), 0, *num_heads))
    streams = [pack_stream(pack, CPU, tensor, context, rank) for rank in range(context)]
    assert len({len(stream.token_ids) for stream in streams}) == 1 and len(streams[0].token_ids) % tensor == 0

    def attend(rank: int) -> Tensor:
        ranks.rank, stream = rank, streams[rank]
        padding = len(stream.token_ids) - stream.num_tokens
        rows = [F.pad(x[stream.pack_slice], (0, 0, 0, 0, 0, padding), value=1e3) for x in inputs]
        return causal_attention(*rows, stream, 0.25, group)[: stream.num_tokens]

    for stream in streams:
        assert torch.equal(stream.token_ids[: stream.num_tokens], pack.token_ids[stream.pack_slice])
        assert torch.equal(stream.positions[: stream.num_tokens], pack.position_ids[stream.pack_slice])
    with ThreadPoolExecutor(context) as threads:
        out = torch.cat(list(threads.map(attend, range(context))))
    expected = naive_attention(*inputs, LENGTHS)
    grad = torch.randn(out.shape, dtype=out.dtype)
    results = [[result, *torch.autograd.grad(result, inputs, grad)] for result in (out, expected)]
    for ours, naive in zip(*results):
        torch.testing.assert_close(ours, naive)


def test_padding_is_a_sequence_of_its_own_and_routers_process_a_part_of_the_tokens() -> None:
    stream = pack_stream(make_pack([5, 6]), CPU, tensor=4)
    assert (len(stream.token_ids), stream.num_tokens, stream.pack_slice) == (12, 11, slice(0, 11))
    assert stream.cu_seqlens.tolist() == [0, 5, 11, 12]
    stream = pack_stream(make_pack([3, 4]), CPU, tensor=2)
    assert [stream.router_rows(rank, 2).tolist() for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, -1]]
    second = pack_stream(make_pack([3, 4]), CPU, tensor=2, context=2, context_rank=1)
    assert [second.router_rows(rank, 2).tolist() for rank in (0, 1)] == [[4, 5], [6, -1]]
    padding = pack_stream(make_pack([1, 1]), CPU, context=4, context_rank=3)
    assert (len(padding.token_ids), padding.num_tokens) == (1, 0)


def shape_with_heads(keys: int, values: int) -> Any:
    return SimpleNamespace(head_dim=keys, latent=None if keys == values else SimpleNamespace(v_head_dim=values))


HEADS = shape_with_heads(128, 128)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, on which FlashAttention-4 is installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(transformer_config, "distributions", lambda name: iter([name]))


@pytest.mark.parametrize("backend", [None, "auto", "flash", "unfused", "local"])
def test_names_of_megatron_choose_the_padded_kernel_on_a_cpu(backend: str | None) -> None:
    assert torch.cuda.is_available() or choose_attention_kernel(backend, "bf16", HEADS) == "padded"
    assert choose_attention_kernel(backend, "fp32", HEADS) == "padded"


@pytest.mark.parametrize("backend", [None, "flash"])
@pytest.mark.parametrize(("keys", "values", "kernel"), [(128, 128, "fa4"), (192, 128, "fa4"), (80, 80, "torch")])
def test_fa4_is_chosen_for_tested_heads(hopper: None, backend: str | None, keys: int, values: int, kernel: str) -> None:
    heads = shape_with_heads(keys, values)
    for name, dtype, expected in (
        (backend, "bf16", kernel),
        ("torch", "bf16", "torch"),
        ("unfused", "bf16", "padded"),
        (backend, "fp32", "padded"),
    ):
        assert choose_attention_kernel(name, dtype, heads) == expected


def test_a_kernel_that_does_not_work_here_is_refused(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, dtype, heads, message in (
        (
            "fa4",
            "bf16",
            shape_with_heads(80, 80),
            r"or \(192, 128\) \(keys, values\); found heads of \(80, 80\): use auto",
        ),
        ("fa4", "fp32", HEADS, "--attention-backend fa4 needs bf16 on a .*GPU.*; found fp32 on"),
        ("torch", "fp32", HEADS, "--attention-backend torch needs bf16 on a .*GPU.*; found fp32 on"),
    ):
        with pytest.raises(OptionError, match=message):
            choose_attention_kernel(backend, dtype, heads)
    monkeypatch.setattr(transformer_config, "distributions", lambda name: iter([]))
    assert choose_attention_kernel("auto", "bf16", HEADS) == "torch"
    with pytest.raises(OptionError, match="found no such package: use auto"):
        choose_attention_kernel("fa4", "bf16", HEADS)


WIDTHS = [(128, 128), (64, 64), (192, 128)]  # of keys, of values
NO_FA4 = pytest.mark.skipif(not any(distributions(name=FA4)), reason="flash-attn-4 is not installed")
FLASH_KERNELS = ["torch", pytest.param("fa4", marks=NO_FA4)]


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("kernel", FLASH_KERNELS)
def test_flash_kernels_equal_padded_attention_in_fp32(kernel: AttentionKernel, widths: tuple[int, int]) -> None:
    pack, generator = make_pack(LENGTHS), torch.Generator("cuda").manual_seed(0)
    streams = {name: pack_stream(pack, torch.device("cuda"), kernel=name) for name in ("padded", kernel)}
    groups = 2 if widths[0] == widths[1] else 4  # latent attention has as many key heads as query heads
    inputs = [
        torch.randn(sum(LENGTHS), size, width, dtype=torch.bfloat16, device="cuda", generator=generator)
        for size, width in zip((4, groups, groups), (widths[0], *widths))
    ]
    results = []
    for name, dtype in (("padded", torch.float32), (kernel, torch.bfloat16)):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        out = packed_attention(*own, streams[name], 0.1)
        out.float().pow(2).sum().backward()
        results.append([out.detach().float(), *(x.grad.float() for x in own)])
    for expected, found in zip(*results):
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("kernel", FLASH_KERNELS)
def test_deterministic_flash_kernels_repeat_bit_for_bit(kernel: AttentionKernel, widths: tuple[int, int]) -> None:
    stream = pack_stream(make_pack([700, 1, 3000, 411]), torch.device("cuda"), kernel=kernel)
    generator, num_tokens = torch.Generator("cuda").manual_seed(0), len(stream.token_ids)
    inputs = [
        torch.randn(num_tokens, 4, width, dtype=torch.bfloat16, device="cuda", generator=generator).requires_grad_()
        for width in (widths[0], *widths)
    ]
    torch.use_deterministic_algorithms(True)
    try:
        results = []
        for _ in range(5):
            out = packed_attention(*inputs, stream, 0.1)
            results.append([out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)])
    finally:
        torch.use_deterministic_algorithms(False)
    for repeated in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], repeated))
