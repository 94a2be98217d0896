"""The client interface of inference engines (`EngineClient`); stages and flows call engines only through it.

An implementation is a package under `engines/`, with a row in `backends.BACKENDS`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass, field
from operator import add, sub
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]
Transport = Literal["tensor", "nccl", "disk"]
PauseMode = Literal["retract", "in_place"]
"""How an engine pauses running requests for a weight update: "retract" frees their KV cache and computes it again
afterwards, "in_place" keeps it."""
EngineUrls = Callable[[], Sequence[str]] | Sequence[str]  # addresses, or a function that returns those of live engines
BUCKET_BYTES = 512 << 20
# Prefix of the weight version of engines that have loaded weights only for their checksums. The next weight update must
# lead to the same checksums (--check-weight-update-equal, `weights/transfer.py`).
REFERENCE = "reference:"


class EngineGone(ConnectionError):
    """An engine did not answer a request in time, or closed the connection while it was being answered."""


class EngineRefused(RuntimeError):
    """An engine answered a call with an error."""


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of one generation, or of several; the last three are zero without speculative decoding."""

    prompt: int = 0  # prompt tokens; each turn of a conversation counts all preceding tokens again
    cached: int = 0  # prompt tokens that were in the engines' prefix cache
    verifications: int = 0  # forward passes that verified draft tokens; each also samples one further token
    proposed: int = 0  # draft tokens
    accepted: int = 0  # draft tokens that became part of a response

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(*map(sub, astuple(self), astuple(other)))


@dataclass(frozen=True)
class PromptImage:
    """An image of a prompt, whose tokens in the prompt are consecutive and equal."""

    data: bytes = field(repr=False)  # a file with the scaled image: engines only normalize its pixels
    start: int  # index of the image's first token in the prompt
    num_tokens: int


@dataclass(slots=True)
class Generation:
    """One sampled response as returned by the engine. R: number of response tokens."""

    token_ids: list[int]  # [R], including the end-of-sequence token if it was sampled
    logprobs: list[float]  # [R], of the sampled tokens at the sampling temperature
    finish_reason: FinishReason
    weight_versions: list[tuple[str, int]]
    """Weight version -> number of consecutive tokens that these weights sampled, in order; several versions if weights
    were updated during the generation. [] without tokens."""
    counts: TokenCounts = TokenCounts()
    # Routed expert ids of all prompt and response tokens except the last one, encoded as in
    # storage/samples/routed_experts.py; None if they were not requested.
    routed_experts: bytes | None = None


@dataclass(frozen=True)
class EngineRoute:
    """Which trainer ranks send the weights to one engine."""

    senders: tuple[int, ...] = (0,)
    """For each tensor-parallel rank of the engine the trainer rank whose memory it reads, or one trainer rank for all.
    The first one also makes the HTTP requests to the engine."""
    incarnation: str = ""
    """Id of the engine's process, which changes at every restart; "" if unknown (external engines)."""


@dataclass(frozen=True)
class WeightUpload:
    """How the transport "disk" reaches engines that share no file system with the trainer: trainer rank 0 uploads the
    directory of weights to a store, and each engine's actor downloads it (`weights/transfer.py`)."""

    store: str  # URI
    store_options: Mapping[str, Any] = field(repr=False)  # with resolved secrets
    prefix: str  # key prefix in the store under which the directory is uploaded
    actors: Mapping[str, Any]  # URL -> handle of the Ray actor (`EngineServer`) that runs on the engine's machine


@dataclass(frozen=True)
class PublishedAdapter:
    """LoRA adapters that engines load beside the weights of their model (--lora-publish adapter)."""

    name: str  # name of the adapters in the engines, one for each policy version (`serving/endpoints.py`)
    config: Mapping[str, Any]  # content of PEFT's adapter_config.json
    num_tensors: int  # number of matrices
    compare: bool = False  # whether engines compare the checksum of every tensor that they receive


