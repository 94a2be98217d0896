"""Options of the algorithm: estimator, losses, corrections, auxiliary models; formulas are in docs/algorithms.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import AfterValidator, PlainSerializer

from penstock.engines.lora import LoraOptions
from penstock.stages.plugins import DEFAULT_NAMES
from penstock.stages.train.algorithms.registry import DIVERGENCES, ESTIMATORS, POLICY_LOSSES
from penstock.storage.config import StageConfig, option

if TYPE_CHECKING:
    EstimatorName: TypeAlias = str
    PolicyLossName: TypeAlias = str
    DivergenceName: TypeAlias = str
    Teachers: TypeAlias = dict[str, str]  # name -> path or URL; the name is "" if there is only one
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
    PolicyLossName = Literal[tuple(POLICY_LOSSES)]
    DivergenceName = Literal[tuple(DIVERGENCES)]
    Teachers = Annotated[
        str | dict[str, str] | None,
        AfterValidator(lambda value: {"": value} if isinstance(value, str) else value or {}),
        PlainSerializer(lambda teachers: teachers.get("", teachers)),  # one teacher is written as it is given
    ]

HINT_TEMPLATE = (  # github.com/idanshen/Self-Distillation
    "{prompt}\n\nThis is an example for a response to the question:\n{hint}\n\n"
    "Now answer with a response of your own, including the thinking process."
)

# option that names a user-defined function -> names of the arguments
PLUGINS = {
    "custom_advantage_function_path": ("experience", "options"),
    "custom_loss_function_path": ("logprobs", "entropy", "fields", "samples", "options"),
    "custom_tis_function_path": ("old_logprobs", "rollout_logprobs", "samples", "options"),
    "custom_pg_loss_reducer_function_path": ("trajectory_index", "sample_index", "num_trajectories"),
    "rollout_data_postprocess_path": ("args", "rollout_id", "rollout_data"),
}


class HintedPolicyConfig(StageConfig):
    """Distil from the policy itself, which sees each prompt together with its hint (SDFT)."""

    opd_hint_template: str = option(HINT_TEMPLATE)
    """Text that the teacher sees in place of the prompt (of a chat: of the last message of the user): {prompt} and
    {hint} are replaced. Default: the text of SDFT's authors."""

    opd_self_ema: float | None = option(None, gt=0, lt=1)
    """The teacher is a moving average of the policy's weights, which moves by this share towards the policy after each
    round. Default: the teacher is the policy at the beginning of the round."""

    def rules(self) -> Iterator[tuple[object, str]]:
        yield (
            not all(name in self.opd_hint_template for name in ("{prompt}", "{hint}")),
            f"--opd-hint-template {self.opd_hint_template[:60]!r} must contain {{prompt}} and {{hint}}: add them",
        )


class TeacherEngineConfig(StageConfig):
    """Distil from a model for which the run starts an engine; its log-probs are stored with the samples."""

    opd_teacher_engine: str = option()
    """Hugging Face checkpoint of the teacher, of any supported architecture, with the policy's tokenizer."""

    opd_teacher_num_gpus: int = option(1, ge=1, mutability="placement")
    """Number of GPUs of the teacher's engine, next to the GPUs of trainer and engines. On a machine without GPUs the
    engine is a process on the CPU."""


