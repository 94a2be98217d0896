"""Corrections of the engine's log-probs against loops over lists, and what they do to the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from stages.train.algorithms.corrections import correction
from stages.train.algorithms.objectives import policy_objective
from tests.train.ragged import options, sums
from tests.train.test_policy_losses import LENGTHS, made_up, split, tensors


def naive(
    old: list[float], rollout: list[float], level: str, mode: str, low: float, high: float, veto: float | None
) -> list[tuple[float, ...]]:
    """(ratio, weight, kept) of every token."""
    found: list[tuple[float, ...]] = []
    for mine in zip(split(old), split(rollout), strict=True):
        gaps = [o - r for o, r in zip(*mine, strict=True)]
        whole = {"sequence": sum(gaps), "geometric": sum(gaps) / len(gaps), "token": 0.0}[level]
        kept = veto is None or all(math.exp(gap) >= veto for gap in gaps)
        for gap in gaps:
            ratio = math.exp(gap if level == "token" else whole)
            inside = low <= ratio <= high
            weight = ratio if inside else (max(low, min(high, ratio)) if mode == "truncate" else 0.0)
            found.append((ratio, weight, float(kept)))
    return found


@pytest.mark.parametrize("veto", [None, 0.7])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_every_correction_equals_the_loop(level: str, mode: str, veto: float | None) -> None:
    _, known, _ = made_up(1, spread=0.2)
    low, high = (0.9, 1.1) if level == "geometric" else (0.7, 1.5)
    correct = correction(options(use_tis=True, tis_level=level, tis_mode=mode, tis_clip_low=low, tis_clip=high, tis_veto=veto))
    assert correct is not None
    old, rollout = (torch.tensor(known[name], dtype=torch.float64) for name in ("old_logprobs", "rollout_logprobs"))
    weights, mask, metrics = correct(old, rollout, sums(LENGTHS))
    ratios, expected, kept = (
        list(column) for column in zip(*naive(old.tolist(), rollout.tolist(), level, mode, low, high, veto), strict=True)
    )
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)
    assert metrics["tis"].tolist() == pytest.approx(ratios, rel=1e-12)
    assert metrics["tis_abs"].tolist() == pytest.approx([abs(ratio - 1) for ratio in ratios], rel=1e-9)
    assert metrics["tis_clipfrac"].tolist() == [float(w != r) for w, r in zip(expected, ratios, strict=True)]
    assert 0 < metrics["tis_clipfrac"].mean() < 1
    assert (mask is None) == (veto is None)
    if mask is not None:
        assert mask.tolist() == kept and 0 < mask.mean() < 1
        assert metrics["tis_veto_frac"].tolist() == [1.0 - k for k in kept]


def test_weights_scale_the_policy_gradient_and_a_veto_takes_tokens_out_of_the_whole_loss() -> None:
    new, known, entropy = made_up(1)
    terms = dict(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")

    def loss(**changed: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logprobs = torch.tensor(new, dtype=torch.float64)
        return policy_objective(options(**changed))(
            logprobs, torch.tensor(entropy, dtype=torch.float64), tensors(known), sums(LENGTHS)
        )

    plain, rest = loss()[0], loss(**terms)[0] - loss()[0]
    tis = dict(use_tis=True, tis_clip=1.3, tis_veto=0.5)
    expected = naive(known["old_logprobs"], known["rollout_logprobs"], "token", "truncate", 0.0, 1.3, 0.5)
    weights, kept = (torch.tensor([row[i] for row in expected], dtype=torch.float64) for i in (1, 2))
    found, metrics = loss(**terms, **tis)
    torch.testing.assert_close(found, (plain * weights + rest) * kept)
    torch.testing.assert_close(metrics["train/pg_loss"], plain * weights * kept)
    assert metrics["train/kl_loss"].all()  # what is watched keeps the original mask

    measured, metrics = loss(**terms, **(tis | {"use_tis": False, "get_mismatch_metrics": True}))
    assert torch.equal(measured, loss(**terms)[0]) and "train/tis" in metrics and "train/tis" not in loss(**terms)[1]


def test_a_scale_of_the_reducer_touches_the_policy_gradient_alone() -> None:
    new, known, entropy = made_up(2)
    scale = torch.linspace(0, 3, len(new), dtype=torch.float64)
    logprobs, entropies, streams = (
        torch.tensor(new, dtype=torch.float64),
        torch.tensor(entropy, dtype=torch.float64),
        tensors(known),
    )
    objective = policy_objective(options(entropy_coef=0.1))
    _, before = objective(logprobs, entropies, streams, sums(LENGTHS))
    streams.pg_scale = scale
    loss, after = objective(logprobs, entropies, streams, sums(LENGTHS))
    torch.testing.assert_close(after["train/pg_loss"], before["train/pg_loss"] * scale)
    torch.testing.assert_close(loss, after["train/pg_loss"] - 0.1 * entropies)


def test_nothing_is_computed_that_nobody_asked_for() -> None:
    assert correction(options()) is None


def test_a_correction_of_the_users(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def correction(old, rollout, samples, options):\n"
        "    gap = samples.mean((old - rollout).abs())\n"
        "    return 1 / (1 + gap), (gap < 0.6).to(gap.dtype), {'gap': gap}\n\n"
        "def scalar(old, rollout, samples, options):\n"
        "    return old.mean(), None, {}\n"
    )
    new, known, entropy = made_up(3)
    given = torch.tensor(new, dtype=torch.float64), torch.tensor(entropy, dtype=torch.float64), tensors(known), sums(LENGTHS)
    plain, _ = policy_objective(options())(*given)
    found, metrics = policy_objective(options(use_tis=True, custom_tis_function_path=str(mine)))(*given)
    gaps = [
        [abs(o - r) for o, r in zip(*part, strict=True)]
        for part in zip(split(known["old_logprobs"]), split(known["rollout_logprobs"]), strict=True)
    ]
    gap = torch.tensor([sum(part) / len(part) for part in gaps for _ in part], dtype=torch.float64)
    torch.testing.assert_close(metrics["train/gap"], gap)
    torch.testing.assert_close(found, plain / (1 + gap) * (gap < 0.6))
    assert 0 < (gap < 0.6).double().mean() < 1
    with pytest.raises(ValueError, match=r"weights of shape \[\]: return one number for each of 16 tokens"):
        policy_objective(options(use_tis=True, custom_tis_function_path=f"{mine}:scalar"))(*given)
