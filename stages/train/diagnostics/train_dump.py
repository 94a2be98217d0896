"""Write the data that a round was trained on to a file that other tools read (--save-debug-train-data).

The file has {"rollout_id", "rank", "samples"}, with a dictionary per sample, in the order of the rollout's samples.
Every rank holds the data of all samples, so rank 0 writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from penstock.stages.torch_files import fill_template, save_torch_file
from penstock.stages.train.batching import Batch
from penstock.stages.train.step import TrainedRound


def save_train_data(template: str, rollout_id: int, table: pa.Table, batch: Batch, trained: TrainedRound) -> Path:
    """Write the training data of round `rollout_id`, and return the path.

    Args:
        template: path with placeholders, see --save-debug-train-data.
        rollout_id: number of the round.
        table: committed samples of the round.
        batch: the same samples as arrays.
        trained: the result of training, with the log-probs, advantages and returns of the trained tokens.

    Raises:
        OSError: the file cannot be written.
    """
    path = fill_template(template, rollout_id=rollout_id, rank=0)
    experience, estimate = trained.experience, trained.estimate
    per_token = {  # name -> [N], values of the trained tokens
        "log_probs": trained.tokens.get("trainer_logprobs"),
        "rollout_log_probs": experience.rollout_logprobs,
        "ref_log_probs": experience.ref_logprobs,
        "teacher_log_probs": experience.teacher_logprobs,
        "values": experience.values,
        "advantages": estimate.advantages,
        "returns": estimate.returns,
    }
    fields = {name: at_all_tokens(values, batch) for name, values in per_token.items() if values is not None}
    masks = table["loss_mask"].to_pylist()
    samples = [row_of_sample(batch, fields, masks[index], index) for index in range(len(batch.lengths))]
    save_torch_file(path, {"rollout_id": rollout_id, "rank": 0, "samples": samples})
    return path


def at_all_tokens(values: Tensor, batch: Batch) -> Tensor:  # [N] -> [S] float32
    """Return values of the trained tokens at the positions of all tokens, with 0 at the others."""
    result = torch.zeros(len(batch.token_ids))
    result[torch.from_numpy(batch.trained_positions)] = values.float()
    return result


def row_of_sample(batch: Batch, fields: dict[str, Tensor], mask: list[int], index: int) -> dict[str, Any]:
    """Return the tokens of sample `index`, and its per-token data (`fields`: name -> values of all tokens) from the
    first trained token on. `mask`: the sample's loss mask in the commit."""
    start, end = int(batch.offsets[index]), int(batch.offsets[index + 1])
    num_prompt = mask.index(1) if 1 in mask else len(mask)
    first = start + num_prompt
    reward = float(batch.rewards[index])
    return {
        "sample_index": index,
        "group_index": int(batch.group_index[index]),
        "tokens": torch.from_numpy(batch.token_ids[start:end].copy()),
        "response_length": end - first,
        "loss_mask": torch.from_numpy(batch.loss_mask[first:end].astype(np.int64)),
        "reward": None if np.isnan(reward) else reward,
        **{name: values[first:end].clone() for name, values in fields.items()},
    }
