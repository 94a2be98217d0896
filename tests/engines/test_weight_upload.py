"""Weight updates over disk for engines that share no file system with the trainer: over an object store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.engines.generation import EngineGone, WeightTransport, WeightUpload
from penstock.engines.options import EngineOptions
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.weights.transfer import ProcessPlace, update_and_check, upload_weights
from penstock.flows.config import Flow, PostTrainConfig
from penstock.flows.runtime.processes import Processes
from penstock.flows.runtime.publishing import PolicyPublisher
from penstock.flows.runtime.runs import ActiveRun
from penstock.storage.commit import RunKeys
from penstock.storage.errors import StoreError
from penstock.storage.store import Store

PREFIX = "runs/r/published"


@pytest.mark.integration
def test_an_engine_loads_weights_that_its_actor_downloads(
    engine_pool: EnginePool, other_tiny_model: Path, object_store: Store
) -> None:
    client = SGLangClient(engine_pool.urls)
    upload = WeightUpload(object_store.uri, object_store.options, PREFIX, engine_pool.actors(client.urls))
    assert list(upload.actors) == client.urls and "'test'" not in repr(upload)  # key and secret
    transport = WeightTransport("disk", model_path=str(other_tiny_model), upload=upload, bucket_bytes=4096)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = load_file(other_tiny_model / "model.safetensors", device=device)

    def publish(version: str, transport: WeightTransport) -> None:
        client.update_weights(weights.items(), version, transport)

    client.overwrite_weights()
    publish("upload/1", transport)
    uploaded = client.weight_checksums()
    assert client.weight_version(client.urls[0]) == "upload/1"
    publish("upload/2", WeightTransport())
    assert client.weight_checksums() == uploaded
    assert update_and_check(client, publish, "upload/3", transport, is_initial=False)[0] > 10
    assert list(object_store.walk(PREFIX)) == []  # every copy is removed


@pytest.mark.integration
@pytest.mark.parametrize("error", [StoreError("damaged"), None], ids=["damaged", "dead"])
def test_a_failed_download_is_raised_and_the_upload_removed(cluster: object, object_store: Store, error: Any) -> None:
    import ray

    class Actor:
        def download(self, *args: object) -> str:
            if error is None:
                ray.actor.exit_actor()
            raise error

        def remove_download(self) -> None:
            pass

    actor: Any = ray.remote(Actor).options(num_cpus=0).remote()
    upload = WeightUpload(object_store.uri, object_store.options, PREFIX, {"http://a": actor})
    with (
        pytest.raises(EngineGone if error is None else StoreError),
        upload_weights(lambda path: (path / "weights").write_bytes(b"1"), upload),  # type: ignore[arg-type, return-value]
    ):
        pass
    assert list(object_store.walk(PREFIX)) == []


HERE, THERE = ProcessPlace("a", pid=1), ProcessPlace("b", pid=2)


@pytest.mark.parametrize(
    ("uri", "disk_dir", "places", "directory", "uploads"),
    [
        ("memory://store", None, [HERE, THERE], None, True),
        ("memory://store", None, [HERE], None, False),  # the temporary directory of the only machine
        ("memory://store", "/shared", [HERE, THERE], "/shared", False),
        ("{tmp_path}", None, [HERE, THERE], "{tmp_path}/runs/r/published", False),
        ("{tmp_path}", "/shared", [HERE, THERE], "/shared", False),
    ],
)
def test_weights_are_uploaded_only_if_no_directory_is_shared(
    uri: str, disk_dir: str | None, places: list[ProcessPlace], directory: str | None, uploads: bool, tmp_path: Path
) -> None:
    config = PostTrainConfig.model_validate({"run": {"run": "r", "update_weight_disk_dir": disk_dir}})
    store = Store(uri.format(tmp_path=tmp_path), probe=False)
    processes = Processes(ActiveRun(store, RunKeys("r"), Flow.TRAIN, config), print)
    by_url = {f"http://{index}": place for index, place in enumerate(places)}
    engines = SimpleNamespace(places=lambda urls: by_url, actors=lambda urls: dict.fromkeys(urls, "actor"))
    processes.__dict__["engine_options"] = EngineOptions(ServerSpec(model_path="model"), transport="disk")
    processes.start_engines = lambda: engines  # type: ignore[method-assign, assignment, return-value]
    trainer: Any = SimpleNamespace(places=lambda: [HERE])
    transport = PolicyPublisher(processes, print).transport(trainer, list(by_url), 0)
    assert transport.kind == "disk" and (transport.upload is not None) == uploads
    if directory is not None:
        assert transport.directory == directory.format(tmp_path=tmp_path)
    if transport.upload is not None:
        assert (transport.upload.prefix, list(transport.upload.actors)) == (PREFIX, list(by_url))


def test_a_frozen_vision_tower_is_sent_once_to_each_process_of_an_engine(tmp_path: Path) -> None:
    config = PostTrainConfig.model_validate({"run": {"run": "r"}})
    processes = Processes(ActiveRun(Store(str(tmp_path), probe=False), RunKeys("r"), Flow.TRAIN, config), print)
    places, sent = {"http://a": HERE, "http://b": replace(HERE, pid=3)}, list[bool]()
    engines = SimpleNamespace(places=lambda urls: {url: places[url] for url in urls}, actors=lambda urls: {})
    trainer: Any = SimpleNamespace(
        places=lambda: [HERE],
        policy_state=lambda: None,
        publish=lambda urls, version, transport: sent.append(not transport.without_vision),
    )
    processes.start_engines = lambda: engines  # type: ignore[method-assign, assignment, return-value]
    processes.restore_trainer_at = lambda version: trainer  # type: ignore[method-assign]
    processes.__dict__["trainer"] = trainer

    def publish(publisher: PolicyPublisher, *urls: str) -> bool:
        publisher.send(0, list(urls), rewind=True)
        return sent.pop()

    def publisher(**options: Any) -> PolicyPublisher:
        processes.__dict__["engine_options"] = EngineOptions(ServerSpec(model_path=str(tmp_path)), **options)
        return PolicyPublisher(processes, lambda *published: None)

    frozen = publisher(vision="frozen")
    assert [publish(frozen, "http://a"), publish(frozen, "http://a")] == [True, False]
    assert [publish(frozen, "http://a", "http://b"), publish(frozen, "http://b")] == [True, False]
    places["http://b"] = replace(HERE, pid=4)  # restarted
    assert [publish(frozen, "http://b"), publish(frozen, "http://a", "http://b")] == [True, False]
    for always in (
        {"vision": "trained"},
        {"vision": "frozen", "offload": True},
        {"vision": "frozen", "compares": True},
    ):
        other = publisher(**always)
        assert [publish(other, "http://a"), publish(other, "http://a")] == [True, True]
