"""The functions and classes that user-defined functions import from slime, another trainer, implemented with functions
of Penstock. slime_modules.py lists the names under which slime has them.

Functions that generate need the `args` of a generate or rollout function, because these have the engines of the round.
"""

from __future__ import annotations

import asyncio
import inspect
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from penstock.engines.serving.endpoints import auth_headers
from penstock.stages.plugins import load_function
from penstock.stages.rewards.builtin import dapo, deepscaler, grade_math, last_answer, last_boxed
from penstock.stages.rewards.hub import builtin_reward_name, get_builtin_reward
from penstock.stages.rollout.plugins.user_sample import ANSWERS, EngineAnswer, UserSample
from penstock.storage.errors import PluginError

REQUEST_SECONDS = 3600.0  # timeout of a request; an engine may take long for a response
BOX_CHARACTERS = 100  # characters at the end of a response in which a strict verification looks for the answer


@dataclass
class RolloutFnTrainOutput:
    """The result of a rollout function: groups, and further metrics of the round."""

    samples: list[list[UserSample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """The result of a rollout function for an evaluation: data set -> "samples" and optionally "rewards", and further
    metrics of the evaluation."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


class GenerateState:
    """Tokenizer, sampling parameters and a semaphore for the requests of a round."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = _of_args(args, "engine").tokenizer.inner
        self.processor = None  # slime's processor of images; only text models are supported
        self.sampling_params: dict[str, Any] = args.engine.config.sampling_params()
        self.semaphore = asyncio.Semaphore(args.engine_concurrency)
        self.aborted = False


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the groups that the built-in rollout keeps, or the results of the built-in evaluation. Call it in a
    rollout function without `async`."""
    groups = _of_args(args, "rollout").generate_rollout(data_source)
    return _eval_output(args, groups) if evaluation else RolloutFnTrainOutput(groups)


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[Any]]:
    """Return the results of the built-in evaluation on the data set of `args.eval_prompt_data`, and no groups."""
    tools = _of_args(args, "rollout")
    return _eval_output(args, await asyncio.to_thread(tools.generate_rollout, tools.source)), []


def _eval_output(args: Any, groups: list[list[UserSample]]) -> RolloutFnEvalOutput:
    samples = [sample for group in groups for sample in group]
    results = {
        "rewards": [0.0 if sample.reward is None else sample.reward for sample in samples],
        "truncated": [sample.status == UserSample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
    return RolloutFnEvalOutput({args.rollout.data_set: results})


async def generate(args: Any, sample: UserSample, sampling_params: dict[str, Any]) -> UserSample:
    """Return a sample with a response, and without a reward."""
    return await _generate_one(args, sample, sampling_params, grade=False)


async def generate_and_rm(
    args: Any, sample: UserSample, sampling_params: dict[str, Any], evaluation: bool = False
) -> UserSample:
    """Return a sample with a response and a reward."""
    return await _generate_one(args, sample, sampling_params, grade=True)


async def generate_and_rm_group(
    args: Any, group: list[UserSample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[UserSample]:
    """Return a group with responses and rewards."""
    done: list[UserSample] = await _of_args(args, "rollout").generate_group(group, sampling_params, grade=True)
    return done


def get_model_url(args: Any, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of the router or engine. Ignores `model_name`, because Penstock serves only one model."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def async_rm(args: Any, sample: UserSample, **kwargs: Any) -> Any:
    """Return the reward of a sample, computed by the function of --custom-rm-path, else by the built-in reward that the
    sample's metadata field `rm_type` names, else by --rm-type."""
    if args.custom_rm_path:
        return await _call_custom_reward(args, sample, **kwargs)
    reward = get_builtin_reward(builtin_reward_name(sample.metadata, args.rm_type))
    if reward.remote:
        return await reward.function(args, sample)
    return await asyncio.to_thread(reward.function, sample)


async def _call_custom_reward(args: Any, samples: UserSample | Sequence[UserSample], **kwargs: Any) -> Any:
    value = load_function(args.custom_rm_path)(args, samples, **kwargs)
    return await value if inspect.isawaitable(value) else value


async def batched_async_rm(args: Any, samples: Sequence[UserSample], **kwargs: Any) -> list[Any]:
    """Return the reward of every sample. As in slime, a function of --custom-rm-path gets all samples in one call."""
    if args.custom_rm_path:
        return list(await _call_custom_reward(args, samples, **kwargs))
    return list(await asyncio.gather(*(async_rm(args, sample) for sample in samples)))


# ---- rewards of texts ------------------------------------------------------------------------------------------------


def grade_answer(solution: str, label: str) -> bool:
    """Return whether the answer in a solution equals the label (--rm-type math)."""
    return grade_math(solution, label) > 0


def deepscaler_reward(response: str, label: str) -> float:
    """Return the reward of --rm-type deepscaler."""
    sample: Any = SimpleNamespace(response=response, label=label, metadata={})
    return deepscaler(sample)


def dapo_reward(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """Return the reward of --rm-type dapo, with the keys score, acc and pred (the answer); with `strict_box_verify`,
    the answer is the text in the last \\boxed{} among the last 100 characters, and must be identical to the label."""
    if strict_box_verify:
        answer = last_boxed(solution_str[-BOX_CHARACTERS:])
        return {"score": 1.0 if answer == ground_truth else -1.0, "acc": answer == ground_truth, "pred": answer}
    sample: Any = SimpleNamespace(response=solution_str, label=ground_truth, metadata={})
    return {**dapo(sample), "pred": last_answer(solution_str)}


# ---- helpers ---------------------------------------------------------------------------------------------------------


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """Send a POST request with a JSON body, and return the JSON of its response. Failed connections are retried.
    Requests to the run's engines and router are sent with the API key."""
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS) as client:
        attempt = 0
        while True:
            attempt += 1
            try:
                response = await client.post(url, json=payload, headers=_request_headers(url, headers))
                response.raise_for_status()
                break
            except httpx.TransportError:
                if attempt >= max_retries:
                    raise
                await asyncio.sleep(1)
    answer, answers = response.json(), ANSWERS.get()  # answers of engines, for `UserSample.take_answers`
    info = answer.get("meta_info") or {} if isinstance(answer, dict) else {}
    if answers is not None and "input_ids" in payload and (new := info.get("output_token_logprobs")):
        token_ids, logprobs = [item[1] for item in new], [item[0] for item in new]
        answers.append(EngineAnswer(list(payload["input_ids"]), token_ids, logprobs, info))
    return answer


async def get(url: str) -> Any:
    """Send a GET request, and return the JSON of its response."""
    async with httpx.AsyncClient(timeout=REQUEST_SECONDS) as client:
        response = await client.get(url, headers=_request_headers(url))
        response.raise_for_status()
        return response.json()


def _request_headers(url: str, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    server = urlsplit(url)
    return {**auth_headers(f"{server.scheme}://{server.netloc}"), **(headers or {})}


def load_tokenizer(directory: str, **kwargs: Any) -> Any:
    """Load the tokenizer of a Hugging Face directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, **kwargs)


def log(args: Any, metrics: Mapping[str, Any], step_key: str | None = None, **kwargs: Any) -> None:
    """Add metrics to those of the round. Call it in a log function; the round is the step of all metrics."""
    _of_args(args, "logged_metrics").update({key: value for key, value in metrics.items() if key != step_key})


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """Return mean, median, maximum and minimum of numbers."""
    numbers = [float(value) for value in values]
    return {
        "mean": statistics.fmean(numbers),
        "median": float(statistics.median(numbers)),
        "max": max(numbers),
        "min": min(numbers),
    }


def dict_add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the dictionary with a prefix before every key."""
    return {f"{prefix}{key}": value for key, value in values.items()}


class SingletonMeta(type):
    """Metaclass of classes with one instance per process."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]


async def _generate_one(args: Any, sample: UserSample, sampling: dict[str, Any], *, grade: bool) -> UserSample:
    if hasattr(args, "rollout"):
        [done] = await args.rollout.generate_group([sample], sampling, grade=grade)
        return done
    engine = _of_args(args, "engine")
    await engine.generate(sample, **sampling)
    if grade:
        sample.reward = await async_rm(args, sample)
    return sample


def _of_args(args: Any, name: str) -> Any:
    """Return an attribute of `args`. Raises PluginError if the calling function does not have it."""
    kinds = {
        "engine": "a generate or rollout function",
        "rollout": "a rollout function (--rollout-function-path)",
        "logged_metrics": "a log function (--custom-rollout-log-function-path)",
    }
    if not hasattr(args, name):
        raise PluginError(
            f"this function of slime works only with the `args` of {kinds[name]}: call it in such a function"
        )
    return getattr(args, name)
