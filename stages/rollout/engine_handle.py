"""What a user's function talks to the engines with: the model writes, a tool answers, and the sample has the exact tokens of both.

    async def generate(args, sample, sampling_params, engine):
        for _ in range(args.max_turns):
            text = await engine.generate(sample, stop=["</call>"])              # the model's tokens: trained, with their log-probs
            if "</call>" not in text or not engine.append(sample, answer(text)):    # the tool's tokens: not trained
                break
        return sample

Nothing is tokenised twice: the next request is the tokens that are there. The handle keeps to the limits of the configuration, checks
which policy answers, and works from any thread and any event loop; requests are made in the loop that owns the client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engines.sglang.client import EngineClient, Generation
from stages.rollout.config import RolloutConfig
from stages.rollout.generate import sampling_of
from stages.rollout.responses import add_response
from stages.rollout.round import Round
from stages.rollout.tokenizer import PromptTokenizer
from stages.rollout.user_sample import UserSample
from storage.errors import PluginError
from storage.sample import Sample, Status

if TYPE_CHECKING:
    from stages.rollout.agents.conversation import Conversation
    from stages.rollout.agents.endpoint import OpenAIEndpoint
    from stages.rollout.agents.session import AgentSession


class EngineHandle:
    """The engines of one round.

    Args:
        client: of the engines.
        tokenizer: of the policy.
        config: sampling and limits.
        round: whose policy must answer.
    """

    def __init__(self, client: EngineClient, tokenizer: PromptTokenizer, config: RolloutConfig, round: Round) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.config = config
        self.round = round
        self.loop: asyncio.AbstractEventLoop | None = None  # that the client belongs to; None: the caller's
        self.fault: Exception | None = None  # what no sample is to blame for, and what ends the round
        self.num_prompt_tokens = 0  # of all requests
        self.num_cached_tokens = 0  # of these, what the engines had computed before
        self._endpoint: OpenAIEndpoint | None = None
        self._lock = threading.Lock()

    async def generate(self, sample: Sample, **sampling: Any) -> str:
        """Let the model write on; returns what it wrote.

        Its tokens are appended and trained. The status is then `completed` (it ended, or met a stop text), `truncated` (no room left, or
        `max_new_tokens` used up) or `aborted` (the round is over: the text may be empty, and so is that of all later calls).

        Args:
            sample: what it has is the prompt.
            sampling: SGLang's parameters that are to differ from the configuration's, e.g. `stop`, `max_new_tokens`.

        Raises:
            EngineError: an engine refuses the request.
            PluginError: another temperature is asked for than is trained at.
            RuntimeError, ConnectionError, TimeoutError: of the engines; it ends the round, also if it is caught.
        """
        if sample.status is Status.ABORTED:
            return ""
        params = sampling_of(self.config, sample)
        room = params["max_new_tokens"]
        if room < 1:
            sample.status = Status.TRUNCATED
            return ""
        if self.round.kind == "rollout" and sampling.get("temperature", params["temperature"]) != params["temperature"]:
            raise PluginError(
                f"temperature {sampling['temperature']} is not --rollout-temperature {params['temperature']}, at which the trainer computes "
                "the probability of these tokens: change that one"
            )
        params |= {**sampling, "max_new_tokens": min(room, sampling.get("max_new_tokens", room))}
        if "stop" in sampling:
            params.setdefault("no_stop_trim", True)  # else the text lacks what the tokens have
        num_before = len(sample.token_ids)
        try:
            generation = await self._ask(list(sample.token_ids), params, sample.trajectory_id)
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
        self._write_response(sample)
        return self._text(sample.token_ids[num_before:])

    def append(self, sample: Sample, content: str | Sequence[int]) -> bool:
        """Append what the model did not write: text, or tokens if it must be exact. It is not trained.

        Returns:
            Whether it was appended. If there is no room for it the sample is `truncated`; if the round is over it stays `aborted`.
        """
        if sample.status is Status.ABORTED:
            return False
        token_ids = self.tokenizer.encode([content])[0] if isinstance(content, str) else [int(token) for token in content]
        if len(token_ids) > sampling_of(self.config, sample)["max_new_tokens"]:
            sample.status = Status.TRUNCATED
            return False
        sample.token_ids += token_ids
        sample.loss_mask += [0] * len(token_ids)
        sample.rollout_logprobs += [0.0] * len(token_ids)
        self._write_response(sample)
        return True

    def conversation(self, sample: UserSample, **options: Any) -> Conversation:
        """The sample as a chat: messages in, messages out (conversation.py)."""
        from stages.rollout.agents.conversation import Conversation

        return Conversation(self, sample, **options)

    def openai(self, sample: UserSample) -> AgentSession:
        """An address for one execution of an agent that speaks OpenAI's protocol, and what its calls become (agents/session.py)."""
        with self._lock:
            if self._endpoint is None:
                from stages.rollout.agents.endpoint import OpenAIEndpoint

                self._endpoint = OpenAIEndpoint(self, self.config.agent_endpoint_port)
        return self._endpoint.session(sample)

    def end(self, trajectory_id: str) -> None:
        """Answer an agent no more: its time is over, or it has failed."""
        if self._endpoint is not None:
            self._endpoint.end(trajectory_id)

    def close(self) -> None:
        """End what was opened for agents."""
        if self._endpoint is not None:
            self._endpoint.close()

    async def _ask(self, token_ids: list[int], params: dict[str, Any], session: str) -> Generation:
        call = self.client.generate(token_ids, params, session=session)
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return (await call)[0]
        try:
            answer = asyncio.run_coroutine_threadsafe(call, self.loop)
        except RuntimeError:  # the round is long over, and this is a function that was given up
            call.close()
            raise
        return (await asyncio.wrap_future(answer))[0]

    def _write_response(self, sample: Sample) -> None:
        """Decoded whole: the bytes of one character may lie in two turns."""
        sample.response = self._text(sample.token_ids[sample.prompt_length :])

    def _text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([token_ids], skip_special_tokens=self.config.rollout_skip_special_tokens)[0]
