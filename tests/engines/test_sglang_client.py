"""The client with small HTTP servers that answer like SGLang or like a failing SGLang: groups, sessions, aborts,
images, and the router."""

from __future__ import annotations

import asyncio
import base64
import math
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from small_servers import Handler, JsonServer, SmallEngine, answer, echo, with_servers

from penstock.engines.generation import Generation, PromptImage, TokenCounts
from penstock.engines.network import reserve_free_port
from penstock.engines.sglang.client import SGLangClient, parse_generation
from penstock.storage.errors import EngineError
from penstock.storage.samples.routed_experts import ExpertsFormat


def generate(handlers: list[Handler], prompt: list[int], n: int = 1, **options: Any) -> list[Generation]:
    async def use(urls: list[str]) -> list[Generation]:
        async with SGLangClient(urls, **options) as client:
            return await client.generate(prompt, {}, n)

    return with_servers(handlers, use)


def test_generate_sends_one_request_for_a_group() -> None:
    generations = generate([echo], [7, 8, 9], n=3)
    assert [g.token_ids for g in generations] == [[9, 0], [9, 1], [9, 2]]
    assert generations[1].logprobs == [-4.5, -0.5]
    assert (generations[0].finish_reason, generations[0].weight_versions) == ("stop", [("run/3", 2)])
    assert generations[0].counts == TokenCounts(prompt=3, cached=2)


def test_requests_of_all_ranks_are_counted_and_unknown_numbers_are_none() -> None:
    loads = [{"num_running_reqs": 3, "num_waiting_reqs": 0}, {"num_running_reqs": 2, "num_waiting_reqs": 7}]
    said: dict[str, Any] = {"loads": loads}
    server = JsonServer(lambda path: said if path.startswith("/v1/loads") else {})
    client = SGLangClient([server.url])
    assert client.num_requests(server.url) == (5, 7)
    del loads[1]["num_waiting_reqs"]
    assert client.num_requests(server.url) is None
    said.clear()
    assert client.num_requests(server.url) is None
    server.die()
    assert client.num_requests(server.url, 1.0) is None


EXPERTS = ExpertsFormat(num_layers=3, num_dense_layers=1, num_experts=4, top_k=2)


def chosen_experts(num_tokens: int) -> dict[str, str]:
    """Routed experts as SGLang sends them: base64 of int32 for all layers, dense ones too."""
    numbers = np.array([[[9, 9], [token % 4, (token + 1) % 4], [3, 0]] for token in range(num_tokens)], dtype=np.int32)
    return {"routed_experts": base64.b64encode(numbers.tobytes()).decode()}


