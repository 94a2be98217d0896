"""Call a user-defined function with the data of a rollout before the update (--rollout-data-postprocess-path):

    def postprocess(args, rollout_id, rollout_data)

`rollout_data` has the keys that docs/plugins.md lists, with one entry per sample. Per-token entries are tensors over
the response (from the first trained token on), 0 at tokens that are not trained; the function may change them in place
or replace them. It is called on every rank with the whole rollout. Its result must depend only on its arguments: the
results of all ranks are compared here, and the weights of a replay with those of the commit.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.stages.plugins import DEFAULT_NAMES, describe_path, load_checked_function, with_function_name
from penstock.stages.train.algorithm_config import PLUGINS, AlgorithmConfig
from penstock.stages.train.algorithms.advantages import call_on_every_rank
from penstock.stages.train.algorithms.experience import Estimate, Experience
from penstock.stages.train.batching import Batch
from penstock.storage.errors import PluginError, check_rules

EXPERIENCE_KEYS = {  # key of rollout_data -> field of Experience that the update reads
    "log_probs": "old_logprobs",
    "ref_log_probs": "ref_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "values": "values",
}
# Fields of Experience with one entry per trained token.
TOKEN_FIELDS = ("sample_index", "teacher_logprobs", *EXPERIENCE_KEYS.values())


def postprocess_rollout(
    path: str, batch: Batch, experience: Experience, estimate: Estimate, config: AlgorithmConfig
) -> tuple[Batch, Experience, Estimate]:
    """Return the rollout as the user-defined function at `path` has changed it. The batch is the same object unless the
    function has masked tokens; experience and estimate then do not contain these tokens.

    Raises:
        PluginError: the function returns a value; changes something that is not read back; leaves tensors of other
            sizes, numbers that are not finite, or a loss mask of 1 on a token that was not trained; or it fails or has
            different results on some ranks.
    """
    joined = call_on_every_rank(
        lambda: _call_function(path, batch, experience, estimate, config),
        lambda joined: joined.values(),
        f"--rollout-data-postprocess-path {path}",
    )
    kept = joined.pop("loss_masks").bool()
    if "log_probs" not in joined and experience.old_logprobs is not None:
        joined["log_probs"] = joined["rollout_log_probs"]
    fields: dict[str, Any] = {field: joined[key] for key, field in EXPERIENCE_KEYS.items() if key in joined}
    experience = replace(experience, **fields)
    estimate = replace(estimate, advantages=joined["advantages"], returns=joined.get("returns"))
    if kept.all():
        return batch, experience, estimate
    mask = batch.loss_mask.copy()
    mask[batch.trained_positions[~kept.numpy()]] = False
    token_values = {name: getattr(experience, name) for name in TOKEN_FIELDS}
    experience = replace(experience, **{name: v[kept] for name, v in token_values.items() if v is not None})
    estimate = Estimate(
        estimate.advantages[kept],
        None if estimate.returns is None else estimate.returns[kept],
        {name: values[kept] for name, values in estimate.metrics.items()},
    )
    return replace(batch, loss_mask=mask), experience, estimate


def _call_function(
    path: str, batch: Batch, experience: Experience, estimate: Estimate, config: AlgorithmConfig
) -> dict[str, Tensor]:  # values of the N trained tokens
    """Call the function with the data of the rollout, and return the entries of rollout_data after the call: those that
    the update reads, and "loss_masks". Raises PluginError; see `postprocess_rollout`."""
    option = "rollout_data_postprocess_path"
    function = load_checked_function(path, DEFAULT_NAMES[option], PLUGINS[option])
    name = describe_path(with_function_name(path, DEFAULT_NAMES[option]))
    responses = _Responses(batch, name)
    tokens = {key: getattr(experience, field) for key, field in EXPERIENCE_KEYS.items()}
    if experience.old_logprobs is experience.rollout_logprobs:  # --use-rollout-logprobs: one entry for both
        del tokens["log_probs"]
    tokens |= {"advantages": estimate.advantages, "returns": estimate.returns}
    tokens = {key: values for key, values in tokens.items() if values is not None}
    data = {key: responses.split(values) for key, values in tokens.items()}
    data["loss_masks"] = responses.split(torch.ones(len(batch.trained_positions), dtype=torch.int32))
    fixed, copies = responses.fixed_entries(experience), responses.fixed_entries(experience)
    data |= fixed
    result = function(SimpleNamespace(**config.model_dump()), batch.rollout_id, data)
    unknown = sorted(data.keys() ^ {*tokens, *fixed, "loss_masks"})
    changed = [key for key, values in copies.items() if not _are_equal(data.get(key), values)]
    rules = [
        (result is not None, f"{name} returned a value: change the tensors of rollout_data, and return None"),
        (
            unknown,
            f"{name} adds or removes {', '.join(map(repr, unknown))} of rollout_data, but its keys are fixed: change "
            "only the values",
        ),
        (
            changed,
            f"{name} changes {', '.join(map(repr, changed))} of rollout_data, which the update does not read: change "
            f"{', '.join(tokens)} or loss_masks",
        ),
    ]
    check_rules(rules, PluginError)
    joined = {key: responses.join(data[key], key) for key in tokens}
    return joined | {"loss_masks": responses.join_mask(data["loss_masks"])}


class _Responses:
    """Splits values of the N trained tokens of a batch into responses, and joins them again.

    Args:
        batch: the rollout.
        name: name of the function, for messages.
    """

    def __init__(self, batch: Batch, name: str) -> None:
        self.batch, self.name = batch, name
        self.positions = torch.from_numpy(batch.trained_positions)
        ends = batch.offsets[1:]
        starts = ends.copy()  # a sample without trained tokens gets an empty span: start = end
        has_trained = batch.num_trained_tokens > 0
        first = np.cumsum(batch.num_trained_tokens) - batch.num_trained_tokens
        starts[has_trained] = batch.trained_positions[first[has_trained]]
        self.spans = list(zip(starts.tolist(), ends.tolist()))

    def fixed_entries(self, experience: Experience) -> dict[str, list[Any]]:
        """Return the entries of rollout_data that the update does not read: the recorded samples, and the inputs of the
        advantages."""
        tokens, offsets = torch.from_numpy(self.batch.token_ids), self.batch.offsets.tolist()
        teacher = experience.teacher_logprobs
        of_teacher = {} if teacher is None else {"teacher_log_probs": self.split(teacher)}
        return of_teacher | {
            "tokens": [tokens[start:end].clone() for start, end in pairwise(offsets)],
            "total_lengths": self.batch.lengths.tolist(),
            "response_lengths": [end - start for start, end in self.spans],
            "rewards": experience.rewards.tolist(),
            "raw_reward": self.batch.rewards.tolist(),
        }

    def split(self, values: Tensor) -> list[Tensor]:  # [N] -> B x [response length]
        """Return values of the trained tokens as one tensor per response."""
        full = torch.zeros(len(self.batch.token_ids), dtype=values.dtype)
        full[self.positions] = values.cpu()
        return [full[start:end].clone() for start, end in self.spans]

    def join(self, parts: Any, key: str) -> Tensor:  # B x [response length] -> [N] float64
        """Return the values of the trained tokens. Raises PluginError if sizes differ, or a number is not finite."""
        full = torch.zeros(len(self.batch.token_ids), dtype=torch.float64)
        if not isinstance(parts, list | tuple) or len(parts) != len(self.spans):
            raise PluginError(
                f"{self.name} leaves {key!r} without one tensor for each of {len(self.spans)} samples: keep one tensor "
                "for each sample"
            )
        for (start, end), part in zip(self.spans, parts):
            values = torch.as_tensor(part, dtype=torch.float64)
            if values.shape != (end - start,) or not values.isfinite().all():
                raise PluginError(
                    f"{self.name} leaves {key!r} of a sample with the shape {list(values.shape)}, or with numbers that "
                    f"are not finite: leave {end - start} finite numbers, one for each token of the response"
                )
            full[start:end] = values
        return full[self.positions]

    def join_mask(self, parts: Any) -> Tensor:  # B x [response length] -> [N] bool
        """Return for each trained token whether it is still trained. Raises PluginError if other tokens are trained."""
        kept = self.join(parts, "loss_masks")
        total = sum(float(torch.as_tensor(part).sum()) for part in parts)
        if not ((kept == 0) | (kept == 1)).all() or total != float(kept.sum()):
            raise PluginError(
                f"{self.name} sets loss_masks to a value other than 0 or 1, or to 1 where it was 0: change it only to "
                "0, for tokens that must not be trained on"
            )
        return kept.bool()


def _are_equal(values: Any, others: list[Any]) -> bool:
    """Return whether two lists of tensors or numbers are equal; NaN equals NaN."""
    if not isinstance(values, list) or len(values) != len(others):
        return False
    pairs = [(torch.as_tensor(value), torch.as_tensor(other)) for value, other in zip(values, others)]
    return all(a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()) for a, b in pairs)
