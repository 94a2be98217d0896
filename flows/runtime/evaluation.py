"""Evaluate one policy version on one data set with the engines of a run: generate responses to its prompts, grade them,
and commit the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from penstock.flows.runtime.display import ProgressCallback
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.publishing import PolicyEngines
from penstock.flows.runtime.runs import ActiveRun
from penstock.stages.eval.scores import compute_eval_metrics
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import Commit
from penstock.storage.preemption import StopRequest


@dataclass(frozen=True)
class Evaluator:
    """Evaluates policy versions of a run."""

    run: ActiveRun
    processes: Processes
    engines: PolicyEngines
    tokenizer: PromptTokenizer
    stop: StopRequest

    def evaluate(self, version: int, name: str, on_progress: ProgressCallback = lambda done, total: None) -> Commit:
        """Score policy `version` on the data set `name`, and return the commit; return the existing commit if there is
        one. Engines that do not serve `version` get it from the trainer, which is restored to it."""
        store, keys, config = self.run.store, self.run.keys, self.run.config
        prefix, evals = keys.eval_prefix(version, name), config.eval
        if existing := store.committed(prefix):
            return existing
        rollout = config.rollout_with_args.model_copy(update=evals.rollout_overrides(dict(evals.data_sets)[name], name))
        source = PromptSource.open(rollout)
        with self.engines.for_evaluation(version) as engines:
            context = RolloutContext(
                store,
                rollout,
                source,
                self.tokenizer,
                engines,
                provenance=self.run.provenance,
                stop=self.stop,
                on_progress=on_progress,
                connect=self.processes.setup.connect_for_evaluation,
                read_counters=partial(self.processes.engine_counters, evaluation=True),
            )
            return rollout_stage(
                context,
                prefix,
                RolloutRound(keys.run, version, version, kind="eval", id_prefix=f"eval-{version:06d}-{name}-"),
                num_prompts=len(source),
                summarize=lambda samples: compute_eval_metrics(
                    samples,
                    name,
                    pass_threshold=evals.data_set_settings(name).get("pass_threshold"),
                    require_pass_rate=evals.log_passrate,
                ),
            )
