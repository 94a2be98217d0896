"""Publishing of LoRA adapters without an engine: names, requests, updates, and when adapters are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from penstock.engines.generation import EngineRefused, PublishedAdapter, WeightTransport
from penstock.engines.lora import LoraOptions, adapter_targets
from penstock.engines.options import EngineOptions, ServedAdapters
from penstock.engines.serving import endpoints
from penstock.engines.serving.endpoints import BASE, adapter_suffix
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang import control
from penstock.engines.sglang.checks import check_external_adapters, reason_against_adapters
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.weights.transfer import ProcessPlace
from penstock.storage.errors import EngineError
from tests.engines.megatron_reference import SHAPE
from tests.engines.small_servers import JsonServer, answer, with_servers
from tests.engines.test_lora import MIXTURE

LORA = LoraOptions(lora_rank=4, lora_alpha=8, lora_target_modules=["all-linear"], lora_use_rslora=True)
NAMED = {"base_model.model.x.lora_A.weight": torch.ones(4, 8), "base_model.model.x.lora_B.weight": torch.zeros(8, 4)}
SUFFIX = adapter_suffix("store run 1.0")


@pytest.fixture(autouse=True)
def no_adapters() -> Iterator[None]:
    yield
    endpoints._current.clear()


class AdapterServer:
    """The control routes of an SGLang server for adapters. Like SGLang, it refuses a name that is loaded."""

    def __init__(self, release: str = "0.5.21", version: str = BASE, **info: Any) -> None:
        self.release, self.version, self.info = release, version, info
        self.loaded: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = JsonServer(self._say, self._change).url

    def _say(self, path: str) -> dict[str, Any]:
        if path == "/v1/models":
            base = {"id": "model", "parent": None}
            return {"data": [base, *({"id": name, "parent": "model"} for name in self.loaded)]}
        return {"weight_version": self.version, "version": self.release, "tp_size": 1, **self.info}

    def _change(self, path: str, body: dict[str, Any]) -> None:
        self.paths.append(path)
        self.bodies.append(body)
        if path.startswith("/load_lora_adapter"):
            assert body and body["lora_name"] not in self.loaded
            self.loaded.append(body["lora_name"])
        elif path == "/unload_lora_adapter":
            self.loaded.remove(body["lora_name"])
        elif path == "/update_weight_version":
            self.version = body["new_version"]


def publish(*servers: AdapterServer, version: str = "run/1", **transport: Any) -> str:
    adapter = PublishedAdapter(version + SUFFIX, {"r": 4}, len(NAMED), compare=transport.pop("compare", False))
    client = SGLangClient([server.url for server in servers])
    client.update_weights(iter(NAMED.items()), version, WeightTransport(adapter=adapter, **transport))
    client.use_adapter(adapter.name)
    return adapter.name


def test_names_contain_the_version_and_belong_to_one_driver_of_one_run() -> None:
    name, other = "run/12" + SUFFIX, "run/12" + adapter_suffix("store run 2.0")
    earlier = "run/11" + adapter_suffix("store run 1.0")  # of another driver of this run
    assert endpoints.version_of(name) == "run/12"
    assert len({name, other, earlier.replace("/11@", "/12@")}) == 3
    loaded = [name, other, earlier, "run/3", "run-2/11@" + name.partition("@")[2], "run/13" + SUFFIX]
    assert endpoints.other_adapters(name, [*loaded, "run/3" + SUFFIX]) == [earlier, "run/3" + SUFFIX]


def test_update_loads_without_a_pause_and_resumes_after_a_failure() -> None:
    first, second = AdapterServer(), AdapterServer()
    second.loaded = ["run/1" + SUFFIX]  # from an update that failed on the other server
    name = publish(first, second, compare=True)
    assert first.loaded == second.loaded == [name] and second.bodies == []
    assert first.paths == ["/load_lora_adapter_from_tensors"]
    body = first.bodies[0]
    assert body["config_dict"] == {"r": 4} and body["load_format"] == "flattened_bucket"
    assert len(body["serialized_named_tensors"]) == 1 and body["expected_checksums"].keys() == NAMED.keys()
    assert all(SGLangClient([s.url]).weight_version(s.url) == "run/1" for s in (first, second))


def test_release_before_payloads_per_rank_gets_one_payload() -> None:
    server = AdapterServer("0.5.15.post1")
    publish(server)
    assert isinstance(server.bodies[0]["serialized_tensors"], str)
    assert "serialized_named_tensors" not in server.bodies[0]
    with pytest.raises(EngineError, match=r"needs SGLang 0\.5\.21 .* do not compare checksums, .* SGLang 0\.5\.15:"):
        publish(server, version="run/2", compare=True)


def test_update_over_disk_keeps_the_files_of_the_last_adapters(tmp_path: Path) -> None:
    server = AdapterServer()
    client = SGLangClient([server.url])
    for number in range(3):
        adapter = PublishedAdapter(f"run/{number}" + SUFFIX, {"r": 4}, len(NAMED))
        transport = WeightTransport("disk", model_path="/model", directory=str(tmp_path), adapter=adapter)
        client.update_weights(iter(NAMED.items()), f"run/{number}", transport)
    paths = [Path(body["lora_path"]) for body in server.bodies]
    assert [path.exists() for path in paths] == [False, True, True]
    assert sorted(file.name for file in paths[-1].iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_engine_with_other_weights_or_released_memory() -> None:
    with pytest.raises(EngineError, match="has the weights 'other/7' instead of its model's own weights"):
        publish(AdapterServer(version="other/7"))
    server = AdapterServer(version="released")
    name = publish(server)
    assert server.paths == [
        *("/resume_memory_occupation", "/update_weight_version", "/load_lora_adapter_from_tensors"),
        "/update_weight_version",
    ]
    assert server.version == f"loaded:{BASE}" and server.loaded == [name]
    assert SGLangClient([server.url]).weight_version(server.url) == f"loaded:{BASE}"  # until the KV cache is back
    SGLangClient([server.url]).resume_kv_cache()
    assert SGLangClient([server.url]).weight_version(server.url) == "run/1"


def test_adapters_are_unloaded_when_no_request_uses_them() -> None:
    server = AdapterServer()
    foreign = "run/1" + adapter_suffix("other store")
    server.loaded = [foreign]
    first = publish(server)
    with endpoints.requesting(server.url) as used:
        assert used == first
        second = publish(server, version="run/2")
        SGLangClient([server.url]).unload_adapters()
        assert server.loaded == [foreign, first], "unloaded while a request uses it"
    publish(server, version="run/2")
    SGLangClient([server.url]).unload_adapters()
    assert server.loaded == [foreign] and endpoints.adapter_of(server.url) is None and second not in server.loaded


def test_restarted_engine_does_not_serve_the_policy() -> None:
    server = AdapterServer()
    publish(server)
    server.loaded = []  # a new process at the same address
    assert SGLangClient([server.url]).weight_version(server.url) == BASE


def test_requests_name_the_adapter_and_record_its_version() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        if len(bodies) == 2:
            return web.json_response({"error": "Got LoRA adapter that has never been loaded: x"}, status=400)
        return web.json_response([answer([5, 6], weight_version=BASE) for _ in bodies[-1]["input_ids"]])

    async def use(urls: list[str]) -> list[Any]:
        async with SGLangClient(urls) as client:
            without = await client.generate([1], {})
            endpoints.set_adapter(urls[0], "run/4" + SUFFIX)
            return [*without, *await client.generate([1], {}, n=2)]

    without, *with_adapter = with_servers([handler], use)
    assert without.weight_versions == [(BASE, 2)]
    assert [generation.weight_versions for generation in with_adapter] == [[("run/4", 2)]] * 2
    assert [body.get("lora_path") for body in bodies] == [None, "run/4" + SUFFIX, "run/4" + SUFFIX]
    assert not endpoints.is_requested("run/4" + SUFFIX)


def test_engines_that_cannot_apply_adapters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(shape: Any = SHAPE, modules: tuple[str, ...] = ("all-linear",), **args: Any) -> str | None:
        options = EngineOptions(ServerSpec(model_path="/model", args=args), compares=True)
        return reason_against_adapters(options, shape, adapter_targets(shape, modules))

    assert reason() is None and reason(MIXTURE, ("attention",)) is None
    assert "attention of a mixture of experts only" in str(reason(MIXTURE))
    assert "Glm4ForCausalLM" in str(reason(SHAPE.model_copy(update={"architecture": "Glm4ForCausalLM"})))
    monkeypatch.setattr("penstock.engines.sglang.older_release.version", lambda package: "0.5.15.post1")
    assert "0.5.21 does not compare" in str(reason())
    monkeypatch.undo()
    assert "quantized" in str(reason(quantization="fp8")) and "--sglang-dp-size" in str(reason(dp_size=2))


def test_adapters_are_sent_through_memory_where_engines_can_read_it() -> None:
    served = ServedAdapters(rank=4, modules=("q_proj",))
    options = EngineOptions(ServerSpec(model_path="/model"), num_gpus=1, adapters=served)
    near = {"http://a": ProcessPlace("n", ("1",), 7)}
    transport = options.weight_transport(near, [ProcessPlace("n", ("0",))], "/d")
    assert (transport.kind, transport.through_host, transport.routes["http://a"].senders) == ("tensor", True, (0,))
    far = {"http://a": ProcessPlace("m", ("0",), 7)}
    assert options.weight_transport(far, [ProcessPlace("n", ("0",))], "/d").kind == "disk"
    shared = options.weight_transport(near, [ProcessPlace("n", ("1",))], "/d")
    assert (shared.kind, shared.through_host) == ("tensor", False)


def test_external_engine_must_load_the_adapters_and_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["q_proj", "v_proj"]}
    info = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj", "v_proj"]}
    open_server = AdapterServer(**info)
    with pytest.raises(EngineError, match="without an API key: start it with --api-key and --admin-api-key"):
        check_external_adapters(open_server.url, args)
    for change in ({"enable_lora": False}, {"max_lora_rank": 2}, {"lora_target_modules": ["q_proj"]}):
        with pytest.raises(EngineError, match="--enable-lora --max-lora-rank 4 --lora-target-modules q_proj v_proj"):
            check_external_adapters(AdapterServer(**info | change).url, args)
    with pytest.raises(EngineError, match="--max-loaded-loras 4"):
        check_external_adapters(AdapterServer(**info, max_loaded_loras=4).url, args)

    def refuse(url: str, path: str, *args: Any, **options: Any) -> dict[str, Any]:
        if options.get("with_key", True):
            return info
        raise EngineRefused(f"{url}{path} answered HTTP 401: Unauthorized")

    monkeypatch.setattr(control, "call_server", refuse)
    check_external_adapters("http://closed", args)
