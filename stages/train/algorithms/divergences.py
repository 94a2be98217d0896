"""Compute the divergence between the policy's and a teacher's distribution over the vocabulary at each trained token.

A divergence is a sum over outcomes. The outcomes are all tokens of the vocabulary, or the teacher's k most probable
tokens and, as one further outcome, all other tokens together (the tail bucket of SDPO, arXiv 2601.20802, `add_tail` in
its code). If a process group is given, the vocabulary is split over its ranks: rank i holds the i-th slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engines.training import OutputHead
from penstock.stages.train.algorithms.logprobs import scale_logits

# log p and log q of the outcomes [t, outcomes] -> Terms: a row of DIVERGENCE_TERMS, to which beta is bound
Divergence = Callable[[Tensor, Tensor], "Terms"]
SMALLEST_TAIL = 1e-7  # of a teacher whose k probabilities, rounded to float32, may sum to 1; the bound of SDPO's code


class Terms(NamedTuple):
    """The parts of a divergence D(p, q), where p is the policy and q the teacher."""

    values: Tensor  # [t, outcomes] the summands of D
    slopes: Tensor  # [t, outcomes] p x dD/dp, with the probabilities as independent variables


def forward_kl(log_p: Tensor, log_q: Tensor, beta: float) -> Terms:
    """Return the terms of KL(q || p) = sum of q (log q - log p): p covers all that q does (arXiv 1503.02531)."""
    q = log_q.exp()
    return Terms(q * (log_q - log_p), -q)


def reverse_kl(log_p: Tensor, log_q: Tensor, beta: float) -> Terms:
    """Return the terms of KL(p || q) = sum of p (log p - log q): p prefers the modes of q (arXiv 2306.08543)."""
    p = log_p.exp()
    values = p * (log_p - log_q)
    return Terms(values, values + p)


def jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Terms:
    """Return the terms of the generalized Jensen-Shannon divergence beta KL(q || m) + (1 - beta) KL(p || m), where
    m = beta q + (1 - beta) p (GKD, arXiv 2306.13649). The gradient tends to that of beta x forward KL as beta tends to
    0, and to that of (1 - beta) x reverse KL as beta tends to 1."""
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(math.log(beta) + log_q, math.log1p(-beta) + log_p)
    of_p = (1 - beta) * p * (log_p - log_m)
    return Terms(beta * q * (log_q - log_m) + of_p, of_p)


DIVERGENCE_TERMS = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}  # --opd-divergence


# ---- teachers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's distribution at n positions: its k most probable tokens, and the rest."""

    ids: Tensor  # [n, k] int64
    logprobs: Tensor  # [n, k + 1]; the last column is for all other tokens together

    @classmethod
    def from_logprobs(cls, ids: Tensor, logprobs: Tensor) -> TeacherTopK:  # [n, k] each
        """Add the probability of all other tokens to the log-probs of the k tokens."""
        total = logprobs.double().logsumexp(-1, keepdim=True).clamp(max=-SMALLEST_TAIL)
        return cls(ids, torch.cat([logprobs.double(), torch.expm1(total).neg().log()], -1).to(logprobs.dtype))

    def outcomes(self, rows: Tensor, like: Tensor, temperature: float, group: Any) -> tuple[Tensor | None, Tensor]:
        """Return the ids [t, k] and the log-probs [t, k + 1] of the outcomes, on the device of `like`."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return self.ids[rows.cpu()].to(like.device), self.logprobs[rows.cpu()].to(like.device, dtype)


@dataclass(frozen=True)
class TeacherHidden:
    """The distributions of one or several teachers at n positions, over the whole vocabulary, as hidden states: the
    logits of all positions would not fit into memory."""

    hidden: Tensor  # [n, H] in host memory
    heads: Sequence[OutputHead]  # of each teacher
    teacher: Tensor  # [n] int64, which teacher a position has

    def outcomes(self, rows: Tensor, like: Tensor, temperature: float, group: Any) -> tuple[Tensor | None, Tensor]:
        """Return None, and the log-probs [t, V / group size] of this rank's slice of the vocabulary."""
        hidden, teacher = self.hidden[rows.cpu()].to(like.device), self.teacher[rows.cpu()].to(like.device)
        with torch.no_grad():
            x = scale_logits(self.heads[0](hidden), temperature)
            for index, head in enumerate(self.heads[1:], 1):
                own = (teacher == index).nonzero()[:, 0]
                x[own] = scale_logits(head(hidden[own]), temperature)
            return None, x - log_sum_exp(x, group)[:, None]


Teacher = TeacherTopK | TeacherHidden


