"""One sampled response, and how it is read from SGLang's JSON."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from storage.routed_experts import ExpertsFormat

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Generation:
    """One sampled response, exactly as the engine made it."""

    token_ids: list[int]  # [R], the end token included if there is one
    logprobs: list[float]  # [R], of the sampled tokens under the sampling temperature
    finish_reason: FinishReason
    weight_version: str  # of the last token
    first_weight_version: str  # of the first token; another one if weights were published in between
    cached_tokens: int  # of the prompt, found in the radix cache
    routed_experts: bytes | None = (
        None  # of all tokens but the last one, prompt included (storage/routed_experts.py); None: not asked for
    )


def parse_generation(answer: dict[str, Any], experts: ExpertsFormat | None = None, num_prompt_tokens: int = 0) -> Generation:
    """One response of SGLang's JSON. Tokens come from the log-probs, so the two cannot disagree.

    Args:
        answer: as it came.
        experts: of the model, if it was to return its choice of them.
        num_prompt_tokens: which the choice includes.
    """
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    token_ids = [int(pair[1]) for pair in pairs]
    assert token_ids == list(answer.get("output_ids") or []), f"SGLang's output_ids and output_token_logprobs disagree: {answer}"
    spans = meta.get("weight_versions") or []
    version = str(meta["weight_version"])
    reason = (meta.get("finish_reason") or {}).get("type")
    assert reason in ("stop", "length", "abort"), f"SGLang's finish reason {reason!r} is unknown to us"
    return Generation(
        token_ids=token_ids,
        logprobs=[float(pair[0]) for pair in pairs],
        finish_reason=reason,
        weight_version=version,
        first_weight_version=str(spans[0]["version"]) if spans else version,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        routed_experts=None
        if experts is None or reason == "abort"
        else _routed_experts(meta, experts, num_prompt_tokens + len(token_ids) - 1),
    )


def _routed_experts(meta: dict[str, Any], experts: ExpertsFormat, num_tokens: int) -> bytes:
    """SGLang's base64 of int32 for every layer, dense ones too, made as small as it is kept."""
    if meta.get("routed_experts") is None:
        raise RuntimeError("an engine returned no routed experts: start it with --sglang-enable-return-routed-experts")
    try:
        return experts.encode(np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32), num_tokens)
    except ValueError as error:
        raise RuntimeError(str(error)) from None  # of every prompt, not of this one
