"""Log-probs of a teacher model, from an SGLang server that the run does not manage (--opd-type sglang).

They are stored in the samples, so training and replay need no teacher. A request contains the tokens of prompt and
response; the server returns the log-prob of each token given those before it, at temperature 1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp

from penstock.storage.samples.sample import Sample, Status
from penstock.storage.secrets import redact

TIMEOUT = 600.0  # seconds of one request
TRIES = 5  # the first is followed by waits of 1, 2, 4 and 8 s
CONCURRENCY = 64  # requests in flight


class Teacher:
    """Client of a teacher's server. Must be created in the event loop that calls `score`.

    Args:
        url: address of the server, such as http://10.0.0.7:30000.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `teacher_logprobs` of all samples that have trained tokens and no teacher log-probs yet.

        Raises:
            RuntimeError: the server does not answer, or its answer does not fit the tokens.
        """
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
        async with self._slots:
            for attempt in range(TRIES):
                try:
                    async with session.post(f"{self.url}/generate", json=body) as response:
                        response.raise_for_status()
                        return token_logprobs(await response.json(), token_ids)
                except (aiohttp.ClientError, TimeoutError) as error:
                    if attempt + 1 == TRIES:
                        raise RuntimeError(
                            f"--opd-teacher-url {redact(self.url)} failed {TRIES} times, last with "
                            f"{type(error).__name__}: {redact(str(error))[:200]}; check the server, and resume"
                        ) from error
                await asyncio.sleep(2**attempt)
        raise AssertionError("the last attempt returns or raises")


def token_logprobs(answer: Any, token_ids: list[int]) -> list[float]:  # [L]
    """Return the log-probs in a server's answer, 0.0 for the first token.

    Raises:
        RuntimeError: the answer has no log-probs, or those of other tokens.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != token_ids:
            raise ValueError(f"log-probs of {len(entries)} other tokens")
        return [0.0, *(float(entry[0]) for entry in entries[1:])]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"--opd-teacher-url answered without the log-probs of the {len(token_ids)} tokens of a sample "
            f"({type(error).__name__}: {str(error)[:100]}): give the address of an SGLang server with a model of the "
            "same tokenizer"
        ) from error
