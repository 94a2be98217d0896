"""Compare corrections of the mismatch with plain loops, and check their effect on the loss."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from penstock.stages.train.algorithms.losses import mismatch_correction, policy_loss
from penstock.storage.errors import PluginError
from tests.train.ragged import options, sums
from tests.train.test_policy_losses import LENGTHS, made_up, policy_inputs, split


def naive(
    old: list[float], rollout: list[float], level: str, mode: str, low: float, high: float, veto: float | None
) -> list[tuple[float, ...]]:
    """Return (ratio, weight, kept) of every token."""
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
def test_every_correction_equals_a_plain_loop(level: str, mode: str, veto: float | None) -> None:
    _, known, _ = made_up(2, spread=0.2)
    low, high = (0.9, 1.1) if level == "geometric" else (0.7, 1.5)
    opts = options(use_tis=True, tis_level=level, tis_mode=mode, tis_clip_low=low, tis_clip=high, tis_veto=veto)
    old, rollout = (torch.tensor(known[name], dtype=torch.float64) for name in ("old_logprobs", "rollout_logprobs"))
    weights, mask, metrics = mismatch_correction(old, rollout, sums(LENGTHS), opts)
    ratios, expected, kept = (
        list(column)
        for column in zip(*naive(old.tolist(), rollout.tolist(), level, mode, low, high, veto), strict=True)
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


def test_weights_scale_the_policy_gradient_and_a_veto_masks_the_whole_loss() -> None:
    new, known, entropy = made_up(2)
    terms = dict(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")

    def loss(**changed: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return policy_loss(*policy_inputs(new, known, entropy), options(**changed))

    plain, rest = loss()[0], loss(**terms)[0] - loss()[0]
    tis = dict(use_tis=True, tis_clip=1.3, tis_veto=0.5)
    expected = naive(known["old_logprobs"], known["rollout_logprobs"], "token", "truncate", 0.0, 1.3, 0.5)
    weights, kept = (torch.tensor([row[i] for row in expected], dtype=torch.float64) for i in (1, 2))
    found, metrics = loss(**terms, **tis)
    torch.testing.assert_close(found, (plain * weights + rest) * kept)
    torch.testing.assert_close(metrics["train/pg_loss"], plain * weights * kept)
    assert metrics["train/kl_loss"].all()  # metrics are not masked

    measured, metrics = loss(**terms, **(tis | {"use_tis": False, "get_mismatch_metrics": True}))
    assert torch.equal(measured, loss(**terms)[0]) and "train/tis" in metrics and "train/tis" not in loss(**terms)[1]


def test_reducer_scale_changes_only_the_policy_gradient() -> None:
    new, known, entropy = made_up(2)
    scale = torch.linspace(0, 3, len(new), dtype=torch.float64)
    logprobs, entropies, fields, samples = policy_inputs(new, known, entropy)
    opts = options(entropy_coef=0.1)
    _, before = policy_loss(logprobs, entropies, fields, samples, opts)
    fields.pg_scale = scale
    loss, after = policy_loss(logprobs, entropies, fields, samples, opts)
    torch.testing.assert_close(after["train/pg_loss"], before["train/pg_loss"] * scale)
    torch.testing.assert_close(loss, after["train/pg_loss"] - 0.1 * entropies)


def test_user_defined_correction(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def correction(old, rollout, samples, options):\n"
        "    gap = samples.mean((old - rollout).abs())\n"
        "    return 1 / (1 + gap), (gap < 0.6).to(gap.dtype), {'gap': gap}\n\n"
        "def scalar(old, rollout, samples, options):\n"
        "    return old.mean(), None, {}\n"
    )
    new, known, entropy = made_up(3)
    given = policy_inputs(new, known, entropy)
    plain, _ = policy_loss(*given, options())
    found, metrics = policy_loss(*given, options(use_tis=True, custom_tis_function_path=str(mine)))
    gaps = [
        [abs(o - r) for o, r in zip(*part, strict=True)]
        for part in zip(split(known["old_logprobs"]), split(known["rollout_logprobs"]), strict=True)
    ]
    gap = torch.tensor([sum(part) / len(part) for part in gaps for _ in part], dtype=torch.float64)
    torch.testing.assert_close(metrics["train/gap"], gap)
    torch.testing.assert_close(found, plain / (1 + gap) * (gap < 0.6))
    assert 0 < (gap < 0.6).double().mean() < 1
    with pytest.raises(PluginError, match=f"{mine}:scalar"):
        policy_loss(*given, options(use_tis=True, custom_tis_function_path=f"{mine}:scalar"))
