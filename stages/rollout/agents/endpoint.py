"""Serve the engines to agents through an OpenAI-compatible HTTP API: chat completions with tools, whole or streamed,
and the list of models. An agent needs no code for training: conversation.py turns its requests into samples.

The server listens on 127.0.0.1 in its own thread and event loop, so an agent that blocks its event loop does not block
the server. Every session has an API key that each request must send, because the URL may be visible in a command line;
the Host header is checked to prevent DNS rebinding. The run sets the sampling parameters, not the agent: the trainer
computes log-probs at the run's temperature, and the samples of a prompt must differ.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from penstock.stages.rollout.agents.conversation import AgentSession, Answer, ContextLengthError, SessionClosed
from penstock.stages.rollout.group import EngineCalls
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.text.templates import normalize_messages
from penstock.storage.errors import EngineError
from penstock.storage.samples.sample import Status

logger = logging.getLogger(__name__)

MODEL = "policy"  # model name in GET /models; requests may give any model name
MAX_REQUEST_BYTES = 64 * 2**20
# Ignored request parameters -> their default. Any value except the default and None logs a warning.
IGNORED = {
    "seed": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
}


class OpenAIEndpoint:
    """An OpenAI-compatible HTTP server for agents. The server starts when the first session is created."""

    def __init__(self, handle: EngineCalls, port: int = 0) -> None:
        config = handle.config
        self._handle, self._port = handle, port
        self._defaults: dict[str, Any] = IGNORED | {
            "temperature": config.rollout_temperature,
            "top_p": config.rollout_top_p,
            "top_k": config.rollout_top_k,
        }
        self._logged: set[str] = set()
        self._sessions: dict[str, AgentSession] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None

    def session(self, sample: UserSample) -> AgentSession:
        """Return a new session for one execution of an agent on the prompt of `sample`. Thread-safe."""
        with self._lock:
            if self._closed:
                raise SessionClosed("the endpoint is closed, because the round is over: do not start more agents")
            if self._thread is None:
                self._start_server()
        name = secrets.token_urlsafe(16)
        url = f"http://127.0.0.1:{self._port}/{name}/v1"
        key = secrets.token_urlsafe(32)
        session = AgentSession(self._handle, sample, url, key, on_close=lambda: self._sessions.pop(name, None))
        self._sessions[name] = session
        return session

    def end(self, trajectory_id: str) -> None:
        """Close all sessions of a trajectory; later requests of its agent get HTTP status 503."""
        for session in list(self._sessions.values()):
            if session.trajectory_id == trajectory_id:
                session.close()

    def close(self) -> None:
        """Close all sessions and the server; requests in flight are cancelled."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            assert self._loop is not None and self._closing is not None
            self._loop.call_soon_threadsafe(self._closing.set)
            thread.join()
        for session in list(self._sessions.values()):
            session.close()

    def _start_server(self) -> None:
        listening: Future[int] = Future()

        def run_server() -> None:
            try:
                with asyncio.Runner() as loop:
                    loop.run(self._serve(listening))
            except BaseException as error:
                if listening.done():
                    raise
                listening.set_exception(error)

        self._thread = threading.Thread(target=run_server, name="openai-endpoint", daemon=True)
        self._thread.start()
        try:
            self._port = listening.result()
        except OSError as error:
            self._thread = None
            raise EngineError(
                f"--agent-endpoint-port {self._port} cannot be used ({error}): give another port, or 0 for a free port"
            ) from None

    async def _serve(self, listening: Future[int]) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=MAX_REQUEST_BYTES, middlewares=[self._handle_with_openai_errors])
        app.router.add_post("/{session}/v1/chat/completions", self._chat_completions)
        app.router.add_get("/{session}/v1/models", self._list_models)
        # If an agent disconnects (after a timeout, for instance), its request is cancelled and not recorded.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            listening.set_result(runner.addresses[0][1])
            await self._closing.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _handle_with_openai_errors(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Check the Host header and the session's API key, and handle the request; convert errors to OpenAI's format,
        with a header that tells clients not to retry."""
        try:
            if request.host.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
                problem = "the Host header is not 127.0.0.1 or localhost: use session.base_url"
                return _error_response(403, problem, "invalid_request_error")
            if name := request.match_info.get("session"):  # else the path is unknown: `handler` raises HTTPNotFound
                if (session := self._sessions.get(name)) is None:
                    problem = "unknown session: the session is closed, or the URL is not the base_url of a session"
                    return _error_response(503, problem, "server_error", "stopped")
                scheme, _, key = request.headers.get("Authorization", "").partition(" ")
                if scheme != "Bearer" or not secrets.compare_digest(key.encode(), session.api_key.encode()):
                    problem = "the API key is missing or not the key of this session: give the client session.api_key"
                    return _error_response(401, problem, "invalid_request_error")
                request["session"] = session
            return await handler(request)
        except web.HTTPException as error:
            return _error_response(error.status, error.reason, "invalid_request_error")
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            return _error_response(400, str(error), "invalid_request_error", code)
        except SessionClosed as error:
            return _error_response(503, str(error), "server_error", "stopped")
        except Exception as error:
            logger.warning(
                "a request of an agent failed; the agent gets HTTP status 500: %s: %s", type(error).__name__, error
            )
            return _error_response(500, f"{type(error).__name__}: {error}", "server_error")

    async def _list_models(self, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session: AgentSession = request["session"]
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            raise ValueError(f"the body of the request is not JSON ({error}): send a JSON object") from None
        messages = normalize_messages(body.get("messages") if isinstance(body, dict) else None)
        if body.get("n") not in (None, 1):
            raise ValueError(f"n is {body['n']}, but only one choice per request is supported: send n=1")
        # "developer" is OpenAI's newer name of the system role, which chat templates of open models do not know.
        messages = [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]
        for name, default in self._defaults.items():
            is_default = body.get(name) in (None, default) or (name == "tool_choice" and body[name] == "none")
            if not is_default and name not in self._logged:
                self._logged.add(name)
                logger.warning(
                    "an agent requested %s=%s; ignored, because agents cannot set it (logged once per parameter)",
                    name,
                    str(body[name])[:80],
                )
        sampling: dict[str, Any] = {}  # sampling parameters that a request may set, under the engine's names
        if (limit := body.get("max_completion_tokens") or body.get("max_tokens")) is not None:
            sampling["max_new_tokens"] = int(limit)
        if stop := body.get("stop"):
            sampling["stop"] = [stop] if isinstance(stop, str) else list(stop)
        answer = await session.complete(
            messages,
            tools=() if body.get("tool_choice") == "none" else body.get("tools") or (),
            template_options=body.get("chat_template_kwargs"),
            **sampling,
        )
        completion = self._completion_body(body, answer)
        return (
            await _stream_completion(request, body, completion) if body.get("stream") else web.json_response(completion)
        )

    def _completion_body(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        turn, sample = answer.turn, answer.conversation.sample
        reason = "tool_calls" if "tool_calls" in answer.message else "stop"
        choice = {
            "index": 0,
            "message": answer.message,
            "finish_reason": "length" if turn.status is Status.TRUNCATED else reason,
            "logprobs": None,
        }
        start, end = turn.num_tokens - turn.num_written, turn.num_tokens
        if body.get("logprobs"):
            texts = self._handle.tokenizer.decode([[i] for i in sample.token_ids[start:end]], skip_special_tokens=False)
            choice["logprobs"] = {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, logprob in zip(texts, sample.rollout_logprobs[start:end])
                ]
            }
        return {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": start, "completion_tokens": end - start, "total_tokens": end},
        }


def _error_response(status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})  # obeyed by the openai package


async def _stream_completion(
    request: web.Request, body: dict[str, Any], completion: dict[str, Any]
) -> web.StreamResponse:
    """Send a finished completion as server-sent events: the content, every tool call, then the finish reason."""
    choice, message = completion["choices"][0], completion["choices"][0]["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls") or ())]
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choices = [[{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}] for delta in deltas]
    choices[0][0]["logprobs"] = choice["logprobs"]
    choices.append([{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}])
    chunks: list[dict[str, Any]] = [head | {"choices": choice} for choice in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": completion["usage"]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
