"""Supervised fine-tuning: the loop of train.py over demonstrations, without engines. Each round trains
on the next rows of the data set."""

from typing import Annotated  # no `from __future__ import annotations`: Prefect could not resolve the strings

from prefect import State, flow
from pydantic import BeforeValidator

from penstock.flows import tasks
from penstock.flows.config import PostTrainConfig, with_sft_loss
from penstock.flows.reporting.prefect_page import report_end
from penstock.flows.runtime.retries import retried
from penstock.flows.session import open_session


@flow(
    name="sft",
    flow_run_name="{config.run.run}",
    validate_parameters=True,
    on_failure=[report_end],
    on_crashed=[report_end],
)
@retried
def sft(config: Annotated[PostTrainConfig, BeforeValidator(with_sft_loss)]) -> State[None]:
    """Fine-tune on demonstrations: prompts with responses, from --prompt-data.

    Args:
        config: config of the run. If a run of its name exists, that run is resumed.
    """
    with open_session("sft", config) as session:
        session.start_trainer()
        tasks.convert(session)
        tasks.restore(session)
        due = tasks.build_stage_schedule(session)
        for r in session.remaining_rounds():
            demonstrations = tasks.demonstrate(session, r)
            tasks.train(session, demonstrations)
            for stage in due(r + 1):
                stage(session, r + 1)
        tasks.save_missing_hf(session)
        done = tasks.publish_results(session)
    return done
