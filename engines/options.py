"""Options of a run's inference engines, and values derived from them: number of engines, GPUs and weight transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.engines.generation import BUCKET_BYTES, EngineRoute, PauseMode, Transport, WeightTransport
from penstock.engines.network import LOOPBACK
from penstock.engines.serving.endpoints import is_on_this_machine
from penstock.engines.serving.server import ServerSpec
from penstock.engines.weights.fp8_blocks import fp8_weights
from penstock.engines.weights.transfer import ProcessPlace, engine_process_id, memory_routes, shares_memory


class HealthCheck(BaseModel):
    """Health-check settings of engines: interval, timeout, and limits on failures and restarts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    interval: float = Field(default=10.0, gt=0)  # seconds between checks that the engine generates tokens
    timeout: float = Field(default=30.0, gt=0)  # seconds for one check; a busy engine may need 20
    failures: int = Field(default=3, ge=1)  # failed checks in a row after which an engine is restarted
    max_restarts: int = Field(default=3, ge=0)  # maximum number of restarts of all engines together, within one stage


class ServedAdapters(BaseModel):
    """LoRA adapters that engines load, one per policy version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    modules: tuple[str, ...]  # last names of the Hugging Face layers with adapters, for instance q_proj
    max_versions: int = 1  # maximum number of policy versions that requests in flight use at the same time


@dataclass(frozen=True)
class EngineOptions:
    """The configured engine options of a run. `start_pool` resolves secrets that are references (`env:NAME`)."""

    spec: ServerSpec  # settings of every server; `spec.args` are the configured server flags
    engine: str | None = None  # --engine; None: the default
    params_dtype: Literal["fp32", "bf16"] | None = None  # of the trained weights; None: bf16 on GPUs, fp32 on CPUs
    num_engines: int = 1  # used on a cluster without GPUs; with GPUs see `num_engines_to_start`
    num_gpus: int | None = None  # GPUs of all engines together; None shares the trainer's GPUs (colocated)
    gpus_per_engine: int = 1
    trainer_gpus: int = 1
    external: tuple[str, ...] = ()  # host:port of external engines; if given, the run starts no engines itself
    health: HealthCheck = field(default_factory=HealthCheck)
    transport: Transport | None = None  # None: chosen by `weight_transport`
    bucket_bytes: int = BUCKET_BYTES  # maximum bytes that a weight update sends at a time
    in_flight: PauseMode | None = None  # how weight updates pause the requests; None: weights are sent between rollouts
    offload: bool = False  # release the GPU memory of weights and KV cache while the trainer works
    router: dict[str, Any] | None = None  # flags of the router; None: no router
    router_restarts: int = 3  # maximum number of restarts of the router
    sampling: dict[str, Any] = field(default_factory=dict)  # --rollout-sampling
    sampling_seeds: bool = False  # --rollout-sampling-seeds
    fp32_head: bool = False  # --fp32-lm-head
    scores: bool = False  # --opd-teacher-engine, --opd-teacher-url
    compares: bool = False  # --check-weight-update-equal: compare checksums of the weights, or of adapters
    return_experts: bool = False  # request the routed expert ids of every token
    adapters: ServedAdapters | None = None  # send adapters instead of weights
    vision: Literal["frozen", "trained"] | None = None  # whether the tower of a vision-language model is trained

    def num_engines_to_start(self, has_gpus: bool) -> int:
        """Return the number of engines to start: `num_engines` without GPUs, otherwise as many as the GPUs allow."""
        if not has_gpus:
            return self.num_engines
        return (self.num_gpus or self.trainer_gpus) // self.gpus_per_engine

    @property
    def sends_vision_once(self) -> bool:
        """Return whether engines keep the frozen vision tower that they got with their first weight update: unless
        they release their memory, or their weights are overwritten for a comparison."""
        return self.vision == "frozen" and not self.offload and not self.compares

    @property
    def first_gpu(self) -> int:
        """Return the index of the engines' first GPU: 0 if they share the trainer's GPUs, else the first after them."""
        return 0 if self.num_gpus is None else self.trainer_gpus

    def weight_transport(
        self, engines: Mapping[str, ProcessPlace], ranks: Sequence[ProcessPlace], directory: str
    ) -> WeightTransport:
        """Return how weights are sent to the engines: over the configured transport, or over one chosen here. The
        transport "disk" writes to `directory`.

        "tensor" is chosen if the engines can read the trainer's memory: on the same GPUs, or on machines without GPUs.
        Otherwise "nccl" is chosen, and for external engines "disk", because nothing is known about their network.
        Adapters are sent over "tensor" through host memory if all engines run on the node of trainer rank 0, else over
        "disk".
        """
        if self.external:
            on_cpu = not any(place.gpu_ids for place in ranks)
            readable = on_cpu and all(map(is_on_this_machine, self.external))
        else:
            readable = shares_memory(engines, ranks)
        on_node = {node for place in engines.values() for node in place.rank_nodes} <= {ranks[0].node}
        through_host = self.adapters is not None and not self.external and on_node and not readable
        kind = self.transport or ("tensor" if readable or through_host else "disk" if self.external else "nccl")
        if self.adapters is not None and kind == "nccl":
            kind = "disk"
        if kind == "tensor" and not self.external and not through_host:
            routes = memory_routes(engines, ranks)
        else:
            routes = {url: EngineRoute(incarnation=engine_process_id(place)) for url, place in engines.items()}
        on_loopback = all(map(is_on_this_machine, self.external)) if self.external else on_node
        return WeightTransport(
            kind,
            routes,
            self.spec.model_path,
            directory,
            bucket_bytes=self.bucket_bytes,
            host=LOOPBACK if on_loopback else None,
            in_flight=self.in_flight,
            fp8_weights=fp8_weights(self.spec.model_path),
            through_host=through_host,
        )

    def replace_spec_fields(self, **fields: Any) -> EngineOptions:
        """Return a copy of the options in which the given fields of `spec` (the server settings) are replaced."""
        return replace(self, spec=self.spec.model_copy(update=fields))
