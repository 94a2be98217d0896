"""Generate samples with several turns: append the model's tokens and the tools' output to a sample.

No text is tokenized twice: the prompt of a request is the list of tokens that the sample has so far. The length limits
of the configuration hold for the whole sample, and every response must come from the policy version of the round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock.engines.generation import EngineClient, Generation
from penstock.stages.rollout.config import GenerationConfig
from penstock.stages.rollout.group import add_response, sampling_params_for
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import PluginError
from penstock.storage.samples.sample import Sample, Status


class EngineCalls:
    """Sends requests to the engines of one round, from any thread and any event loop.

    Args:
        client: client of the engines.
        tokenizer: tokenizer of the policy.
        config: sampling parameters and length limits.
        round: the round; responses of another policy version than the round's are an error.
    """

    def __init__(
        self, client: EngineClient, tokenizer: PromptTokenizer, config: GenerationConfig, round: RolloutRound
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.round = round
        self.loop: asyncio.AbstractEventLoop | None = None  # event loop of the client; None: the caller's loop
        self.fault: Exception | None = None  # an engine failure; it ends the round, even if the function catches it
        self.num_prompt_tokens = 0  # prompt tokens of all requests
        self.num_cached_tokens = 0  # prompt tokens that were in the engines' prefix cache

    async def generate(self, sample: Sample, **sampling: Any) -> str:
        """Generate a continuation of the sample, append its tokens to the sample, and return its text.

        The appended tokens have loss mask 1. The sample's status becomes `completed` (end token or stop text),
        `truncated` (length limit or `max_new_tokens`) or `aborted` (the round is over: the text may be incomplete or
        empty, and further calls return '').

        Args:
            sample: the sample; its tokens so far are the prompt.
            sampling: SGLang parameters that override the configuration's, e.g. `stop`, `max_new_tokens`.

        Raises:
            EngineError: an engine refuses the request.
            PluginError: `temperature` differs from --rollout-temperature, at which the trainer computes log-probs.
            RuntimeError, ConnectionError, TimeoutError: the engines failed; this ends the round, even if the caller
                catches the exception.
        """
        if sample.status is Status.ABORTED:
            return ""
        params = sampling_params_for(self.config, sample)
        room = params["max_new_tokens"]
        if room < 1:
            sample.status = Status.TRUNCATED
            return ""
        if self.round.kind == "rollout" and sampling.get("temperature", params["temperature"]) != params["temperature"]:
            raise PluginError(
                f"temperature {sampling['temperature']} differs from --rollout-temperature {params['temperature']}, "
                "at which the trainer computes the probability of these tokens: set --rollout-temperature instead"
            )
        params |= {**sampling, "max_new_tokens": min(room, sampling.get("max_new_tokens", room))}
        if "stop" in sampling:
            params.setdefault("no_stop_trim", True)  # otherwise the text would lack the stop text that the tokens have
        num_before = len(sample.token_ids)
        try:
            generation = await self._send_request(list(sample.token_ids), params, sample.trajectory_id)
            add_response(sample, generation, self.round)
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            self.fault = error
            raise
        self.num_prompt_tokens += num_before
        self.num_cached_tokens += generation.cached_tokens
        if generation.finish_reason == "abort" and isinstance(sample, UserSample):
            sample.aborted = True
        else:
            sample.metadata["num_turns"] = sample.metadata.get("num_turns", 0) + 1
        self._decode_response(sample)
        return self._decode(sample.token_ids[num_before:])

    def append(self, sample: Sample, content: str | Sequence[int]) -> bool:
        """Append content that the model did not generate (tool output, for instance), as text or token ids, with loss
        mask 0.

        Returns:
            Whether the content was appended. False if it exceeds the length limit (the sample's status becomes
            `truncated`), or if the sample is `aborted` because the round is over.
        """
        if sample.status is Status.ABORTED:
            return False
        token_ids = (
            self.tokenizer.encode([content])[0] if isinstance(content, str) else [int(token) for token in content]
        )
        if len(token_ids) > sampling_params_for(self.config, sample)["max_new_tokens"]:
            sample.status = Status.TRUNCATED
            return False
        sample.token_ids += token_ids
        sample.loss_mask += [0] * len(token_ids)
        sample.rollout_logprobs += [0.0] * len(token_ids)
        self._decode_response(sample)
        return True

    async def _send_request(self, token_ids: list[int], params: dict[str, Any], session: str) -> Generation:
        call = self.client.generate(token_ids, params, session=session)
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return (await call)[0]
        try:
            answer = asyncio.run_coroutine_threadsafe(call, self.loop)
        except RuntimeError:  # the client's loop is closed: the round is over, and the calling function was abandoned
            call.close()
            raise
        return (await asyncio.wrap_future(answer))[0]

    def _decode_response(self, sample: Sample) -> None:
        """Decode the whole response: the bytes of one character may be split between two turns."""
        sample.response = self._decode(sample.token_ids[sample.prompt_length :])

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([token_ids], skip_special_tokens=self.config.rollout_skip_special_tokens)[0]
