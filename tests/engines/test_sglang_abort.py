"""The client beyond plain groups: several prompts in a request, sticky sessions, aborts, and the router."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from small_servers import SmallEngine, echo, with_servers

from penstock.engines.sglang.client import SGLangClient


def test_generate_each_sends_one_request_with_parameters_for_each_prompt() -> None:
    engine = SmallEngine()

    async def use(urls: list[str]) -> Any:
        async with SGLangClient(urls) as client:
            assert await client.generate_each([], []) == []
            return await client.generate_each([[7, 8], [9]], [{"sampling_seed": 1}, {"sampling_seed": 2}])

    assert [g.token_ids for g in with_servers([engine], use)] == [[8, 0], [9, 0]]
    [body] = engine.bodies
    assert body["input_ids"] == [[7, 8], [9]]
    assert body["sampling_params"] == [{"sampling_seed": 1}, {"sampling_seed": 2}]


def test_a_session_stays_with_its_engine_while_it_lives() -> None:
    engines = [SmallEngine(0.01), SmallEngine(0.01)]

    async def use(urls: list[str]) -> None:
        listed = list(urls)
        async with SGLangClient(lambda: listed) as client:
            for _ in range(5):
                await asyncio.gather(*[client.generate([name], {}, session=f"session {name}") for name in range(8)])
            sessions = [{body["input_ids"][0][0] for body in engine.bodies} for engine in engines]
            assert not sessions[0] & sessions[1] and [len(engine.bodies) for engine in engines] == [20, 20]
            listed.remove(urls[0])
            await client.generate([0], {}, session=f"session {min(sessions[0])}")
            assert len(engines[1].bodies) == 21
            listed.append(urls[0])
            await client.generate([0], {}, session=f"session {min(sessions[0])}")
            assert len(engines[1].bodies) == 22  # its prefix is cached there now

    with_servers([*engines], use)


def test_abort_ends_only_the_requests_of_this_client() -> None:
    engine = SmallEngine(seconds=20)

    async def use(urls: list[str]) -> None:
        async with SGLangClient(urls) as client, SGLangClient(urls) as other:
            running = [asyncio.create_task(client.generate([7, index], {}, n=2)) for index in range(3)]
            elsewhere = asyncio.create_task(other.generate([5], {}))
            await asyncio.sleep(0.1)
            await client.abort()
            answers = [generation for group in await asyncio.gather(*running) for generation in group]
            assert [(g.token_ids, g.finish_reason, g.weight_versions) for g in answers] == [
                ([index], "abort", [("run/3", 1)]) for index in (0, 0, 1, 1, 2, 2)
            ]
            [late] = await client.generate([7], {})
            assert (late.token_ids, late.finish_reason, late.weight_versions) == ([], "abort", [])
            assert not elsewhere.done() and len(engine.aborted) == 6 and len(engine.bodies) == 4
            elsewhere.cancel()
            await client.abort()  # again: nothing to do

    with_servers([engine], use)


def test_abort_works_without_live_engines_and_with_failing_ones() -> None:
    async def failing(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.Response(status=503, text="starting")

    async def use(urls: list[str]) -> None:
        for listed in ([], urls):
            async with SGLangClient(lambda listed=listed: listed, num_tries=1 if not listed else 100) as client:
                running = asyncio.create_task(client.generate([7], {}, n=2))
                await asyncio.sleep(0.1)
                await client.abort()
                assert [g.finish_reason for g in await running] == ["abort", "abort"]

    with_servers([failing], use)


def test_abort_reaches_a_request_that_arrives_late() -> None:
    """An engine ignores ids that it does not know, so one abort is not enough."""
    engine = SmallEngine(seconds=20)

    async def slow_to_read(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            await asyncio.sleep(0.25)
        return await engine(request)

    async def use(urls: list[str]) -> None:
        async with SGLangClient(urls) as client:
            running = asyncio.create_task(client.generate([7], {}))
            await asyncio.sleep(0.05)
            await client.abort()
            assert [g.token_ids for g in await running] == [[7]]

    with_servers([slow_to_read], use)


def test_requests_are_sent_to_the_router_and_aborts_to_every_engine() -> None:
    """Requests carry a routing key per session; aborts go to all engines, because only the router knows which one."""
    engines, keys = [SmallEngine(20), SmallEngine(20)], []

    async def router(request: web.Request) -> web.StreamResponse:
        assert request.path == "/generate" and isinstance((await request.json())["sampling_params"], dict)
        keys.append(request.headers["X-SMG-Routing-Key"])
        return await engines[len(keys) % 2](request)

    async def use(urls: list[str]) -> None:
        away = [True]
        async with SGLangClient(lambda: urls[1:], router=lambda: None if away else urls[0]) as client:
            calls = [
                client.generate([7], {}, n=2, session="one"),
                client.generate_each([[1], [2]], [{}, {}]),
                client.generate_each([[3], [4]], [{"sampling_seed": 0}, {"sampling_seed": 1}]),
            ]
            running = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0.1)
            assert not keys
            away.clear()
            await asyncio.sleep(0.3)
            await client.abort()
            answers = await asyncio.gather(*running)
        assert [[g.token_ids[0] for g in group] for group in answers] == [[7, 7], [1, 2], [3, 4]]
        assert len(keys) == 4 and len(set(keys)) == 3 and "one" in keys

    with_servers([router, *engines], use)


def test_a_router_without_restarts_left_raises_its_error() -> None:
    def hopeless() -> str | None:
        raise RuntimeError("the router failed after 3 restarts")

    async def use(urls: list[str]) -> None:
        async with SGLangClient(urls, router=hopeless) as client:
            await client.generate([7], {})

    with pytest.raises(RuntimeError, match="3 restarts"):
        with_servers([echo], use)
