"""Estimate how much each sample of a round has changed the result of an evaluation, for `penstock bisect`.

Let J be the sum of contrast x log-prob over the samples of evaluations (the contrast of a sample is its reward minus
the mean reward of its prompt), and let U_i be the sum of loss weight x advantage x log-prob over the tokens of sample i
of the round. To first order, training on sample i changes J by the inner product of the gradients of J and U_i in the
metric of the optimizer. The inner product is symmetric, so it is also the change of U_i by optimizer steps that raise
J. These steps are the same for all samples: the estimate costs the same for 4 groups as for 4,000. Half the
difference between steps that raise and steps that lower J cancels what both have in common (the momentum of earlier
rounds, weight decay). docs/design/0043-the-round-of-a-fall.md compares this with training without each group.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.stages.train.algorithms.experience import Estimate, TokenFields
from penstock.stages.train.algorithms.logprobs import LMHead
from penstock.stages.train.batching import Batch, PackedMicrobatch
from penstock.stages.train.build import Models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.microbatches import LossWeights, plan_steps
from penstock.stages.train.step import (
    Clock,
    attach_token_fields,
    choose_update_routing,
    forward_all_tokens,
    policy_logprobs,
    prepare_round,
    run_optimizer_steps,
    stored_experience,
)

# With one step Adam moves by a tenth of the learning rate in the new direction, which bf16 weights hardly resolve; with
# four by about one learning rate (momentum 0.9), as a step of the round does.
NUM_STEPS = 4


def objective_of_samples(
    models: Models,
    batch: Batch,
    evaluated: Batch,
    contrast: np.ndarray,  # [E], one value for each sample of `evaluated`
    config: TrainConfig,
    *,
    temperature: float,
    sign: int,
) -> np.ndarray:  # [B]
    """Take NUM_STEPS optimizer steps that raise (`sign` 1) or lower (-1) the log-probs of the evaluated samples in
    proportion to their contrast. Return the objective U_i of every sample of the round with these weights. Changes the
    weights and the optimizer's state. Collective.

    `models` are at the policy with which the round began; `batch` is the round.
    """
    logprobs_of = partial(policy_logprobs, engine=models.policy, config=config, temperature=temperature)
    round_ = prepare_round(models, batch, config, temperature, Clock())
    one_step = config.model_copy(update={"global_batch_size": None, "num_steps_per_rollout": 1})
    steps = plan_steps(models.policy, evaluated, one_step)
    samples = torch.from_numpy(evaluated.sample_index)
    advantages = sign * torch.from_numpy(contrast)[samples]
    weights = LossWeights(torch.full_like(advantages, 1 / len(contrast)), None, num_steps=1)
    estimate, device = Estimate(advantages), models.policy.device
    attach_token_fields(steps, stored_experience(evaluated), estimate, weights, device)

    def loss(
        hidden: Tensor, head: LMHead, packed: PackedMicrobatch, fields: TokenFields
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return -fields.advantages * logprobs_of(hidden, head, packed)[0], {}

    def logprobs(hidden: Tensor, head: LMHead, packed: PackedMicrobatch) -> Tensor:
        return logprobs_of(hidden, head, packed)[0]

    run_optimizer_steps(models.policy, steps * NUM_STEPS, loss)
    num_tokens = len(round_.batch.trained_positions)
    routing = choose_update_routing(config, len(round_.steps))
    after = forward_all_tokens(models.policy, round_.steps, num_tokens, logprobs, routing)
    scale = 1.0 if round_.weights.pg_scale is None else round_.weights.pg_scale
    shares = round_.weights.weights * scale * round_.estimate.advantages.cpu() * after
    return np.bincount(round_.batch.sample_index, weights=shares.numpy(), minlength=len(batch.lengths))
