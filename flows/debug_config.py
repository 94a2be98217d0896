"""Options for finding faults: dumps of samples, rollouts from files, profiler traces, conditions that fail a run."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.flows.options.argv import flag_of_field
from penstock.stages.torch_files import template_rules
from penstock.stages.train.diagnostics.config import DiagnosticsConfig
from penstock.storage.config import option

GRAD_NORM_PLACEHOLDERS = ("role", "rollout_id", "step_id")  # in the paths of --ci-save- and --ci-load-grad-norm
COMPANIONS = {  # option -> options that have no effect without it
    "use_pytorch_profiler": ("profile_target", "profile_step_start", "profile_step_end", "profile_dir"),
    "record_memory_history": (
        "memory_snapshot_dir",
        "memory_snapshot_path",
        "memory_snapshot_num_steps",
        "memory_recorder",
    ),
    "ci_test": ("ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold"),
    "load_debug_rollout_data": ("load_debug_rollout_data_subsample",),
}


class DebugConfig(DiagnosticsConfig):
    """All options for finding faults. The options that the trainer reads are inherited from `DiagnosticsConfig`."""

    save_debug_rollout_data: str | None = option(None, mutability="placement", min_length=1)
    """Write the samples of each round, after its commit, to this path, which contains {rollout_id}. For evaluations,
    {rollout_id} is replaced by eval_<policy version>_<data set>."""

    load_debug_rollout_data: str | None = option(None, mutability="schedule", min_length=1)
    """Instead of generating, train on the samples in the files at this path, which --save-debug-rollout-data has
    written; {rollout_id} is the round. Implies --debug-train-only."""

    load_debug_rollout_data_subsample: float | None = option(None, mutability="schedule", gt=0, le=1)
    """With --load-debug-rollout-data: fraction of each file's groups to use; they are taken from the start and the end
    of the file."""

    dump_details: str | None = option(None, mutability="placement", min_length=1)
    """Local directory for both dumps: sets --save-debug-rollout-data and --save-debug-train-data if they are not
    given."""

    ci_test: bool = option(False, mutability="placement")
    """Fail the run after a round whose log-probs differ too much between engine and trainer, or whose KL is not 0 where
    it must be."""

    ci_disable_kl_checker: bool = option(False, mutability="placement")
    """With --ci-test: do not check the KL."""

    ci_train_rollout_logprob_abs_diff_threshold: float = option(0.1, mutability="placement", ge=0)
    """With --ci-test: maximum mean difference of the log-probs of engine and trainer, in nats."""

    ci_save_grad_norm: str | None = option(None, mutability="placement", min_length=1)
    """Write the gradient norm of each optimizer step to this path, which contains {rollout_id} and {step_id}, and
    {role} (actor or critic) if there is a critic."""

    ci_load_grad_norm: str | None = option(None, mutability="placement", min_length=1)
    """Fail the run after a step whose gradient norm differs by more than 0.01, absolute or relative, from the one that
    --ci-save-grad-norm wrote to this path."""

    custom_config_path: str | None = option(None, mutability="placement")
    """YAML file with further options, by their names without leading dashes; they override flags. User-defined
    functions get names that no option has as attributes of `args` (--plugin-args). The run records the values."""

    @property
    def rollout_dump(self) -> str | None:
        """Return the path of --save-debug-rollout-data, or the path that --dump-details sets for it; None if samples
        are not dumped."""
        return self.save_debug_rollout_data or (
            self.dump_details and f"{self.dump_details}/rollout_data/{{rollout_id}}.pt"
        )

    @property
    def diagnostics(self) -> DiagnosticsConfig:
        """Return the diagnostics options for the trainer's ranks. If only --dump-details is given, they contain the
        path that it sets for --save-debug-train-data."""
        values = self.model_dump(include=set(DiagnosticsConfig.model_fields))
        if self.dump_details and not self.save_debug_train_data:
            values["save_debug_train_data"] = f"{self.dump_details}/train_data/{{rollout_id}}_{{rank}}.pt"
        return DiagnosticsConfig(**values)

    def _path_rules(self) -> Iterator[tuple[object, str]]:
        """Yield the rules about the placeholders of all paths."""
        round_only, norm = ("rollout_id",), GRAD_NORM_PLACEHOLDERS
        for name, allowed, required in (
            ("save_debug_rollout_data", round_only, round_only),
            ("load_debug_rollout_data", round_only, ()),
            ("save_debug_train_data", (*round_only, "rank"), round_only),
            ("ci_save_grad_norm", norm, norm[1:]),
            ("ci_load_grad_norm", norm, norm[1:]),
            ("dump_details", (), ()),
        ):
            if template := getattr(self, name):
                yield from template_rules(flag_of_field(name), template, allowed, required)

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from (*super().rules(), *self._path_rules())
        for switch, names in COMPANIONS.items():
            for name in names:
                flag, needed = flag_of_field(name), flag_of_field(switch)
                is_given = getattr(self, name) != type(self).model_fields[name].default
                yield (
                    is_given and not getattr(self, switch),
                    f"{flag} has no effect without {needed}: add {needed}, or omit {flag}",
                )
        targets = ", ".join(self.profile_target)
        yield (
            len(self.profile_target) > 1 and "train_overall" in self.profile_target,
            f"--profile-target {targets}: train_overall contains the others, and one profiler can run at a time: give "
            "train_overall alone, or leave it out",
        )
        yield (
            self.profile_step_end <= self.profile_step_start,
            f"--profile-step-end {self.profile_step_end} is not above --profile-step-start {self.profile_step_start}, "
            "so no round is traced: raise --profile-step-end",
        )
        yield (
            self.memory_recorder == "memray" and self.memory_snapshot_num_steps is None,
            "--memory-recorder memray needs --memory-snapshot-num-steps, the number of rounds after which its file is "
            "complete: add --memory-snapshot-num-steps",
        )
        yield (
            self.ci_save_grad_norm and self.ci_load_grad_norm,
            "--ci-save-grad-norm writes the gradient norms that --ci-load-grad-norm compares: omit --ci-save-grad-norm "
            "to compare, or --ci-load-grad-norm to write",
        )
        yield (
            self.custom_config_path is not None,
            "--custom-config-path is read by the command line only: give the options of the file here",
        )
