"""The interface of a generation backend (`EngineBackend`), and the table of the available backends.

To add an inference engine, write a package `engines/<name>` with subclasses of `EngineBackend` (in `backend.py`),
`EngineClient` and `EngineServer`, and add a row to `BACKENDS`; `--engine <name>` selects it, and its own flags are
given as `--<name>-FLAG` (docs/internals.md). All backends share the code for placement, supervision,
restarts and external engines (`engines/serving`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from penstock.engines.families import count_rank_parameters
from penstock.engines.families.entries import read_config
from penstock.engines.generation import BUCKET_BYTES, EngineClient, EngineUrls
from penstock.storage.errors import EngineError, OptionError

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.options import EngineOptions
    from penstock.engines.serving.server import EngineServer
    from penstock.storage.samples.routed_experts import ExpertsFormat

FULL_DISTRIBUTION = (("top_p", 1.0), ("top_k", -1))  # values with which these sampling parameters exclude no token
DEFAULT = "sglang"
BACKENDS = {"sglang": "penstock.engines.sglang.backend:SGLangBackend"}  # value of --engine -> module:class


def stores_quantized_weights(options: EngineOptions) -> bool:
    """Return whether the checkpoint that the engines load has quantized weights."""
    config = Path(options.spec.model_path) / "config.json"
    return config.is_file() and bool(read_config(config).get("quantization_config"))


class Capability(Enum):
    """What only some engines can do. The value of a member: the option that needs it, what the engine then does (both
    for messages), and a function that returns whether the options of a run need it. LoRA adapters have no member:
    `EngineBackend.reason_against_adapters` decides about them."""

    SEEDS = "--rollout-sampling-seeds", "samples with the seed of each request", lambda o: o.sampling_seeds
    PARAMETERS = "--rollout-sampling", "takes further sampling parameters, and checks them", lambda o: o.sampling
    EXPERTS = "--use-rollout-routing-replay", "returns the routed experts of every token", lambda o: o.return_experts
    SCORES = "a teacher in an engine (--opd-*)", "returns the log-probs of given tokens", lambda o: o.scores
    FP32_HEAD = "--fp32-lm-head", "computes the logits in fp32", lambda o: o.fp32_head
    QUANTIZED = "a model with quantized weights", "loads and updates such weights", stores_quantized_weights
    SEVERAL_GPUS = "--rollout-num-gpus-per-engine above 1", "shards a model over GPUs", lambda o: o.gpus_per_engine > 1
    OFFLOAD = "--offload-rollout (--colocate sets it)", "releases the memory of weights and cache", lambda o: o.offload
    TENSOR = "--update-weight-transport tensor", "reads the trainer's memory", lambda o: o.transport == "tensor"
    NCCL = "--update-weight-transport nccl", "joins an NCCL group of the trainer", lambda o: o.transport == "nccl"
    DISK = "--update-weight-transport disk", "loads new weights from a directory", lambda o: o.transport == "disk"
    BUCKETS = "--update-weight-buffer-size", "loads weights in parts", lambda o: o.bucket_bytes != BUCKET_BYTES
    CHECKSUMS = "--check-weight-update-equal", "computes checksums of its weights", lambda o: o.compares
    RETRACT = "--async-mode streaming", "pauses requests for an update", lambda o: o.in_flight == "retract"
    IN_PLACE = "--pause-generation-mode in_place", "keeps its KV cache in updates", lambda o: o.in_flight == "in_place"
    EXTERNAL = "--rollout-external-engine-addrs", "works without being started by the run", lambda o: o.external
    ROUTER = "--use-router (or --router-*)", "has a router", lambda o: o.router is not None
    IMAGES = "a vision-language model", "reads images", lambda o: o.vision is not None
    PYTHON = "--engine-python", "runs in another Python interpreter", lambda o: o.spec.python is not None


@dataclass(frozen=True)
class EngineFacts:
    """Settings in the engine's own flags that checks outside of the backend need."""

    context_length: int | None = None  # in tokens; None: the model's own context length
    quantization: str | None = None  # format to which the engine quantizes the weights that it loads
    replicates_attention: bool = False  # True: the number of attention heads need not be a multiple of the GPUs
    speculates: bool = False  # whether speculative decoding is on
    draft_model: str | None = None  # directory of the draft model; None: the multi-token prediction layers of the model


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one GPU of an engine, in bytes."""

    weight_bytes: int
    static_bytes: int  # for weights and KV cache together
    bytes_per_token: int  # KV cache of one token
    share_flag: str = ""  # the flag that sets `static_bytes`, as a fraction of the GPU's memory

    @property
    def kv_cache_bytes(self) -> int:
        """Return the bytes left for the KV cache; 0 if the weights need all of `static_bytes`."""
        return max(0, self.static_bytes - self.weight_bytes)


class RequestRouter(AbstractContextManager["RequestRouter"], Protocol):
    """A load balancer in front of the engines: a context manager that starts and stops the router's process."""

    def set_backends(self, urls: list[str]) -> None:
        """Make the router send requests only to the engines at `urls`."""

    def address(self) -> str | None:
        """Return the router's URL, or None while the router cannot accept requests."""


