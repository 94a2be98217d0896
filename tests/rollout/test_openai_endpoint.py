"""Agents that use the `openai` package: the answers they get, and the samples that their calls become."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from scripted_replies import handle_with, pending, text, trained
from sft_templates import QWEN3

from penstock.stages.rollout.agents.conversation import AgentSession
from penstock.stages.rollout.agents.endpoint import OpenAIEndpoint
from penstock.stages.rollout.plugins.user_sample import UserSample, checked_sample
from penstock.storage.errors import EngineError
from penstock.storage.samples.sample import Status

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
RESULT: Any = {"role": "tool", "tool_call_id": "functions.add:0", "content": "2"}


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def assistant(content: str) -> Any:
    return {"role": "assistant", "content": content}


class Bench:
    """An endpoint with one session, and an agent's client for it."""

    def __init__(self, *replies: Any, **options: Any) -> None:
        self.handle: Any = handle_with(QWEN3, *replies, **options)
        self.endpoint = OpenAIEndpoint(self.handle)
        self.sample = pending(self.handle)
        self.session: AgentSession = self.endpoint.session(self.sample)
        self.client = openai.OpenAI(base_url=self.session.base_url, api_key=self.session.api_key)

    def ask(self, *messages: Any, **options: Any) -> Any:
        return self.client.chat.completions.create(model="any", messages=list(messages), **options)

    def say(self, *messages: Any, **options: Any) -> str:
        return self.ask(*messages, **options).choices[0].message.content

    def samples(self) -> list[UserSample]:
        return [self.checked(sample) for sample in self.session.samples()]

    def checked(self, sample: UserSample) -> UserSample:
        if sample.status not in (Status.ABORTED, Status.FAILED):
            plain = checked_sample(sample)
            assert [bool(logprob) for logprob in plain.rollout_logprobs] == [bool(mask) for mask in plain.loss_mask]
            assert plain.prompt + plain.response == text(self.handle, plain)
        return sample


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Bench] = []

    def make(*replies: Any, **options: Any) -> Bench:
        made.append(Bench(*replies, **options))
        return made[-1]

    yield make
    for one in made:
        one.client.close()
        one.endpoint.close()


def test_a_tool_loop_is_one_sample(bench: Any) -> None:
    b = bench(CALL, "it is 2<|im_end|>")
    first = b.ask(user("1+1?"), tools=TOOLS, logprobs=True)
    assert first.choices[0].finish_reason == "tool_calls" and first.model == "any"
    message = first.choices[0].message
    assert message.content is None and message.tool_calls[0].function.name == "add"
    second = b.ask(user("1+1?"), message, RESULT, tools=TOOLS)  # the package's own objects, with their empty fields
    assert second.choices[0].message.content == "it is 2" and second.choices[0].finish_reason == "stop"

    (sample,) = b.samples()
    assert trained(b.handle, sample) == [CALL, "it is 2<|im_end|>"] and sample.status is Status.COMPLETED
    written = first.choices[0].logprobs.content
    assert "".join(token.token for token in written) == CALL
    start = sample.loss_mask.index(1)
    assert [token.logprob for token in written] == sample.rollout_logprobs[start : start + len(written)]
    assert second.usage.prompt_tokens + second.usage.completion_tokens == len(sample.token_ids)
    assert sample.prompt.endswith("1+1?<|im_end|>\n<|im_start|>assistant\n")
    assert sample.trajectory_id == b.sample.trajectory_id
    assert b.sample.token_ids == b.handle.tokenizer.encode(["1+1="])[0]  # the one that was given is as it was


