"""Define the `engine` argument of user-defined generate functions: text generation turn by turn, chats, and an
OpenAI-compatible endpoint. Example:

async def generate(args, sample, sampling_params, engine):
    for _ in range(args.max_turns):
        text = await engine.generate(sample, stop=["</call>"])     # tokens of the model: trained, with log-probs
        if "</call>" not in text or not engine.append(sample, answer(text)):    # tokens of the tool: not trained
            break
    return sample
"""

from __future__ import annotations

import threading
from typing import Any

from penstock.stages.rollout.agents.conversation import Conversation
from penstock.stages.rollout.agents.endpoint import OpenAIEndpoint
from penstock.stages.rollout.agents.session import AgentSession
from penstock.stages.rollout.plugins.engine_calls import EngineCalls
from penstock.stages.rollout.plugins.user_sample import UserSample


class EngineHandle(EngineCalls):
    """Gives user-defined generate functions access to the engines of one round."""

    _endpoint: OpenAIEndpoint | None = None
    _lock = threading.Lock()

    def conversation(self, sample: UserSample, **options: Any) -> Conversation:
        """Return a chat that takes and returns messages, and records their tokens in `sample`."""
        return Conversation(self, sample, **options)

    def openai(self, sample: UserSample) -> AgentSession:
        """Return a session (URL and API key) for one execution of an agent that uses an OpenAI client. The session
        records the agent's requests as samples (agents/session.py)."""
        with self._lock:
            if self._endpoint is None:
                self._endpoint = OpenAIEndpoint(self, self.config.agent_endpoint_port)
        return self._endpoint.session(sample)

    def end(self, trajectory_id: str) -> None:
        """Close the agent sessions of this trajectory; further requests are refused."""
        if self._endpoint is not None:
            self._endpoint.end(trajectory_id)

    def close(self) -> None:
        """Stop the OpenAI-compatible endpoint, if it is running."""
        if self._endpoint is not None:
            self._endpoint.close()
