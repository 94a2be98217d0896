"""Every server and the router have an API key: requests without it are refused, and no command line shows it."""

from __future__ import annotations

import asyncio
import itertools
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from aiohttp import web
from small_servers import answer, with_servers

from penstock.engines.backends import engine_backend
from penstock.engines.serving import endpoints
from penstock.engines.serving.endpoints import engine_url
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.replica import ExternalReplica
from penstock.engines.serving.server import ServerSpec, read_log_tail
from penstock.engines.sglang import control
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.sglang.passthrough import check_sglang_args
from penstock.engines.sglang.router import SGLangRouter
from penstock.storage.errors import EngineError

CONTROL = (
    "/flush_cache",
    "/pause_generation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/abort_request",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
)


def status(url: str, key: str | None = None, *, post: bool = False) -> int:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, b"{}" if post else None, headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def command_lines() -> str:
    words = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
            words += process.cmdline()
    return " ".join(words)


def test_each_server_gets_only_its_own_key_also_through_the_router(tmp_path: Path) -> None:
    seen: list[list[str | None]] = [[], []]

    def engine(number: int) -> object:
        async def handle(request: web.Request) -> web.Response:
            if request.path == "/generate":
                seen[number].append(request.headers.get("Authorization"))
                return web.json_response([answer([ids[-1]]) for ids in (await request.json())["input_ids"]])
            return web.json_response({"model_path": "/m", "weight_version": "run/3"})

        return handle

    async def use(urls: list[str]) -> None:
        for url, key in zip(urls, ("first-key", "second-key")):
            endpoints.set_api_key(url, key)
        async with SGLangClient([urls[0]]) as client:
            await client.generate([1], {})
        async with SGLangClient(["http://127.0.0.1:9"], num_tries=1) as client:
            assert endpoints.auth_headers("http://127.0.0.1:9") == {}
        with SGLangRouter({}, str(tmp_path)) as router:
            router.set_backends(urls)
            async with SGLangClient(urls, router=router.address, timeout=60) as client:
                async with asyncio.timeout(60):  # the router registers the engines one after the other
                    for number in itertools.count():
                        await client.generate([number], {})
                        if len(seen[0]) > 1 and seen[1]:
                            break
                address = router.address()
                assert address is not None
                key = endpoints.known_api_keys([address])[address]
                assert [status(f"{address}/workers", given) for given in (None, "first-key", key)] == [401, 401, 200]
                assert status(f"{address}/generate", post=True) == 401
                assert key not in command_lines() and "first-key" not in command_lines()
        for url in urls:
            endpoints.set_api_key(url, None)

    with_servers([engine(0), engine(1)], use)  # type: ignore[list-item]
    assert set(seen[0]) == {"Bearer first-key"} and set(seen[1]) == {"Bearer second-key"}


def test_read_log_tail_redacts_keys(tmp_path: Path) -> None:
    endpoints.set_api_key("http://127.0.0.1:8", "a-key-of-a-test")
    log = tmp_path / "log"
    log.write_text("server_args=ServerArgs(api_key='a-key-of-a-test')\n")
    assert read_log_tail(log, 5) == "server_args=ServerArgs(api_key='***')"
    endpoints.set_api_key("http://127.0.0.1:8", None)


def test_external_engines_use_sglang_api_key_and_refuse_credentials_in_addresses(tiny_model: Path) -> None:
    spec = ServerSpec(model_path=str(tiny_model), args={"api_key": "given-key"})
    ExternalReplica("127.0.0.1:7", spec, 0, engine_backend())
    ExternalReplica(
        "127.0.0.1:7", ServerSpec(model_path=str(tiny_model)), 0, engine_backend()
    )  # without a key the known one stays
    assert endpoints.auth_headers("http://127.0.0.1:7") == {"Authorization": "Bearer given-key"}
    endpoints.set_api_key("http://127.0.0.1:7", None)
    with pytest.raises(EngineError) as refused:
        engine_url("http://me:hunter22@127.0.0.1:7")
    assert "hunter22" not in str(refused.value)
    with pytest.raises(EngineError, match="--sglang-api-key"):
        check_sglang_args({"admin_api_key": "x"})


@pytest.mark.integration
def test_a_real_engine_answers_401_without_its_key(engine_pool: EnginePool) -> None:
    [url] = engine_pool.urls
    key = endpoints.known_api_keys([url])[url]
    assert len(key) == 64 and key not in command_lines()
    for path in ("/generate", *CONTROL):
        assert status(url + path, post=True) == status(url + path, "guess", post=True) == 401, path
    for path in ("/server_info", "/model_info", "/v1/models"):
        assert [status(url + path, given) for given in (None, "guess", key)] == [401, 401, 200], path
    assert control.weight_version(url) and control.generates_tokens(url)
    assert key not in read_log_tail(Path(engine_pool.replicas[0]._log), 200)
