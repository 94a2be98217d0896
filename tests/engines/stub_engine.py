"""A second inference engine, as a stranger would add it: its servers have no model and answer with digits.

The file is also the server's program: `python stub_engine.py PORT FIRST_DIGIT`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

state = {"version": "default"}  # of the server's process


class Handler(BaseHTTPRequestHandler):
    """GET returns the state; POST updates it and, with prompts, returns responses of four digits."""

    def do_GET(self) -> None:
        self.answer(state)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = int(sys.argv[2])
        responses = [[first + (len(prompt) + i) % 4 for i in range(4)] for prompt in body.pop("prompts", ())]
        state.update(body)
        self.answer({"responses": responses, "version": state["version"]})

    def answer(self, content: Any) -> None:
        allowed = self.headers["Authorization"] == f"Bearer {os.environ['PENSTOCK_SERVER_KEY']}"
        text = json.dumps(content if allowed else {}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *words: Any) -> None:
        pass


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


from penstock.engines.backends import (  # noqa: E402
    Capability,
    EngineBackend,
    EngineFacts,
    EngineMemory,
    estimate_engine_memory,
)
from penstock.engines.generation import (  # noqa: E402
    OVER_MEMORY,
    EngineClient,
    EngineGone,
    EngineUrls,
    Generation,
    PromptImage,
    WeightTransport,
)
from penstock.engines.serving.endpoints import auth_headers  # noqa: E402
from penstock.engines.serving.server import EngineServer  # noqa: E402
from penstock.storage.errors import EngineError  # noqa: E402

opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, body: dict[str, Any] | None = None, timeout: float = 10) -> dict[str, Any]:
    request = urllib.request.Request(url, body and json.dumps(body).encode(), auth_headers(url))
    try:
        with opener.open(request, timeout=timeout) as response:
            answer: dict[str, Any] = json.loads(response.read())
    except OSError as error:
        raise EngineGone(f"{url} did not answer: {error}") from error
    return answer


class StubClient(EngineClient):
    def __init__(self, urls: EngineUrls) -> None:
        self._urls = urls
        self._aborted = False
        self.received: list[str] = []

    @property
    def urls(self) -> list[str]:
        return list(self._urls() if callable(self._urls) else self._urls)

    async def generate_each(
        self,
        prompts: list[list[int]],
        samplings: list[dict[str, Any]],
        *,
        images: Sequence[Sequence[PromptImage]] = (),
        session: str | None = None,
    ) -> list[Generation]:
        if self._aborted:
            return [Generation([], [], "abort", []) for _ in prompts]
        answer = await asyncio.to_thread(call, self.urls[0], {"prompts": prompts})
        return [Generation(ids, [-1.0] * 4, "stop", [(answer["version"], 4)]) for ids in answer["responses"]]

    async def abort(self) -> None:
        self._aborted = True

    def update_weights(
        self, named: Iterable[tuple[str, Tensor]], version: str, transport: WeightTransport = OVER_MEMORY
    ) -> None:
        self.received = [name for name, _ in named]
        for url in self.urls:
            call(url, {"version": version})

    def generates_tokens(self, url: str, timeout: float = 30) -> bool:
        try:
            return bool(call(url, timeout=timeout))
        except EngineGone:
            return False

    def weight_version(self, url: str, timeout: float = 30) -> str:
        return str(call(url, timeout=timeout)["version"])


class StubServer(EngineServer):
    name = "stub"

    def command(self, port: int) -> list[str]:
        return [sys.executable, __file__, str(port), str(self.spec.args.get("first_digit", 6))]

    def is_ready(self) -> bool:
        return StubClient([]).generates_tokens(self.url(), 5)


class StubBackend(EngineBackend):
    title = "Stub"
    help = "--stub-first-digit N: the first of four token ids."
    server_class = StubServer
    capabilities = frozenset({Capability.EXTERNAL})
    context_flag = "--stub-context-length"

    def facts(self, args: Mapping[str, Any]) -> EngineFacts:
        return EngineFacts(context_length=args.get("context_length"))

    def check_args(self, args: Mapping[str, Any], *, router: bool = False) -> dict[str, Any]:
        if unknown := set(args) - {"first_digit", "context_length", "api_key"}:
            raise EngineError(f"--stub-{min(unknown)} is not a flag of the stub: omit it")
        return dict(args)

    def start_check(self) -> tuple[list[str], str]:
        return ["-c", "pass"], "nothing can be missing"

    def connect(self, urls: EngineUrls, timeout: float = 600, **_: Any) -> StubClient:
        return StubClient(urls)

    def estimate_memory(self, options: Any, shape: Any, gpu_bytes: int) -> EngineMemory:
        return estimate_engine_memory(shape, options.gpus_per_engine, gpu_bytes // 2)