def test_streamed_answer_equals_whole_answer(bench: Any) -> None:
    b = bench("so " + CALL)
    chunks = list(b.ask(user("1+1?"), tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "so"
    assert [call.function.arguments for delta in deltas for call in delta.tool_calls or ()] == ['{"a": 1}']
    (sample,) = b.samples()
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens == sum(sample.loss_mask)
    assert trained(b.handle, sample) == ["so " + CALL]


def test_forks_train_shared_turns_once(bench: Any) -> None:
    b = bench("a<|im_end|>", "b<|im_end|>", "c<|im_end|>", "d<|im_end|>", "e<|im_end|>")
    system: Any = {"role": "system", "content": "help"}
    assert b.say(system, user("1")) == "a"
    assert b.say(system, user("1"), assistant("a"), user("2")) == "b"
    assert b.say(system, user("1"), assistant(" a\n"), user("3")) == "c", "the first reply once more, trimmed"
    assert b.say(user("other")) == "d"  # a helper
    assert b.say(system, user("1"), assistant("a"), user("2"), assistant("b"), user("4")) == "e"
    main, branch, helper = b.samples()
    assert trained(b.handle, main) == ["a<|im_end|>", "b<|im_end|>", "e<|im_end|>"]
    assert trained(b.handle, branch) == ["c<|im_end|>"] and trained(b.handle, helper) == ["d<|im_end|>"]
    shared = text(b.handle, main).index("a<|im_end|>") + len("a<|im_end|>")
    assert text(b.handle, branch)[:shared] == text(b.handle, main)[:shared]
    assert branch.token_ids[: branch.prompt_length] == main.token_ids[: branch.prompt_length]
    assert {sample.trajectory_id for sample in (main, branch, helper)} == {"g-00"}


def test_rewritten_history_starts_new_sample(bench: Any) -> None:
    b = bench("a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    b.say(user("1"))
    b.say(user("1"), assistant("A"), user("2"))  # not what the model said
    b.say(user("1"), assistant("a"), user("2"), tools=TOOLS)  # other tools: another prompt
    assert [trained(b.handle, sample) for sample in b.samples()] == [["a<|im_end|>"], ["b<|im_end|>"], ["c<|im_end|>"]]


def test_concurrent_calls(bench: Any) -> None:
    b = bench("a<|im_end|>", *["x<|im_end|>"] * 8)
    b.say(user("1"))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: b.say(user("1"), assistant("a"), user(f"more {i}")), range(8)))
    samples = b.samples()
    assert answers == ["x"] * 8 and len(samples) == 8
    stretches = [stretch for sample in samples for stretch in trained(b.handle, sample)]
    assert sorted(stretches) == ["a<|im_end|>", *["x<|im_end|>"] * 8]
    assert sorted(i for i in range(8) for sample in samples if f"more {i}" in text(b.handle, sample)) == list(range(8))


def test_sampling_parameters_of_requests_are_ignored(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    b = bench("a b<|im_end|>", "c<|im_end|>", rollout_temperature=0.7)
    with caplog.at_level(logging.WARNING):
        assert b.say(user("1"), temperature=0.0, seed=1, stop=" b", max_tokens=9, top_p=1.0, tool_choice="auto") == "a"
        assert b.say(user("2"), temperature=0.0, max_completion_tokens=5) == "c"
    (_, first), (_, second) = b.handle.client.requests
    assert first["temperature"] == second["temperature"] == 0.7 and "sampling_seed" not in first
    assert first["stop"] == [" b"] and first["no_stop_trim"] is True
    assert (first["max_new_tokens"], second["max_new_tokens"]) == (9, 5)
    warnings = [record.args for record in caplog.records if "an agent requested" in record.message]
    assert [args[0] for args in warnings if args] == ["seed", "temperature"]  # type: ignore[index]
    assert trained(b.handle, b.samples()[0]) == ["a b<|im_end|>"]


def test_an_agent_that_never_calls_has_failed(bench: Any) -> None:
    b = bench()
    (sample,) = b.samples()
    assert sample is b.sample and sample.status is Status.FAILED
    assert sample.metadata["error"] == "the agent got no answer from the model: it sent no request"


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"messages": []}, "has no messages"),
        ({"messages": [user("1")], "n": 2}, "n is 2"),
        ({"messages": [user("1"), {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool call"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "only text"),
    ],
)
def test_invalid_requests_get_openai_errors(bench: Any, request_: dict[str, Any], sentence: str) -> None:
    b = bench()
    with pytest.raises(openai.BadRequestError, match=sentence) as refused:
        b.client.chat.completions.create(model="any", **request_)
    assert refused.value.type == "invalid_request_error"


def test_full_context_is_context_length_exceeded(bench: Any) -> None:
    b = bench("a<|im_end|>", rollout_max_response_len=50)
    b.say(user("1"))
    with pytest.raises(openai.BadRequestError) as refused:
        b.say(user("1"), assistant("a"), user("x" * 50))
    assert refused.value.code == "context_length_exceeded"
    with b.session:  # an agent that fails over it has been cut off
        raise refused.value
    (sample,) = b.samples()
    assert trained(b.handle, sample) == ["a<|im_end|>"] and sample.status is Status.TRUNCATED


def test_error_of_agent_is_raised(bench: Any) -> None:
    b = bench("a<|im_end|>", "b<|im_end|>", rollout_max_response_len=50)
    b.say(user("1"))
    with pytest.raises(openai.BadRequestError):
        b.say(user("1"), assistant("a"), user("x" * 50))
    b.say(user("a summary"))  # it has found a way out
    with pytest.raises(ZeroDivisionError), b.session:
        _ = 1 / 0


def test_calls_after_end_of_round_get_503(bench: Any) -> None:
    b = bench("a<|im_end|>")
    b.say(user("1"))
    b.handle.client.stopped = True
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="round") as stopped:
            b.say(user("1"), assistant("a"), user("2"))
        assert stopped.value.status_code == 503
    assert len(b.handle.client.requests) == 2  # nor did the package try again
    assert b.sample.aborted  # holds even if the agent's error is all that its caller sees
    (sample,) = b.samples()
    assert sample is b.sample and sample.status is Status.ABORTED and not any(sample.loss_mask)
    with pytest.raises(openai.InternalServerError, match="session"):
        b.say(user("1"))


def test_engine_failure_ends_round(bench: Any) -> None:
    b = bench(ConnectionError("no engine answered"))
    with pytest.raises(openai.InternalServerError, match="no engine answered"):
        b.say(user("1"))
    assert isinstance(b.handle.fault, ConnectionError)
    (sample,) = b.samples()
    assert "its last request failed: no engine answered" in sample.metadata["error"]


def test_cancelled_call_leaves_no_trace(bench: Any) -> None:
    b = bench("a<|im_end|>", "late<|im_end|>", "b<|im_end|>")
    b.say(user("1"))
    b.handle.client.hold = asyncio.Event()  # never set
    with pytest.raises(openai.APITimeoutError):
        b.client.with_options(timeout=0.2, max_retries=0).chat.completions.create(
            model="any", messages=[user("1"), assistant("a"), user("2")]
        )
    while b.session._busy:
        time.sleep(0.01)
    b.handle.client.hold = None
    assert b.say(user("1"), assistant("a"), user("2")) == "b"
    (sample,) = b.samples()
    assert trained(b.handle, sample) == ["a<|im_end|>", "b<|im_end|>"]
    assert text(b.handle, sample).count("user\n2") == 1


def test_models_and_unknown_addresses(bench: Any) -> None:
    b = bench()
    assert [model.id for model in b.client.models.list()] == ["policy"]
    with pytest.raises(openai.NotFoundError):
        b.client.embeddings.create(model="any", input="x")


def test_call_without_session_key_or_with_foreign_host_is_refused(bench: Any) -> None:
    b = bench("a<|im_end|>")
    other = b.endpoint.session(UserSample.of(pending(b.handle)))
    assert b.session.api_key not in b.session.base_url
    for key in ("guess", other.api_key):
        with pytest.raises(openai.AuthenticationError, match=r"session\.api_key"):
            b.client.with_options(api_key=key).models.list()
        with pytest.raises(openai.AuthenticationError):
            b.client.with_options(api_key=key).chat.completions.create(model="any", messages=[user("1")])
    with pytest.raises(openai.PermissionDeniedError):
        b.client.with_options(default_headers={"Host": "example.com:80"}).models.list()
    assert b.say(user("1")) == "a"
    assert len(b.samples()) == 1


def test_sessions_close_one_by_one_and_together(bench: Any) -> None:
    b = bench("a<|im_end|>", "b<|im_end|>")
    other = b.endpoint.session(UserSample.of(pending(b.handle)))
    assert other.base_url != b.session.base_url
    b.endpoint.end("g-01")
    assert b.say(user("1")) == "a"
    b.endpoint.end("g-00")
    with pytest.raises(openai.InternalServerError, match="session"):
        b.say(user("1"))
    b.endpoint.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "openai-endpoint"]
    assert [trained(b.handle, sample) for sample in b.samples()] == [["a<|im_end|>"]]


def test_port_in_use_raises_engine_error() -> None:
    handle = handle_with(QWEN3)
    with socket.create_server(("127.0.0.1", 0)) as taken_port:
        endpoint = OpenAIEndpoint(handle, taken_port.getsockname()[1])
        with pytest.raises(EngineError, match="--agent-endpoint-port"):
            endpoint.session(pending(handle))


@pytest.mark.parametrize(
    ("target", "error", "raised"),
    [
        ("aiohttp.web.AppRunner.setup", RuntimeError, RuntimeError),
        ("asyncio.events.new_event_loop", OSError, EngineError),
    ],
)
def test_server_that_cannot_start_raises(
    target: str, error: type[Exception], raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error("out of file descriptors")

    monkeypatch.setattr(target, fail)
    with pytest.raises(raised, match="out of file descriptors"):
        Bench()