@dataclass(frozen=True)
class WeightTransport:
    """How weights are transferred from the trainer to the engines.

    tensor    engines copy from the trainer's memory: CUDA IPC from the trainer rank on the same GPU, shared memory on
              CPU. Both sides must have the same torch version.
    nccl      trainer rank 0 broadcasts to all ranks of the engines over NCCL (over gloo on machines without GPUs).
              Engines may be on other GPUs and other nodes.
    disk      trainer rank 0 writes a Hugging Face directory and the engines load it, from a file system shared by
              trainer and engines or, with `upload`, over a store.
    """

    kind: Transport = "tensor"
    routes: Mapping[str, EngineRoute] = field(default_factory=dict)  # engine URL -> route; without entry: EngineRoute()
    model_path: str = ""  # "disk": the model's Hugging Face directory; its JSON files are copied beside the weights
    directory: str = ""  # "disk": directory to write to, under a path that is the same for trainer and engines
    upload: WeightUpload | None = None  # "disk": instead of `directory`
    host: str | None = "127.0.0.1"
    """"nccl": address of trainer rank 0, at which the engines join the NCCL group; None: the address of its node."""
    bucket_bytes: int = BUCKET_BYTES
    in_flight: PauseMode | None = None
    """How requests that run during the update are paused; None: no requests run then."""
    fp8_weights: frozenset[str] = frozenset()
    """Hugging Face names of the weights that the engines hold in block fp8; they are quantized before they are sent."""
    adapter: PublishedAdapter | None = None
    """Send adapters instead of weights; "nccl" is then not possible, and generation is not paused."""
    without_vision: bool = False
    """Do not send the weights of the vision tower, which the engines have."""
    through_host: bool = False
    """"tensor": copy adapters to host memory, which engines on other GPUs of trainer rank 0's node can read."""


OVER_MEMORY = WeightTransport()


class Scores(NamedTuple):
    """What a model says about L given tokens."""

    logprobs: list[float]  # [L]
    top_ids: list[int]  # [L * k] for each position the k most probable tokens, most probable first
    top_logprobs: list[float]  # [L * k]


