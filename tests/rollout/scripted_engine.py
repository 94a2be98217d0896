"""A small engine behind the real client's interface, and a run around it, for tests of what surrounds the engines."""

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from engines.sglang.client import EngineClient, Generation
from stages.rollout.config import RolloutConfig
from stages.rollout.data_source import PromptSource
from stages.rollout.generate import Round
from stages.rollout.rollout import rollout_stage, state_before
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

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], n: int = 1) -> list[Generation]:
        self.requests.append((input_ids, sampling, n))
        self.in_flight += n
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.pause * random.random())
        self.in_flight -= n
        return [
            Generation(
                token_ids=[6 + (len(input_ids) + index) % 10, 1],
                logprobs=[-0.5, -0.25],
                finish_reason=self.finish_reason,
                weight_version=self.weight_version,
                first_weight_version=self.weight_version,
                cached_tokens=2,
            )
            for index in range(n)
        ]


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
            state=state_before(self.store, KEYS, r),
            connect=partial(self.connect, version=r, **changes),
        )
