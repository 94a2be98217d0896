"""A small engine behind the real client's interface, for tests of what surrounds it."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

from engines.sglang.client import EngineClient, Generation


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
