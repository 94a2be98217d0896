"""Wrong training options end in a sentence that names the flag."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stages.train.algorithm_config import PLUGINS
from stages.train.config import TrainConfig


def test_every_function_of_the_users_is_looked_at_before_anything_starts() -> None:
    assert set(PLUGINS) == {name for name in TrainConfig.model_fields if name.startswith("custom_")}


@pytest.mark.parametrize(
    "options,sentence",
    [
        ({"actor_num_gpus_per_node": 6, "tensor_model_parallel_size": 4}, "6 trainer ranks .* cannot be divided by .* = 4"),
        (
            {"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 4},
            "2 trainer ranks .* cannot be divided by expert .* = 4",
        ),
        (
            {"actor_num_gpus_per_node": 4, "global_batch_size": 2},
            "--global-batch-size 2 is smaller than the 4 data-parallel replicas",
        ),
        ({"lr_decay_style": "cosine"}, "--lr-decay-style cosine needs --lr-decay-iters"),
        ({"kl_loss_coef": 0.1}, "--kl-loss-coef 0.1 has no effect without --use-kl-loss"),
        ({"learning_rate": 0.1}, "Extra inputs are not permitted"),
    ],
)
def test_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainConfig(**options)


def test_replicas_are_what_is_left_of_the_ranks() -> None:
    config = TrainConfig(actor_num_nodes=2, actor_num_gpus_per_node=8, tensor_model_parallel_size=2, context_parallel_size=2)
    assert (config.num_ranks, config.data_parallel_size) == (16, 4)
