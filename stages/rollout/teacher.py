"""Log-probs of a teacher model, from an engine of the run or another server.

They are stored in the samples, so training and replay need no teacher. A request contains the tokens of prompt and
response; the server returns the log-prob of each token given those before it, at temperature 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from penstock.engines.serving.endpoints import auth_headers
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import redact

TIMEOUT = 600.0  # seconds of one request
TRIES = 5  # the first is followed by waits of 1, 2, 4 and 8 s
CONCURRENCY = 64  # requests in flight
POLL_SECONDS = 0.5  # between checks whether the server has restarted

# Keeps an engine of the run with the teacher running, and yields a function that returns its address (`Teacher.urls`).
ServingTeacher = Callable[[], AbstractContextManager[Callable[[], list[str]]]]


@dataclass(eq=False)
class Teacher:
    """Client of a teacher's server. Must be created in the event loop that calls `score`. `urls` returns the server's
    address, or nothing while it restarts, and raises an error if it cannot restart."""

    urls: Callable[[], list[str]]
    name: str  # of the server, in messages
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CONCURRENCY))

    @classmethod
    def at(cls, url: str) -> Teacher:
        """Return the client of the server at an address (--opd-teacher-url)."""
        url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        return cls(lambda: [url], f"--opd-teacher-url {redact(url)}")

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `teacher_logprobs` of all samples that have trained tokens and no teacher log-probs yet."""
        unscored = [
            sample
            for sample in samples
            if sample.teacher_logprobs is None and sample.status is not Status.FAILED and any(sample.loss_mask)
        ]
        if not unscored:
            return
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session:
            scores = await asyncio.gather(*(self._request(session, sample.token_ids) for sample in unscored))
        for sample, logprobs in zip(unscored, scores):
            sample.teacher_logprobs = [
                value if is_trained else 0.0 for value, is_trained in zip(logprobs, sample.loss_mask)
            ]

    async def _request(self, session: aiohttp.ClientSession, token_ids: list[int]) -> list[float]:  # [L]
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        async with self.slots:
            for attempt in range(TRIES):
                while not (urls := self.urls()):  # noqa: ASYNC110  # another thread restarts it
                    await asyncio.sleep(POLL_SECONDS)
                url = urls[0]
                try:
                    async with session.post(f"{url}/generate", json=body, headers=auth_headers(url)) as response:
                        response.raise_for_status()
                        return token_logprobs(await response.json(), token_ids)
                except (aiohttp.ClientError, TimeoutError) as error:
                    if attempt + 1 == TRIES:
                        raise RuntimeError(
                            f"{self.name} failed {TRIES} times, last with "
                            f"{type(error).__name__}: {redact(str(error))[:200]}; check the server, and resume"
                        ) from error
                await asyncio.sleep(2**attempt)
        raise AssertionError("the last attempt returns or raises")


@asynccontextmanager
async def open_teacher(
    url: str | None, serving: ServingTeacher | None, round: RolloutRound
) -> AsyncIterator[Teacher | None]:
    """Yield the client of the teacher; None in evaluations, and if the run has no teacher."""
    if round.kind == "eval":
        yield None
    elif serving is not None:
        with serving() as urls:
            yield Teacher(urls, "the teacher's engine (--opd-teacher-load)")
    else:
        yield Teacher.at(resolve_secrets(url)) if url else None


def token_logprobs(answer: Any, token_ids: list[int]) -> list[float]:  # [L]
    """Return the log-probs in a server's answer, 0.0 for the first token."""
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        scored = [entry[1] for entry in entries]
        # the engine reports the last id of the vocabulary, whose log-prob is right, as 0.
        last = max(token_ids)
        if len(scored) != len(token_ids) or any(a != b and (a, b) != (0, last) for a, b in zip(scored, token_ids)):
            raise ValueError(f"log-probs of {len(entries)} other tokens")
        return [0.0, *(float(entry[0]) for entry in entries[1:])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"the teacher answered without the log-probs of the {len(token_ids)} tokens of a sample "
            f"({type(error).__name__}: {str(error)[:100]}): give an engine's server with a model of the same tokenizer "
            "as --opd-teacher-url"
        ) from error
