"""Evaluation alone: score a Hugging Face checkpoint on any number of data sets. Nothing is trained, no trainer starts."""

from __future__ import annotations

from prefect import flow

from flows import tasks
from flows.config import PostTrainConfig
from flows.session import Session


@flow(name="evaluate", flow_run_name="{config.run.run}", validate_parameters=True)
def evaluate(config: PostTrainConfig) -> None:
    """Evaluate.

    Args:
        config: `convert.hf_checkpoint` is scored on `eval.eval_prompt_data`; the results are committed under `run.run`.
    """
    with Session("evaluate", config) as session:
        tasks.evaluate(session, 0)
        tasks.finish(session)