class EngineBackend(ABC):
    """An inference engine implementation: creates clients, servers and routers, and checks engine options.

    Only what every engine must have is abstract. Options that need more are refused, unless `capabilities` has the
    capability. LoRA adapters are refused, unless `reason_against_adapters` returns None.
    """

    title: ClassVar[str]  # the engine's name in pages and messages
    help: ClassVar[str]  # text about the engine's own flags, for `penstock train --help-all`
    server_class: ClassVar[type[EngineServer]]  # starts and stops one server process
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    packages: ClassVar[Mapping[str, str]] = {}  # Python packages that the engine needs -> beginning of their versions
    # Text in the command line of one kind of process -> how its ports authenticate requests; the first kind is servers
    processes: ClassVar[Mapping[str, str]] = {}
    shared_memory: ClassVar[str | None] = None  # regular expression of files in /dev/shm that a dead server may leave
    # How messages of other modules name two settings of the engine: its flags, or by default a description.
    context_flag: ClassVar[str] = "the engine's context length"
    speculation_flag: ClassVar[str] = "the engine's speculative decoding"
    path_flags: ClassVar[tuple[str, ...]] = ()  # with underscores, without prefix: flags whose value is a local path

    def facts(self, args: Mapping[str, Any]) -> EngineFacts:
        """Return the settings in the engine's own flags `args` (name with underscores -> value), without checking
        the values."""
        return EngineFacts()

    @abstractmethod
    def check_args(self, args: Mapping[str, Any], *, router: bool = False) -> dict[str, Any]:
        """Check the names of the engine's own flags or, with `router`, of its router's flags. Return the flags with
        underscores in their names, as the installed release spells them.
        """

    def flag_tables(self) -> Mapping[str, Mapping[str, str]]:
        """Return tables of the flags that Penstock refuses or translates: sentence above a table -> flag -> what
        Penstock does with it."""
        return {}

    @abstractmethod
    def start_check(self) -> tuple[list[str], str]:
        """Return how `penstock doctor` tests the installation: arguments with which a Python interpreter starts the
        server's program so that it exits at once, and the advice that is printed if this fails."""

    @abstractmethod
    def connect(
        self,
        urls: EngineUrls,
        timeout: float = 600,
        *,
        experts: ExpertsFormat | None = None,
        router: Callable[[], str | None] | None = None,
    ) -> EngineClient:
        """Return a client of the engines at these addresses.

        Args:
            urls: addresses, or a function that returns those of the live engines. With a function, a request whose
                engine died is sent again to a live engine.
            timeout: seconds for one request, including the time spent waiting for an engine.
            experts: if given, request the routed expert ids of every token and encode them in this format.
            router: if given, returns the router's address, to which generation requests are then sent, or None while
                the router is down.
        """

    def server_args(self, options: EngineOptions, *, has_gpus: bool) -> dict[str, Any]:
        """Return the server's command-line flags: `options.spec.args`, and the flags that other options imply."""
        return dict(options.spec.args)

    def create_router(self, options: EngineOptions) -> RequestRouter | None:
        """Return a router that has not been started, or None if no router is configured."""
        return None

    def check_options(self, options: EngineOptions) -> None:
        """Check the engine options before any process is started."""
        self.check_args(options.spec.args)

    def check_gpus(self, options: EngineOptions, *, has_gpus: bool) -> None:  # noqa: B027
        """Raise an error if an option needs GPUs, but the machines of the engines that the run starts have none."""

    def check_sharding(self, options: EngineOptions, shape: ModelShape) -> None:  # noqa: B027
        """Check that the weights of a model can be sharded over the GPUs of an engine. Raises LayoutError."""

    def check_weight_updates(self, options: EngineOptions, capabilities: list[tuple[int, int]] | None) -> None:  # noqa: B027
        """Check that weight updates can replace the engines' weights. The trainer sends bf16 or fp32 weights; those
        that the checkpoint stores in block fp8 are quantized before they are sent. `capabilities`: compute capability
        of each GPU of the engines, or None if it is unknown because the engines run on other machines.
        """

    @abstractmethod
    def estimate_memory(self, options: EngineOptions, shape: ModelShape, gpu_bytes: int) -> EngineMemory:
        """Estimate how an engine divides the memory of one of its GPUs between weights and KV cache."""

    def graph_warning(self, options: EngineOptions, num_samples: int, gpu_bytes: int) -> str | None:
        """Return a warning if an engine may decode larger batches than those for which it captures CUDA graphs by
        default, because that is slow; else None. `num_samples`: maximum number of samples in flight on one engine.
        """
        return None

    def reason_against_adapters(self, options: EngineOptions, shape: ModelShape, layers: Iterable[str]) -> str | None:
        """Return why the engine cannot serve LoRA adapters of these layers (global Megatron names) beside the weights,
        or None if it can."""
        return f"{self.title} cannot serve adapters"

    def check_external_server(self, url: str, model_path: str, args: Mapping[str, Any]) -> None:  # noqa: B027
        """Check that the external engine at `url`, with the server flags `args`, can load the weights of the model at
        `model_path`, or the run's adapters."""

    def find_biasing_params(self, params: Mapping[str, Any]) -> list[str]:
        """Return the sampling parameters in `params`, as `name=value`, that make the engine sample from a distribution
        other than that of the log-probs it returns."""
        return [f"{name}={value}" for name, value in params.items() if (name, value) not in FULL_DISTRIBUTION]