def replace_rows(before: Teacher | None, new: Teacher, rows: Tensor) -> Teacher:
    """Return `before` with the distributions of `new` in some rows [n] (bool); `new` without `before`."""
    names = ("hidden",) if isinstance(new, TeacherHidden) else ("ids", "logprobs")
    parts = {name: torch.where(rows[:, None], getattr(new, name), getattr(before or new, name)) for name in names}
    return replace(new, **parts)  # type: ignore[arg-type]


@torch.no_grad()
def top_k(logits: Tensor, k: int, temperature: float, group: dist.ProcessGroup | None) -> TeacherTopK:
    """Return the k most probable tokens of each row of logits [t, V / group size], the same on every rank."""
    x = scale_logits(logits, temperature)
    values, ids = x.topk(min(k, x.shape[-1]))
    if group is not None:
        ids = ids + group.rank() * x.shape[-1]
        parts = [[torch.empty_like(part) for _ in range(group.size())] for part in (values, ids)]
        for own, gathered in zip((values.contiguous(), ids.contiguous()), parts):
            dist.all_gather(gathered, own, group=group)
        values, ids = (torch.cat(part, -1) for part in parts)
        values, chosen = values.topk(k)
        ids = ids.gather(-1, chosen)
    _, tail = _split_vocabulary(x, ids, group)
    total = log_sum_exp(x, group)[:, None]
    return TeacherTopK(ids, torch.cat([values, log_sum_exp(tail, group)[:, None]], -1) - total)


# ---- the divergence --------------------------------------------------------------------------------------------------


def vocabulary_divergence(
    logits: Tensor,  # [t, V / group size] of the policy
    rows: Tensor,  # [t] int64, the teacher's positions to which they belong
    teacher: Teacher,
    divergence: Divergence,
    temperature: float,
    group: dist.ProcessGroup | None,
) -> Tensor:  # [t] float32 or wider
    """Return the divergence between softmax(logits / temperature) and the teacher's distribution at each position."""
    ids, log_q = teacher.outcomes(rows, logits, temperature, group)
    result: Tensor = _Divergence.apply(logits, ids, log_q, divergence, temperature, group)
    return result


class _Divergence(torch.autograd.Function):
    """Compute a divergence and its gradient, d D / d x_j = slope_j - p_j x (sum of all slopes), with x = logits /
    temperature. A token of the tail has the share of the tail's slope that it has of the tail's probability."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [t, V / group size]
        ids: Tensor | None,  # [t, k]
        log_q: Tensor,  # [t, V / group size], or [t, k + 1] with `ids`
        divergence: Divergence,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        x = scale_logits(logits, temperature)
        total = log_sum_exp(x, group)[:, None]
        if ids is None:
            values, slopes = divergence(x - total, log_q)
            sums = torch.stack([values.sum(-1), slopes.sum(-1)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            value, gradient = sums[0], slopes - (x - total).exp() * sums[1][:, None]
        else:
            at_ids, tail = _split_vocabulary(x, ids, group)
            tail_total = log_sum_exp(tail, group)[:, None]
            values, slopes = divergence(torch.cat([at_ids, tail_total], -1) - total, log_q)
            value = values.sum(-1)
            gradient = slopes[:, -1:] * (tail - tail_total).exp() - slopes.sum(-1, True) * (x - total).exp()
            columns, is_own = _own_columns(ids, x.shape[-1], group)
            gradient.scatter_add_(-1, columns, slopes[:, :-1] * is_own)
        ctx.save_for_backward(gradient.div_(temperature))
        ctx.dtype = logits.dtype
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = ctx.saved_tensors
        return (gradient * grads[0][:, None]).to(ctx.dtype), None, None, None, None, None


def log_sum_exp(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:  # [t, V / group size] -> [t]
    """Return the log of the sum of exp(x) over the whole vocabulary."""
    if group is None:
        return x.logsumexp(-1)
    largest = x.amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = (x - largest[:, None]).exp().sum(-1)
    dist.all_reduce(sums, group=group)
    return sums.log() + largest


def _split_vocabulary(x: Tensor, ids: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the values at the given ids [t, k], and a copy of this rank's slice [t, V / group size] in which these
    entries have the lowest finite number, so that they do not add to a sum of exp(x)."""
    columns, is_own = _own_columns(ids, x.shape[-1], group)
    at_ids = torch.where(is_own, x.gather(-1, columns), 0.0)
    if group is not None:
        dist.all_reduce(at_ids, group=group)
    taken = torch.zeros_like(x).scatter_add_(-1, columns, is_own.to(x.dtype)) > 0
    return at_ids, x.masked_fill(taken, torch.finfo(x.dtype).min / 4)


def _own_columns(ids: Tensor, num_columns: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return each id's column in this rank's slice of the vocabulary [t, k], and whether the rank has the id [t, k]."""
    columns = ids - (0 if group is None else group.rank() * num_columns)
    return columns.clamp(0, num_columns - 1), (columns >= 0) & (columns < num_columns)
