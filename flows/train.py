"""RL post-training: convert -> [rollout -> train -> publish -> (checkpoint) -> (evaluate)] x N -> export.

Each step of the loop is a task whose result is committed to the store. After a kill, the same call resumes after the
last committed task. With --async-buffer-size or --async-mode streaming, further rollouts are generated while a round is
trained (rollouts.py).
"""

from __future__ import annotations

from prefect import State, flow

from penstock.flows import tasks
from penstock.flows.config import PostTrainConfig
from penstock.flows.reporting.prefect_page import report_end
from penstock.flows.rollouts import rollouts
from penstock.flows.runtime.retries import retried
from penstock.flows.session import open_session


@flow(
    name="train",
    flow_run_name="{config.run.run}",
    validate_parameters=True,
    on_failure=[report_end],
    on_crashed=[report_end],
)
@retried
def train(config: PostTrainConfig) -> State[None]:
    """Train a policy by reinforcement learning.

    Args:
        config: config of the run. If the store has a run named `run.run`, that run is resumed.
    """
    with open_session("train", config) as session:
        config = session.config  # the plan, in which every option has its final value
        if session.run.needs_rollout(session.run.num_trained_rounds()):
            session.processes.start_engines()  # the engines load while the model is converted
        if not config.run.debug_rollout_only:
            session.start_trainer()
        tasks.convert(session)
        if not config.run.debug_rollout_only:
            tasks.restore(session)
        due = tasks.build_stage_schedule(session)
        for stage in due(0):
            stage(session, 0)
        with rollouts(session) as get_rollout:
            for r in session.remaining_rounds():
                rollout = get_rollout(r)
                if config.run.debug_rollout_only:
                    continue
                tasks.train(session, rollout)
                for stage in due(r + 1):
                    stage(session, r + 1)
        tasks.evaluate_skipped(session)
        tasks.save_missing_hf(session)
        done = tasks.publish_results(session)
        is_trained = session.run.num_trained_rounds() == config.run.num_rollout
        if config.eval.promote_to and is_trained and not config.run.debug_train_only:
            tasks.promote(session, config.run.num_rollout)
    return done
