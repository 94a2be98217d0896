"""The section [train.megatron]: spellings, values and combinations; and every option reaches the trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.engines.megatron.megatron_options import MegatronOptions
from penstock.flows.config import validate_config
from penstock.flows.options.flags import parse_config
from penstock.storage.errors import OptionError
from tests.engines.megatron_reference import MIXTURE, SHAPE, make_engine, make_pack
from tests.engines.test_megatron_optimizer import share_of_freed_main_params
from tests.engines.test_memory_plan import EMBEDDING, FIRST, LAST, LOSS

# Options of slime's launch scripts and model files that the scripts in tests/flows/slime_scripts do not have.
SCRIPTS = """
--spec slime_plugins.models.glm4 get_glm_spec --make-vocab-size-divisible-by 64 --seq-length 4096 --train-iters 100
--no-rope-fusion --use-flash-attn --moe-grouped-gemm --moe-permute-fusion --moe-aux-loss-coeff 0 --moe-router-dtype fp32
--moe-router-load-balancing-type seq_aux_loss --moe-router-load-balancing-type none --moe-token-drop-policy probs
--recompute-loss-function --recompute-modules mlp --recompute-activations --use-distributed-optimizer --bf16
--use-mcore-models --transformer-impl local --use-checkpoint-opt-param-scheduler --distributed-timeout-minutes 30
--async-save --tokenizer-type HuggingFaceTokenizer --tokenizer-model x --overlap-grad-reduce --overlap-param-gather
--grad-reduce-in-bf16 --no-gradient-accumulation-fusion --log-interval 1 --manual-gc --manual-gc-interval 5
"""


def test_options_of_slimes_scripts_are_accepted() -> None:
    for flag in SCRIPTS.split("--")[1:]:
        parse_config(["--run", "r", *f"--{flag}".split()])


def test_every_spelling_sets_its_field() -> None:
    words = "--recompute-activations --ddp-bucket-size 7 --no-bias-gelu-fusion --moe-router-dtype fp64"
    flags = parse_config(words.split())
    assert flags.train.megatron.model_dump() == {
        **{"recompute_granularity": "selective", "bucket_size": 7, "moe_router_dtype": "fp64"},
        "bias_activation_fusion": False,
    }
    assert parse_config(["--recompute-modules", "mlp"]).train.megatron.recompute_modules == ["mlp"]
    assert MegatronOptions.model_validate(flags.train.megatron.model_dump(mode="json")) == flags.train.megatron


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("recompute_granularty", "full", r"^\[train.megatron\] recompute_granularty: .* mean recompute_granularity\?"),
        ("num_layers", 2, "num_layers is not supported: config.json of --hf-checkpoint describes the model"),
        ("lr", 1e-5, "lr: no such option"),
        ("recompute_granularity", "ful", "--recompute-granularity 'ful': input should be 'full' or 'selective'"),
        ("recompute_modules", ["mlp", "x"], "--recompute-modules 'x': input should be 'core_attn'"),
        ("recompute_num_layers", 0, "--recompute-num-layers 0: input should be greater than or equal to 1"),
        ("optimizer_offload_fraction", 2, "--optimizer-offload-fraction 2: input should be less than or equal to 1"),
        ("overlap_grad_reduce", "maybe", "--overlap-grad-reduce 'maybe': input should be a valid boolean"),
        ("bucket_size", True, "--bucket-size takes a number; found true"),
    ],
)
def test_unknown_option_or_value_is_refused_in_one_sentence(name: str, value: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        validate_config({"train": {"megatron": {name: value}}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_size": 5}, "--ddp-bucket-size has an effect only with --overlap-grad-reduce"),
        ({"moe_permute_fusion": True, "moe_grouped_gemm": False}, "which --no-moe-grouped-gemm turns off"),
        ({"recompute_granularity": "full"}, "--recompute-granularity full needs --recompute-method"),
        ({"recompute_method": "block"}, "have an effect only with --recompute-granularity full"),
        ({"recompute_modules": ["mlp"]}, "has an effect only with --recompute-granularity selective"),
    ],
)
def test_options_without_their_partner_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MegatronOptions(**options).check()


def config_field(name: str) -> Any:
    return lambda engine: getattr(engine.config, name)


def summed_loss(factor: float = 1.0) -> Any:
    return lambda hidden, head, packed: (head(hidden).float().sum() * factor, {})


def one_step(engine: Any, factor: float = 1.0) -> None:
    engine.forward_backward([make_pack([5, 9])], summed_loss(factor))


def calls(*names: str) -> Any:
    """Observe how often modules run in a forward and backward pass: twice if their activations are recomputed."""

    def observe(engine: Any) -> tuple[int, ...]:
        counts = dict.fromkeys(names, 0)
        modules = dict(engine.wrapped[0].module.named_modules())

        def count(name: str) -> Any:
            def hook(*_: Any) -> None:
                counts[name] += 1

            return hook

        for name in names:
            modules[name].register_forward_pre_hook(count(name))
        one_step(engine)
        return tuple(counts.values())

    return observe


def grad_dtype(engine: Any) -> Any:
    return engine.wrapped[0].buffers[0].grad_dtype


def has_buckets(engine: Any) -> bool:
    return len(engine.wrapped[0].buffers[0].buckets) > 1


def reduces_in_backward(engine: Any) -> bool:
    """Observe whether gradients are reduced by hooks of the backward pass."""
    started = []
    for group in engine.wrapped[0].bucket_groups:
        start = group.start_grad_sync

        def note(start: Any = start, **named: Any) -> None:
            started.append(torch._C._current_graph_task_id() >= 0)
            start(**named)

        group.start_grad_sync = note
    for _ in range(2):  # the first pass counts the gradients of each bucket
        one_step(engine)
    return any(started)


def gathers_in_forward(engine: Any) -> bool:
    """Observe whether the optimizer leaves the all-gather of parameters to the forward pass."""
    return bool(engine.wrapped[0].ddp_config.overlap_param_gather and engine.wrapped[0].remove_forward_pre_hook_handles)


def fails_on_nan(engine: Any) -> bool:
    try:
        one_step(engine, float("nan"))
    except RuntimeError as error:
        return "NaN" in str(error)
    return False


def router_dtype(engine: Any) -> Any:
    """Observe the data type in which the router computes its scores."""
    seen = []
    [router] = [m for name, m in engine.wrapped[0].module.named_modules() if name == "decoder.layers.1.mlp.router"]
    gating = router.gating
    router.gating = lambda *words, **named: (seen.append(output := gating(*words, **named)), output)[1]
    one_step(engine)
    return seen[0].dtype


def kind_of_experts(engine: Any) -> str:
    return type(dict(engine.wrapped[0].module.named_modules())["decoder.layers.1.mlp.experts"]).__name__


def offloaded_share(engine: Any) -> float:
    engine.optimizer_step()
    return round(share_of_freed_main_params(engine), 1)


LAYERS = ("decoder.layers.0", "decoder.layers.3")
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
CORE, MLP = "decoder.layers.0.self_attention.core_attention", "decoder.layers.0.mlp"
# option -> (options, observation of the built engine, the observed value); with other values than the defaults
EFFECTS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "attention_backend": ({"attention_backend": "local"}, lambda engine: engine.attention_kernel, "padded"),
    "recompute_granularity": (FULL | {"recompute_method": "uniform"}, calls(*LAYERS), (2, 2)),
    "recompute_method": (FULL | {"recompute_method": "block"}, calls(*LAYERS), (2, 1)),
    "recompute_num_layers": (FULL | {"recompute_method": "block", "recompute_num_layers": 4}, calls(*LAYERS), (2, 2)),
    "recompute_modules": (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        calls(CORE, MLP),
        (1, 2),
    ),
    "bias_activation_fusion": ({"bias_activation_fusion": True}, config_field("bias_activation_fusion"), True),
    "bias_dropout_fusion": ({"bias_dropout_fusion": True}, config_field("bias_dropout_fusion"), True),
    "gradient_accumulation_fusion": (
        {"gradient_accumulation_fusion": False},
        config_field("gradient_accumulation_fusion"),
        False,
    ),
    "moe_grouped_gemm": ({"moe_grouped_gemm": True}, kind_of_experts, "GroupedExperts"),
    "moe_permute_fusion": ({"moe_permute_fusion": True}, kind_of_experts, "GroupedExperts"),
    "moe_router_dtype": ({"moe_router_dtype": "fp64"}, router_dtype, torch.float64),
    "overlap_param_gather": (
        {"overlap_param_gather": True, "overlap_grad_reduce": True},
        gathers_in_forward,
        True,
    ),
    "overlap_grad_reduce": ({"overlap_grad_reduce": True}, reduces_in_backward, True),
    "grad_reduce_in_fp32": ({"grad_reduce_in_fp32": False}, grad_dtype, torch.bfloat16),
    "bucket_size": ({"bucket_size": 20000, "overlap_grad_reduce": True}, has_buckets, True),
    "check_for_nan_in_grad": ({"check_for_nan_in_grad": False}, fails_on_nan, False),
    "optimizer_cpu_offload": ({"optimizer_cpu_offload": True}, offloaded_share, 1.0),
    "optimizer_offload_fraction": (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.0},
        offloaded_share,
        0.0,
    ),
}
ON_GPUS = {"attention_backend", "gradient_accumulation_fusion"}  # on a CPU they have one value only


@pytest.mark.integration
@pytest.mark.parametrize("name", EFFECTS)
def test_effective_option_reaches_the_engine(name: str, world: None) -> None:
    options, observe, value = EFFECTS[name]
    MegatronOptions(**options).check()
    shape = MIXTURE if name.startswith("moe_") else SHAPE
    # main parameters of an fp32 model are views of its weights, and its gradients are fp32
    dtype = "bf16" if "offload" in name or name == "grad_reduce_in_fp32" else "fp32"
    assert observe(make_engine(shape, dtype=dtype, overrides=options)) == value
    if name not in ON_GPUS:
        without = {"optimizer_cpu_offload": True} if name == "optimizer_offload_fraction" else {}
        assert observe(make_engine(shape, dtype=dtype, overrides=without)) != value


def test_every_option_is_tested() -> None:
    elsewhere = {FIRST, LAST, EMBEDDING, LOSS, "bf16"}  # test_memory_plan.py, tests/train/test_train_config.py
    assert {*EFFECTS, *elsewhere} == set(MegatronOptions.model_fields)
