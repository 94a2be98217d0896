"""What a round asks of the client beside plain groups: many prompts in a request, sessions, and an end before the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from small_servers import SmallEngine, echo, with_servers

from engines.sglang.client import EngineClient


def test_each_prompt_with_its_own_parameters_in_one_request() -> None:
    engine = SmallEngine()

    async def use(urls: list[str]) -> Any:
        async with EngineClient(urls) as client:
            assert await client.generate_each([], []) == []
            return await client.generate_each([[7, 8], [9]], [{"sampling_seed": 1}, {"sampling_seed": 2}])

    assert [g.token_ids for g in with_servers([engine], use)] == [[8, 0], [9, 0]]
    [body] = engine.bodies
    assert body["input_ids"] == [[7, 8], [9]] and body["sampling_params"] == [{"sampling_seed": 1}, {"sampling_seed": 2}]


def test_a_session_stays_with_its_engine_while_it_lives() -> None:
    engines = [SmallEngine(0.01), SmallEngine(0.01)]

    async def use(urls: list[str]) -> None:
        listed = list(urls)
        async with EngineClient(lambda: listed) as client:
            for _ in range(5):
                await asyncio.gather(*[client.generate([name], {}, session=f"session {name}") for name in range(8)])
            homes = [{body["input_ids"][0][0] for body in engine.bodies} for engine in engines]
            assert not homes[0] & homes[1] and [len(engine.bodies) for engine in engines] == [20, 20]
            listed.remove(urls[0])
            await client.generate([0], {}, session=f"session {min(homes[0])}")
            assert len(engines[1].bodies) == 21
            listed.append(urls[0])
            await client.generate([0], {}, session=f"session {min(homes[0])}")
            assert len(engines[1].bodies) == 22  # where its beginning is cached now

    with_servers([*engines], use)


def test_abort_ends_the_requests_of_this_client_alone() -> None:
    engine = SmallEngine(seconds=20)

    async def use(urls: list[str]) -> None:
        async with EngineClient(urls) as client, EngineClient(urls) as other:
            running = [asyncio.create_task(client.generate([7, index], {}, n=2)) for index in range(3)]
            elsewhere = asyncio.create_task(other.generate([5], {}))
            await asyncio.sleep(0.1)
            await client.abort()
            answers = [generation for group in await asyncio.gather(*running) for generation in group]
            assert [(g.token_ids, g.finish_reason, g.weight_version) for g in answers] == [
                ([index], "abort", "run/3") for index in (0, 0, 1, 1, 2, 2)
            ]
            [late] = await client.generate([7], {})
            assert (late.token_ids, late.finish_reason, late.weight_version) == ([], "abort", "")
            assert not elsewhere.done() and len(engine.aborted) == 6 and len(engine.bodies) == 4
            elsewhere.cancel()
            await client.abort()  # a second time nothing is to be done

    with_servers([engine], use)


def test_abort_while_no_engine_lives_and_while_one_fails() -> None:
    async def failing(request: web.Request) -> web.Response:
        await asyncio.sleep(0.05)
        return web.Response(status=503, text="starting")

    async def use(urls: list[str]) -> None:
        for listed in ([], urls):
            async with EngineClient(lambda listed=listed: listed, num_tries=1 if not listed else 100) as client:
                running = asyncio.create_task(client.generate([7], {}, n=2))
                await asyncio.sleep(0.1)
                await client.abort()
                assert [g.finish_reason for g in await running] == ["abort", "abort"]

    with_servers([failing], use)


def test_a_request_that_has_not_arrived_yet_is_aborted_too() -> None:
    """An engine passes over ids that it does not know, so one abort is not enough."""
    engine = SmallEngine(seconds=20)

    async def slow_to_read(request: web.Request) -> web.StreamResponse:
        if request.path == "/generate":
            await asyncio.sleep(0.25)
        return await engine(request)

    async def use(urls: list[str]) -> None:
        async with EngineClient(urls) as client:
            running = asyncio.create_task(client.generate([7], {}))
            await asyncio.sleep(0.05)
            await client.abort()
            assert [g.token_ids for g in await running] == [[7]]

    with_servers([slow_to_read], use)


def test_through_a_router() -> None:
    """It gets the requests, with a key that says what belongs together; aborts go to every engine, for it may have been any."""
    engines, keys = [SmallEngine(20), SmallEngine(20)], []

    async def router(request: web.Request) -> web.StreamResponse:
        assert request.path == "/generate" and isinstance((await request.json())["sampling_params"], dict)
        keys.append(request.headers["X-SMG-Routing-Key"])
        return await engines[len(keys) % 2](request)

    async def use(urls: list[str]) -> None:
        away = [True]
        async with EngineClient(lambda: urls[1:], router=lambda: None if away else urls[0]) as client:
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


def test_a_router_that_cannot_be_kept_alive_ends_the_wait() -> None:
    def hopeless() -> str | None:
        raise RuntimeError("the router has been started 4 times")

    async def use(urls: list[str]) -> None:
        async with EngineClient(urls, router=hopeless) as client:
            await client.generate([7], {})

    with pytest.raises(RuntimeError, match="started 4 times"):
        with_servers([echo], use)