def test_routed_experts_are_requested_and_compressed() -> None:
    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["return_routed_experts"]
        return web.json_response([answer([5, 6], **chosen_experts(len(ids) + 1)) for ids in body["input_ids"]])

    [first, _] = generate([reply], [7, 8, 9], n=2, experts=EXPERTS)
    assert first.routed_experts == bytes([0, 1, 3, 0, 1, 2, 3, 0, 2, 3, 3, 0, 3, 0, 3, 0])


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "--sglang-enable-return-routed-experts"),
        (chosen_experts(3), r"returned 18 routed experts, expected 24 \(4 tokens x 3 layers x 2 experts\)"),
    ],
)
def test_missing_or_misshaped_routed_experts_raise(meta: dict[str, str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        parse_generation(answer([5, 6], **meta), EXPERTS, num_prompt_tokens=3)
    stopped = parse_generation(answer([5, 6], finish_reason={"type": "abort"}), EXPERTS, num_prompt_tokens=3)
    assert stopped.routed_experts is None


def test_parse_generation_reads_version_spans_and_rejects_disagreeing_tokens() -> None:
    spans = [{"version": "run/2", "start": 0, "end": 1}, {"version": "run/3", "start": 1, "end": 2}]
    generation = parse_generation(answer([4, 5], weight_versions=spans))
    assert generation.weight_versions == [("run/2", 1), ("run/3", 1)]
    assert parse_generation(answer([])).logprobs == []
    assert math.isnan(parse_generation(answer([4], output_token_logprobs=[[None, 4, None]])).logprobs[0])
    with pytest.raises(AssertionError, match="disagree"):
        parse_generation({**answer([4, 5]), "output_ids": [4, 6]})


def test_requests_move_from_a_failing_engine_to_another() -> None:
    async def failing(request: web.Request) -> web.Response:
        return web.Response(status=503, text="starting")

    async def use(urls: list[str]) -> Any:
        async with SGLangClient([*urls, f"http://127.0.0.1:{reserve_free_port()}"]) as client:
            return [await client.generate([index], {}) for index in range(4)]

    groups = with_servers([failing, echo], use)
    assert [group[0].token_ids[0] for group in groups] == [0, 1, 2, 3]


def test_responses_of_an_incomplete_weight_update_are_requested_again() -> None:
    """An update that failed on one engine leaves the others with parts of the new weights."""
    calls = []

    async def half_updated(request: web.Request) -> web.Response:
        calls.append(request.path)
        weights = "updating:run/4" if len(calls) < 3 else "run/4"
        return web.json_response([answer([5], weight_version=weights)])

    [generation] = generate([half_updated], [1])
    assert generation.weight_versions == [("run/4", 1)] and len(calls) == 3


def test_raises_connection_error_after_num_tries() -> None:
    calls = []

    async def failing(request: web.Request) -> web.Response:
        calls.append(request.path)
        return web.Response(status=500, text="scheduler died")

    with pytest.raises(ConnectionError, match=r"2 tries.*scheduler died"):
        generate([failing], [1], num_tries=2)
    assert len(calls) == 2


def test_a_request_is_sent_again_after_its_engine_died() -> None:
    """The engine dies with requests in flight; for a while there is none; then another one starts elsewhere."""
    listed: list[str] = []
    asked = {"dying": 0, "new": 0}
    all_arrived = asyncio.Event()

    async def dying(request: web.Request) -> web.Response:
        asked["dying"] += 1
        if asked["dying"] == 6:
            all_arrived.set()
        await all_arrived.wait()
        await asyncio.sleep(0.1)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def new(request: web.Request) -> web.Response:
        asked["new"] += 1
        return await echo(request)

    async def use(urls: list[str]) -> Any:
        listed.append(urls[0])
        async with SGLangClient(lambda: listed, num_tries=1) as client:
            running = [asyncio.create_task(client.generate([7, index], {}, n=2)) for index in range(6)]
            await all_arrived.wait()
            listed.clear()
            await asyncio.sleep(0.2)
            assert not any(task.done() for task in running)
            listed.append(urls[1])
            return await asyncio.gather(*running)

    groups = with_servers([dying, new], use)
    assert [[g.token_ids for g in group] for group in groups] == [[[i, 0], [i, 1]] for i in range(6)]
    assert asked == {"dying": 6, "new": 6}


def test_a_request_is_resent_when_its_engine_leaves_the_list() -> None:
    """The machine is lost, and the connection stays open."""

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return await echo(request)

    async def use(urls: list[str]) -> Any:
        listed = [urls[0]]
        async with SGLangClient(lambda: listed) as client:
            running = asyncio.create_task(client.generate([7], {}))
            await asyncio.sleep(0.1)
            listed[0] = urls[1]
            start = asyncio.get_running_loop().time()
            assert (await running)[0].token_ids == [7, 0]
            assert asyncio.get_running_loop().time() - start < 5, "the silent one answers after 5 s"

    with_servers([silent, echo], use)


@pytest.mark.parametrize("failing", ["engines", "router"])
def test_an_error_of_the_engine_list_or_of_the_router_is_raised(failing: str) -> None:
    failed: list[bool] = []

    def find() -> Any:
        if failed:
            raise RuntimeError("engine 0 died (exit code -9)")
        return [] if failing == "engines" else None

    async def use() -> None:
        client = SGLangClient(find) if failing == "engines" else SGLangClient(["http://127.0.0.1:9"], router=find)
        async with client:
            running = asyncio.create_task(client.generate([7], {}))
            await asyncio.sleep(0.05)
            failed.append(True)
            await running

    with pytest.raises(RuntimeError, match="exit code -9"):
        asyncio.run(use())


def test_refusals_and_timeouts_are_not_retried() -> None:
    calls = []

    async def refusing(request: web.Request) -> web.Response:
        calls.append("refused")
        return web.json_response({"error": {"message": "the prompt has 300 tokens"}}, status=400)

    async def slow(request: web.Request) -> web.Response:
        calls.append("slow")
        await asyncio.sleep(5)
        return web.json_response([])

    with pytest.raises(ValueError, match="the prompt has 300 tokens"):
        generate([refusing], [1])
    with pytest.raises(TimeoutError):
        generate([slow], [1], timeout=0.2)
    assert calls in (["refused", "slow"], ["refused"])  # asked at most once


def test_the_least_busy_engine_gets_the_next_group() -> None:
    served: dict[int, int] = {}

    def counting(name: int, seconds: float) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            served[name] = served.get(name, 0) + 1
            await asyncio.sleep(seconds)
            return await echo(request)

        return handle

    async def use(urls: list[str]) -> Any:
        async with SGLangClient(urls) as client:
            gate = asyncio.Semaphore(4)

            async def one() -> None:
                async with gate:
                    await client.generate([1], {})

            await asyncio.gather(*[one() for _ in range(24)])
            assert set(client._load.values()) == {0}

    with_servers([counting(0, 0.3), counting(1, 0.005)], use)
    assert served[1] > 2 * served[0] > 0


# ---- sessions, aborts and the router ---------------------------------------------------------------------------------


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


# ---- images ----------------------------------------------------------------------------------------------------------

FIRST, SECOND = PromptImage(b"first", 1, 3), PromptImage(b"second", 6, 2)
SHOWN = [5, 58, 58, 58, 6, 7, 58, 58, 8]  # tokens 1 to 3 belong to the first image, 6 and 7 to the second one


def ask_with_images(prompts: list[list[int]], images: list[list[PromptImage]], num_tokens: list[int]) -> list[Any]:
    """Return the request of a client to a server that counts `num_tokens` for the prompts, and the responses."""
    bodies: list[Any] = []

    async def reply(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response([answer([9, 1], prompt_tokens=count) for count in num_tokens])

    async def use(urls: list[str]) -> list[Generation]:
        async with SGLangClient(urls) as client:
            return await client.generate_each(prompts, [{}] * len(prompts), images=images)

    return [*with_servers([reply], use), *bodies]


def test_requests_have_one_token_and_one_file_for_each_image() -> None:
    first, second, body = ask_with_images([SHOWN, [4, 5]], [[FIRST, SECOND], []], [9, 2])
    assert body["input_ids"] == [[5, 58, 6, 7, 58, 8], [4, 5]]
    assert [list(map(base64.b64decode, shown)) for shown in body["image_data"]] == [[b"first", b"second"], []]
    assert (first.counts.prompt, second.counts.prompt) == (9, 2)
    assert "image_data" not in ask_with_images([[4, 5]], [[]], [2])[-1]


def test_a_prompt_that_the_engine_expands_to_other_tokens_is_refused() -> None:
    with pytest.raises(EngineError, match="made 8 tokens of a prompt with images, which has 9"):
        ask_with_images([SHOWN], [[FIRST, SECOND]], [8])
