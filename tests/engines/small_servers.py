"""Small HTTP servers that answer like SGLang."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiohttp import web

from penstock.engines.ports import reserve_free_port

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


def serve_json(say: Callable[[str], dict[str, Any]], port: int = 0) -> ThreadingHTTPServer:
    """Start a server in background threads that answers every GET with `say(path)`; port 0 is a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(say(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return http


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
            return web.json_response(
                {"model_path": "small", "weight_version": "run/3", "version": "0.5.21", "tp_size": 1}
            )
        body = await request.json()
        self.bodies.append(body)
        return web.json_response(
            await asyncio.gather(
                *[self._one(f"{body['rid']}_{index}", ids) for index, ids in enumerate(body["input_ids"])]
            )
        )

    async def _one(self, rid: str, ids: list[int]) -> dict[str, Any]:
        stopped = self._running[rid] = asyncio.Event()
        try:
            await asyncio.wait_for(stopped.wait(), self.seconds)
            return answer([ids[-1]], finish_reason={"type": "abort", "message": "Aborted"})
        except TimeoutError:
            return answer([ids[-1], 0])
        finally:
            del self._running[rid]
