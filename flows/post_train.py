"""RL post-training: convert -> [rollout -> train -> publish -> (checkpoint) -> (evaluate)] x N -> export.

Each line of the loop is a task with a durable result. Killed anywhere, the same call goes on after the last one.
"""

from __future__ import annotations

from prefect import flow

from flows import tasks
from flows.config import PostTrainConfig
from flows.session import Session


@flow(name="post-train", flow_run_name="{config.run.run}", validate_parameters=True)
def post_train(config: PostTrainConfig) -> None:
    """Train a policy by reinforcement learning.

    Args:
        config: everything about the run; the same run name resumes it.
    """
    with Session("post_train", config) as session:
        if session.generates_with(session.num_trained()):
            session.processes.start_engines()
        tasks.convert(session)
        tasks.restore(session)
        due = tasks.schedule(session)
        for stage in due(0):
            stage(session, 0)
        for r in session.rounds():
            rollout = tasks.rollout(session, r)
            tasks.train(session, rollout)
            tasks.publish(session, r + 1)
            for stage in due(r + 1):
                stage(session, r + 1)
        tasks.finish(session)
