"""Parse the JSON responses of SGLang's /generate route."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from penstock.engines.generation import Generation, TokenCounts
from penstock.engines.sglang import older_release
from penstock.storage.samples.routed_experts import ExpertsFormat


def parse_generation(
    answer: dict[str, Any],
    experts: ExpertsFormat | None = None,
    num_prompt_tokens: int = 0,
    adapter_version: str | None = None,
) -> Generation:
    """Parse one response of SGLang's /generate route.

    Args:
        answer: the JSON object of the response.
        experts: storage format of the routed expert ids; None if they were not requested.
        num_prompt_tokens: number of prompt tokens; routed experts, if requested, are returned for these, too.
        adapter_version: policy version of the adapter that the request named; None: the request named none. SGLang
            reports the version of the base weights only, and a request keeps its adapter to its end.

    Raises:
        RuntimeError: routed experts were requested, but are missing or have the wrong size.
    """
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    token_ids = [int(pair[1]) for pair in pairs]
    assert token_ids == list(answer.get("output_ids") or []), (
        f"the tokens in SGLang's output_ids and output_token_logprobs disagree: {answer}"
    )
    spans: list[dict[str, Any]]
    if adapter_version is not None:
        spans = [{"version": adapter_version, "start": 0, "end": len(token_ids)}]
    else:
        spans = meta.get("weight_versions") or older_release.weight_versions(meta, len(token_ids))
    reason = (meta.get("finish_reason") or {}).get("type")
    assert reason in ("stop", "length", "abort"), f"SGLang returned the unknown finish reason {reason!r}"
    routed_experts = None
    if experts is not None and reason != "abort":
        encoded = meta.get("routed_experts")
        if encoded is None:
            raise RuntimeError(
                "an engine returned no routed experts: restart it with --sglang-enable-return-routed-experts (an "
                "external engine with --enable-return-routed-experts)"
            )
        try:  # [tokens, layers, top_k] int32, dense layers included
            routed = np.frombuffer(base64.b64decode(encoded), dtype=np.int32)
            routed_experts = experts.encode(routed, num_prompt_tokens + len(token_ids) - 1)
        except ValueError as error:
            raise RuntimeError(str(error)) from None  # not a ValueError, which callers take for an error of the prompt
    return Generation(
        token_ids=token_ids,
        logprobs=[float(pair[0]) for pair in pairs],
        finish_reason=reason,
        weight_versions=[
            (str(span["version"]), span["end"] - span["start"]) for span in spans if span["end"] > span["start"]
        ],
        counts=TokenCounts(
            prompt=num_prompt_tokens,
            cached=int(meta.get("cached_tokens") or 0),
            verifications=int(meta.get("spec_verify_ct") or 0),
            proposed=int(meta.get("spec_num_proposed_drafts") or 0),
            accepted=int(meta.get("spec_num_correct_drafts") or 0),
        ),
        routed_experts=routed_experts,
    )