def estimate_engine_memory(
    shape: ModelShape,
    gpus_per_engine: int,
    static_bytes: int,
    *,
    bytes_per_weight: float = 2,
    bytes_per_kv_element: int = 2,
    num_draft_layers: int = 0,
    share_flag: str = "",
) -> EngineMemory:
    """Estimate the memory for weights and KV cache, together `static_bytes`, on one GPU of an engine.

    KV heads are replicated if there are fewer of them than GPUs; with multi-head latent attention (MLA) every GPU has
    the latent KV vectors of all tokens. `bytes_per_weight` is the mean if some weights are quantized. A multi-token
    prediction layer used for speculative decoding has the size of the model's last layer and a replicated projection
    [hidden, 2 * hidden]; embedding and LM head are the model's.
    """
    parameters = count_rank_parameters(shape, range(shape.num_layers), tensor=gpus_per_engine).total
    draft = count_rank_parameters(shape, [shape.num_layers - 1], tensor=gpus_per_engine, outer=()).total
    parameters += num_draft_layers * (draft + 2 * shape.hidden_size**2)
    num_layers = shape.num_layers + num_draft_layers
    if shape.latent:
        width = shape.latent.kv_lora_rank + shape.latent.qk_rope_head_dim
    else:
        heads = max(1, shape.num_query_groups // gpus_per_engine)
        width = 2 * heads * shape.head_dim
        replicated = heads - shape.num_query_groups / gpus_per_engine
        parameters += round(2 * replicated * shape.head_dim * shape.hidden_size * num_layers)
    bytes_per_token = bytes_per_kv_element * width * num_layers
    return EngineMemory(round(bytes_per_weight * parameters), static_bytes, bytes_per_token, share_flag)


@cache
def engine_backend(name: str | None = None) -> EngineBackend:
    """Return the backend `name`: a key of `BACKENDS`, or module:class; None: the default backend."""
    module, colon, cls = BACKENDS.get(name := DEFAULT if name is None else name, name).partition(":")
    try:
        if not colon:
            raise ImportError("unknown engine")
        backend: EngineBackend = getattr(importlib.import_module(module), cls)()
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(
            f"--engine {name} cannot be used ({error}): give one of {', '.join(BACKENDS)}, or module:class of a "
            "subclass of penstock.engines.backends.EngineBackend"
        ) from error
    return backend


def check_capabilities(options: EngineOptions) -> None:
    """Check that the engine has the capabilities that the options need."""
    backend = engine_backend(options.engine)
    for capability in Capability:
        option, what, is_needed = capability.value
        if is_needed(options) and capability not in backend.capabilities:
            raise EngineError(
                f"{option} needs an engine that {what}, and {backend.title} (--engine {options.engine}) does not: "
                f"do without it, or use --engine {DEFAULT}"
            )


def engine_flag(engine: str, name: str) -> str:
    """Return how an engine's own flag (`name`, with underscores) is spelled on Penstock's command line."""
    return f"--{engine}-{name.replace('_', '-')}" if engine in BACKENDS else f"--engine-options {name}"


def connect(urls: EngineUrls, timeout: float = 600, **options: Any) -> EngineClient:
    """Return a client of the engines at `urls`, from the default backend; arguments as in `EngineBackend.connect`."""
    return engine_backend().connect(urls, timeout, **options)
