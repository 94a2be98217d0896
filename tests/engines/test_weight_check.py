"""--check-weight-update-equal: a tensor that an engine does not have as the trainer has it is reported by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.generation import REFERENCE, Transport, WeightTransport
from penstock.engines.serving.pool import EnginePool
from penstock.engines.sglang import weight_sender
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.weight_sender import write_weights
from penstock.engines.weights.transfer import INITIAL, update_and_check
from penstock.storage.errors import WeightMismatch
from tests.rollout.scripted_engine import ScriptedClient

Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    return {f"layer.{number}": torch.full((4,), float(number)) for number in range(3)}


def check_scripted(
    client: ScriptedClient, change: Callable[[Weights, str], object] = lambda sent, version: None
) -> int:
    """Publish version 0; `change` alters what is sent under a version."""

    def publish(version: str, transport: WeightTransport) -> None:
        sent = weights()
        change(sent, version)
        client.update_weights(sent.items(), version, transport)

    return update_and_check(client, publish, "run/0", WeightTransport(), is_initial=True)[0]


def test_equal_weights_pass_and_their_number_is_returned() -> None:
    client = ScriptedClient(["http://a", "http://b"])
    assert check_scripted(client) == 6
    assert client.served_version == "run/0"


def only_update(change: Callable[[Weights], object]) -> Callable[[Weights, str], None]:
    """Alter what is sent over the transport, but not the tensors that the engine must have."""

    def call(sent: Weights, version: str) -> None:
        if not version.startswith(REFERENCE):
            change(sent)

    return call


@pytest.mark.parametrize(
    "change",
    [
        only_update(lambda sent: sent["layer.1"].neg_()),
        only_update(lambda sent: sent.pop("layer.1")),
        only_update(lambda sent: sent.update({"layer.1": sent["layer.2"]})),
        lambda sent, version: sent.pop("layer.1"),  # the trainer has no such tensor: the engine keeps its old values
    ],
    ids=["wrong", "missing", "exchanged", "never sent"],
)
def test_a_wrong_or_missing_tensor_is_reported_and_sent_again(change: Callable[[Weights, str], object]) -> None:
    client = ScriptedClient(["http://a"])
    client.update_weights(weights().items(), "run/earlier")
    with pytest.raises(WeightMismatch, match=r"http://a, rank 0: layer\.1 \(1 of 3 tensors differ\).*checksum \w+ "):
        check_scripted(client, change)
    assert client.served_version == "overwritten"  # so the next attempt sends the weights again


def test_a_converted_model_that_differs_from_the_checkpoint_is_reported() -> None:
    client = ScriptedClient(["http://a"], weight_version=INITIAL)
    client.weights = weights()
    check_scripted(client)
    client.served_version, client.weights["layer.2"] = INITIAL, torch.zeros(4)
    with pytest.raises(WeightMismatch, match=r"layer\.2 .*--hf-checkpoint"):
        check_scripted(client)


def test_a_file_that_differs_from_its_tensors_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(tensors: Weights, path: Path, **options: Any) -> None:
        save_file({name: tensor + (name == "layer.1") for name, tensor in tensors.items()}, path, **options)

    write_weights(tmp_path / "right", weights().items(), tmp_path, 1 << 20, verify=True)
    monkeypatch.setattr(weight_sender, "save_file", save)
    with pytest.raises(WeightMismatch, match=r"layer\.1 read back"):
        write_weights(tmp_path / "wrong", weights().items(), tmp_path, 1 << 20, verify=True)


# Name of a sent tensor -> name of the engine's parameter that contains it: fused, and tied with the output head.
ALTERED = {
    "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.qkv_proj.weight",
    "model.embed_tokens.weight": "model.embed_tokens.weight",
}
TRANSPORTS: tuple[Transport, ...] = ("tensor", "nccl", "disk")


@pytest.mark.integration
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_sglang_reports_one_altered_bit_over_every_transport(
    kind: Transport, engine_pool: EnginePool, other_tiny_model: Path, tmp_path: Path
) -> None:
    client, altered = SGLangClient(engine_pool.urls), list[str]()
    transport = WeightTransport(kind, model_path=str(other_tiny_model), directory=str(tmp_path), bucket_bytes=4096)

    def check() -> int:
        def publish(version: str, transport: WeightTransport) -> None:
            sent = read_weights(other_tiny_model)
            for name in altered if not version.startswith(REFERENCE) else ():
                sent[name].view(torch.uint8).flatten()[0] ^= 1
            client.update_weights(sent.items(), version, transport)

        return update_and_check(client, publish, "check/1", transport, is_initial=False)[0]

    assert check() > 10
    for sent, parameter in ALTERED.items():
        altered[:] = [sent]
        with pytest.raises(WeightMismatch, match=rf"{client.urls[0]}, rank 0: {parameter} \(1 of "):
            check()
        assert client.weight_version(client.urls[0]) == "overwritten"
    altered.clear()
    client.release_memory()  # as with --colocate
    assert check() > 10
    client.resume_kv_cache()
    assert client.weight_version(client.urls[0]) == "check/1" and not list(tmp_path.iterdir())


@pytest.mark.integration
def test_sglang_loads_the_checkpoint_as_the_trainer_sends_it(
    engine_pool: EnginePool, tiny_model: Path, other_tiny_model: Path, tmp_path: Path
) -> None:
    """A new engine has the weights of --hf-checkpoint; here they are loaded under the version that it would report."""
    client = SGLangClient(engine_pool.urls)
    disk = WeightTransport("disk", model_path=str(tiny_model), directory=str(tmp_path))

    def check(model: Path) -> int:
        def publish(version: str, transport: WeightTransport) -> None:
            client.update_weights(read_weights(model).items(), version, transport)

        client.update_weights(read_weights(tiny_model).items(), INITIAL, disk)
        transport = WeightTransport("tensor", {}, *disk_paths)
        return update_and_check(client, publish, "check/0", transport, is_initial=True)[0]

    disk_paths = (str(tiny_model), str(tmp_path))
    assert check(tiny_model) > 10
    with pytest.raises(WeightMismatch, match="--hf-checkpoint"):
        check(other_tiny_model)


def read_weights(model: Path) -> Weights:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_file(model / "model.safetensors", device=device)