class EngineClient(AbstractAsyncContextManager["EngineClient"]):
    """Client of the engines of one run, which all serve the same policy version.

    `generate`, `generate_each` and `abort` are coroutines: await all of them in the same event loop. `close` is a
    coroutine, too. The other methods block and may be called from any thread. A client is an async context manager that
    calls `close` on exit.

    Every client implements the abstract methods. A method that raises NotImplementedError here is called only if the
    engine's backend has the capability that the method's docstring names.

    The weight version that an engine reports says which weights and memory it has:

        <run>/<number>       the weights of a policy version; after the engine's start, `ServerSpec.weight_version`
        updating:<version>   parts of <version>: `update_weights` is running, or has failed
        overwritten          random values: `overwrite_weights`
        released             nothing, after `release_memory`
        loading:<version>    parts of <version>, and no KV cache: the first update after a release is running
        loaded:<version>     all weights of <version>, but no KV cache: the first update after a release has ended
        loading:overwritten  random values, and no KV cache: `overwrite_weights` after a release

    An engine that reports one of the last four versions is paused. `resume_kv_cache` has an effect only on an engine
    that reports loaded:<version>.
    """

    router: Callable[[], str | None] | None = None
    """None without a router; otherwise a function that returns the router's address, or None while it is down."""

    @property
    @abstractmethod
    def urls(self) -> list[str]:
        """Return the addresses of the live engines. Raises RuntimeError, with the tail of the engine's log, if an
        engine died and no restarts are left."""

    async def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        n: int = 1,
        *,
        images: Sequence[PromptImage] = (),
        session: str | None = None,
    ) -> list[Generation]:
        """Sample `n` responses to the prompt `input_ids`; the other arguments and errors as in `generate_each`."""
        return await self.generate_each([input_ids] * n, [sampling] * n, images=[images] * n, session=session)

    @abstractmethod
    async def generate_each(
        self,
        prompts: list[list[int]],
        samplings: list[dict[str, Any]],
        *,
        images: Sequence[Sequence[PromptImage]] = (),
        session: str | None = None,
    ) -> list[Generation]:
        """Sample one response to each prompt (token ids), in one request. If the engine dies, the request is sent to
        another engine.

        `samplings` has the parameters of each prompt: `temperature`, `top_p`, `top_k`, `max_new_tokens`, `stop`,
        `stop_token_ids`, `no_stop_trim`, `sampling_seed` and those of `--rollout-sampling`. `images` has the images of
        each prompt, in the order of their tokens; () if no prompt has images. Only an engine with Capability.IMAGES
        gets images. Requests with the same session id go to the same engine while it is alive, to hit its prefix cache.

        Raises:
            EngineError: the engine rejected the request, for instance because the prompt is too long, or it made
                another number of tokens of the images than the prompt has.
            TimeoutError: there was no answer within the client's time limit.
            ConnectionError: the request failed in every try, with a connection error or a retryable HTTP status.
            RuntimeError: routed experts were requested, but the engine did not return them.
        """

    async def score(self, input_ids: list[int], top_k: int = 0) -> Scores:
        """Return the log-prob of each of L tokens given the tokens before it, at temperature 1, and the `top_k` most
        probable tokens at its position; 0 for the first token. Needs Capability.SCORES. Raises the errors of
        `generate_each`, and RuntimeError if the answer has no log-probs of these tokens."""
        raise NotImplementedError

    @abstractmethod
    async def abort(self) -> None:
        """Abort all requests of this client and wait until they have ended. These and all later requests of this client
        return with finish reason "abort" and the tokens generated so far (none if the request was never sent)."""

    def prepare_weight_updates(self) -> None:
        """Import what `update_weights` needs, so that its first call starts without delay."""

    @abstractmethod
    def update_weights(
        self, named: Iterable[tuple[str, Tensor]], version: str, transport: WeightTransport = OVER_MEMORY
    ) -> None:
        """Load weights into all engines; afterwards each engine reports `version` with every response.

        Requests in flight are kept and continue with the new weights. If the trainer has several ranks, this is a
        collective: every rank calls it with the same engines, version and transport. It raises only on the ranks that
        make requests to a failing engine; the other ranks return normally.

        An engine whose memory was released gets the memory of its weights back, and stays paused until
        `resume_kv_cache`.

        `named` has pairs of Hugging Face name and full (unsharded) tensor, consumed one at a time. With
        `transport.adapter` it has pairs of PEFT's name and adapter matrix, and requests use the new adapter only after
        a call of `use_adapter`.

        Raises:
            ConnectionError: an engine died or does not answer. The other engines report `updating:<version>` until the
                weights are sent again.
            EngineRefused: an engine rejected the weights.
            EngineError: trainer and engines cannot use this transport.
        """

    def use_adapter(self, name: str) -> None:
        """Send all later requests of this process to these engines with the adapter `name`, which `update_weights` has
        loaded. Requests in flight keep their adapter. Earlier adapters of the run that no request uses are unloaded in
        the background. Called only if `EngineBackend.reason_against_adapters` returns None."""
        raise NotImplementedError

    def unload_adapters(self) -> None:
        """Send later requests without an adapter, and unload the run's adapters from these engines as soon as no
        request uses them. Engines that do not answer are skipped. Called only if
        `EngineBackend.reason_against_adapters` returns None."""
        raise NotImplementedError

    def weight_checksums(self) -> dict[str, list[dict[str, str]]]:
        """Return the checksum of every weight tensor in the memory of the engines: URL -> for each rank of the engine,
        name of the tensor in the engine -> checksum. Needs Capability.CHECKSUMS.

        Engines shard, fuse and convert the tensors that they load, so only checksums of the same engine are comparable.
        """
        raise NotImplementedError

    def overwrite_weights(self) -> None:
        """Overwrite all weights in the memory of the engines with random values: tensors that the next `update_weights`
        misses then have wrong checksums. Needs Capability.CHECKSUMS."""
        raise NotImplementedError

    def release_memory(self) -> None:
        """Release the memory of weights and KV cache in all engines. Running requests are aborted. `update_weights`
        allocates the memory of the weights again, `resume_kv_cache` the cache. Needs Capability.OFFLOAD."""
        raise NotImplementedError

    def resume_kv_cache(self) -> None:
        """Allocate the KV cache again and resume generation, in engines whose weights were loaded after a release.
        Needs Capability.OFFLOAD."""
        raise NotImplementedError

    @abstractmethod
    def generates_tokens(self, url: str, timeout: float = 30) -> bool:
        """Return whether the engine at `url` generates tokens. An idle engine generates one token for this check. An
        engine whose KV cache is released cannot generate; for it, return whether its HTTP server answers."""

    @abstractmethod
    def weight_version(self, url: str, timeout: float = 30) -> str:
        """Return the weight version that the engine at `url` reports or, if requests of this process use an adapter
        that the engine has loaded, the policy version of the adapter.
        """

    def num_requests(self, url: str, timeout: float = 30) -> tuple[int, int] | None:
        """Return how many requests of all clients the engine at `url` is generating, and how many wait in its queue;
        None if it does not answer or does not count them."""
        return None

    async def close(self) -> None:
        """Close the HTTP connections to the engines, which abort the requests in flight on them."""

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
