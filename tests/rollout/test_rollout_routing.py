"""R3 with a real SGLang server: the experts it chose, through shards, are those that the trainer's routers would
choose and follow."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape, experts_format
from penstock.engines.generation import Generation
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.backend import SGLangServer
from penstock.engines.sglang.client import SGLangClient
from penstock.stages.train.batching import EngineChoices
from penstock.storage.commit import Commit
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_table, write_shards
from penstock.storage.store import Store
from tests.engines.replay_ranks import make_engine, random_record
from tests.families import make_family

pytestmark = pytest.mark.integration
PROMPTS = [[(7 * i * i + 3 * i + 2) % 61 for i in range(length)] for length in (40, 7)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("routing") / "qwen3-moe", "qwen3-moe")


def sampled(checkpoint: Path, shape: ModelShape, directory: Path) -> list[list[Generation]]:
    """Two answers to each prompt; the second prompt is asked again when its beginning is cached."""
    server = SGLangServer(
        ServerSpec(model_path=str(checkpoint), args={"enable_return_routed_experts": True}, log_dir=str(directory))
    )

    async def ask(url: str) -> list[list[Generation]]:
        async with SGLangClient([url], experts=experts_format(shape, "--use-rollout-routing-replay")) as client:
            params = {"temperature": 1.0, "max_new_tokens": 9}
            return [await client.generate(prompt, params, 2) for prompt in (*PROMPTS, PROMPTS[0])]

    try:
        return asyncio.run(ask(server.start()))
    finally:
        server.stop()


def committed(store: Store, answers: list[list[Generation]]) -> Commit:
    rows = [
        Sample(
            f"s{number}-{index}",
            f"g{number}",
            f"t{number}-{index}",
            0,
            token_ids=prompt + answer.token_ids,
            loss_mask=[0] * len(prompt) + [1] * len(answer.token_ids),
            rollout_logprobs=[0.0] * len(prompt) + answer.logprobs,
            routed_experts=answer.routed_experts,
            status=Status.COMPLETED,
        )
        for number, (prompt, group) in enumerate(zip((*PROMPTS, PROMPTS[0]), answers))
        for index, answer in enumerate(group)
    ]
    attempt = store.new_attempt("runs/r/rollouts/000000")
    with store.writing(attempt) as out:
        write_shards(out.path, rows)
    return store.commit("runs/r/rollouts/000000", Commit(kind="rollout", attempt=attempt, files=out.files))


def logprobs_of(engine: Any, pack: Any, routing: str | None) -> Tensor:
    """[T] of each token after the one before it."""

    def keep(hidden: Tensor, head: Any, pack: Any) -> Any:
        logprobs = head(hidden).log_softmax(-1).gather(1, pack.token_ids.roll(-1)[:, None])[:, 0].roll(1)
        return None, {"logprobs": logprobs}

    [output] = engine.forward_backward([pack], keep, forward_only=True, routing=routing)
    return output["logprobs"]


def test_recorded_experts_reach_trainer(world: None, checkpoint: Path, tmp_path: Path) -> None:
    shape = read_shape(checkpoint)
    answers = sampled(checkpoint, shape, tmp_path)
    assert answers[2][0].counts.cached >= 30, "the third request shall find its prompt"
    store = Store(str(tmp_path / "store"))
    table = read_table(store, committed(store, answers))
    choices, rows = EngineChoices.from_table(table, shape), range(len(table))
    lengths = [len(tokens) for tokens in table["token_ids"]]
    pack = SimpleNamespace(
        token_ids=torch.tensor([token for tokens in table["token_ids"].to_pylist() for token in tokens]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
        max_seqlen=max(lengths),
        images=None,
        stream=None,
        routing=None,
    )
    trained = torch.tensor([x for mask in table["loss_mask"].to_pylist() for x in mask]).bool()
    of_engine = torch.tensor([x for stream in table["rollout_logprobs"].to_pylist() for x in stream])
    last = pack.cu_seqlens[1:].long() - 1

    engine = make_engine(shape, checkpoint)
    free = logprobs_of(engine, pack, "record")
    own = pack.routing
    assert own is not None
    theirs = choices.decode(rows)
    assert list(theirs) == list(own) == [0, 1, 2, 3]
    for layer, choice in theirs.items():
        assert (choice[last] == -1).all(), "an engine does not run the last token"
        known = torch.ones(len(choice), dtype=torch.bool)
        known[last] = False
        assert torch.equal(choice[known].sort(-1).values, own[layer][known].sort(-1).values), f"layer {layer}"
    assert (free - of_engine)[trained].abs().max() < 1e-4

    pack.routing = theirs
    assert (logprobs_of(engine, pack, "replay") - of_engine)[trained].abs().max() < 1e-4
    pack.routing = random_record(len(pack.token_ids), shape, seed=0)
    assert (logprobs_of(engine, pack, "replay") - of_engine)[trained].abs().max() > 0.1, (
        "another choice gives other log-probs"
    )
