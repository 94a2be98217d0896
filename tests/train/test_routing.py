"""Routing replay: from the shards' bytes to the record of a micro-batch, and rounds of training with it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.engines.families import read_shape
from penstock.engines.families.shape import Experts, experts_format
from penstock.stages.train.batching import Batch, EngineChoices
from penstock.stages.train.build import Models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.step import train_rollout
from penstock.storage.errors import OptionError
from penstock.storage.samples.routed_experts import ExpertsFormat
from penstock.storage.samples.sample import Sample, to_table
from tests import random_rollouts
from tests.engines.megatron_reference import SHAPE, Pack
from tests.engines.replay_ranks import make_engine
from tests.families import make_family

MIXTURE = SHAPE.model_copy(
    update={"experts": Experts(num_experts=6, top_k=2, ffn_hidden_size=8, num_dense_layers=2)}
)  # 4 layers


def samples(lengths: list[int]) -> list[Sample]:
    """Return samples: token t of sample s goes to experts s and 4 in layer 2, and to 5 and t % 5 in layer 3; the last
    token's are unknown."""
    known = experts_format(MIXTURE, "--option")
    rows = []
    for number, length in enumerate(lengths):
        chosen = np.array([[[0, 0], [0, 0], [number, 4], [5, t % 5]] for t in range(length - 1)], dtype=np.int32)
        content = known.encode(chosen.ravel(), length - 1)
        row = Sample(f"s{number}", "g", f"t{number}", 0, token_ids=[7] * length, routed_experts=content)
        row.loss_mask, row.rollout_logprobs = [1] * length, [0.0] * length
        rows.append(row)
    return rows


def test_routing_record_has_the_experts_of_the_packed_samples() -> None:
    rows = samples([3, 1, 2, 4])
    rows[2].routed_experts = None  # its generation failed, say
    choices = EngineChoices.from_table(to_table([*samples([5]), *rows]).slice(1), MIXTURE)
    record = choices.decode([3, 2, 0])
    assert list(record) == [2, 3]
    unknown = [-1, -1]
    assert record[2].tolist() == [[3, 4], [3, 4], [3, 4], unknown, unknown, unknown, [0, 4], [0, 4], unknown]
    assert record[3].tolist() == [[5, 0], [5, 1], [5, 2], unknown, unknown, unknown, [5, 0], [5, 1], unknown]
    assert choices.decode([]) == {}


def test_missing_experts_are_refused() -> None:
    with pytest.raises(OptionError, match="--use-rollout-routing-replay"):
        EngineChoices.from_table(to_table(samples([3])), SHAPE)
    rows = samples([3, 4])
    for row in rows:
        row.routed_experts = None
    with pytest.raises(OptionError, match=r"--use-rollout-routing-replay.* no routed experts"):
        EngineChoices.from_table(to_table(rows), MIXTURE)


# ---- a round of training ---------------------------------------------------------------------------------------------


def test_replaying_equal_experts_of_engine_and_trainer_gives_equal_steps(world: None, tmp_path: Path) -> None:
    """R3 with the trainer's own choice equals R2. Both differ from free routing in the second optimizer step, and from
    another choice of the engine in the first."""
    checkpoint = make_family(tmp_path / "qwen3-moe", "qwen3-moe")
    shape = read_shape(checkpoint)
    rows = random_rollouts.samples(0, 16)
    own = own_choices(make_engine(shape, checkpoint), rows, experts_format(shape, "--option"))

    def trained(option: str | None, choices: list[bytes] | None = None) -> list[dict[str, float]]:
        for row, content in zip(rows, choices or [None] * len(rows)):
            row.routed_experts = content
        table = to_table(rows)
        batch = Batch.from_table(table, needs_rewards=True)
        if choices is not None:
            batch = replace(batch, engine_choices=EngineChoices.from_table(table, shape))
        config = TrainConfig(num_steps_per_rollout=2, max_tokens_per_gpu=60, **({option: True} if option else {}))
        return train_rollout(Models(policy=make_engine(shape, checkpoint)), batch, config).steps

    free, recorded = trained(None), trained("use_routing_replay")
    followed = trained("use_rollout_routing_replay", own)
    other = trained("use_rollout_routing_replay", [bytes(7 - expert for expert in content) for content in own])
    watched = ("train/loss", "train/grad_norm", "train/ppo_kl", "train/train_rollout_logprob_abs_diff")
    for name in watched:
        assert recorded[0][name] == free[0][name], "before the first step the routing is the same"
        assert [step[name] for step in followed] == pytest.approx(
            [step[name] for step in recorded], rel=1e-5, abs=1e-7
        ), name
    assert recorded[1]["train/grad_norm"] != pytest.approx(free[1]["train/grad_norm"], rel=1e-3)
    assert other[0]["train/grad_norm"] != pytest.approx(free[0]["train/grad_norm"], rel=1e-3)


def own_choices(engine: Any, rows: list[Sample], known: ExpertsFormat) -> list[bytes]:
    """Return the trainer's experts for each sample as bytes of an engine, which omits the last token."""
    contents = []
    for row in rows:
        length = len(row.token_ids)
        pack = Pack(
            token_ids=torch.tensor(row.token_ids),
            position_ids=torch.arange(length),
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            max_seqlen=length,
        )
        engine.forward_backward([pack], lambda *_: (None, {}), forward_only=True, routing="record")
        chosen = torch.stack([pack.routing[layer] for layer in known.routed_layers], 1)[: length - 1]
        contents.append(known.encode(chosen.int().numpy().ravel(), length - 1))
    return contents
