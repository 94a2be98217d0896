"""Generate the responses of a group with the engines, then grade them.

A sample's tokens are the token ids that the engine returned; the response text is decoded from them and never tokenized
again. Every response reports the weight version that generated it; a version other than the round's is an error. Many
groups are in flight at once, bounded by the engines' concurrency, and groups are graded while others are generated.
collect.py and stream.py decide which groups are generated, and how many.

A teacher model adds its log-probs, from an engine of the run or another server. They are stored in the samples, so
training and replay need no teacher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import numpy as np

from penstock.engines.backends import engine_backend
from penstock.engines.generation import EngineClient, Generation, PromptImage, Scores, TokenCounts
from penstock.stages.images import SampleImages
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.outcome import Outcome
from penstock.stages.rollout.config import GenerationConfig, RolloutConfig
from penstock.stages.rollout.journal import Journal
from penstock.stages.rollout.plugins.user_sample import UserSample
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound, copy_sample, is_unfinished
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import DataError, PluginError, check_rules
from penstock.storage.failpoints import failpoint
from penstock.storage.samples.sample import TEACHER, Sample, Status
from penstock.storage.secret_references import resolve_secrets
from penstock.storage.secrets import redact

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}  # finish reason -> status
TEACHER_CONCURRENCY = 64  # requests in flight to the teacher

# Returns a context manager that keeps the run's engine with the teacher model running. It yields a function, which
# returns a list with the engine's address, or an empty list while the engine restarts.
ServingTeacher = Callable[[], AbstractContextManager[Callable[[], list[str]]]]


class Generator(Protocol):
    """Generates the responses of a group: EngineGenerator, or CustomGeneration for user-defined functions. A call sets
    the status of every sample to completed, truncated, failed or aborted; a later round continues or restarts aborted
    samples."""

    @property
    def counts(self) -> TokenCounts:
        """Token counts of all requests."""
        ...

    async def __call__(self, samples: Group) -> Group:
        """Return the group with its responses. Raises ValueError if the engines reject the group's prompt."""
        ...

    async def abort(self) -> None:
        """Abort the requests in flight. Calls in progress return at once and set the status of their unfinished samples
        to aborted."""
        ...


