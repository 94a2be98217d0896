"""Megatron-core as a training engine, and the choice of the parameters that are not trained: the vision tower
(--freeze-vision), and patterns of names (--freeze-params-name-list, --only-train-params-name-list). The driver imports
this module, so torch is imported in methods.

A pattern is a regular expression that is searched in both names that a parameter has in Megatron-core: the name in its
local layers, which Penstock uses, and the name in TransformerEngine's layers. Layers and experts are numbered over the
whole model.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.engines.families import tensor_layout
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import VISION
from penstock.engines.parallel_layout import ParallelLayout
from penstock.engines.training import EngineBuild, TrainBackend
from penstock.storage.errors import OptionError
from penstock.storage.preemption import time_limit

if TYPE_CHECKING:
    from penstock.engines.megatron.engine import MegatronEngine

USER_VARIABLES = (  # environment variables that trainer ranks inherit unchanged if the driver has them
    "NCCL_CUMEM_ENABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
FREEZE, ONLY_TRAIN = "--freeze-params-name-list", "--only-train-params-name-list"
EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
FUSED_NORMS = {  # name in Megatron's local layers -> name in TransformerEngine's, which fuses a norm with a projection
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


class MegatronBackend(TrainBackend):
    """The implementation of `TrainBackend` for Megatron-core."""

    checkpoint_format = "torch_dist"

    def rank_environment(self, layout: ParallelLayout, threads: int) -> dict[str, str]:
        defaults = {
            # SGLang turns NCCL's cuMem allocations off, and both ends of a connection must have the same setting
            "NCCL_CUMEM_ENABLE": "0",
            # Several threads pin the host memory for offloaded state: 10.7 GB in 1.5 s instead of 3.3 s (H200).
            "PYTORCH_ALLOC_CONF": "pinned_use_cuda_host_register:True,pinned_num_register_threads:8",
        }
        if layout.tensor > 1:  # kernels then start in the order of their launches, and communication overlaps with them
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        given = {name: os.environ[name] for name in USER_VARIABLES if name in os.environ}
        if "PYTORCH_CUDA_ALLOC_CONF" in given:  # the older name
            del defaults["PYTORCH_ALLOC_CONF"]
        return {
            # Ray's default is one OpenMP thread per actor, and the number of threads changes the rounding of fp32 sums
            "OMP_NUM_THREADS": str(threads),
            # Inductor compiles in the rank's process; otherwise its pool of compile processes survives a killed rank
            # (seen with torch 2.11)
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **defaults,
            **given,
        }

    def import_libraries(self) -> None:
        import penstock.engines.megatron.engine  # noqa: F401

    def init_ranks(
        self,
        rank: int,
        num_ranks: int,
        rendezvous: str | socket.socket,
        layout: ParallelLayout,
        threads: int,
        timeout: timedelta,
    ) -> None:
        from penstock.engines.megatron.parallel import init_parallel

        init_parallel(rank, num_ranks, rendezvous, layout, threads, timeout=timeout)

    def build(self, build: EngineBuild) -> MegatronEngine:
        from penstock.engines.megatron.engine import MegatronEngine, use_deterministic_kernels

        if build.deterministic:
            use_deterministic_kernels()
        frozen = frozen_parameters(build.shape, build.freeze, build.only_train, build.freeze_vision)
        trained = {"frozen": frozen, "lora": build.lora}
        engine = MegatronEngine(
            build.shape,
            build.layout,
            dtype=build.dtype,
            optimizer=build.optimizer | trained,
            overrides=build.options,
            seed=build.seed,
            role=build.role,
        )
        for chunk in engine.chunks:
            chunk.fp32_head = build.fp32_head
        return engine

    def is_written_by_rank(self, rank: int, name: str) -> bool:
        from penstock.engines.megatron.checkpoints.torch_dist import is_written_by_rank

        return is_written_by_rank(rank, name)

    def bytes_used(self) -> tuple[int, int]:
        from penstock.engines.megatron.residency import device_and_host_bytes_used

        return device_and_host_bytes_used()


def frozen_parameters(
    shape: ModelShape, freeze: Sequence[str] | None, only_train: Sequence[str] | None, freeze_vision: bool = True
) -> set[str]:
    """Return the names (of Megatron's local layers) of the parameters that are not trained: those that match a pattern
    in `freeze`, or those that match none in `only_train`; with `freeze_vision` also those of the vision tower."""
    flag, patterns = (FREEZE, freeze) if freeze else (ONLY_TRAIN, only_train)
    names = [name for name in tensor_layout(shape).megatron_names() if not name.endswith("router.expert_bias")]
    vision = {name for name in names if freeze_vision and name.startswith(VISION)}
    if not patterns:
        return vision
    matched: set[str] = set()
    for pattern in patterns:
        try:
            with time_limit("the search"):
                found = {name for name in names if any(re.search(pattern, text) for text in _names_of(shape, name))}
        except TimeoutError as error:
            raise OptionError(f"{flag} {pattern}: {error}; give a pattern without nested repetitions") from None
        except (re.error, RecursionError, OverflowError) as error:
            raise OptionError(f"{flag} {pattern}: not a regular expression ({error}); correct it") from None
        if not found:
            raise OptionError(
                f"{flag} {pattern} matches no parameter of the model; give a part of a name such as {names[-2]} (a "
                "tied LM head is part of embedding.word_embeddings.weight)"
            )
        matched |= found
    frozen, given = (matched if freeze else set(names) - matched) | vision, f"{flag} {' '.join(patterns)}"
    if len(frozen) == len(names):
        also = ", or add --no-freeze-vision" if vision else ""
        raise OptionError(f"{given} freezes every parameter: leave some to train{also}")
    of_layer = {name: EXPERT.sub(r".local_experts.*.\2.weight", name) for name in names}
    if split := sorted({of_layer[name] for name in frozen} & {of_layer[name] for name in set(names) - frozen}):
        raise OptionError(
            f"{given} freezes some of {split[0]}: the experts of a layer are frozen together; give "
            "a pattern without the number of an expert"
        )
    return frozen


def check_frozen_layers(shape: ModelShape, frozen: set[str], num_stages: int) -> None:
    """Raise OptionError if, because of the `frozen` parameters, a pipeline stage could lack an optimizer that other
    stages have. Megatron has one optimizer for the experts and one for all other parameters; a stage in which all
    parameters of one of them are frozen lacks that optimizer."""
    if num_stages == 1 or not frozen:
        return
    names = [name for name in tensor_layout(shape).megatron_names() if not name.endswith("router.expert_bias")]
    experts = {name for name in names if EXPERT.search(name)}
    layers = {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
    trained = {name.split(".")[2] for name in set(names) - frozen - experts if name.startswith("decoder.layers.")}
    if layers - trained or (experts & frozen and experts - frozen):
        raise OptionError(
            f"--pipeline-model-parallel-size {num_stages} needs a trained parameter outside of the experts in every "
            "layer, and the experts of all layers or none frozen: use --pipeline-model-parallel-size 1, or freeze "
            "other parameters"
        )


def _names_of(shape: ModelShape, name: str) -> list[str]:
    """Return the names of a parameter in Megatron's local layers and in TransformerEngine's."""
    names = [name]
    if expert := EXPERT.search(name):
        names.append(EXPERT.sub(rf".{expert[2]}.weight{expert[1]}", name))
    match = re.match(r"(decoder\.layers\.(\d+)\.)(.+)", name)
    if match and (fused := FUSED_NORMS.get(match[3])):
        is_fused = shape.latent is not None
        if match[3] == "input_layernorm.weight":
            is_fused = shape.latent is None
        elif match[3] == "pre_mlp_layernorm.weight":
            is_fused = shape.experts is None or int(match[2]) < shape.experts.num_dense_layers
        names += [match[1] + fused] if is_fused else []
    return names
