"""Distillation over the vocabulary in the training step: which teacher sees what, against plain loops. A bigram model
takes the place of the training engine; layout_ranks.py runs the same step under every layout."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from random_rollouts import samples

from penstock.stages.train.algorithms.divergences import TeacherTopK
from penstock.stages.train.batching import Batch, PackedMicrobatch, add_teacher_data
from penstock.stages.train.build import Models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.step import train_rollout
from penstock.storage.errors import RunError
from penstock.storage.samples.sample import TEACHER, Sample, to_table
from tests.train.bigram_engine import VOCABULARY, BigramEngine, process_group  # noqa: F401 fixture

KEPT = {"num_steps_per_rollout": 1, "max_tokens_per_gpu": 40}


class SumEngine(BigramEngine):
    """The logits of the next token are the sum of a table's rows of all tokens so far, so they depend on the prompt."""

    is_last_stage = True

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = table_of(0).to(dtype).requires_grad_()

    def hidden_of(self, packed: PackedMicrobatch) -> torch.Tensor:
        bounds = packed.cu_seqlens.tolist()
        rows = self.table[packed.token_ids]
        return torch.cat([rows[a:b].cumsum(0) for a, b in pairwise(bounds)])

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float(self.table.detach()[0, 0])

    def copy_head(self) -> Any:
        factor = float(self.table.detach()[0, 0])
        return lambda hidden: hidden * factor

    @contextmanager
    def using_weights(self, snapshot: torch.Tensor) -> Iterator[None]:
        own, self.table = self.table, snapshot
        yield
        self.table = own


def table_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 3


def config_of(**opd: Any) -> TrainConfig:
    return TrainConfig(**KEPT, opd={"opd_divergence": "reverse_kl", **opd})


def train(rows: list[Sample], config: TrainConfig, **models: Any) -> tuple[dict[str, Any], np.ndarray, Batch]:
    """Return the metrics, the divergence of each trained token, and the batch."""
    table = to_table(rows)
    batch = add_teacher_data(Batch.from_table(table, needs_rewards=True), table, config)
    result = train_rollout(Models(policy=SumEngine(), **models), batch, config, keep_tokens=True)
    return result.metrics, result.tokens["divergence"].numpy(), batch


def probs(table: torch.Tensor, tokens: list[int]) -> list[float]:
    logits = (table[tokens].sum(0) * table[0, 0]).tolist()
    weights = [math.exp(x - max(logits)) for x in logits]
    return [w / sum(weights) for w in weights]


def reverse_kl(p: list[float], q: list[float]) -> float:
    return sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))


def trained_positions(row: Sample) -> list[int]:
    return [i for i, mask in enumerate(row.loss_mask) if mask and i] if row.reward is not None else []


