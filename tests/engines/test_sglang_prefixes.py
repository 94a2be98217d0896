"""Which keys and values the real SGLang reuses after weight updates in place (docs/design/0025): none of other weights,
whatever the request, the update and the client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from families import hf_model, logprob_error
from small_servers import generate_once

from penstock.engines.generation import Generation, TokenCounts, WeightTransport
from penstock.engines.serving import endpoints
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang import control
from penstock.engines.sglang.backend import SGLangServer
from penstock.engines.sglang.client import SGLangClient, parse_generation
from penstock.engines.sglang.router import SGLangRouter
from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
CHUNK = 64  # tokens of prefill
TOLERANCE = 1e-3  # of log-probs in fp32; measured 3e-6
DIFFERENCE = 0.1  # of log-probs over keys and values of other weights
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
IN_PLACE = WeightTransport(in_flight="in_place")
rng = random.Random(5)


class Engine:
    """A server with prefill in chunks of 64 tokens and a cache of 4,096, and two models whose weights it loads. They
    are large enough for log-probs to depend on every token of the prompt."""

    def __init__(self, directory: Path) -> None:
        self.directory = make_tiny_model(directory / "model", max_length=2048)
        self.models = [
            hf_model(make_tiny_model(directory / f"seed{seed}", seed=seed, max_length=2048)) for seed in (1, 2)
        ]
        for model in self.models:
            for weight in model.parameters():
                weight.data *= 8 if weight.ndim == 2 else 1
            model.model.embed_tokens.weight.data[[*range(6), *range(54, 64)]] = 0  # samples characters only
        self.tokenizer = make_tokenizer()
        args = {"enable_cache_report": True, "chunked_prefill_size": CHUNK, "max_total_tokens": 4096}
        self.server = SGLangServer(ServerSpec(model_path=str(self.directory), args=args, log_dir=str(directory)))
        self.url = self.server.start()
        self.loaded, self.num_updates = 0, 0

    def update(self, transport: WeightTransport = IN_PLACE, version: str | None = None) -> None:
        """Load the other model's weights."""
        self.loaded, self.num_updates = 1 - self.loaded, self.num_updates + 1
        named = {name: value for name, value in self.models[self.loaded].state_dict().items() if "lm_head" not in name}
        client = SGLangClient([self.url])
        client.update_weights(iter(named.items()), version or f"run/{self.num_updates}", transport)
        assert client._weight_sender is not None
        client._weight_sender._leave_engine_group()  # so that other clients of this process can have theirs

    def error(self, prompt: list[int], generation: Generation) -> float:
        return logprob_error(self.models[self.loaded], prompt, generation)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("prefixes"))
    yield engine
    report = engine.server.exit_report()
    engine.server.stop()
    assert report.startswith("is stuck"), report  # alive: SGLang ends if its cache loses track of a page


def new_prompt(length: int = 101) -> list[int]:
    return [rng.randrange(6, 54) for _ in range(length)]


def ask(engine: Engine, prompt: list[int], n: int = 1, **options: Any) -> list[Generation]:
    return generate_once([engine.url], prompt, GREEDY, n, **options)


def raw(engine: Engine, path: str, body: dict[str, Any]) -> Any:
    """Send a request as a program that does not use Penstock's client."""
    return control.call_server(engine.url, path, body)


def generate(engine: Engine, prompt: list[int], **fields: Any) -> list[Generation]:
    body = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True, **fields}
    return [parse_generation(raw(engine, "/generate", body), None, len(prompt))]


def through_router(engine: Engine, prompt: list[int]) -> list[Generation]:
    with SGLangRouter({}, str(engine.directory)) as router:
        router.set_backends([engine.url])
        return ask(engine, prompt, router=router.address)


