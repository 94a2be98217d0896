"""Conversion alone: a Hugging Face checkpoint as torch_dist in the store, ready for any run. It belongs to no run, so it needs no name."""

from __future__ import annotations

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows.config import PostTrainConfig
from flows.prefect_api import wait_for_api
from flows.preflight import preflight
from flows.runs import open_store
from stages.convert.config import ConvertConfig
from storage.refs import CheckpointRef
from storage.store import Store


@flow(name="convert", validate_parameters=True)
def convert(config: PostTrainConfig) -> None:
    """Convert, and verify bit for bit.

    Args:
        config: only `convert` and `run.store` are used.
    """
    preflight("convert", config)
    store = open_store(config.run)
    ref = convert_checkpoint(store, config.convert, config.run.ray_address)
    wait_for_api(print)
    print(f"{config.convert.hf_checkpoint} is converted and verified: {ref.uri}")


@task(name="convert", retries=2, retry_delay_seconds=2, persist_result=False, cache_policy=NO_CACHE)
def convert_checkpoint(store: Store, config: ConvertConfig, ray_address: str | None) -> CheckpointRef:
    """One conversion in a process of its own; a model that was converted before is only looked up."""
    from engines.cluster import Cluster
    from stages.convert.to_torch_dist import convert_hf

    cluster = Cluster.start(ray_address)
    try:
        return cluster.run(convert_hf, store, config.hf_checkpoint, timeout=config.convert_timeout)
    finally:
        cluster.stop()
