"""Routed experts survive encoding and decoding; invalid routings and bytes of other models are refused."""

import numpy as np
import pytest

from penstock.storage.errors import EngineError, RunError
from penstock.storage.samples.routed_experts import UNKNOWN, ExpertsFormat


@pytest.mark.parametrize(("num_experts", "num_bytes"), [(8, 1), (256, 1), (257, 2), (512, 2)])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_round_trip(num_experts: int, num_bytes: int, num_tokens: int) -> None:
    """The last token is unknown; layers without experts are ignored."""
    known = ExpertsFormat(num_layers=5, num_dense_layers=2, num_experts=num_experts, top_k=3)
    rng = np.random.default_rng(num_experts + num_tokens)
    chosen = rng.random((num_tokens, 5, num_experts)).argsort(-1)[..., :3].astype(np.int32)
    chosen[:, :2] = -7
    content = known.encode(chosen.ravel(), num_tokens)
    assert len(content) == num_tokens * 3 * 3 * num_bytes
    decoded = known.decode(content, num_tokens + 1)
    assert decoded.dtype == np.int16 and (decoded[:num_tokens] == chosen[:, 2:]).all()
    assert (decoded[num_tokens:] == UNKNOWN).all() and decoded.shape == (num_tokens + 1, 3, 3)
    assert (known.decode(None, 4) == UNKNOWN).all()


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        ([0, 1, 2], "3 routed experts, expected 4 \\(1 tokens x 2 layers x 2 experts"),
        ([0, 1, 2, 2], "not 2 different ids below 4"),
        ([0, 1, 2, 4], "not 2 different ids below 4"),
        ([-1, 1, 2, 3], "not 2 different ids below 4"),
    ],
)
def test_encode_refuses_an_invalid_routing(chosen: list[int], sentence: str) -> None:
    known = ExpertsFormat(num_layers=2, num_dense_layers=0, num_experts=4, top_k=2)
    with pytest.raises(EngineError, match=sentence):
        known.encode(np.array(chosen, dtype=np.int32), 1)


@pytest.mark.parametrize("content", [bytes(7), bytes(12)])
def test_decode_refuses_bytes_of_another_model(content: bytes) -> None:
    known = ExpertsFormat(num_layers=2, num_dense_layers=0, num_experts=4, top_k=2)
    with pytest.raises(RunError, match=f"routed_experts .*{len(content)} expert ids"):
        known.decode(content, 2)
