"""A small engine behind the real client's interface, and a run around it, for tests of what surrounds the engines."""

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from engines.sglang.client import EngineClient, Generation
from stages.rollout.beginning import beginning_of
from stages.rollout.config import RolloutConfig
from stages.rollout.prompts.source import PromptSource
from stages.rollout.rollout import rollout_stage
from stages.rollout.round import Round
from stages.rollout.tokenizer import PromptTokenizer
from storage.preemption import StopRequest
from storage.refs import Commit, RunKeys
from storage.store import Store

KEYS = RunKeys("run")


class ScriptedClient(EngineClient):
    """Answers every prompt with digits and an end token, after a random pause."""

    def __init__(self, urls: list[str], timeout: float = 600, *, weight_version: str = "run/0") -> None:
        super().__init__(urls, timeout)
        self.weight_version = weight_version
        self.finish_reason: Any = "stop"
        self.pause = 0.001
        self.in_flight = self.most_in_flight = 0
        self.requests: list[tuple[list[int], dict[str, Any], int]] = []

    async def generate_each(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], *, session: str | None = None
    ) -> list[Generation]:
        n = len(prompts)
        self.requests.append((list(prompts[0]), samplings[0], n))
        self.in_flight += n
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.pause * random.random())
        self.in_flight -= n
        return [self.answer(input_ids, index) for index, input_ids in enumerate(prompts)]

    def answer(self, input_ids: list[int], index: int) -> Generation:
        return Generation(
            token_ids=[6 + (len(input_ids) + index) % 10, 1],
            logprobs=[-0.5, -0.25],
            finish_reason=self.finish_reason,
            weight_version=self.weight_version,
            first_weight_version=self.weight_version,
            cached_tokens=2,
        )


class SlowClient(ScriptedClient):
    """Writes one token after another, and stops in the middle when it is told to abort. How long a response gets, and how long its
    tokens take, is drawn; some prompts are refused, and some requests end the round."""

    chance = random.Random(0)
    pause = 0.001  # seconds a token, on average
    longest = 8
    refused = broken = 0.0  # shares of requests

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.aborted = asyncio.Event()

    async def generate_each(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], *, session: str | None = None
    ) -> list[Generation]:
        self.requests.append((list(prompts[0]), samplings[0], len(prompts)))
        fate = self.chance.random()
        self.in_flight += 1
        try:
            answers = await asyncio.gather(*(self._write(sampling["max_new_tokens"]) for sampling in samplings))
        finally:
            self.in_flight -= 1
        if fate < self.refused:
            raise ValueError("the input is too long")
        if fate > 1 - self.broken:
            raise ConnectionError("no engine answered")
        return answers

    async def abort(self) -> None:
        self.aborted.set()
        while self.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    async def _write(self, most: int) -> Generation:
        wanted, token_ids, pause = self.chance.randint(1, self.longest), [], self.chance.random() * 2 * self.pause
        while len(token_ids) < min(wanted, most) and not self.aborted.is_set():
            await asyncio.sleep(pause)
            token_ids.append(6 + len(token_ids) % 10)
        ended = "stop" if len(token_ids) == wanted else "length" if len(token_ids) == most else "abort"
        version = self.weight_version if token_ids else ""
        return Generation(token_ids, [-0.5] * len(token_ids), ended, version, version, cached_tokens=0)  # type: ignore[arg-type]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class Bench:
    """One run in a temporary store: `round(r)` does round r as a flow would."""

    def __init__(self, directory: Path, tokenizer: PromptTokenizer, num_rows: int = 10, **options: Any) -> None:
        rows = [{"input": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i}} for i in range(num_rows)]
        options = {
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rm_type": "exact_number",
            "rollout_shuffle": True,
        } | options
        self.config = RolloutConfig(prompt_data=write_jsonl(directory / "rows.jsonl", rows), label_key="label", **options)
        self.store = Store(str(directory / "store"))
        self.tokenizer = tokenizer
        self.clients: list[ScriptedClient] = []

    def connect(
        self, urls: list[str], timeout: float, version: int = 0, client: type[ScriptedClient] = ScriptedClient, **changes: Any
    ) -> ScriptedClient:
        made = client(urls, timeout, weight_version=f"run/{version}")
        for name, value in changes.items():
            setattr(made, name, value)
        self.clients.append(made)
        return made

    def source(self) -> PromptSource:
        return PromptSource.open(self.config)

    def journal(self, r: int) -> list[Commit]:
        """The entries of a round's journal."""
        prefix = f"{KEYS.rollout(r)}.journal"
        entries = [self.store.committed(f"{prefix}/{number:06d}") for number in self.store.committed_indices(prefix)]
        return [entry for entry in entries if entry is not None]

    def round(self, r: int, stop: StopRequest | None = None, policy_version: int | None = None, **changes: Any) -> Commit:
        return rollout_stage(
            self.store,
            KEYS.rollout(r),
            Round("run", rollout_id=r, policy_version=r if policy_version is None else policy_version),
            engines=["http://engine"],
            stop=stop,
            source=self.source(),
            tokenizer=self.tokenizer,
            config=self.config,
            beginning=beginning_of(self.store, KEYS, r),
            connect=partial(self.connect, version=r, **changes),
        )