@dataclass
class GroupRunner:
    """Generates and grades the groups of one round. Must be created in the event loop that calls `run`."""

    round: RolloutRound
    generator: Generator
    journal: Journal  # provides groups that an earlier attempt generated, and stores groups generated in this one
    submit: Callable[[list[Sample]], list[Future[Outcome]]]  # starts grading the samples of one prompt
    hook: Callable[[Sample], None] | None  # called with every generated sample before it is graded
    slots: asyncio.Semaphore  # limits how many groups are generated concurrently
    partial_rollout: bool  # aborted samples keep their tokens; otherwise they restart from the prompt
    num_gpus: int = 1  # GPUs of all engines; on a machine without GPUs, the number of engines
    teacher: Teacher | None = None  # computes log-probs in an engine
    images: SampleImages | None = None  # of a vision-language model
    stopping: bool = False  # whether `stop` was called
    generated: list[Sample] = field(default_factory=list)  # samples generated in this attempt (not from the journal)
    num_response_tokens: int = 0  # trained tokens generated in this attempt
    adopted: list[str] = field(default_factory=list)  # ids of groups taken from the journal
    last_token_time: float = field(default_factory=time.perf_counter)  # time when the last group was generated
    counts_before: TokenCounts = field(default_factory=TokenCounts)  # token counts of requests in earlier rounds

    @property
    def counts(self) -> TokenCounts:
        """Token counts of the requests of this round."""
        return self.generator.counts - self.counts_before

    def begin_round(self, round: RolloutRound, journal: Journal) -> None:
        """Start the token counts of `round`, and add groups that finish from now on to this round's journal."""
        self.round, self.journal, self.counts_before = round, journal, self.generator.counts
        self.generated, self.num_response_tokens, self.adopted = [], 0, []

    async def run(self, group: Group) -> Group:
        """Return the group with responses and rewards. If `stop` aborted the group, return it ungraded: with the tokens
        generated so far if `partial_rollout`, otherwise as it was before the call."""
        if is_unfinished(group):
            if finished := self.journal.find_finished_group(group):
                group = finished
                self.adopted.append(group[0].group_id)
            else:
                before = [copy_sample(sample) for sample in group]
                group = await self._generate(group)
                if is_unfinished(group):
                    if not self.stopping:
                        raise RuntimeError(
                            f"group {group[0].group_id} was aborted, but this round did not request it: either its "
                            "engine was stopped (see the engine's log), or the user-defined generate function set the "
                            "status `aborted`, which is reserved for requests that the engine aborted"
                        )
                    return group if self.partial_rollout else before
        await self.grade(group)
        return group

    async def run_samples(self, samples: Group, *, grade: bool) -> Group:
        """Return the samples of a group, or some of them, with responses and, if `grade`, with rewards. Finished
        groups are neither read from the journal nor added to it."""
        async with self.slots:
            samples = await self._call_generator(samples)
        if grade:
            await self.grade(samples)
        return samples

    def count_generated(self, samples: Group) -> None:
        """Count samples that a user-defined rollout function has generated, unless `run` has counted them."""
        known = {sample.sample_id for sample in self.generated}
        new = [sample for sample in samples if sample.sample_id not in known]
        if new:
            self.last_token_time = time.perf_counter()
            self.generated += new
            self.num_response_tokens += num_trained_tokens(new)

    async def stop(self) -> None:
        """Abort the groups in flight; their `run` calls return them unfinished."""
        self.stopping = True
        await self.generator.abort()

    async def flush_journal_periodically(self) -> None:
        """Flush the journal every `rollout_journal_interval` seconds, until cancelled."""
        while self.journal.interval:
            await asyncio.sleep(self.journal.interval)
            await asyncio.to_thread(self.journal.flush)

    async def _generate(self, group: Group) -> Group:
        num_before = num_trained_tokens(group)
        async with self.slots:
            try:
                group = await self._call_generator(group)
            except ValueError as error:  # only this prompt is invalid (too long, for example); the round continues
                for sample in group:
                    Outcome(error=f"refused by the engine: {error}").apply(sample)
                return group
        self.last_token_time = time.perf_counter()
        self.generated += group
        self.num_response_tokens += num_trained_tokens(group) - num_before
        if self.round.kind == "eval":
            failpoint("eval-generating")
        if all(sample.status in (Status.COMPLETED, Status.TRUNCATED) for sample in group):
            self.journal.add_finished_group(group)
        return group

    async def _call_generator(self, group: Group) -> Group:
        group = await self.generator(group)
        for sample in group:
            if not np.isfinite(sample.rollout_logprobs).all():
                sample.fail(
                    "the engine returned a log-prob that is not a finite number: its logits overflowed, so check the "
                    "weights, or generate with another dtype or attention backend"
                )
        if self.images is not None:
            await asyncio.to_thread(self.images.fail_unusable, group)
        return group

    async def grade(self, group: Group) -> None:
        """Set the rewards of samples without one. Raises ValueError if the reward is misconfigured."""
        samples = [sample for sample in group if sample.reward is None and sample.status is not Status.FAILED]
        if self.hook is not None:
            await asyncio.gather(*(asyncio.to_thread(self.hook, sample) for sample in samples))
            samples = [sample for sample in samples if sample.status is not Status.FAILED]
        # Shielded: cancelling this task must not cancel a future whose result the grader will still set.
        futures = [asyncio.shield(asyncio.wrap_future(future)) for future in self.submit(samples)]
        if self.teacher is not None:  # the teacher scores the samples while the rewards are computed
            await self.teacher.score(group)
        for sample, outcome in zip(samples, await asyncio.gather(*futures)):
            outcome.apply(sample)


@dataclass(eq=False, repr=False)
class EngineGenerator:
    """Sends the pending samples of a group to an engine in one request. A sample aborted in an earlier round is
    continued after the tokens that it has."""

    client: EngineClient
    config: GenerationConfig
    tokenizer: PromptTokenizer
    round: RolloutRound
    images: SampleImages | None = None
    counts: TokenCounts = field(default_factory=TokenCounts)

    async def __call__(self, samples: Group) -> Group:
        """Return the group with its responses."""
        num_prompt = samples[0].prompt_length
        pending: list[tuple[Sample, dict[str, Any]]] = []
        for sample in samples:
            if sample.status is Status.PENDING:
                params = sampling_params_for(self.config, sample)
                if params["max_new_tokens"] > 0:
                    pending.append((sample, params))
                else:  # reached the length limit, which was higher in the earlier round that aborted the sample
                    sample.status = Status.TRUNCATED
        if not pending:
            return samples
        generations = await self.client.generate_each(
            [sample.token_ids for sample, _ in pending],
            [params for _, params in pending],
            images=[await prompt_images(self.images, sample) for sample, _ in pending],
        )
        assert len(generations) == len(pending), f"{len(generations)} responses for {len(pending)} samples"
        for (sample, _), generation in zip(pending, generations):
            append_generation(sample, generation, self.round)
            self.counts += generation.counts
        # Decode the whole response: where a sample was aborted, a character's bytes may be split between two requests.
        texts = self.tokenizer.decode(
            [sample.token_ids[num_prompt:] for sample, _ in pending],
            skip_special_tokens=self.config.rollout_skip_special_tokens,
        )
        for (sample, _), text in zip(pending, texts):
            sample.response = text
        return samples

    async def abort(self) -> None:
        """Abort all requests in flight; each returns the tokens generated so far."""
        await self.client.abort()


