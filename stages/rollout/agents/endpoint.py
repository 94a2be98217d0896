"""An OpenAI-compatible server in front of the engines, for agents that know nothing of training: chat completions with tools,
whole or streamed, and the list of models. What the calls become is `session.py`'s.

It listens on 127.0.0.1 in a thread and an event loop of its own, so that an agent which blocks its loop does not block its own
answers. Every session has a key, which each of its calls must carry; the address alone, which a command line may show, opens nothing, and
no page of a browser can come in under another Host. How tokens are drawn is the run's to say and not the agent's: the trainer computes the probability of every token at
the run's temperature, and samples of one prompt must differ.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from aiohttp import web

from stages.rollout.agents.session import AgentSession, Answer, NoRoom, Stopped
from stages.rollout.user_sample import UserSample
from storage.errors import EngineError
from storage.sample import Status

if TYPE_CHECKING:
    from stages.rollout.engine_handle import EngineHandle

logger = logging.getLogger(__name__)

MODEL = "policy"  # its name in the list of models; a request may say any
LONGEST_REQUEST = 64 * 2**20  # bytes
# What an agent may ask for and does not get -> the value that asks for nothing. None does, too.
NOT_THE_AGENTS = {
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
    """The server, started with the first session.

    Args:
        handle: of the engines; its `generate` may be called from any event loop.
        port: 0 finds a free one.
    """

    def __init__(self, handle: EngineHandle, port: int = 0) -> None:
        config = handle.config
        self._handle, self._port = handle, port
        self._own: dict[str, Any] = NOT_THE_AGENTS | {
            "temperature": config.rollout_temperature,
            "top_p": config.rollout_top_p,
            "top_k": config.rollout_top_k,
        }
        self._told: set[str] = set()
        self._sessions: dict[str, AgentSession] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None

    def session(self, sample: UserSample) -> AgentSession:
        """A session for one execution of an agent. From any thread.

        Raises:
            EngineError: the port is taken.
            Stopped: the endpoint is closed.
        """
        with self._lock:
            if self._closed:
                raise Stopped("the round is over")
            if self._thread is None:
                self._start()
        name = secrets.token_urlsafe(16)
        url = f"http://127.0.0.1:{self._port}/{name}/v1"
        key = secrets.token_urlsafe(32)
        session = AgentSession(self._handle, sample, url, key, on_close=lambda: self._forget(name))
        self._sessions[name] = session
        return session

    def end(self, trajectory_id: str) -> None:
        """End the sessions of an execution that has failed or taken too long: what it still asks is not answered."""
        for session in list(self._sessions.values()):
            if session.trajectory_id == trajectory_id:
                session.close()

    def close(self) -> None:
        """End all sessions and the server; calls still running are cancelled."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            assert self._loop is not None and self._closing is not None
            self._loop.call_soon_threadsafe(self._closing.set)
            thread.join()
        for session in list(self._sessions.values()):
            session.close()

    def _forget(self, name: str) -> None:
        self._sessions.pop(name, None)

    def _start(self) -> None:
        listening: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="openai-endpoint", daemon=True)
        self._thread.start()
        try:
            self._port = listening.result()
        except OSError as error:
            self._thread = None
            raise EngineError(
                f"--agent-endpoint-port {self._port} cannot be used ({error}): give another port, or 0 for a free one"
            ) from None

    def _run(self, listening: Future[int]) -> None:
        try:
            asyncio.run(self._serve(listening))
        except BaseException as error:
            if listening.done():
                raise
            listening.set_exception(error)  # the caller waits for a port

    async def _serve(self, listening: Future[int]) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=LONGEST_REQUEST, middlewares=[self._in_openais_words])
        app.router.add_post("/{session}/v1/chat/completions", self._chat_completions)
        app.router.add_get("/{session}/v1/models", self._models)
        # An agent that hangs up, at a time limit say, has not had the answer: the call is cancelled and leaves nothing.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
            listening.set_result(runner.addresses[0][1])
            await self._closing.wait()
        except OSError as error:
            listening.set_exception(error)
        finally:
            await runner.cleanup()

    @web.middleware
    async def _in_openais_words(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Errors as OpenAI's clients read them. None of ours is worth their trying again."""
        try:
            self._check_access(request)
            return await handler(request)
        except web.HTTPException as error:
            return _error(error.status, error.reason, "invalid_request_error")
        except NoRoom as error:
            return _error(400, str(error), "invalid_request_error", "context_length_exceeded")
        except ValueError as error:
            return _error(400, str(error), "invalid_request_error")
        except Stopped as error:
            return _error(503, str(error), "server_error", "stopped")
        except Exception as error:
            logger.warning("a call of an agent failed: %s: %s", type(error).__name__, error)
            return _error(500, f"{type(error).__name__}: {error}", "server_error")

    def _check_access(self, request: web.Request) -> None:
        """Refuse a foreign Host and a call without the session's key. A session that has ended has none; its calls are told so."""
        if request.host.rpartition(":")[0] not in ("127.0.0.1", "localhost"):
            raise web.HTTPForbidden(reason="foreign Host")
        session = self._sessions.get(request.match_info.get("session", ""))
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if session is not None and not (scheme == "Bearer" and secrets.compare_digest(key.encode(), session.api_key.encode())):
            raise web.HTTPUnauthorized(reason="the call has no key, or that of another session: give the client session.api_key")

    async def _models(self, request: web.Request) -> web.Response:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "penstock"}
        return web.json_response({"object": "list", "data": [model]})

    def _session_of(self, request: web.Request) -> AgentSession:
        if (session := self._sessions.get(request.match_info["session"])) is None:
            raise Stopped("there is no such session: it has ended, or the address is wrong")
        return session

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            raise ValueError(f"the request is no JSON ({error})") from None
        messages = _checked_messages(body)
        self._tell_of_ignored(body)
        answer = await session.complete(
            messages,
            tools=() if body.get("tool_choice") == "none" else body.get("tools") or (),
            template_options=body.get("chat_template_kwargs"),
            **_sampling(body),
        )
        completion = self._completion(body, answer)
        return await _streamed(request, body, completion) if body.get("stream") else web.json_response(completion)

    def _tell_of_ignored(self, body: dict[str, Any]) -> None:
        for name, own in self._own.items():
            if (
                body.get(name) not in (None, own)
                and not (name == "tool_choice" and body[name] == "none")
                and name not in self._told
            ):
                self._told.add(name)
                logger.warning(
                    "an agent asks for %s=%s, which is not its own to say: the run's is used", name, str(body[name])[:80]
                )

    def _completion(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
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


def _checked_messages(body: Any) -> list[dict[str, Any]]:
    """The messages of a request. Raises ValueError for what cannot be answered."""
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("the request has no messages: give a list of at least one")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{json.dumps(message)[:80]} is no message: it needs a role and content")
        for call in message.get("tool_calls") or ():
            if not isinstance(call, dict) or not isinstance((call.get("function") or {}).get("name"), str):
                raise ValueError(f"{json.dumps(call)[:80]} is no tool call: it needs a function with a name")
    if body.get("n") not in (None, 1):
        raise ValueError(f"n is {body['n']}: ask for one choice at a time")
    # "developer" is OpenAI's newer word, which no open model's template knows.
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """What of a request is the agent's to say, in SGLang's words."""
    sampling: dict[str, Any] = {}
    if (limit := body.get("max_completion_tokens") or body.get("max_tokens")) is not None:
        sampling["max_new_tokens"] = int(limit)
    if stop := body.get("stop"):
        sampling["stop"] = [stop] if isinstance(stop, str) else list(stop)
    return sampling


def _error(status: int, message: str, kind: str, code: str | None = None) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})  # the openai package obeys it


async def _streamed(request: web.Request, body: dict[str, Any], completion: dict[str, Any]) -> web.StreamResponse:
    """A finished completion as server-sent events: one for the content, one per tool call, one for the end."""
    choice, message = completion["choices"][0], completion["choices"][0]["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] or ""}]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls") or ())]
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choices = [[{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}] for delta in deltas]
    choices[0][0]["logprobs"] = choice["logprobs"]
    choices.append([{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}])
    chunks: list[dict[str, Any]] = [head | {"choices": one} for one in choices]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": completion["usage"]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response
