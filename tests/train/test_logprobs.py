"""Compare log-probs and entropies in chunks with log_softmax in float64."""

from __future__ import annotations

import pytest
import torch

from penstock.stages.train.algorithms.logprobs import token_logprobs


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_chunked_logprobs_and_gradients_equal_log_softmax(chunk_size: int) -> None:
    torch.manual_seed(0)
    temperature = 0.7
    hidden = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(6, 17, bias=False, dtype=torch.float64)
    targets = torch.randint(17, (10,))
    upstream, entropy_upstream = torch.randn(10, dtype=torch.float64), torch.randn(10, dtype=torch.float64)

    log_p = (head(hidden) / temperature).log_softmax(-1)
    expected = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    expected_grads = torch.autograd.grad(
        (expected[0] * upstream + expected[1] * entropy_upstream).sum(), (hidden, head.weight)
    )

    found = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size, entropy_gradient=True)
    found_grads = torch.autograd.grad((found[0] * upstream + found[1] * entropy_upstream).sum(), (hidden, head.weight))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_grads, expected_grads)

    log_probs, entropy = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size)
    assert not entropy.requires_grad  # without an entropy bonus nothing is kept for it
    torch.testing.assert_close(
        torch.autograd.grad((log_probs * upstream).sum(), hidden)[0],
        torch.autograd.grad(
            ((head(hidden) / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0] * upstream).sum(), hidden
        )[0],
    )


def test_logprobs_of_no_tokens_give_zero_gradients() -> None:
    hidden, head = torch.randn(0, 6, requires_grad=True), torch.nn.Linear(6, 17)
    logprobs, _ = token_logprobs(hidden, head, torch.zeros(0, dtype=torch.long))
    logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()
