"""What is optimised: estimator, losses, corrections, models beside the policy. Formulas and papers are in docs/algorithms.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import model_validator

from storage.config import StageConfig, option
from storage.errors import OptionError

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")  # estimators that are defined with whitened advantages


PLUGINS = {
    "custom_advantage_function_path": ("advantages", ("experience", "options")),
    "custom_loss_function_path": ("loss", ("logprobs", "entropy", "streams", "samples", "options")),
    "custom_tis_function_path": ("correction", ("old", "rollout", "samples", "options")),
    "custom_pg_loss_reducer_function_path": ("weights", ("trajectory_index", "sample_index", "num_trajectories")),
}


class AlgorithmConfig(StageConfig):
    """Everything that decides which number is minimised."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = option("policy_loss")
    """What is minimised: the policy loss of RL, the negative log-likelihood of demonstrations, or a function of yours."""

    custom_loss_function_path: str | None = option(None)
    """The function of --loss-type custom_loss, as file.py:name or pkg.module:name."""

    # ---- from rewards to advantages -------------------------------------------------------------------------------------

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = option("grpo")
    """How rewards become advantages; gspo and cispo are grpo with another policy loss, ppo trains a critic."""

    custom_advantage_function_path: str | None = option(None)
    """A function of yours in place of the estimator, as file.py:name or pkg.module:name."""

    disable_rewards_normalization: bool = option(False)
    """Take rewards as they are, not compared with their group."""

    disable_grpo_std_normalization: bool = option(False)
    """Do not divide advantages by the standard deviation of their group (Dr. GRPO)."""

    normalize_advantages: bool = option(False)
    """Whiten advantages over all trained tokens of the rollout."""

    gamma: float = option(1.0, ge=0, le=1)
    """Discount of later rewards (ppo, reinforce_plus_plus), per trained token."""

    lambd: float = option(1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (ppo)."""

    kl_coef: float = option(0.0, ge=0)
    """Subtract so much of the KL to the reference from the reward of every token; excludes --kl-loss-coef."""

    use_opd: bool = option(False)
    """On-policy distillation: subtract the log-ratio to a teacher from the advantages."""

    opd_kl_coef: float = option(1.0, ge=0)
    """Weight of that log-ratio."""

    opd_teacher_load: str | None = option(None)
    """The teacher: a Hugging Face checkpoint of the policy's architecture and sizes."""

    # ---- the policy loss ------------------------------------------------------------------------------------------------

    eps_clip: float = option(0.2, ge=0)
    """How far below 1 the probability ratio may matter."""

    eps_clip_high: float | None = option(None, ge=0)
    """How far above 1 the probability ratio may matter; the same as --eps-clip if not given."""

    eps_clip_c: float | None = option(None, gt=1)
    """Dual clip: the loss of a token with negative advantage is at most so many times the advantage's size."""

    use_kl_loss: bool = option(False)
    """Keep a frozen reference and measure the KL to it; it enters the loss times --kl-loss-coef."""

    kl_loss_coef: float = option(0.0, ge=0)
    """Weight of the KL to the reference in the loss; 0 only observes it."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option("k1")
    """Estimator of the KL, in the loss and in the rewards."""

    use_unbiased_kl: bool = option(False)
    """Multiply the KL in the loss by the probability ratio, which makes its gradient unbiased off policy."""

    entropy_coef: float = option(0.0)
    """Weight of the entropy bonus."""

    use_opsm: bool = option(False)
    """Off-policy sequence masking: no gradient of samples with negative advantage from which the policy has moved away."""

    opsm_delta: float = option(1e-4)
    """How far, as the mean of old minus current log-probs."""

    calculate_per_token_loss: bool = option(False)
    """Average over all tokens of a step, instead of over samples of the average over their tokens."""

    custom_pg_loss_reducer_function_path: str | None = option(None)
    """A function of yours that weighs the tokens of the policy-gradient part, as file.py:name or pkg.module:name."""

    # ---- the gap between engine and trainer -----------------------------------------------------------------------------

    use_rollout_logprobs: bool = option(False)
    """The engine's log-probs are the old ones; the trainer does not compute its own."""

    use_tis: bool = option(False)
    """Weigh the loss by the ratio of the trainer's to the engine's probabilities (truncated importance sampling)."""

    tis_clip: float = option(2.0, gt=0)
    """Highest such ratio."""

    tis_clip_low: float = option(0.0, ge=0)
    """Lowest such ratio."""

    tis_mode: Literal["truncate", "mask"] = option("truncate")
    """What happens to a ratio outside: it is set to the bound (TIS), or the tokens do not count (IcePop)."""

    tis_level: Literal["token", "sequence", "geometric"] = option("token")
    """Whose ratio it is: the token's, the product over its sample, or the geometric mean over its sample."""

    tis_veto: float | None = option(None, gt=0, lt=1)
    """Samples with a token whose ratio is below this do not count at all."""

    custom_tis_function_path: str | None = option(None)
    """A function of yours in place of that correction, as file.py:name or pkg.module:name."""

    get_mismatch_metrics: bool = option(False)
    """Measure the correction without applying it."""

    # ---- models beside the policy ---------------------------------------------------------------------------------------

    ref_load: str | None = option(None)
    """The reference: a Hugging Face or torch_dist checkpoint of the policy's sizes; the starting weights if not given."""

    ref_update_interval: int | None = option(None, ge=1)
    """Take the policy as the new reference every so many rounds."""

    value_clip: float = option(0.2, ge=0)
    """How far the critic's values may move from those before the update (ppo)."""

    num_critic_only_steps: int = option(0, ge=0)
    """Rounds at the beginning that train the critic alone (ppo)."""

    critic_lr: float | None = option(None, gt=0)
    """Learning rate of the critic; as --lr if not given."""

    critic_lr_warmup_iters: int | None = option(None, ge=0)
    """Optimizer steps over which the critic's learning rate rises; as --lr-warmup-iters if not given."""

    # ---- experts --------------------------------------------------------------------------------------------------------

    use_routing_replay: bool = option(False)
    """Train with the choice of experts that the old log-probs were computed with (R2)."""

    use_rollout_routing_replay: bool = option(False)
    """Train with the choice of experts that the engine made (R3)."""

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.loss_type == "policy_loss" and self.advantage_estimator == "ppo"

    @property
    def models_beside(self) -> dict[str, str]:
        """Models that are not trained and not the starting one: name -> path."""
        paths = {"reference": self.ref_load, "teacher": self.opd_teacher_load}
        return {name: path for name, path in paths.items() if path}

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of a frozen reference are needed."""
        return self.loss_type != "sft_loss" and (self.use_kl_loss or self.kl_coef > 0)

    def refreshes_reference_at(self, version: int) -> bool:
        """Whether policy `version` is to be the new reference."""
        return (
            self.uses_reference
            and version > 0
            and self.ref_update_interval is not None
            and version % self.ref_update_interval == 0
        )

    @property
    def plugins(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Functions of the user's: path, what a bare file.py is expected to define, what it is called with."""
        for name, (usual_name, words) in PLUGINS.items():
            if path := getattr(self, name):
                yield path, usual_name, words

    @model_validator(mode="after")
    def _check_algorithm(self) -> AlgorithmConfig:
        for wrong, sentence in self._contradictions():
            if wrong:
                raise OptionError(sentence)
        return self

    def _contradictions(self) -> Iterator[tuple[object, str]]:
        """What is wrong -> the sentence that says so."""
        estimator = self.advantage_estimator
        yield (
            self.kl_loss_coef and not self.use_kl_loss,
            f"--kl-loss-coef {self.kl_loss_coef} has no effect without --use-kl-loss: add it, or leave the coefficient out",
        )
        yield (
            self.kl_coef and estimator in ("grpo", "gspo", "cispo", "rloo") and not self.custom_advantage_function_path,
            f"--kl-coef {self.kl_coef} has no place in {estimator}, whose advantage is one number per sample: use --use-kl-loss with "
            "--kl-loss-coef",
        )
        yield (
            self.eps_clip_c and estimator == "cispo",
            "--eps-clip-c has no effect in cispo, which does not clip the loss: leave it out",
        )
        yield (
            self.kl_coef and self.kl_loss_coef,
            f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} both pull towards the reference: keep one of them",
        )
        yield (
            self.use_unbiased_kl and not self.use_kl_loss,
            "--use-unbiased-kl has no effect without --use-kl-loss: add it, or leave the switch out",
        )
        yield (
            self.loss_type == "policy_loss" and estimator in WHITENED and not self.normalize_advantages,
            f"--advantage-estimator {estimator} is defined with whitened advantages: add --normalize-advantages",
        )
        yield (
            (self.loss_type == "custom_loss") != (self.custom_loss_function_path is not None),
            "--loss-type custom_loss and --custom-loss-function-path belong together: give both or neither",
        )
        yield (
            self.use_opd != (self.opd_teacher_load is not None),
            "--use-opd and --opd-teacher-load belong together: give both or neither",
        )
        yield (
            self.use_tis and self.use_rollout_logprobs,
            "--use-tis corrects what --use-rollout-logprobs leaves out: with the engine's log-probs as the old ones there is nothing "
            "to correct, so keep one of them",
        )
        yield (
            self.custom_tis_function_path and not (self.use_tis or self.get_mismatch_metrics),
            "--custom-tis-function-path has no effect without --use-tis or --get-mismatch-metrics: add one, or leave it out",
        )
        yield (
            self.tis_clip_low > self.tis_clip,
            f"--tis-clip-low {self.tis_clip_low} is above --tis-clip {self.tis_clip}: make it smaller",
        )
        yield (
            (self.ref_load or self.ref_update_interval) and not self.uses_reference,
            "--ref-load and --ref-update-interval have no effect without --use-kl-loss or --kl-coef: add one, or leave them out",
        )
        yield (
            self.num_critic_only_steps and not self.uses_critic,
            f"--num-critic-only-steps {self.num_critic_only_steps} needs a critic: use --advantage-estimator ppo, or leave it out",
        )
        yield (
            self.use_rollout_routing_replay and self.loss_type == "sft_loss",
            "--use-rollout-routing-replay needs samples of an engine, and demonstrations have none: leave it out",
        )
        yield (
            self.use_routing_replay and self.use_rollout_routing_replay,
            "--use-routing-replay (the trainer's choice) and --use-rollout-routing-replay (the engine's) exclude each other: keep one",
        )
