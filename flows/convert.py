"""Conversion alone: a Hugging Face checkpoint as torch_dist in the store, ready for any run."""

from __future__ import annotations

from prefect import flow

from flows import tasks
from flows.config import PostTrainConfig
from flows.session import Session


@flow(name="convert", validate_parameters=True)
def convert(config: PostTrainConfig) -> None:
    """Convert, and verify bit for bit.

    Args:
        config: only `convert` and `run.store` are used.
    """
    with Session("convert", config) as session:
        tasks.convert(session)