class DistillationConfig(StageConfig):
    """On-policy distillation from one kind of teacher: subtract the log-ratio to the teacher from the advantages, or
    add a divergence from the teacher's distribution to the loss."""

    opd_kl_coef: float = option(1.0, ge=0)
    """Coefficient of the policy/teacher log-ratio that is subtracted from the advantages, or of --opd-divergence in the
    loss."""

    opd_divergence: DivergenceName | None = option(None)
    """Divergence between the distributions of policy and teacher at each trained token, which is added to the loss.
    Default: the log-ratio of the sampled token is subtracted from the advantages instead."""

    opd_jsd_beta: float = option(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of --opd-divergence jsd."""

    opd_top_k: int | None = option(None, ge=1)
    """Compute --opd-divergence over the teacher's K most probable tokens and, as one outcome, all other tokens.
    Default: over the whole vocabulary, which needs a teacher in the trainer."""

    hinted: HintedPolicyConfig | None = option(None, aliases=("opd-self",))

    opd_teacher_load: Teachers = option(default_factory=dict)
    """Teacher in the trainer: a Hugging Face checkpoint with the architecture and sizes of the policy. For several
    teachers, give name=directory pairs: the column --opd-teacher-key of the prompts then names the teacher of each
    prompt."""

    engine: TeacherEngineConfig | None = option(None, aliases=("opd-engine",))

    opd_teacher_url: Teachers = option(default_factory=dict, mutability="placement", secret=True)
    """Teacher on a server: its address, such as http://10.0.0.7:30000; its log-probs are stored with the samples. It
    must be a server of the engine that --engine names, and its model must have the policy's tokenizer. Several
    teachers: name=address pairs, as in --opd-teacher-load."""

    def rules(self) -> Iterator[tuple[object, str]]:
        yield (
            sum(map(bool, (self.hinted, self.opd_teacher_load, self.engine, self.opd_teacher_url))) != 1,
            "[train.opd] needs one kind of teacher: give either --opd-teacher-load (in the trainer), "
            "--opd-teacher-engine (in an engine of the run), --opd-teacher-url (on a server) or --opd-self (the policy "
            "with hints), or omit --use-opd",
        )
        yield (
            self.opd_top_k and self.opd_divergence is None,
            f"--opd-top-k {self.opd_top_k} has no effect without --opd-divergence: add --opd-divergence, or omit "
            "--opd-top-k",
        )
        yield (
            self.opd_jsd_beta != 0.5 and self.opd_divergence != "jsd",
            f"--opd-jsd-beta {self.opd_jsd_beta} has no effect without --opd-divergence jsd: add --opd-divergence jsd, "
            "or omit --opd-jsd-beta",
        )
        yield (
            (self.engine or self.opd_teacher_url) and self.opd_divergence and self.opd_top_k is None,
            f"--opd-divergence {self.opd_divergence} needs the teacher's log-probs of the whole vocabulary, which "
            "an engine does not return: add --opd-top-k, or use a teacher in the trainer (--opd-teacher-load)",
        )
        yield (
            not all(re.fullmatch(r"[\w-]*", name) for name in self.opd_teacher_load),
            f"--opd-teacher-load has the names {', '.join(map(repr, self.opd_teacher_load))}, which become names of "
            "files: use only letters, digits, _ and -",
        )


class SequenceMaskingConfig(StageConfig):
    """Off-policy sequence masking: mask samples with a negative advantage whose mean log-prob has fallen by more than
    --opsm-delta since the rollout."""

    opsm_delta: float = option(1e-4)
    """Mask samples if the mean of their old minus their current log-probs is above this value."""


class AlgorithmConfig(StageConfig):
    """Options of the algorithm: everything that defines the loss."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = option("policy_loss")
    """Loss: RL's policy loss, the negative log-likelihood of demonstrations, or a user-defined loss."""

    custom_loss_function_path: str | None = option(None)
    """User-defined loss of --loss-type custom_loss, as file.py:name or pkg.module:name."""

    # ---- from rewards to advantages ----------------------------------------------------------------------------------

    advantage_estimator: EstimatorName = option("grpo")
    """Advantage estimator (docs/algorithms.md); gspo and cispo are grpo with --policy-loss gspo or cispo, gdpo compares
    several rewards, ppo also trains a critic."""

    policy_loss: PolicyLossName | None = option(None)
    """Policy-gradient loss; default: gspo or cispo for the estimator of the same name, ppo_clip for all others."""

    custom_advantage_function_path: str | None = option(None)
    """User-defined advantage estimator, in place of the built-in one, as file.py:name or pkg.module:name."""

    rollout_data_postprocess_path: str | None = option(None)
    """User-defined function that changes loss masks, advantages or log-probs of a rollout before the update, `f(args,
    rollout_id, rollout_data)`, as file.py:name or pkg.module:name."""

    disable_compute_advantages_and_returns: bool = option(False, mutability="placement")
    """Do not compute advantages. Accepted only with --loss-type sft_loss, which never computes them anyway."""

    disable_rewards_normalization: bool = option(False)
    """Use raw rewards in group-relative estimators, without normalizing them within their group."""

    disable_grpo_std_normalization: bool = option(False)
    """Do not divide advantages by the standard deviation of their group (Dr. GRPO)."""

    baseline_over_trajectories: bool = option(False)
    """Compare trajectories within a group instead of samples: the reward of a trajectory is the mean reward of its
    samples, which all get its advantage. Without it, a trajectory counts once for each of its samples."""

    normalize_advantages: bool = option(False)
    """Whiten advantages (mean 0, variance 1) over all trained tokens of the rollout."""

    gdpo_reward_weights: dict[str, float] = option(default_factory=dict)
    """Reward components that --advantage-estimator gdpo compares, and their weights: keys of the dictionary that the
    reward function returns, as key=value pairs or JSON."""

    gamma: float = option(1.0, ge=0, le=1)
    """Discount factor of rewards (ppo, reinforce_plus_plus), per trained token."""

    lambd: float = option(1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (ppo)."""

    kl_coef: float = option(0.0, ge=0)
    """Coefficient of the KL to the reference as a penalty on each token's reward; cannot be combined with
    --kl-loss-coef."""

    opd: DistillationConfig | None = option(None, aliases=("use-opd",))

    # ---- the policy loss ---------------------------------------------------------------------------------------------

    eps_clip: float = option(0.2, ge=0)
    """Lower clip range: the probability ratio is clipped at 1 minus this value. gmpo: its logarithm is clipped at minus
    this value; dppo_tv and dppo_kl: bound of the divergence where the advantage is negative."""

    eps_clip_high: float | None = option(None, ge=0)
    """Upper clip range: the probability ratio is clipped at 1 plus this value; default: --eps-clip. gmpo: its logarithm
    is clipped at this value; dppo_tv and dppo_kl: bound of the divergence where the advantage is positive."""

    eps_clip_c: float | None = option(None, gt=1)
    """Dual-clip constant c: the loss of a token with a negative advantage A is at most c x |A|. dppo_tv and dppo_kl:
    upper bound of the probability ratio."""

    sapo_tau_pos: float = option(1.0, gt=0)
    """Temperature of the gate of --policy-loss sapo where the advantage is positive: the higher it is, the faster the
    gradient falls as the probability ratio leaves 1."""

    sapo_tau_neg: float = option(1.05, gt=0)
    """Temperature of the gate of --policy-loss sapo where the advantage is negative."""

    use_kl_loss: bool = option(False)
    """Load a frozen reference, report the KL to the reference, and add --kl-loss-coef x KL to the loss."""

    kl_loss_coef: float = option(0.0, ge=0)
    """Coefficient of the KL to the reference in the loss; with 0, the KL is only reported."""

    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option("k1")
    """Estimator of the KL, in the loss and in the rewards."""

    use_unbiased_kl: bool = option(False)
    """Multiply the KL in the loss by the probability ratio, which makes its gradient unbiased off policy."""

    entropy_coef: float = option(0.0)
    """Coefficient of the entropy bonus."""

    opsm: SequenceMaskingConfig | None = option(None, aliases=("use-opsm",))

    calculate_per_token_loss: bool = option(False)
    """Average the loss over all tokens of a step; default: average over each sample's tokens, then over samples."""

    calculate_per_prompt_loss: bool = option(False)
    """Average the loss over the tokens of all samples of a prompt, then over the prompts of a step (ScaleRL)."""

    loss_denominator: int | None = option(None, ge=1)
    """Divide the policy-gradient loss of each sample by this number in place of its number of tokens, then average over
    samples (Dr. GRPO); usually --rollout-max-response-len. KL and entropy keep their weights."""

    custom_pg_loss_reducer_function_path: str | None = option(None)
    """User-defined weights of the tokens in the policy-gradient loss, as file.py:name or pkg.module:name."""

    # ---- mismatch between engine and trainer -------------------------------------------------------------------------

    use_rollout_logprobs: bool = option(False)
    """Use the engine's log-probs as old log-probs, instead of computing them with the trainer."""

    use_tis: bool = option(False)
    """Weight the loss by the ratio of the trainer's to the engine's probabilities (truncated importance sampling)."""

    tis_clip: float = option(2.0, gt=0)
    """Upper bound of the trainer/engine probability ratio with --use-tis."""

    tis_clip_low: float = option(0.0, ge=0)
    """Lower bound of the trainer/engine probability ratio with --use-tis."""

    tis_mode: Literal["truncate", "mask"] = option("truncate")
    """Ratios out of bounds are clamped to the bound (truncate: TIS) or set to 0 (mask: IcePop)."""

    tis_level: Literal["token", "sequence", "geometric"] = option("token")
    """Which ratio is bounded. token: of each token; sequence: the product over a sample's tokens; geometric: the
    geometric mean over them."""

    tis_veto: float | None = option(None, gt=0, lt=1)
    """Mask samples in which the trainer/engine probability ratio of any token is below this value."""

    custom_tis_function_path: str | None = option(None)
    """User-defined importance weights, in place of the built-in ones of --use-tis (file.py:name or pkg.module:name)."""

    get_mismatch_metrics: bool = option(False)
    """Report the metrics of --use-tis without applying its importance weights."""

    # ---- auxiliary models --------------------------------------------------------------------------------------------

    ref_load: str | None = option(None)
    """Checkpoint of the reference model (Hugging Face or torch_dist), which must have the policy's architecture and
    sizes; default: the starting weights. Without --load, the policy also starts from this checkpoint."""

    ref_update_interval: int | None = option(None, ge=1)
    """Replace the reference by the current policy every N rounds; default: never."""

    value_clip: float = option(0.2, ge=0)
    """Clip range of the critic's values around its values before the update (ppo)."""

    num_critic_only_steps: int = option(0, ge=0)
    """Number of initial rounds that train only the critic (ppo)."""

    critic_lr: float | None = option(None, gt=0)
    """Learning rate of the critic; default: --lr."""

    critic_lr_warmup_iters: int | None = option(None, ge=0)
    """Warm-up of the critic's learning rate in optimizer steps; default: --lr-warmup-iters."""

    # ---- trained parameters ------------------------------------------------------------------------------------------

    freeze_params_name_list: list[str] | None = option(None, min_length=1)
    """Regular expressions: parameters of the policy whose Megatron name contains a match are not trained."""

    only_train_params_name_list: list[str] | None = option(None, min_length=1)
    """Regular expressions: only parameters of the policy whose Megatron name contains a match are trained."""

    freeze_vision: bool = option(True)
    """Do not train the vision tower of a vision-language model."""

    vision_lr: float | None = option(None, gt=0)
    """Learning rate of the vision tower if it is trained, in policy and critic, with the warm-up and decay of --lr;
    default: the learning rate of the model that it belongs to."""

    reset_optimizer_states: bool = option(False)
    """Zero Adam's moments and step count of policy and critic before every round; the learning-rate schedule
    continues."""

    # ---- adapters ----------------------------------------------------------------------------------------------------

    lora: LoraOptions | None = option(None)

    # ---- experts -----------------------------------------------------------------------------------------------------

    use_routing_replay: bool = option(False)
    """Routing replay (R2): train with the experts that the trainer's routers chose for the old log-probs."""

    use_rollout_routing_replay: bool = option(False)
    """Rollout routing replay (R3): train with the experts that the inference engine's routers chose."""

    @property
    def policy_loss_name(self) -> str:
        """Name of the policy loss in `registry.POLICY_LOSSES`: --policy-loss, or the default of the estimator."""
        return self.policy_loss or ESTIMATORS[self.advantage_estimator].policy_loss

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained with the policy."""
        return self.loss_type == "policy_loss" and ESTIMATORS[self.advantage_estimator].critic

    @property
    def compares_samples(self) -> bool:
        """Whether the advantage estimator compares the rewards of a prompt's samples."""
        return self.loss_type == "policy_loss" and ESTIMATORS[self.advantage_estimator].group_relative

    @property
    def loss_unit(self) -> str | None:
        """Column of the samples whose values have equal weight in the policy-gradient loss; None: all tokens have."""
        if self.calculate_per_token_loss or self.loss_denominator:
            return None
        return "group_id" if self.calculate_per_prompt_loss else "trajectory_id"

    @property
    def auxiliary_models(self) -> dict[str, str]:
        """Paths of the frozen models that the trainer loads: "reference", "teacher" or, with several teachers,
        "teacher.NAME" -> path."""
        paths = {"reference": self.ref_load} if self.ref_load else {}
        teachers = sorted(self.opd.opd_teacher_load.items()) if self.opd else ()
        return paths | {f"teacher.{name}" if name else "teacher": path for name, path in teachers}

    @property
    def uses_reference(self) -> bool:
        """Whether log-probs of a frozen reference are needed."""
        return self.loss_type != "sft_loss" and (self.use_kl_loss or self.kl_coef > 0)

    @property
    def loads_teacher(self) -> bool:
        """Whether the trainer computes log-probs of a teacher."""
        return self.opd is not None and bool(self.opd.opd_teacher_load)

    @property
    def teacher_names(self) -> list[str]:
        """Names of the teachers in the trainer, in the order of `Batch.teacher_index`; [""] if there is only one."""
        return sorted(self.opd.opd_teacher_load if self.opd else ()) or [""]

    @property
    def distills_vocabulary(self) -> bool:
        """Whether the loss has a divergence from the teacher's distribution (--opd-divergence)."""
        return self.opd is not None and self.opd.opd_divergence is not None

    @property
    def hinted(self) -> HintedPolicyConfig | None:
        """Options of a teacher that is the policy, which sees another prompt; None: the run has no such teacher."""
        return self.opd.hinted if self.opd else None

    @property
    def stored_top_k(self) -> int:
        """Number of the teacher's most probable tokens that the samples store for each token; 0: none."""
        return (self.opd.opd_top_k or 0) if self.opd and self.reads_teacher_logprobs else 0

    @property
    def reads_teacher_logprobs(self) -> bool:
        """Whether the samples have log-probs of a teacher."""
        return self.opd is not None and bool(self.opd.engine or self.opd.opd_teacher_url)

    @property
    def plugins(self) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Path, default function name (for a path without one), and argument names of each user-defined function."""
        for name, arguments in PLUGINS.items():
            if path := getattr(self, name):
                yield path, DEFAULT_NAMES[name], arguments

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from (*self._estimator_rules(), *self._loss_rules(), *self._correction_rules())
        yield from (*self._model_rules(), *self._adapter_rules())

    def _estimator_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules about the advantage estimator."""
        name = self.advantage_estimator
        estimator = ESTIMATORS[name]
        yield (
            self.kl_coef and not estimator.per_token and not self.custom_advantage_function_path,
            f"--kl-coef {self.kl_coef} does not apply to {name}, whose advantage is one number per sample: "
            "use --use-kl-loss with --kl-loss-coef",
        )
        yield (
            self.policy_loss and estimator.policy_loss not in ("ppo_clip", self.policy_loss),
            f"--policy-loss {self.policy_loss} contradicts --advantage-estimator {name}, which means grpo with "
            f"--policy-loss {estimator.policy_loss}: give --advantage-estimator grpo --policy-loss {self.policy_loss}",
        )
        yield (
            self.policy_loss and self.loss_type != "policy_loss",
            f"--policy-loss {self.policy_loss} has no effect with --loss-type {self.loss_type}: omit --policy-loss",
        )
        yield (
            self.loss_type == "policy_loss" and estimator.whitened and not self.normalize_advantages,
            f"--advantage-estimator {name} requires whitened advantages: add --normalize-advantages",
        )
        yield (
            (name == "gdpo") != bool(self.gdpo_reward_weights),
            "--advantage-estimator gdpo and --gdpo-reward-weights, the weight of each reward component, need each "
            "other: give both or neither",
        )
        yield (
            name == "gdpo" and self.disable_rewards_normalization,
            "--disable-rewards-normalization contradicts --advantage-estimator gdpo, which normalizes every reward "
            "component within its group: omit --disable-rewards-normalization, or use --advantage-estimator grpo",
        )
        yield (
            self.baseline_over_trajectories
            and (
                not self.compares_samples or self.disable_rewards_normalization or self.custom_advantage_function_path
            ),
            "--baseline-over-trajectories has no effect, because no built-in estimator compares the rewards of a "
            "group: omit it, or use an estimator such as grpo without --disable-rewards-normalization and without "
            "--custom-advantage-function-path",
        )
        yield (
            self.disable_compute_advantages_and_returns and self.loss_type != "sft_loss",
            f"--disable-compute-advantages-and-returns leaves --loss-type {self.loss_type} without advantages: give "
            "--loss-type sft_loss, or omit the option",
        )

    def _loss_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules about the loss and the weights of its tokens."""
        for field in sorted({name for names in POLICY_LOSSES.values() for name in names}):
            flag, value = f"--{field.replace('_', '-')}", getattr(self, field)
            reads_it = self.loss_type != "policy_loss" or field in POLICY_LOSSES[self.policy_loss_name]
            yield (
                not reads_it and value != AlgorithmConfig.model_fields[field].default,
                f"{flag} {value} has no effect with --policy-loss {self.policy_loss_name}: omit {flag}",
            )
        yield (
            self.kl_loss_coef and not self.use_kl_loss,
            f"--kl-loss-coef {self.kl_loss_coef} has no effect without --use-kl-loss: add --use-kl-loss, or omit "
            "--kl-loss-coef",
        )
        yield (
            self.kl_coef and self.kl_loss_coef,
            f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} both penalize the KL to the reference: "
            "keep one of these options",
        )
        yield (
            self.use_unbiased_kl and not self.use_kl_loss,
            "--use-unbiased-kl has no effect without --use-kl-loss: add --use-kl-loss, or omit --use-unbiased-kl",
        )
        yield (
            (self.loss_type == "custom_loss") != (self.custom_loss_function_path is not None),
            "--loss-type custom_loss and --custom-loss-function-path need each other: give both or neither",
        )
        weightings = ("calculate_per_token_loss", "calculate_per_prompt_loss", "loss_denominator")
        given = [f"--{field.replace('_', '-')}" for field in weightings if getattr(self, field)]
        yield (
            len(given) > 1,
            f"{' and '.join(given)} define different weights of the tokens in the loss: keep one of these options",
        )
        yield (
            self.loss_denominator and (self.loss_type != "policy_loss" or self.custom_pg_loss_reducer_function_path),
            f"--loss-denominator {self.loss_denominator} has no effect with a --loss-type other than policy_loss, or "
            "with --custom-pg-loss-reducer-function-path, which weights the tokens itself: omit --loss-denominator",
        )

    def _correction_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules about the correction of the engine's log-probs."""
        yield (
            self.use_tis and self.use_rollout_logprobs,
            "--use-tis has no effect with --use-rollout-logprobs, which uses the engine's log-probs as old log-probs: "
            "keep one of these options",
        )
        yield (
            self.custom_tis_function_path and not (self.use_tis or self.get_mismatch_metrics),
            "--custom-tis-function-path has no effect without --use-tis or --get-mismatch-metrics: add --use-tis, or "
            "--get-mismatch-metrics to report metrics only",
        )
        yield (
            self.tis_clip_low > self.tis_clip,
            f"--tis-clip-low {self.tis_clip_low} is above --tis-clip {self.tis_clip}: lower --tis-clip-low",
        )

    def _adapter_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules about LoRA adapters."""
        if self.lora is None:
            return
        yield (
            self.lora.lora_dropout,
            f"--lora-dropout {self.lora.lora_dropout:g} is not supported: engines generate without dropout, so their "
            "log-probs would differ from the trainer's; omit it",
        )
        yield (
            self.freeze_params_name_list or self.only_train_params_name_list,
            "--freeze-params-name-list and --only-train-params-name-list cannot be combined with --lora-rank, which "
            "trains only adapters: omit them, and choose layers with --lora-target-modules",
        )
        yield (
            not self.freeze_vision,
            "--no-freeze-vision cannot be combined with --lora-rank, which trains only adapters: omit it",
        )
        yield (
            self.uses_critic,
            f"--lora-rank cannot be combined with --advantage-estimator {self.advantage_estimator}, whose critic "
            "trains all parameters: use an estimator without a critic",
        )
        yield (
            self.ref_update_interval,
            "--ref-update-interval cannot be combined with --lora-rank, whose reference is the model without adapters: "
            "omit --ref-update-interval, or train all parameters without --lora-rank",
        )

    def _model_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules about auxiliary models and expert routing."""
        yield (
            self.distills_vocabulary and self.loss_type != "policy_loss",
            f"--opd-divergence has no effect with --loss-type {self.loss_type}: omit one of these options",
        )
        yield (
            self.distills_vocabulary and self.rollout_data_postprocess_path,
            "--rollout-data-postprocess-path may mask tokens after the teacher has computed their distributions for "
            "--opd-divergence: omit one of these options",
        )
        yield (
            self.lora and self.hinted and self.hinted.opd_self_ema,
            "--opd-self-ema averages all weights, but --lora-rank trains only adapters: omit --opd-self-ema, and the "
            "teacher is the policy with its adapters at the beginning of the round",
        )
        yield (
            self.freeze_params_name_list and self.only_train_params_name_list,
            "--freeze-params-name-list and --only-train-params-name-list exclude each other: keep one of them",
        )
        yield (
            (self.freeze_params_name_list or self.only_train_params_name_list) and self.uses_critic,
            "--freeze-params-name-list and --only-train-params-name-list cannot be combined with --advantage-estimator "
            f"{self.advantage_estimator}, whose critic trains all parameters: use an estimator without a critic",
        )
        yield (
            self.ref_update_interval and not self.uses_reference,
            "--ref-update-interval has no effect without a KL to the reference: add --use-kl-loss or --kl-coef",
        )
        yield (
            self.num_critic_only_steps and not self.uses_critic,
            f"--num-critic-only-steps {self.num_critic_only_steps} needs a critic: use --advantage-estimator ppo",
        )
        yield (
            self.use_rollout_routing_replay and self.loss_type == "sft_loss",
            "--use-rollout-routing-replay needs samples that an engine generated, but --loss-type sft_loss trains on "
            "demonstrations: omit --use-rollout-routing-replay",
        )
        yield (
            self.use_routing_replay and self.use_rollout_routing_replay,
            "--use-routing-replay (the trainer's experts) and --use-rollout-routing-replay (the engine's) exclude each "
            "other: keep one of them",
        )
        yield (
            self.use_routing_replay and self.rollout_data_postprocess_path is not None,
            "--use-routing-replay records experts per micro-batch, but --rollout-data-postprocess-path may change the "
            "micro-batches: use --use-rollout-routing-replay",
        )