@dataclass(eq=False, repr=False)
class EngineCalls:
    """Sends requests to the engines of one round, from any thread and any event loop."""

    client: EngineClient
    tokenizer: PromptTokenizer
    config: GenerationConfig
    round: RolloutRound
    images: SampleImages | None = None
    loop: asyncio.AbstractEventLoop | None = None  # event loop of the client; None: the caller's loop
    fault: Exception | None = None  # engine failure; it fails the round, even if the function catches it
    counts: TokenCounts = field(default_factory=TokenCounts)  # token counts of all requests

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object: a copy of the `args` of a user-defined function uses the same engines."""
        return self

    @property
    def address(self) -> tuple[str | None, int | None]:
        """Return host and port of the router, or of a live engine if no router runs; (None, None) if neither runs.
        User-defined functions may send requests there."""
        url = urlsplit((self.client.router and self.client.router()) or next(iter(self.client.urls), ""))
        return url.hostname, url.port

    async def generate(self, sample: Sample, **sampling: Any) -> str:
        """Append a continuation to `sample` with loss mask 1, and return its text. `sampling` overrides parameters of
        the run.

        The sample's status becomes `completed` (end token or stop text), `truncated` (length limit or `max_new_tokens`)
        or `aborted` (the round is over; the text may be incomplete or empty, and further calls return '').
        RuntimeError, ConnectionError and TimeoutError of the engines also fail the round, even if the caller catches
        them.
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
            params.setdefault("no_stop_trim", True)  # keep the stop string in the text, because its tokens are kept
        num_before = len(sample.token_ids)
        try:
            generation = await self._send_request(sample, params)
            append_generation(sample, generation, self.round)
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            self.fault = error
            raise
        self.counts += generation.counts
        if generation.finish_reason == "abort" and isinstance(sample, UserSample):
            sample.aborted = True
        else:
            sample.metadata["num_turns"] = sample.metadata.get("num_turns", 0) + 1
        # The whole response is decoded, because two turns may share the bytes of a character.
        sample.response = self._decode_from(sample, sample.prompt_length)
        return self._decode_from(sample, num_before)

    def append(self, sample: Sample, content: str | Sequence[int], images: Sequence[bytes] = ()) -> bool:
        """Append content that the model did not generate (for example tool output) with loss mask 0, as text or token
        ids, with one image token for each of `images`, which are files. Return False if it exceeds the length limit
        (the status becomes `truncated`), or if the round is over (`aborted`)."""
        if sample.status is Status.ABORTED:
            return False
        token_ids = (
            self.tokenizer.encode([content])[0] if isinstance(content, str) else [int(token) for token in content]
        )
        num_images = len(sample.images)
        token_ids = self.add_images(sample, token_ids, images)
        if len(token_ids) > sampling_params_for(self.config, sample)["max_new_tokens"]:
            sample.status = Status.TRUNCATED
            del sample.images[num_images:]
            return False
        sample.extend(token_ids, [0.0] * len(token_ids), is_trained=False)
        sample.response = self._decode_from(sample, sample.prompt_length)
        return True

    def add_images(self, sample: Sample, token_ids: list[int], images: Sequence[bytes]) -> list[int]:
        """Add images, which are files, to a sample whose next tokens are `token_ids`. Return these with as many image
        tokens as the images need. Raises DataError."""
        if not images:
            return token_ids
        if self.images is None:
            raise PluginError("a message has an image, but --hf-checkpoint is a model of text only: omit the image")
        return self.images.add(sample, token_ids, images)

    async def _send_request(self, sample: Sample, params: dict[str, Any]) -> Generation:
        images = await prompt_images(self.images, sample)
        call = self.client.generate(list(sample.token_ids), params, images=images, session=sample.trajectory_id)
        if self.loop is None or self.loop is asyncio.get_running_loop():
            return (await call)[0]
        try:
            answer = asyncio.run_coroutine_threadsafe(call, self.loop)
        except RuntimeError:  # the client's event loop is closed: the round is over and the caller was abandoned
            call.close()
            raise
        return (await asyncio.wrap_future(answer))[0]

    def _decode_from(self, sample: Sample, start: int) -> str:
        """Return the text of a sample's tokens from token `start` on."""
        skips = self.config.rollout_skip_special_tokens
        return self.tokenizer.decode([sample.token_ids[start:]], skip_special_tokens=skips)[0]