def completions(engine: Engine, prompt: list[int]) -> list[Generation]:
    body = {"model": "any", "prompt": prompt, "logprobs": 1, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    answer = raw(engine, "/v1/completions", body)
    logprobs = answer["choices"][0]["logprobs"]
    cached = (answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
    ids = engine.tokenizer(logprobs["tokens"], add_special_tokens=False)["input_ids"]
    tokens = [token_id for [token_id] in ids]
    return [Generation(tokens, logprobs["token_logprobs"], "length", [], TokenCounts(len(prompt), cached))]


REQUESTS: dict[str, Callable[[Engine, list[int]], list[Generation]]] = {
    "one": ask,
    "group": lambda engine, prompt: ask(engine, prompt, n=4),
    "router": through_router,
    "own program with its salt": lambda engine, prompt: generate(engine, prompt, cache_salt="run/1"),
    "own program names the key of other weights": lambda engine, prompt: generate(engine, prompt, extra_key="0:"),
    "OpenAI's route": completions,
}


@pytest.mark.parametrize("send", REQUESTS.values(), ids=REQUESTS)
def test_request_after_an_update_computes_its_prompt_with_the_new_weights(
    engine: Engine, send: Callable[[Engine, list[int]], list[Generation]]
) -> None:
    prompt = new_prompt()
    send(engine, prompt)
    for _ in range(2):  # the second time with the weights of the first request, whose keys and values are still there
        engine.update()
        after, later = send(engine, prompt), send(engine, prompt)
        assert after[0].counts.cached == 0, "keys and values of other weights were reused"
        assert {generation.counts.cached for generation in later} == {len(prompt) - 1}
        for generation in [*after, *later]:
            assert engine.error(prompt, generation) < TOLERANCE
            assert logprob_error(engine.models[1 - engine.loaded], prompt, generation) > DIFFERENCE


def over_disk(directory: Path, model: Path) -> WeightTransport:
    return WeightTransport("disk", model_path=str(model), directory=str(directory), in_flight="in_place")


TRANSPORTS: dict[str, Callable[[Engine, Path], WeightTransport]] = {
    "several buckets": lambda engine, directory: replace(IN_PLACE, bucket_bytes=1),
    "nccl": lambda engine, directory: replace(IN_PLACE, kind="nccl"),
    "disk": lambda engine, directory: over_disk(directory, engine.directory),
    "retract": lambda engine, directory: WeightTransport(in_flight="retract"),
}


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS)
def test_every_update_separates_the_cache(
    engine: Engine, transport: Callable[[Engine, Path], WeightTransport], tmp_path: Path
) -> None:
    """The second update has the version of the first: that of a round which is trained again after a crash."""
    prompt, version = new_prompt(), f"run/again-{engine.num_updates}"
    ask(engine, prompt)
    for _ in range(2):
        engine.update(transport(engine, tmp_path / "published"), version)
        [after], [later] = ask(engine, prompt), ask(engine, prompt)
        assert (after.counts.cached, later.counts.cached) == (0, len(prompt) - 1)
        assert max(engine.error(prompt, after), engine.error(prompt, later)) < TOLERANCE


def test_half_loaded_weights_leave_nothing_reusable(engine: Engine) -> None:
    prompt = new_prompt()
    ask(engine, prompt)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(2):  # the first is sent when the second is there
            yield "model.layers.0.self_attn.q_proj.weight", torch.zeros(128, 128)
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        SGLangClient([engine.url]).update_weights(broken(), "run/half", replace(IN_PLACE, bucket_bytes=1))
    [half] = generate(engine, prompt)
    assert half.counts.cached == 0 and half.weight_versions == [("updating:run/half", 6)]
    engine.update()
    [after] = ask(engine, prompt)
    assert after.counts.cached == 0 and engine.error(prompt, after) < TOLERANCE


async def stream(engine: Engine, prompt: list[int], length: int, started: asyncio.Event) -> Generation:
    """Generate `length` tokens; set `started` when the first one has come."""
    body = {"input_ids": prompt, "sampling_params": GREEDY | {"max_new_tokens": length}, "return_logprob": True}
    async with (
        aiohttp.ClientSession(headers=endpoints.auth_headers(engine.url)) as session,
        session.post(engine.url + "/generate", json=body | {"stream": True}) as response,
    ):
        lines = []
        async for line in response.content:
            started.set()
            lines += [line] if line.startswith(b"data: {") else []
    return parse_generation(json.loads(lines[-1].removeprefix(b"data: ")), None, len(prompt))


def live_through_an_update(engine: Engine, prompt: list[int], update: Callable[[], None]) -> Generation:
    """Return the response of a request during which `update` was called."""

    async def once(length: int) -> Generation:
        started = asyncio.Event()
        request = asyncio.create_task(stream(engine, prompt, length, started))
        await started.wait()
        await asyncio.to_thread(update)
        return await request

    for length in (200, 400, 800, 1600):  # a slow test process may find the request finished
        generation = asyncio.run(once(length))
        if len(generation.weight_versions) > 1:
            return generation
    raise AssertionError("no request was running during the update")


@pytest.mark.parametrize("num_updates", [1, 2])
def test_request_that_lived_through_an_update_leaves_nothing_reusable(engine: Engine, num_updates: int) -> None:
    """Neither under the weights with which it began, nor under those with which it ended; after two updates these have
    equal values."""
    prompt = new_prompt()

    def update() -> None:
        for _ in range(num_updates):
            engine.update()

    response = live_through_an_update(engine, prompt, update).token_ids
    turn = [*prompt, *response, *new_prompt(8)]
    for _ in range(2):
        [after], [later] = ask(engine, turn), ask(engine, turn)
        assert (after.counts.cached, later.counts.cached) == (0, len(turn) - 1)
        assert max(engine.error(turn, after), engine.error(turn, later)) < TOLERANCE
        engine.update()


def test_next_turn_of_a_conversation_reuses_the_cache_until_an_update(engine: Engine) -> None:
    turn = new_prompt()
    [reply] = ask(engine, turn)
    turn = [*turn, *reply.token_ids, *new_prompt(8)]
    [second] = ask(engine, turn)
    assert second.counts.cached >= len(turn) - 8 - 1  # the last token of a response has no keys and values
    engine.update()
    turn = [*turn, *second.token_ids, *new_prompt(8)]
    [third] = ask(engine, turn)
    assert third.counts.cached == 0 and engine.error(turn, third) < TOLERANCE
    turn = [*turn, *third.token_ids, *new_prompt(8)]
    assert ask(engine, turn)[0].counts.cached >= len(turn) - 8 - 1


def test_updates_at_any_moment_of_many_requests_mix_no_weights(engine: Engine) -> None:
    """More requests than the cache has room for, so some are retracted, with prompts of several chunks of prefill and
    with a common beginning: whenever an update comes, later requests compute with the new weights."""
    system = new_prompt()
    prompts = [[*system, first, *new_prompt(200)] for first in range(6, 22)]

    async def load() -> None:
        async with SGLangClient([engine.url], timeout=240) as client:
            sampling = GREEDY | {"max_new_tokens": 150}
            running = [asyncio.create_task(client.generate(prompt, sampling)) for prompt in prompts]
            while not all(request.done() for request in running):
                await asyncio.to_thread(engine.update)
                await asyncio.sleep(0.2 * rng.random())
            await asyncio.gather(*running)

    asyncio.run(load())
    engine.update()
    for prompt in [*prompts, system]:
        [generation] = ask(engine, prompt)
        assert generation.counts.cached <= len(system) and engine.error(prompt, generation) < TOLERANCE
