"""Score a Hugging Face checkpoint on any number of data sets, without training."""

from __future__ import annotations

from prefect import State, flow

from penstock.flows import tasks
from penstock.flows.config import PostTrainConfig
from penstock.flows.reporting.prefect_page import report_end
from penstock.flows.runtime.retries import retried
from penstock.flows.session import open_session


@flow(
    name="evaluate",
    flow_run_name="{config.run.run}",
    validate_parameters=True,
    on_failure=[report_end],
    on_crashed=[report_end],
)
@retried
def evaluate(config: PostTrainConfig) -> State[None]:
    """Score a Hugging Face checkpoint.

    Args:
        config: `convert.hf_checkpoint` is scored on `eval.eval_prompt_data`; the results are committed to
            the run named `run.run`.
    """
    with open_session("evaluate", config) as session:
        tasks.evaluate(session, 0)
        done = tasks.publish_results(session)
    return done
