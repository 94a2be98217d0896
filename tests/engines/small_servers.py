"""Small HTTP servers that answer like SGLang."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiohttp import web

from penstock.engines.backends import engine_backend
from penstock.engines.generation import Generation
from penstock.engines.network import reserve_free_port
from penstock.engines.serving.replica import Replica, StartCancelled
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.client import SGLangClient
from penstock.engines.weights.transfer import ProcessPlace

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def answer(token_ids: list[int], **meta: Any) -> dict[str, Any]:
    pairs = [[-0.5 * token, token, None] for token in token_ids]
    return {
        "output_ids": token_ids,
        "meta_info": {
            "output_token_logprobs": pairs,
            "finish_reason": {"type": "stop", "matched": 1},
            "weight_version": "run/3",
            "cached_tokens": 2,
            **meta,
        },
    }


class JsonServer(ThreadingHTTPServer):
    """A server in background threads that answers every GET with `say(path)`, and every POST after
    `change(path, body)`; a ValueError of either is answered with HTTP 400 and an AssertionError with HTTP 500. Port 0
    is a free one."""

    daemon_threads = True

    def __init__(
        self,
        say: Callable[[str], dict[str, Any]],
        change: Callable[[str, dict[str, Any]], None] = lambda path, body: None,
        port: int = 0,
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(lambda: say(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(lambda: change(self.path, body) or {})

            def _answer(self, make: Callable[[], dict[str, Any]]) -> None:
                try:
                    status, answer = 200, make()
                except (AssertionError, ValueError) as error:
                    status, answer = 500 if isinstance(error, AssertionError) else 400, {"error": str(error)}
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: Any) -> None:
                pass

        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def die(self) -> None:
        self.shutdown()
        self.server_close()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "timed out after 10 s"
        time.sleep(0.01)


def with_servers(handlers: list[Handler], use: Callable[[list[str]], Awaitable[Any]]) -> Any:
    """Run `use` with the addresses of one server for each handler."""

    async def main() -> Any:
        runners, urls = [], []
        for handler in handlers:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            port = reserve_free_port()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            runners.append(runner)
            urls.append(f"http://127.0.0.1:{port}")
        try:
            return await use(urls)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(main())


def generate_once(
    urls: list[str], prompt: list[int], sampling: dict[str, Any], n: int = 1, **options: Any
) -> list[Generation]:
    """Let a new client of these servers generate."""

    async def call() -> list[Generation]:
        async with SGLangClient(urls, timeout=120, **options) as client:
            return await client.generate(prompt, sampling, n)

    return asyncio.run(call())


async def echo(request: web.Request) -> web.Response:
    body = await request.json()
    assert body["return_logprob"]
    return web.json_response([answer([ids[-1], index]) for index, ids in enumerate(body["input_ids"])])


class SmallEngine:
    """An engine whose requests take `seconds` and can be aborted by id."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.bodies: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self._running: dict[str, asyncio.Event] = {}

    async def __call__(self, request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            rid = (await request.json())["rid"]
            if rid in self._running:
                self.aborted.append(rid)
                self._running[rid].set()
            return web.Response()
        if request.path != "/generate":
            facts = {"model_path": "small", "weight_version": "run/3", "version": "0.5.21", "tp_size": 1}
            return web.json_response(facts)
        body = await request.json()
        self.bodies.append(body)
        requests = [self._one(f"{body['rid']}_{index}", ids) for index, ids in enumerate(body["input_ids"])]
        return web.json_response(await asyncio.gather(*requests))

    async def _one(self, rid: str, ids: list[int]) -> dict[str, Any]:
        stopped = self._running[rid] = asyncio.Event()
        try:
            await asyncio.wait_for(stopped.wait(), self.seconds)
            return answer([ids[-1]], finish_reason={"type": "abort", "message": "Aborted"})
        except TimeoutError:
            return answer([ids[-1], 0])
        finally:
            del self._running[rid]


class SmallServer:
    """The control routes of an SGLang server. Like SGLang, it dies if memory is released or resumed twice, or released
    while it generates."""

    release, tensor_parallel = "0.5.21", 1

    def __init__(self, version: str = "run/0", events: list[str] | None = None) -> None:
        self.version = version
        self.allocated = {"weights", "kv_cache"}
        self.events = [] if events is None else events
        self.hangs = self.paused = self.refuses_resume = self.dead = False
        self.http = JsonServer(self._say, self._change)
        self.url, self.die = self.http.url, self.http.die

    def _say(self, path: str) -> dict[str, Any]:
        assert not self.dead
        if path == "/health_generate" and self.hangs:
            time.sleep(0.4)
        assert path != "/health_generate" or not self.paused
        return {"weight_version": self.version, "version": self.release, "tp_size": self.tensor_parallel}

    def _change(self, path: str, body: dict[str, Any]) -> None:
        assert not self.dead
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return
        tags = set(body.get("tags", ()))
        if path == "/release_memory_occupation":
            self.dead = not self.paused or not tags <= self.allocated
            self.allocated -= tags
        elif path == "/resume_memory_occupation":
            assert not self.refuses_resume
            self.dead = bool(tags & self.allocated)
            self.allocated |= tags
        elif path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
        assert not self.dead
        self.events.append(" ".join(["engine:", path.removeprefix("/").split("_")[0], *sorted(tags)]))


class SmallReplica(Replica):
    """A replica without Ray, whose servers are threads of the test."""

    def __init__(self, index: int, make_server: Callable[[], SmallServer] = SmallServer) -> None:
        self.index, self.make_server = index, make_server
        self.spec = ServerSpec(model_path="/model")
        self.label = f"{self.spec.role} {index}"
        self.client = engine_backend().connect(lambda: [])
        self.num_starts = 0
        self.starts = True  # whether servers come up
        self.start_seconds = 0.0
        self.launch_server()

    def launch_server(self) -> None:
        self.num_starts += 1
        self.server: SmallServer | None = self.make_server()
        self.known_url = self.server.url
        self._ready = time.monotonic() + self.start_seconds

    def finish_adoption(self) -> None:
        pass

    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        if self.known_url is None:
            self.launch_server()
        while time.monotonic() < self._ready:
            if cancelled():
                raise StartCancelled
            time.sleep(0.01)
        if not self.starts:
            self.kill()
            raise RuntimeError("the server failed to start: no such model")
        assert self.known_url is not None
        return self.known_url

    def alive(self) -> bool:
        """A Ray actor that starts a server does not answer, so the server counts as dead."""
        return self.server is not None and time.monotonic() >= self._ready

    def place(self) -> ProcessPlace:
        return ProcessPlace("")

    def release(self) -> None:
        self.kill()

    def exit_report(self) -> str:
        return f"engine {self.index} died (exit code -9); tail of its log:\nthe last line"

    def die(self) -> None:
        if self.server is not None:
            self.server.die()
        self.server = None

    def kill(self) -> None:
        self.die()
        self.known_url = None