async def prompt_images(images: SampleImages | None, sample: Sample) -> list[PromptImage]:
    """Return the images of a sample for a request to an engine. `images` is None for a model of text only. Raises
    DataError if the sample's image tokens are not those of its images."""
    if images is None or not sample.images:
        return []
    return await asyncio.to_thread(images.of_prompt, sample.token_ids, sample.images)


def sampling_params_for(config: GenerationConfig, sample: Sample) -> dict[str, Any]:
    """Return the sampling parameters for the rest of a sample's response. `max_new_tokens` is the number of tokens
    that the length limits still allow; with `rollout_sampling_seeds`, `sampling_seed` depends on the sample's index in
    its group."""
    params = config.sampling_params()
    num_prompt = sample.prompt_length
    limit = min(params["max_new_tokens"], max_response_tokens(config, num_prompt))
    params["max_new_tokens"] = limit - (len(sample.token_ids) - num_prompt)
    if config.rollout_sampling_seeds:
        index = int(sample.trajectory_id.rpartition("-")[2])  # index of the sample in its group
        params["sampling_seed"] = config.rollout_seed + index
    return params


def max_response_tokens(config: GenerationConfig, num_prompt_tokens: int) -> int:
    """Return the maximum number of response tokens after a prompt. Raises DataError if the prompt leaves no room:
    rollouts skip such prompts, evaluations do not."""
    if config.rollout_max_context_len is None:
        return config.rollout_max_response_len
    room = config.rollout_max_context_len - num_prompt_tokens
    if room < 1:
        raise DataError(
            f"a prompt of {num_prompt_tokens} tokens leaves no room for a response within "
            f"--rollout-max-context-len {config.rollout_max_context_len}: raise this limit, or remove the prompt"
        )
    return min(config.rollout_max_response_len, room)


def append_generation(sample: Sample, generation: Generation, round: RolloutRound) -> None:
    """Append an engine's response to a sample: tokens (with loss mask 1), log-probs, status and policy versions; the
    caller sets the text. If another policy version generated earlier tokens of the sample, `metadata["policy_spans"]`
    lists the versions in order, each as [policy version, number of trained tokens]."""
    token_ids, logprobs = generation.token_ids, generation.logprobs
    assert len(token_ids) == len(logprobs), "the engine returned different numbers of tokens and log-probs"
    sample.status = STATUS[generation.finish_reason]
    if sample.status is Status.ABORTED:
        # Engines check for an abort before they check for the end: the last token may be
        # the end token or the last token allowed. Remove this token; it is sampled again when the sample continues.
        token_ids, logprobs = token_ids[:-1], logprobs[:-1]
    if not token_ids:  # aborted before the first token, or stopped at once by a stop string
        return
    spans = policy_spans(sample)
    room = len(token_ids)
    for weights, num_tokens in generation.weight_versions:
        if (version := round.policy_version_of(weights)) is None:
            raise RuntimeError(
                f"sample {sample.sample_id} was generated by weights {weights!r}, expected {round.weight_version!r}: "
                "resume the run, which publishes the expected weights to the engine again"
            )
        num_tokens, room = min(num_tokens, room), room - min(num_tokens, room)
        if spans and spans[-1][0] == version:
            spans[-1][1] += num_tokens
        elif num_tokens:
            spans.append([version, num_tokens])
    assert room == 0, f"the engine returned {len(token_ids)} tokens, but weight versions of {len(token_ids) - room}"
    if len(spans) > 1:
        sample.metadata["policy_spans"] = spans
    sample.policy_versions = (spans[0][0], spans[-1][0])
    sample.extend(token_ids, logprobs, is_trained=True)
    sample.routed_experts = generation.routed_experts


def policy_spans(sample: Sample) -> list[list[int]]:
    """Return [policy version, number of its consecutive trained tokens] for the trained tokens of a sample, in order:
    a copy of `metadata["policy_spans"]`, which samples of a single version do not have."""
    spans = sample.metadata.get("policy_spans")
    if spans is None:
        spans = [[sample.policy_versions[1], num]] if (num := sum(sample.loss_mask)) else []
    return [list(span) for span in spans]


