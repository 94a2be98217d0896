"""The memory plan equals models that are built, and activations measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.engines.backends import EngineMemory, engine_backend
from penstock.engines.local_gpus import select_visible_gpus
from penstock.engines.megatron.memory_plan import (
    CHUNK_NUMEL,
    GIB,
    RUNTIME,
    TrainerMemory,
    TrainerOptions,
    estimate_trainer_memory,
    stage_layers,
)
from penstock.engines.options import EngineOptions
from penstock.engines.parallel_layout import ParallelLayout
from penstock.engines.serving.server import ServerSpec
from penstock.flows.gpu_plan import GpuPlan
from penstock.storage.errors import EngineError, LayoutError
from tests.engines.built_memory import SHAPES, built_bytes
from tests.engines.megatron_reference import FULL
from tests.engines.real_models import REAL_MODELS

# GiB of a whole training step on one H100: bf16, one micro-batch of 16,384 packed tokens, AdamW, chunks of 4,096 tokens
# for the logits (torch 2.11, no TransformerEngine, random weights in the shapes of the hub's models).
MEASURED: list[tuple[str, dict[str, Any], float]] = [
    ("qwen3-0.6B", {}, 38.9),
    ("qwen3-0.6B", FULL, 19.2),
    ("qwen3-1.7B", {}, 69.5),
]
ABOVE_STATE = 23.8  # GiB of tensors above weights, gradients and optimizer: benchmarks/train.py, docs/benchmarks.md


def plan_of(name: str, layout: ParallelLayout | None = None, num_ranks: int = 1, **options: Any) -> TrainerMemory:
    shape = REAL_MODELS[name].shape
    return estimate_trainer_memory(shape, layout or ParallelLayout(), num_ranks, TrainerOptions(**options))


@pytest.mark.parametrize(("name", "megatron", "measured"), MEASURED)
def test_estimate_is_near_the_measured_memory(name: str, megatron: dict[str, Any], measured: float) -> None:
    plan = plan_of(name, max_tokens=16384, megatron=megatron)
    assert plan.peak_bytes / GIB == pytest.approx(measured, rel=0.1)
    if (name, megatron) == ("qwen3-0.6B", {}):
        assert (plan.activations + plan.temporary) / GIB == pytest.approx(ABOVE_STATE, rel=0.05)


BF16_GRADIENTS, OFFLOAD = {"grad_reduce_in_fp32": False}, {"optimizer_cpu_offload": True}


@pytest.mark.parametrize(
    ("name", "dtype", "options", "critic"),
    [
        ("dense", "bf16", {}, True),
        ("dense", "fp32", OFFLOAD, False),
        ("biases", "bf16", OFFLOAD, True),
        ("sandwich", "fp32", BF16_GRADIENTS, True),
        ("mixture", "bf16", BF16_GRADIENTS, False),
        ("mixture", "fp32", {}, True),
        ("latent", "bf16", OFFLOAD, False),
        ("latent", "fp32", BF16_GRADIENTS, False),
    ],
)
def test_plan_equals_a_built_model(world: None, name: str, dtype: Any, options: dict[str, Any], critic: bool) -> None:
    plan = estimate_trainer_memory(
        SHAPES[name], ParallelLayout(), 1, TrainerOptions(dtype, megatron=options, critic=critic)
    )
    built = built_bytes(SHAPES[name], ParallelLayout(), dtype, options, critic)
    assert (plan.weights, plan.gradients, plan.optimizer) == built


@pytest.mark.integration
def test_plan_equals_built_models_of_two_ranks(run_two_ranks: Callable[..., str]) -> None:
    assert "5 layouts equal" in run_two_ranks("built_memory.py")


@pytest.mark.parametrize("name", ["qwen3-8B", "qwen3-30B-A3B", "deepseek-v3", "glm4-9B"])
def test_one_rank_holds_all_parameters_and_more_ranks_need_less(name: str) -> None:
    shape = REAL_MODELS[name].shape
    assert plan_of(name).parameters == shape.num_parameters
    plans = [plan_of(name, num_ranks=ranks) for ranks in (1, 8, 64, 512)]
    assert [plan.optimizer for plan in plans] == sorted({plan.optimizer for plan in plans}, reverse=True)
    assert len({(plan.weights, plan.gradients, plan.activations) for plan in plans}) == 1
    if shape.experts:
        expert = plan_of(name, ParallelLayout(expert=8), 8)
        assert expert.weights < plans[1].weights and expert.optimizer <= plans[1].optimizer


def test_update_and_host_memory_of_an_offloaded_optimizer() -> None:
    """Two chunks of state are on the device during an update; the embedding is a chunk of its own."""
    offload, size = {"optimizer_cpu_offload": True}, REAL_MODELS["qwen3-4B"].shape.num_parameters
    fp32 = plan_of("qwen3-4B", megatron=offload)
    bf16 = plan_of("qwen3-4B", megatron={**offload, **FULL, "grad_reduce_in_fp32": False})
    assert fp32.update == 12 * (CHUNK_NUMEL + 151936 * 2560)
    assert bf16.update == fp32.update + 4 * size and 2 * bf16.gradients == fp32.gradients
    assert bf16.peak_bytes == bf16.resident_bytes + bf16.update + RUNTIME
    assert bf16.update > bf16.activations + bf16.temporary
    assert fp32.peak_bytes == fp32.resident_bytes + fp32.activations + fp32.temporary + RUNTIME
    assert plan_of("qwen3-0.6B", num_ranks=64, megatron=offload).update == round(12 * 596_049_920 / 64)
    assert fp32.host == 12 * size and plan_of("qwen3-4B").host == 0
    critic = plan_of("qwen3-4B", megatron=offload, critic=True, num_frozen=2)
    assert critic.update == fp32.update and critic.host == 12 * critic.parameters + 2 * 2 * size


FIRST, LAST = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
EMBEDDING, LOSS = (f"account_for_{part}_in_pipeline_split" for part in ("embedding", "loss"))


@pytest.mark.parametrize(
    ("num_layers", "layout", "text"),
    [
        (24, dict(pipeline=4), {}),
        (24, dict(pipeline=4, virtual_pipeline=3), {}),
        (61, dict(pipeline=2), {FIRST: 31}),
        (61, dict(pipeline=4), {LAST: 13}),
        (61, dict(pipeline=8), {FIRST: 7, LAST: 6}),
        (20, dict(pipeline=4, virtual_pipeline=2), {FIRST: 2, LAST: 2}),
        (22, dict(pipeline=4), {EMBEDDING: True, LOSS: True}),
        (23, dict(pipeline=4, virtual_pipeline=2), {LOSS: True}),
    ],
)
def test_stage_layers_equal_megatrons(num_layers: int, layout: dict[str, Any], text: dict[str, Any]) -> None:
    from penstock.engines.megatron.model.transformer_config import transformer_config

    # isort: split
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    sizes = ParallelLayout(**layout)
    config = transformer_config(SHAPES["dense"].model_copy(update={"num_layers": num_layers}), sizes, overrides=text)
    expected = []
    for stage in range(sizes.pipeline):
        layers: list[int] = []
        for chunk in range(sizes.virtual_pipeline) if sizes.virtual_pipeline else [None]:
            first = get_transformer_layer_offset(config, chunk, stage)
            layers += range(first, first + get_num_layers_to_build(config, chunk, stage))
        expected.append(layers)
    assert stage_layers(num_layers, sizes, text) == expected


def test_recomputation_and_parallelism_reduce_activations() -> None:
    for name in ("qwen3-8B", "qwen3-30B-A3B", "deepseek-v3", "glm4-9B"):
        none = plan_of(name)
        modules = ["core_attn", "layernorm", "mlp", "moe", "mla_up_proj"]
        selective = plan_of(name, megatron={"recompute_granularity": "selective", "recompute_modules": modules})
        full = plan_of(name, megatron=FULL)
        block = plan_of(name, megatron=FULL | {"recompute_method": "block", "recompute_num_layers": 4})
        assert full.activations < selective.activations < none.activations
        assert full.activations < block.activations < none.activations
        assert full.resident_bytes == selective.resident_bytes == none.resident_bytes
        sequence = plan_of(name, ParallelLayout(tensor=2, sequence_parallel=True, expert_tensor=1), 2)
        assert 0.45 < sequence.activations / none.activations < 0.6


def test_first_pipeline_stage_keeps_the_micro_batches_of_all_stages() -> None:
    """1F1B: p micro-batches of a stage with 1/p of the layers, so the first stage stores as much as one stage would."""
    shape = REAL_MODELS["qwen3-8B"].shape.model_copy(update={"vocab_size": 64})  # the embedding shall not decide
    alone = estimate_trainer_memory(shape, ParallelLayout(), 1)
    first = estimate_trainer_memory(shape, ParallelLayout(pipeline=4), 4)
    assert first.stage == 0
    head = 3 * 8192 * 2 * shape.hidden_size  # final norm and hidden states of the head, on the last stage only
    assert first.activations == alone.activations - head
    virtual = estimate_trainer_memory(shape, ParallelLayout(pipeline=4, virtual_pipeline=3), 4)
    assert virtual.activations == pytest.approx(first.activations * (1 + 3 / 12))


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 trainer ranks cannot be divided"):
        plan_of("qwen3-8B", ParallelLayout(tensor=2), 3)


def test_colocated_peak_is_the_larger_phase() -> None:
    trainer = TrainerMemory(0, 1, 10, 20, 30, 100, 7, 5, 3)
    small, large = (GpuPlan(1000, trainer, EngineMemory(1, size, 1), colocated=True) for size in (50, 500))
    assert small.colocated_peak_bytes() == trainer.peak_bytes + 50
    assert small.colocated_peak_bytes(offload_train=True) == trainer.peak_bytes + 50
    assert small.colocated_peak_bytes(offload_rollout=True) == trainer.peak_bytes
    assert large.colocated_peak_bytes(offload_rollout=True) == 500 + RUNTIME + trainer.resident_bytes
    assert large.colocated_peak_bytes(offload_train=True, offload_rollout=True) == 500 + RUNTIME


def engine_plan(name: str, gpus: int, **args: Any) -> Any:
    options = EngineOptions(ServerSpec(model_path="/model", args=args), gpus_per_engine=gpus)
    return engine_backend().estimate_memory(options, REAL_MODELS[name].shape, 80 * GIB)


def test_engine_memory_of_known_models() -> None:
    engine = engine_plan("qwen3-0.6B", 1, mem_fraction_static=0.3)
    assert engine.bytes_per_token == 28 * 2 * 8 * 128 * 2 and engine.static_bytes == 24 * GIB
    assert engine.weight_bytes == 2 * REAL_MODELS["qwen3-0.6B"].shape.num_parameters
    assert engine.kv_cache_bytes == engine.static_bytes - engine.weight_bytes
    assert engine_plan("deepseek-v3", 16).bytes_per_token == 61 * (512 + 64) * 2  # latent vectors, on every GPU
    eight, four = engine_plan("qwen3-30B-A3B", 8), engine_plan("qwen3-30B-A3B", 4)  # 4 key-value heads
    assert eight.bytes_per_token == four.bytes_per_token and eight.weight_bytes > four.weight_bytes / 2
    plain, cache = engine_plan("qwen3-8B", 1), engine_plan("qwen3-8B", 1, kv_cache_dtype="fp8_e4m3")
    assert cache.bytes_per_token * 2 == plain.bytes_per_token
    assert engine_plan("qwen3-8B", 1, quantization="fp8").weight_bytes * 2 == plain.weight_bytes
    assert engine_plan("deepseek-v3", 1).kv_cache_bytes == 0


@pytest.mark.parametrize("share", [0, 1, "x", True])
def test_invalid_static_share_is_refused(share: Any) -> None:
    with pytest.raises(EngineError, match="--sglang-mem-fraction-static takes a number between 0 and 1"):
        engine_plan("qwen3-0.6B", 1, mem_fraction_static=share)


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"": [], "-1": [], "1": [20], "2,0": [30, 10], "0,7": [10], "GPU-aa,GPU-bb": [10, 20]}
    for setting, expected in settings.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        assert select_visible_gpus([10, 20, 30]) == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert select_visible_gpus([10, 20, 30]) == [10, 20, 30]


@pytest.mark.parametrize(("dtype", "chunk", "tensor"), [("bf16", 4096, 1), ("bf16", 8192, 2), ("fp32", 4096, 2)])
def test_an_fp32_head_doubles_logits_and_their_gradients_of_a_model_in_bf16(
    dtype: str, chunk: int, tensor: int
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "log_probs_chunk_size": chunk, "max_tokens": 8192}
    options["megatron"] = FULL  # the layers take less
    without, with_head = (
        plan_of("qwen3-0.6B", ParallelLayout(tensor=tensor), tensor, fp32_head=fp32, **options)
        for fp32 in (False, True)
    )
    more = 0 if dtype == "fp32" else 2 * 2 * chunk * REAL_MODELS["qwen3-0.6B"].shape.vocab_size // tensor
    assert with_head.temporary - without.temporary == more
    assert with_head.activations == without.activations
