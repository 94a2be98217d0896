"""LoRA adapters: their options, and two ranks against PEFT."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.engines.families import read_shape
from penstock.engines.families.shape import Experts, ModelShape
from penstock.engines.lora import LoraOptions, adapter_targets, check_adapters
from penstock.engines.training import STATE_KINDS
from penstock.storage.errors import OptionError
from tests.engines.lora_ranks import CASES
from tests.engines.megatron_reference import PACKS, SELECTIVE, SHAPE, cross_entropy, make_engine, train
from tests.families import make_family

MIXTURE = SHAPE.model_copy(
    update={
        "architecture": "Qwen3MoeForCausalLM",
        "family": "qwen3_moe",
        "experts": Experts(num_experts=4, top_k=2, ffn_hidden_size=24),
    }
)
ONE = dict(tensor=1, pipeline=1, expert_tensor=None, grouped=False)


def layers_of(shape: ModelShape, *modules: str) -> set[str]:
    return {name.rpartition(".")[2] for name in adapter_targets(shape, modules) if ".layers.0." in name}


def test_targets_are_groups_or_names_of_megatron_or_hugging_face() -> None:
    assert layers_of(SHAPE, "all-linear") == {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert layers_of(SHAPE, "attention") == {"linear_qkv", "linear_proj"} == layers_of(MIXTURE, "attention")
    assert layers_of(SHAPE, "q_proj", "v_proj", "k_proj", "linear_fc2") == {"linear_qkv", "linear_fc2"}
    assert len(adapter_targets(MIXTURE, ("experts",))) == SHAPE.num_layers * 4 * 2
    qkv = adapter_targets(SHAPE, ("attention",))["decoder.layers.1.self_attention.linear_qkv"]
    assert qkv.hf_modules == tuple(f"model.layers.1.self_attn.{x}_proj" for x in "qkv")


def test_targets_that_match_nothing_or_split_a_joined_layer_are_refused() -> None:
    with pytest.raises(OptionError, match=r"lora-target-modules has q_proj, v_proj, but .* q_proj, k_proj, v_proj"):
        adapter_targets(SHAPE, ("q_proj", "v_proj"))
    with pytest.raises(OptionError, match=r"lora-target-modules experts matches no linear layer"):
        adapter_targets(SHAPE, ("attention", "experts"))


def test_adapters_that_parallel_sizes_do_not_allow_are_refused() -> None:
    def check(modules: tuple[str, ...] = ("all-linear",), rank: int = 8, **sizes: object) -> None:
        options = LoraOptions(lora_rank=rank, lora_alpha=8, lora_target_modules=list(modules))
        check_adapters(MIXTURE, options, **{**ONE, **sizes})  # type: ignore[arg-type]

    check(tensor=2, expert_tensor=1, pipeline=2)
    check(("attention",), rank=3, tensor=4, expert_tensor=2, grouped=True)
    with pytest.raises(OptionError, match="--expert-tensor-parallel-size 1 or 4"):
        check(tensor=4, expert_tensor=2)
    with pytest.raises(OptionError, match="multiple of 8"):
        check(rank=12, grouped=True)
    with pytest.raises(OptionError, match="--pipeline-model-parallel-size 1"):
        check(("experts",), pipeline=2)


def test_adapters_train_and_resume_bit_for_bit_while_the_base_keeps_its_bits(world: None, tmp_path: Path) -> None:
    lora = LoraOptions(lora_rank=4, lora_alpha=8, lora_target_modules=["attention", "linear_fc2"])
    full = make_engine(dtype="bf16", seed=3)
    full.save(tmp_path / "base", None)
    engine = make_engine(dtype="bf16", lora=lora, seed=3)
    engine.load_weights(tmp_path / "base")
    start = engine.digest()
    assert {name for name in start if ".lora_" not in name} == set(full.digest())
    assert train(engine, range(1))[0] == train(full, range(1))[0]  # B is zero
    engine.save(tmp_path / "adapters", {})
    expected = train(engine, range(2))
    changed = {name for name, bits in expected[2].items() if start[name] != bits}
    assert changed == {name for name in start if ".lora_" in name}

    engine.load_weights(tmp_path / "base")
    assert engine.digest() == start
    engine.load(tmp_path / "adapters")
    assert train(engine, range(2)) == expected
    with engine.using_weights(None):
        base = engine.forward_backward(PACKS, cross_entropy, forward_only=True)
    full.load_weights(tmp_path / "base")
    for ours, theirs in zip(base, full.forward_backward(PACKS, cross_entropy, forward_only=True), strict=True):
        assert torch.equal(ours["logits"], theirs["logits"])


def test_options_of_megatron_do_not_change_how_adapters_are_trained(world: None, tmp_path: Path) -> None:
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
    shape = read_shape(make_family(tmp_path, "deepseek-v3", num_hidden_layers=2, **experts))
    overrides = {**SELECTIVE, "recompute_modules": ["mla_up_proj", "core_attn", "moe", "mlp"]}
    overrides |= {"overlap_param_gather": True, "overlap_grad_reduce": True, "optimizer_cpu_offload": True}
    lora = LoraOptions(lora_rank=8, lora_alpha=8, lora_target_modules=["all-linear"])
    plain, other = (make_engine(shape, changed, dtype="bf16", lora=lora, seed=3) for changed in ({}, overrides))
    assert train(other, range(2)) == train(plain, range(2))
    other.offload(STATE_KINDS)
    other.onload(STATE_KINDS)
    assert train(other, range(2, 3)) == train(plain, range(2, 3))


@pytest.mark.integration
def test_adapters_over_two_ranks_equal_pefts(run_two_ranks: Callable[..., str]) -> None:
    """`lora_ranks.py` compares logits, gradients, norms, merged weights, and checkpoints over layouts."""
    output = run_two_ranks("lora_ranks.py")
    missing = [f"{case}, {name}:" for case, (_, names, _) in CASES.items() for name in names]
    assert not [line for line in missing if line not in output]