def test_each_sample_is_compared_with_the_teacher_that_its_prompt_names() -> None:
    rows, tables = samples(1), {"b": table_of(1), "a": table_of(2)}
    for number, row in enumerate(rows):
        row.metadata[TEACHER] = "ab"[number // 8 % 2]
    config = config_of(opd_teacher_load={"b": "/b", "a": "/a"}, opd_kl_coef=2.0)
    metrics, found, _ = train(rows, config, teachers={f"teacher.{name}": table for name, table in tables.items()})
    expected = [
        reverse_kl(probs(table_of(0), row.token_ids[:i]), probs(tables[row.metadata[TEACHER]], row.token_ids[:i]))
        for row in rows
        for i in trained_positions(row)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    loss = metrics["train/pg_loss"] + 2 * metrics["train/opd_divergence"]
    assert metrics["train/loss"] == pytest.approx(loss, abs=1e-5)
    top = config_of(opd_teacher_load={"b": "/b", "a": "/a"}, opd_top_k=VOCABULARY - 1)
    _, of_top_k, _ = train(rows, top, teachers={f"teacher.{name}": table for name, table in tables.items()})
    np.testing.assert_allclose(of_top_k, expected, rtol=1e-4)

    rows[0].metadata[TEACHER] = "c"
    with pytest.raises(RunError, match="have the teacher 'c', but --opd-teacher-load has a, b"):
        train(rows, config)


@pytest.mark.parametrize("k", [None, 5])
def test_the_policy_teaches_itself_after_another_prompt(k: int | None) -> None:
    rows = samples(2)
    for number, row in enumerate(rows):
        row.teacher_prompt_ids = [3 + number % 7] * (1 + 3 * number % 11)
    _, found, batch = train(rows, config_of(hinted={}, opd_top_k=k))
    expected = []
    for row in rows:
        for i in trained_positions(row):
            hinted = row.teacher_prompt_ids + row.token_ids[row.prompt_length : i]
            p, q = probs(table_of(0), row.token_ids[:i]), probs(table_of(0), hinted)
            if k is not None:
                ids = sorted(range(VOCABULARY), key=lambda token: -q[token])[:k]
                p, q = ([x[token] for token in ids] + [1 - sum(x[token] for token in ids)] for x in (p, q))
            expected.append(reverse_kl(p, q))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert batch.hinted is not None and (batch.hinted.num_trained_tokens == batch.num_trained_tokens).all()


def test_same_prompt_for_teacher_and_policy_gives_no_divergence() -> None:
    rows = samples(2)
    for row in rows:
        row.teacher_prompt_ids = row.token_ids[: row.prompt_length]
    metrics, found, _ = train(rows, config_of(hinted={}))
    assert abs(found).max() < 1e-12 and metrics["train/loss"] == pytest.approx(metrics["train/pg_loss"], abs=1e-9)


def test_log_ratio_to_itself_after_a_hint_is_subtracted_from_the_advantages() -> None:
    rows = samples(2)
    for row in rows:
        row.teacher_prompt_ids = [9, *row.token_ids[: row.prompt_length]]
    config = TrainConfig(**KEPT, opd={"hinted": {}})
    table = to_table(rows)
    batch = add_teacher_data(Batch.from_table(table, needs_rewards=True), table, config)
    engine: Any = SumEngine(torch.float32)
    result = train_rollout(Models(policy=engine), batch, config, keep_tokens=True)
    expected = [
        math.log(probs(table_of(0), [9, *row.token_ids[:i]])[row.token_ids[i]])
        for row in rows
        for i in trained_positions(row)
    ]
    np.testing.assert_allclose(result.tokens["trainer_teacher_logprobs"], expected, rtol=1e-4)


def stored(rows: list[Sample], k: int) -> list[Sample]:
    """Give the samples what an engine says: the k most probable tokens of a teacher at each trained token."""
    for row in rows:
        ids, logprobs = np.zeros((len(row.token_ids), k), np.int32), np.zeros((len(row.token_ids), k), np.float32)
        for i in (i for i, mask in enumerate(row.loss_mask) if mask):
            q = np.array(probs(table_of(5), row.token_ids[:i])) if i else np.ones(VOCABULARY) / VOCABULARY
            ids[i] = np.argsort(-q)[:k]
            logprobs[i] = np.log(q[ids[i]])
        row.teacher_top_ids, row.teacher_top_logprobs = ids.ravel(), logprobs.ravel()
    return rows


def test_stored_tokens_of_an_engine_give_the_divergence_of_the_same_teacher_in_the_trainer() -> None:
    opd = {"opd_top_k": 4, "opd_divergence": "forward_kl"}
    _, expected, _ = train(samples(3), config_of(opd_teacher_load="t", **opd), teachers={"teacher": table_of(5)})
    for k in (4, 6):  # more than are needed may be stored
        _, found, _ = train(stored(samples(3), k), config_of(opd_teacher_url="http://t", **opd))
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
    with pytest.raises(RunError, match="lack the teacher's 4 most probable tokens"):
        train(stored(samples(3), 3), config_of(opd_teacher_url="http://t", **opd))
    with pytest.raises(RunError, match="generated without --opd-top-k"):
        train(samples(3), config_of(opd_teacher_url="http://t", **opd))


def test_missing_prompts_of_the_teacher_are_refused() -> None:
    rows = samples(2)
    with pytest.raises(RunError, match="generated without --opd-self"):
        train(rows, config_of(hinted={}))
    rows[0].teacher_prompt_ids = [1]
    with pytest.raises(RunError, match="has no prompt for the teacher"):
        train(rows, config_of(hinted={}))


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opd_jsd_beta": 0.3, "opd_teacher_load": "t"}, "--opd-jsd-beta 0.3 has no effect"),
        ({"hinted": {}, "opd_teacher_load": "t"}, "needs one kind of teacher"),
        ({"opd_teacher_load": {"a/b": "a"}}, "use only letters, digits"),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**options)


def test_self_distillation_over_the_vocabulary_refuses_context_parallelism_and_its_average_refuses_adapters() -> None:
    with pytest.raises(ValueError, match="--context-parallel-size 2 splits"):
        TrainConfig(opd={"hinted": {}, "opd_divergence": "jsd"}, context_parallel_size=2, actor_num_gpus_per_node=2)
    with pytest.raises(ValueError, match="--opd-self-ema averages all weights"):
        TrainConfig(opd={"hinted": {"opd_self_ema": 0.1}}, lora={"lora_rank": 2})
    with pytest.raises(ValueError, match="--opd-divergence has no effect with --loss-type sft_loss"):
        TrainConfig(opd={"hinted": {}, "opd_divergence": "jsd"}, loss_type="sft_loss")


def test_tail_of_an_engine_is_what_its_tokens_leave() -> None:
    known = TeacherTopK.from_logprobs(torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.25]]).log())
    assert known.logprobs.exp()[0].tolist() == pytest.approx([0.5, 0.25, 0.25])