def mask_stale_tokens(sample: Sample, oldest: int) -> int:
    """Set the loss mask and rollout log-probs to 0 for all tokens of a sample that policy versions before `oldest`
    generated. Return their number. `policy_versions` is at least `oldest` afterwards."""
    spans = policy_spans(sample)
    num_stale = sum(count for version, count in spans if version < oldest)
    if num_stale:
        fresh = [span for span in spans if span[0] >= oldest]
        sample.metadata.pop("policy_spans", None)
        if len(fresh) > 1:
            sample.metadata["policy_spans"] = fresh
        trained = [position for position, is_trained in enumerate(sample.loss_mask) if is_trained]
        start = trained[num_stale] if num_stale < len(trained) else len(sample.loss_mask)
        sample.loss_mask = [0] * start + sample.loss_mask[start:]
        sample.rollout_logprobs = [0.0] * start + sample.rollout_logprobs[start:]
        sample.policy_versions = (fresh[0][0], fresh[-1][0]) if fresh else sample.policy_versions
    first, last = sample.policy_versions
    sample.policy_versions = (max(first, oldest), max(last, oldest))
    return num_stale


def num_trained_tokens(group: Group) -> int:
    """Return the number of tokens with loss mask 1 of a group."""
    return sum(sum(sample.loss_mask) for sample in group)


def make_grader(config: RolloutConfig) -> Grader:
    """Return a grader for the reward that `config` names. Raises RewardError for an unknown reward."""
    config = config.model_copy(update={"rm_url": resolve_secrets(config.rm_url)})
    return Grader.from_options(config, config.reward_workers, config.plugin_arguments())


# ---- the teacher -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Teacher:
    """Adds the log-probs of one or several teacher models, which servers compute, to samples. Must be created in the
    event loop that calls `score`."""

    clients: dict[str, EngineClient]  # name of the teacher -> client of its server; "" if there is only one
    name: str  # name of the servers in messages
    top_k: int = 0  # number of the most probable tokens at each position that the samples store
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TEACHER_CONCURRENCY))

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `teacher_logprobs` of all samples that have trained tokens and no teacher log-probs yet."""
        unscored = [
            sample
            for sample in samples
            if sample.teacher_logprobs is None and sample.status is not Status.FAILED and any(sample.loss_mask)
        ]
        for sample, scores in zip(unscored, await asyncio.gather(*map(self._score, unscored))):
            mask = np.array(sample.loss_mask, np.int32)
            sample.teacher_logprobs = [
                value if is_trained else 0.0 for value, is_trained in zip(scores.logprobs, sample.loss_mask)
            ]
            if self.top_k:
                mask = mask.repeat(self.top_k)
                sample.teacher_top_ids = np.array(scores.top_ids, np.int32) * mask
                sample.teacher_top_logprobs = np.array(scores.top_logprobs, np.float32) * mask

    async def _score(self, sample: Sample) -> Scores:
        client = self.clients.get("" if "" in self.clients else sample.metadata.get(TEACHER, ""))
        rules = [
            (
                client is None,
                f"sample {sample.sample_id} names the teacher {sample.metadata.get(TEACHER)!r}, but --opd-teacher-url "
                f"has {', '.join(sorted(self.clients))}: name one of these in the column of --opd-teacher-key",
            ),
            (
                sample.images,
                f"sample {sample.sample_id} has images, which an engine's teacher does not see: use a vision-language "
                "teacher in the trainer (--opd-teacher-load), or prompts without images",
            ),
        ]
        check_rules(rules, DataError)
        assert client is not None
        try:
            async with self.slots:
                return await client.score(sample.token_ids, self.top_k)
        except (ValueError, OSError, RuntimeError) as error:  # EngineError, ConnectionError and TimeoutError
            raise RuntimeError(
                f"{self.name} returned no log-probs: {redact(str(error) or type(error).__name__)}; check the "
                "server, and resume"
            ) from None


@asynccontextmanager
async def open_teacher(
    config: RolloutConfig, servers: Mapping[str, str], serving: ServingTeacher | None, top_k: int = 0
) -> AsyncIterator[Teacher | None]:
    """Yield the teacher; None if there is none. `servers`: name -> address (--opd-teacher-url). `serving`: starts the
    run's own engine for the teacher."""
    if serving is None and not servers:
        yield None
        return
    urls: dict[str, Any] = {name: [(resolve_secrets(url) or "").rstrip("/")] for name, url in servers.items()}
    shown = f"--opd-teacher-url {redact(', '.join(address for [address] in urls.values()))}"
    async with AsyncExitStack() as stack:
        if serving is not None:
            shown, urls = "the teacher's engine (--opd-teacher-engine)", {"": stack.enter_context(serving())}
        backend = engine_backend(config.engine)
        clients = {
            name: await stack.enter_async_context(backend.connect(of_name, config.rollout_timeout))
            for name, of_name in urls.items()
        }
        yield Teacher(clients, shown, top_k)
