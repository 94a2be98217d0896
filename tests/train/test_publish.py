"""Publishing from several trainer ranks to several engines: every engine serves the trainer's weights afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from penstock.engines.cluster import Cluster
from penstock.engines.families import read_shape
from penstock.engines.generation import EngineGone, WeightTransport
from penstock.engines.options import EngineOptions
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.serving.supervisor import restart_dead_engines
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.weights.transfer import update_and_check
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.spec import TrainerSpec
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef, RunKeys
from penstock.storage.store import Store

pytestmark = pytest.mark.integration

PROMPT = [2, 10, 11, 12, 13, 1, 3]
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module")
def pool(cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    log_dir = str(tmp_path_factory.mktemp("sglang"))
    pool = EnginePool(cluster, ServerSpec(model_path=str(tiny_model), log_dir=log_dir), num_engines=2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def base(
    cluster: Cluster, other_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, CheckpointRef]:
    store = Store(str(tmp_path_factory.mktemp("publish") / "store"))
    return store, cluster.run(convert_hf, store, str(other_tiny_model))


def transport_of(kind: str | None, pool: EnginePool, group: TrainerGroup, urls: list[str]) -> WeightTransport:
    options = EngineOptions(pool.spec, transport=kind)  # type: ignore[arg-type]
    return options.weight_transport(pool.places(urls), group.places(), "")


def check_weights(url: str, model_path: Path, version: str) -> None:
    """Check that an engine serves this model's weights, by the log-probs of its own response."""
    from transformers import AutoModelForCausalLM

    async def generate() -> list[float]:
        async with SGLangClient([url]) as client:
            [generation] = await client.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True})
            assert [served for served, _ in generation.weight_versions] == [version]
            return [*generation.token_ids, *generation.logprobs]

    result = asyncio.run(generate())
    ids, logprobs = [int(token) for token in result[:16]], torch.tensor(result[16:])
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(16), torch.tensor(ids)]
    torch.testing.assert_close(logprobs, expected.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["tp2", pytest.param("pp2", marks=pytest.mark.full)])
def test_every_layout_publishes_to_two_engines_over_memory_and_over_a_group(
    layout: str,
    cluster: Cluster,
    pool: EnginePool,
    base: tuple[Store, CheckpointRef],
    tiny_model: Path,
    other_tiny_model: Path,
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    store, ref = base
    keys = RunKeys(f"publish-{layout}")
    config = TrainConfig(actor_num_gpus_per_node=2, trainer_threads=1, **LAYOUTS[layout])  # type: ignore[arg-type]
    spec = TrainerSpec(run=keys.run, shape=read_shape(other_tiny_model), config=config, store=store.uri)
    group = TrainerGroup(cluster, spec)
    try:
        PolicyRestorer(store, keys, group, ref).restore(0)
        for kind in ("tensor", "nccl", "nccl"):  # the second time with the same process group
            before = load_file(tiny_model / "model.safetensors")
            SGLangClient(pool.urls).update_weights(iter(before.items()), "before/0")
            transport = transport_of(kind, pool, group, pool.urls)
            if kind == "tensor":  # each rank sends to one engine
                assert [route.senders for route in transport.routes.values()] == [(0,), (1,)]
            group.publish(pool.urls, f"{keys.run}/0", transport)
            for url in pool.urls:
                check_weights(url, other_tiny_model, f"{keys.run}/0")
        check_every_tensor(pool, group, f"{keys.run}/0", tmp_path)
        if layout == "tp2":
            check_replaced_engine(pool, group, keys, other_tiny_model)
    finally:
        group.kill()


def check_every_tensor(pool: EnginePool, group: TrainerGroup, version: str, directory: Path) -> None:
    """Check --check-weight-update-equal with all ranks, and that it compares every tensor of both engines."""
    transport = replace(transport_of("tensor", pool, group, pool.urls), directory=str(directory))
    client = SGLangClient(pool.urls)
    num_tensors, _ = update_and_check(
        client, lambda label, how: group.publish(pool.urls, label, how), version, transport, is_initial=False
    )
    assert num_tensors == sum(len(rank) for ranks in client.weight_checksums().values() for rank in ranks) > 20
    assert {client.weight_version(url) for url in pool.urls} == {version} and not list(directory.iterdir())


def check_replaced_engine(pool: EnginePool, group: TrainerGroup, keys: RunKeys, model: Path) -> None:
    """Check that a dead engine fails the update without an effect on the trainer, and that its replacement joins."""
    before, incarnation = pool.urls, group.policy_state()
    psutil.Process(pool.replicas[1].place().pid).kill()
    for kind in ("tensor", "nccl"):
        with pytest.raises(EngineGone):
            group.publish(before, f"{keys.run}/0", transport_of(kind, pool, group, before))
    assert group.policy_state() == incarnation
    assert restart_dead_engines(pool.replicas)
    group.publish(pool.urls, f"{keys.run}/0", transport_of("nccl", pool, group, pool.urls))
    for url in pool.urls:
        check_weights(url, model, f"{keys.run}/0")
