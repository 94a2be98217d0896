"""An HTTP proxy that injects faults into a fraction of the calls to an S3 server, and counts them.

In a test: `with FaultyProxy(target, rate=0.05, seed=1) as proxy: ... proxy.url ... proxy.counts`. As a program:

    python tests/storage/faulty.py --port-file F --rate 0.05 --seed 1 --target http://127.0.0.1:5000

It writes its port to F once it listens, answers `GET /-/faults` with its counts, and ends with SIGTERM. The faults:

    error       500 InternalError                           throttle   503 SlowDown
    reset       the connection breaks before the call       hang       it breaks after the client's timeout
    slow        the response is late                        lost       the call is done, its response is lost
    cut         a download ends early                       damage     a range of a download has a wrong byte
    cut_upload  the connection breaks during an upload      short      half of an upload is stored, with status 200
    lag         a listing lacks writes of the last `lag_seconds`

`short` skips records (`If-None-Match`): no protocol survives a store whose conditional create is not atomic.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit
from xml.etree import ElementTree

import aiohttp
from aiohttp import web
from yarl import URL

_HOP = {  # headers of one connection
    *("connection", "keep-alive", "transfer-encoding", "expect", "te", "trailer", "upgrade", "proxy-connection"),
    "content-length",
}
_CODES = {"error": (500, "InternalError"), "throttle": (503, "SlowDown")}
KINDS = {"error", "throttle", "reset", "hang", "slow", "lost", "cut", "damage", "cut_upload", "short", "lag"}
_ANY = ["error", "throttle", "reset", "hang", "slow"]


class FaultyProxy:
    """Stands between a client and `target`, in a thread and an event loop of its own.

    Every call gets a fault with probability `rate`, at most `limit` times, of `kinds` (all by default). Calls that run
    at the same time may meet the faults of a `seed` in another order.
    """

    def __init__(  # noqa: PLR0913, options of its command line
        self,
        target: str,
        *,
        rate: float = 0.05,
        limit: int | None = None,
        seed: int = 0,
        kinds: set[str] | None = None,
        hang_seconds: float = 3.0,  # longer than the client's read timeout
        slow_seconds: float = 0.3,  # at most
        lag_seconds: float = 5.0,  # the age of a listing
        port: int = 0,
    ) -> None:
        self.target, self.rate, self.limit, self.kinds, self.port = target, rate, limit, kinds, port
        self.hang_seconds, self.slow_seconds, self.lag_seconds = hang_seconds, slow_seconds, lag_seconds
        self.counts: Counter[str] = Counter()  # by kind; "calls" are all of them
        self.url = ""
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._records = asyncio.Lock()  # moto checks If-None-Match and then writes; a real store does both at once
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(timeout=30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(timeout=30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=30)
        self._loop.close()

    async def _start(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        hanging = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)

    # ---- one call ----------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/-/faults":
            return web.json_response(dict(self.counts))
        self.counts["calls"] += 1
        body = await request.read()
        fault = self._draw(request, body)
        if fault:
            self.counts[fault] += 1
            self.limit = None if self.limit is None else self.limit - 1
        if fault in _CODES:
            status, code = _CODES[fault]
            xml = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>"
            return web.Response(status=status, text=xml, content_type="application/xml")
        if fault in ("reset", "hang", "cut_upload"):
            if fault == "hang":
                await asyncio.sleep(self.hang_seconds)
            if fault == "cut_upload":
                await self._send_half(request, body)
            return self._broken(request)
        if fault == "slow":
            await asyncio.sleep(self._random.uniform(0.0, self.slow_seconds))
        status, headers, answer = await self._forward(request, body[: len(body) // 2] if fault == "short" else body)
        if fault == "lost":
            return self._broken(request)
        if fault == "lag":
            answer = self._yesterday(answer)
        if fault == "damage" and answer:
            at = self._random.randrange(len(answer))
            answer = answer[:at] + bytes([answer[at] ^ 0x40]) + answer[at + 1 :]
        return await self._answer(request, status, headers, answer, cut=fault == "cut")

    def _draw(self, request: web.Request, body: bytes) -> str | None:
        """The fault of this call, or None. Every kind that fits the call is as likely as the others."""
        kinds = list(_ANY)
        if request.method == "GET":
            kinds += ["lag"] if "list-type" in request.query else ["cut"]
            kinds += ["damage"] if "Range" in request.headers else []
        if request.method in ("PUT", "POST", "DELETE"):
            kinds.append("lost")
        if request.method == "PUT" and len(body) > 1:
            kinds += ["cut_upload"] if "If-None-Match" in request.headers else ["cut_upload", "short"]
        kinds = [kind for kind in kinds if self.kinds is None or kind in self.kinds]
        wanted = self._random.random() < self.rate and self.limit != 0
        return self._random.choice(kinds) if wanted and kinds else None

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP]
        url = URL(self.target + request.raw_path, encoded=True)
        async with self._records if "If-None-Match" in request.headers else contextlib.nullcontext():
            async with self._session.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                return answer.status, list(answer.headers.items()), await answer.read()

    async def _answer(
        self, request: web.Request, status: int, headers: list[tuple[str, str]], answer: bytes, cut: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        for name, value in headers:
            if name.lower() not in _HOP:
                response.headers.add(name, value)
        said = dict((name.lower(), value) for name, value in headers).get("content-length")
        response.content_length = int(said or 0) if request.method == "HEAD" else len(answer)
        if status in (204, 304):
            response.content_length = None
        await response.prepare(request)
        if cut and answer:
            await response.write(answer[: len(answer) // 2])
            return self._broken(request)
        if request.method != "HEAD" and answer:
            await response.write(answer)
        await response.write_eof()
        return response

    def _broken(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    async def _send_half(self, request: web.Request, body: bytes) -> None:
        """What a server sees of a client that dies in the middle: all headers, half a body, the end."""
        where = urlsplit(self.target)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        headers = [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in _HOP]
        head = "\r\n".join(
            [f"{request.method} {request.raw_path} HTTP/1.1", *headers, f"Content-Length: {len(body)}", "", ""]
        )
        writer.write(head.encode() + body[: len(body) // 2])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    def _yesterday(self, answer: bytes) -> bytes:
        """Return a listing as it was `lag_seconds` ago, without objects deleted since."""
        space = "{http://s3.amazonaws.com/doc/2006-03-01/}"
        try:
            root = ElementTree.fromstring(answer)
        except ElementTree.ParseError:
            return answer
        now = datetime.now(UTC).timestamp()
        for entry in root.findall(f"{space}Contents"):
            written = datetime.fromisoformat(entry.findtext(f"{space}LastModified", "1970-01-01T00:00:00Z")).timestamp()
            if now - written < self.lag_seconds:
                root.remove(entry)
        ElementTree.register_namespace("", space[1:-1])
        return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)


def main() -> None:
    """Run as a program."""
    parser = argparse.ArgumentParser(description="A faulty proxy in front of an S3 server.")
    parser.add_argument("--target", required=True, help="the real server, http://host:port")
    parser.add_argument("--port-file", type=Path, required=True, help="where to write the port, once it listens")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang-seconds", type=float, default=20.0)  # s3fs's read timeout is 15
    parser.add_argument("--lag-seconds", type=float, default=5.0)
    parser.add_argument("--kinds", nargs="*", help="only these faults")
    words = parser.parse_args()
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    kinds = set(words.kinds) if words.kinds else None
    seconds = {"hang_seconds": words.hang_seconds, "lag_seconds": words.lag_seconds}
    with FaultyProxy(words.target, rate=words.rate, seed=words.seed, kinds=kinds, **seconds) as proxy:
        temporary = words.port_file.with_suffix(".tmp")
        temporary.write_text(str(proxy.port))
        temporary.rename(words.port_file)
        done.wait()
        print(json.dumps(dict(proxy.counts)))


if __name__ == "__main__":
    main()
