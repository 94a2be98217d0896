"""Recompute a trained round without the model: advantages, token weights and loss, from what the store has of it.

The functions are those of the trainer. What the model computed (log-probs, values, entropies) is read from the round's
trained tokens; what is not stored is named, not estimated. The Parquet file of a round has the columns of sample shards
and trained tokens; the metadata of its schema have the options and the trainer's metrics.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from penstock.stages.train.algorithms.advantages import estimate_advantages
from penstock.stages.train.algorithms.experience import Experience
from penstock.stages.train.algorithms.losses import LOSSES, importance_weights
from penstock.stages.train.batching import Batch, pack, read_teacher_logprobs
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import compute_loss_weights, samples_of_steps
from penstock.stages.train.step import attach_token_fields, needs_old_logprobs, stored_experience
from penstock.storage import disk
from penstock.storage.errors import RunError
from penstock.storage.samples.sample import SCHEMA, check_schema
from penstock.storage.samples.shards import TOKEN_COLUMNS
from penstock.storage.secrets import mask_secrets

FORMAT, METADATA = 1, b"penstock_round"  # version of the file; key of its metadata
_COLUMNS = [name for name in SCHEMA.names if name != "routed_experts"]


@dataclass(frozen=True)
class StoredRound:
    """The stored data of a trained round."""

    samples: pa.Table  # [B] rows with SCHEMA
    trained: pa.Table  # [B] rows with the columns of TOKEN_COLUMNS that the round has stored
    config: TrainConfig  # with which the round was trained
    about: dict[str, Any]  # run, round, options of the reward; `steps`: the trainer's metrics of each optimizer step

    @cached_property
    def batch(self) -> Batch:
        """The samples as arrays, as the trainer has read them."""
        components = self.config.gdpo_reward_weights
        batch = Batch.from_table(self.samples, needs_rewards=True, components=components)
        if self.config.reads_teacher_logprobs and not self.config.distills_vocabulary:
            batch = replace(batch, teacher_logprobs=read_teacher_logprobs(self.samples, batch))
        return batch

    @cached_property
    def tokens(self) -> dict[str, Tensor]:
        """The stored values of the N trained tokens: column -> [N] float64."""
        columns = [name for name in TOKEN_COLUMNS if name in self.trained.column_names]
        tokens = {name: torch.tensor(pc.list_flatten(self.trained[name]).to_numpy()).double() for name in columns}
        num_tokens = len(self.batch.trained_positions)
        if wrong := [name for name, values in tokens.items() if len(values) != num_tokens]:
            raise RunError(f"{wrong[0]} does not have one value for each of the {num_tokens} trained tokens")
        return tokens


class Recomputed(NamedTuple):
    """The arithmetic of a round with B samples and N trained tokens, as far as it is stored or could be computed."""

    experience: Experience
    # Name -> [N]: the stored columns, rollout_logprobs, step (optimizer step), weight; of the advantages kl_penalty,
    # estimated, distilled, whitened; importance, mask, loss, share, and the metrics of the loss.
    values: dict[str, Tensor]
    problem: str = ""  # why advantages or loss could not be computed
    step_losses: Sequence[float] = ()  # of each optimizer step; empty if they could not be computed


def recompute(stored: StoredRound) -> Recomputed:
    """Recompute the advantages of a round and the loss of its optimizer steps, as far as they are stored."""
    batch, config, values = stored.batch, stored.config, dict(stored.tokens)
    steps = samples_of_steps(batch.trajectory_index, config)
    step_of_sample = torch.zeros(len(batch.lengths), dtype=torch.int64)
    for step, rows in enumerate(steps):
        step_of_sample[torch.from_numpy(rows)] = step
    experience = stored_experience(batch)
    experience.ref_logprobs, experience.values = values.get("ref_logprobs"), values.get("values")
    experience.teacher_logprobs = values.get("trainer_teacher_logprobs", experience.teacher_logprobs)
    if config.use_rollout_logprobs:
        experience.old_logprobs = experience.rollout_logprobs
    elif needs_old_logprobs(config, len(steps)):
        experience.old_logprobs = values.get("trainer_logprobs")
    if "trainer_logprobs" in values and (len(steps) == 1 or config.use_rollout_logprobs):  # those of the optimizer step
        values.setdefault("step_logprobs", values["trainer_logprobs"])
    weights = compute_loss_weights(batch, config)
    values |= {"rollout_logprobs": experience.rollout_logprobs, "weight": weights.weights}
    values["step"] = step_of_sample[experience.sample_index]
    if problem := next(_problems(stored, values, False, len(steps)), ""):
        return Recomputed(experience, values, f"the advantages cannot be recomputed: {problem}")
    whitened = {"normalize_advantages": False}  # each part without the later ones
    for name, later in (("estimated", {"opd": None} | whitened), ("distilled", whitened), ("whitened", {})):
        estimate = estimate_advantages(experience, config.model_copy(update=later))
        values[name] = estimate.advantages
    values["kl_penalty"] = config.kl_coef * estimate.metrics.get("rollout/kl", torch.zeros_like(estimate.advantages))
    if problem := next(_problems(stored, values, True, len(steps)), ""):
        return Recomputed(experience, values, f"the loss cannot be recomputed: {problem}")
    packed = pack(batch, range(len(batch.lengths)))  # one micro-batch of all samples, in float32 as in the trainer
    attach_token_fields([[packed]], experience, estimate, weights, torch.device("cpu"))
    fields, logprobs = packed.fields, values["step_logprobs"].float()
    assert fields is not None and packed.weights is not None, "attach_token_fields sets them"
    fields.divergence = values["divergence"].float() if config.distills_vocabulary else None
    entropy = values.get("entropy", torch.zeros_like(logprobs)).float()
    values["loss"], metrics = LOSSES[config.loss_type](logprobs, entropy, fields, packed.samples, config)
    if config.loss_type == "policy_loss":
        trainer = metrics["rollout/log_probs"]
        old = fields.rollout_logprobs if config.use_rollout_logprobs else trainer
        parts = importance_weights(logprobs, old, trainer, fields, packed.samples, config)
        values["importance"], values["mask"], _ = parts
    values |= metrics | {"share": (packed.weights * values["loss"]).double()}
    losses = torch.zeros(len(steps)).double().index_add(0, values["step"], values["share"])
    return Recomputed(experience, values, step_losses=losses.tolist())


def _problems(stored: StoredRound, values: Mapping[str, Tensor], of_loss: bool, num_steps: int) -> Iterator[str]:
    """Yield the reasons why the loss or the advantages of a round cannot be recomputed."""
    config = stored.config
    if config.replay is not None:
        yield "the round may also have trained on samples of earlier rounds (--replay-share)"
    if of_loss and (path := config.rollout_data_postprocess_path):
        yield f"--rollout-data-postprocess-path {path} has changed the data, and the changed data are not stored"
    if of_loss and config.ppo_epochs > 1:
        yield f"the round has {config.ppo_epochs} epochs (--ppo-epochs), and only the first one's log-probs are stored"
    if of_loss and "train/loss" not in stored.about["steps"][0]:
        yield "the round has trained only the critic (--num-critic-only-steps)"
    needed = {
        "trainer_logprobs": needs_old_logprobs(config, num_steps if of_loss else 1) and not config.use_rollout_logprobs,
        "ref_logprobs": config.use_kl_loss if of_loss else config.kl_coef > 0,
        "trainer_teacher_logprobs": not config.distills_vocabulary and (config.loads_teacher or config.hinted),
        "divergence": of_loss and config.distills_vocabulary,
        "values": config.uses_critic,
        "entropy": of_loss and (config.entropy_coef != 0 or config.loss_type == "custom_loss"),
        "step_logprobs": of_loss,
    }
    if missing := [column for column, is_needed in needed.items() if is_needed and column not in values]:
        option = "--keep-step-logprobs" if missing == ["step_logprobs"] else "--save-trained-tokens"
        yield f"the round has not stored {', '.join(missing)} of its tokens (see {option})"


# ---- the file of a round ---------------------------------------------------------------------------------------------


def write_round_file(stored: StoredRound, path: Path) -> None:
    """Write a round to a file, without texts, metadata and token ids, and with secrets in options masked."""
    columns = {name: stored.samples[name] for name in _COLUMNS} | {name: stored.trained[name] for name in stored.tokens}
    for name in ("prompt", "response", "label", "metadata"):
        columns[name] = pa.array(["{}" if name == "metadata" else ""] * len(stored.samples), pa.string())
    offsets, zeros = pa.array(stored.batch.offsets, pa.int32()), np.zeros(len(stored.batch.token_ids), np.int32)
    columns["token_ids"] = pa.ListArray.from_arrays(offsets, pa.array(zeros))
    about = {"format": FORMAT, **stored.about, "train": stored.config.model_dump(mode="json")}
    metadata = {**(stored.samples.schema.metadata or {}), METADATA: json.dumps(mask_secrets(about)).encode()}
    content = pa.BufferOutputStream()
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), content, compression="zstd")
    disk.replace(path, content.getvalue().to_pybytes())


def read_round_file(path: Path) -> StoredRound:
    """Return the round in a file of `write_round_file`. Raises RunError for other files."""
    content = pa.BufferReader(path.read_bytes())
    try:
        table = pq.read_table(content)
        about = json.loads((table.schema.metadata or {})[METADATA])
        if about["format"] != FORMAT:
            raise ValueError(f"it has format {about['format']}, not {FORMAT}")
        check_schema(table.schema)
        stored = StoredRound(table.select(_COLUMNS), table, TrainConfig.model_validate(about.pop("train")), about)
        if functions := [path for path, *_ in stored.config.plugins]:  # a file may be a stranger's
            raise ValueError(f"it was trained with {functions[0]}, and functions that a file names are not called")
        _ = stored.tokens  # reads and checks the columns that the arithmetic needs
    except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
        reason = f"it lacks {error}" if isinstance(error, LookupError) else str(error)[:120]
        raise RunError(
            f"{path} is not the file of a round ({reason}): give one of `penstock export --round`"
        ) from error
    return stored
