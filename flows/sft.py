"""Supervised fine-tuning: the same loop over demonstrations. No engine runs; a round's shard is a piece of the data set."""

from __future__ import annotations

from prefect import flow

from flows import tasks
from flows.config import PostTrainConfig
from flows.session import Session


@flow(name="sft", flow_run_name="{config.run.run}", validate_parameters=True)
def sft(config: PostTrainConfig) -> None:
    """Fine-tune on demonstrations.

    Args:
        config: everything about the run; the same run name resumes it.
    """
    with Session("sft", config) as session:
        tasks.convert(session)
        tasks.restore(session)
        due = tasks.schedule(session)
        for r in session.rounds():
            demonstrations = tasks.demonstrate(session, r)
            tasks.train(session, demonstrations)
            for stage in due(r + 1):
                stage(session, r + 1)
        tasks.finish(session)
