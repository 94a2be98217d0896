"""Vision-language models in Megatron against transformers: positions, logits, gradients, layouts, frozen towers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from penstock.engines.families import read_shape
from penstock.engines.families.shape import ModelShape, Vision
from penstock.engines.generation import WeightTransport
from penstock.engines.megatron.frozen_parameters import frozen_parameters
from penstock.engines.megatron.memory_plan import TrainerOptions, vision_activations
from penstock.engines.megatron.model.norm_and_rope import rope_cos_sin
from penstock.engines.megatron.model.transformer_config import transformer_config
from penstock.engines.megatron.model.vision import VisionTower
from penstock.engines.parallel_layout import check_pipeline
from penstock.stages.train.actor import published_tensors
from penstock.storage.errors import DataError, LayoutError, OptionError
from tests.engines.megatron_reference import (
    FULL,
    OPTIMIZER,
    cross_entropy,
    make_engine,
    put_weights,
    replace_by_gradients,
)
from tests.engines.vision_reference import MIXED, Reference, make_vision_pack, reference_of
from tests.families import VISION_FAMILIES, hf_model, make_family

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    directory = tmp_path_factory.mktemp("vision")
    return {name: reference_of(make_family(directory / name, name), MIXED) for name in VISION_FAMILIES}


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_logits_and_gradients_equal_transformers(world: None, references: dict[str, Reference], name: str) -> None:
    reference = references[name]
    engine = make_engine(reference.shape, freeze_vision=False)
    put_weights(engine, reference.weights)
    outputs = engine.forward_backward(reference.packs, cross_entropy)
    for output, expected in zip(outputs, reference.logits, strict=True):
        assert (output["logits"] - expected).abs().max() < TOLERANCE
    replace_by_gradients(engine, engine.chunks[0].parameters())
    gradients = {key: tensor.clone() for key, tensor in engine.gather_weights().tensors}
    assert gradients.keys() == reference.gradients.keys()
    for key, expected in reference.gradients.items():
        assert (gradients[key] - expected).abs().max() < TOLERANCE * expected.abs().max(), key


@pytest.mark.integration
def test_every_layout_equals_transformers(run_two_ranks: Callable[..., str]) -> None:
    assert "experts, qwen3-vl-moe" in run_two_ranks("vision_ranks.py")


# ---- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_positions_equal_transformers(name: str, tmp_path: Path) -> None:
    source = make_family(tmp_path, name)
    shape, model, generator = read_shape(source), hf_model(source), random.Random(name)
    for seed in range(30):
        conversation: list[Any] = []
        for _ in range(generator.randint(0, 4)):
            grid = (generator.choice([1, 1, 2]), 2 * generator.randint(1, 6), 2 * generator.randint(1, 6))
            conversation += [grid, generator.randint(1, 9)]
        pack = make_vision_pack(shape, [[seed % 3, *conversation] if conversation else [7]], seed)
        [sequence] = pack.sequences
        ids, grids = sequence["input_ids"], sequence.get("image_grid_thw")
        expected, _ = model.model.get_rope_index(ids, (ids == shape.vision.image_token_id).int(), grids)
        assert torch.equal(pack.position_ids, expected[:, 0])


@pytest.mark.parametrize(
    ("token_ids", "grids"),
    [
        ([1, 5, 5, 2], [(1, 2, 2)]),  # more tokens than the image has
        ([1, 5, 2, 5], [(1, 2, 4)]),  # interrupted
        ([1, 5, 5, 5, 2, 5], [(1, 2, 4), (1, 2, 4)]),  # right sum, wrong lengths
        ([1, 2], [(1, 2, 2)]),
    ],
)
def test_image_tokens_that_do_not_match_the_images_are_refused(token_ids: list[int], grids: list[Any]) -> None:
    with pytest.raises(DataError, match="image tokens"):
        tower(image_token_id=5).image_starts(np.array(token_ids), grids)


def test_starts_of_adjacent_images_are_found() -> None:
    ids = np.array([5, 5, 5, 1, 5])
    assert tower(image_token_id=5).image_starts(ids, [(1, 2, 4), (1, 2, 2), (1, 2, 2)]) == [0, 2, 4]


def tower(**changes: Any) -> Vision:
    sizes = dict(num_blocks=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, output_size=8)
    patches = dict(in_channels=3, patch_size=4, temporal_patch_size=2, merge_size=2)
    return Vision(**{"variant": "qwen3", "image_token_id": 0, **sizes, **patches, **changes})


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}])
def test_mrope_angles_equal_transformers(name: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    rope = VISION_FAMILIES[name]["rope_parameters"] | scaling
    source = make_family(tmp_path, name, rope_parameters=rope)
    shape, model = read_shape(source), hf_model(source)
    positions = torch.randint(0, 200, (3, 50))
    expected = model.model.language_model.rotary_emb(torch.zeros(1), positions[:, None])
    found = rope_cos_sin(positions, shape.head_dim, shape.rotary)
    for mine, theirs in zip(found, expected, strict=True):
        if theirs.ndim == 4:  # Qwen2.5-VL chooses the axes of pairs when it rotates
            sections = rope["mrope_section"] * 2
            theirs = torch.cat([part[i % 3] for i, part in enumerate(theirs.split(sections, dim=-1))], dim=-1)
        torch.testing.assert_close(mine[:, 0], theirs[0], rtol=0, atol=2e-5)


def test_text_has_the_same_logits_with_one_and_with_three_positions(
    world: None, references: dict[str, Reference]
) -> None:
    reference = references["qwen3-vl"]
    engine, text = make_engine(reference.shape), reference.packs[1]
    assert text.images is None and text.position_ids.shape[0] == 3
    packs = [text, replace(text, position_ids=text.position_ids[0])]
    three, one = (output["logits"] for output in engine.forward_backward(packs, cross_entropy, forward_only=True))
    assert torch.equal(one, three)


# ---- FLOPs and memory ------------------------------------------------------------------------------------------------


def build_tower(shape: ModelShape, megatron: dict[str, Any]) -> tuple[VisionTower, torch.Tensor, list[list[int]]]:
    """Return a tower in bf16, and the patches and grids of three images."""
    tower, grids = VisionTower(shape.vision, transformer_config(shape, None, "bf16", megatron)), [[1, 8, 16], [2, 4, 6]]
    return tower, torch.randn(sum(map(prod, grids)), tower.shape.patch_dim), grids


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_flops_equal_those_that_torch_counts(world: None, references: dict[str, Reference], name: str) -> None:
    tower, pixel_values, grids = build_tower(references[name].shape, {})
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        tower(pixel_values, grids, "padded")
    assert tower.shape.train_flops(grids, trained=False) == counter.get_total_flops()
    assert tower.shape.train_flops(grids, trained=True) == 3 * counter.get_total_flops()


@pytest.mark.parametrize(("name", "megatron"), [("qwen2.5-vl", FULL), ("qwen3-vl", {})], ids=["recomputed", "all"])
def test_estimated_memory_is_near_that_of_the_saved_tensors(
    world: None, references: dict[str, Reference], name: str, megatron: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU RMSNorm saves copies in fp32, and its GPU kernel does not: LayerNorm takes its place."""
    layer_norm = lambda vision, size, config, options: nn.LayerNorm(size, 1e-6, **options)
    monkeypatch.setattr("penstock.engines.megatron.model.vision.make_norm", layer_norm)
    tower, pixel_values, grids = build_tower(references[name].shape, megatron)
    parameters = {param.untyped_storage().data_ptr() for param in tower.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower(pixel_values, grids, "padded")
    num_bytes = sum(x.untyped_storage().nbytes() for pointer, x in saved.items() if pointer not in parameters)
    options = TrainerOptions(freeze_vision=False, megatron=megatron)
    stored, _ = vision_activations(tower.shape, 2, options)
    num_tokens = sum(map(tower.shape.num_image_tokens, grids))
    assert num_bytes / num_tokens == pytest.approx(stored, rel=0.1)


# ---- training --------------------------------------------------------------------------------------------------------


def build(reference: Reference, **options: Any) -> Any:
    engine = make_engine(reference.shape, **options)
    if options.get("role") != "value":
        put_weights(engine, reference.weights)
    return engine


def vision_of(digest: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in digest.items() if key.startswith("vision.")}


def step(engine: Any, reference: Reference) -> None:
    engine.forward_backward(reference.packs, cross_entropy)
    engine.optimizer_step()


def test_tower_is_frozen_unless_asked(world: None, references: dict[str, Reference]) -> None:
    reference = references["qwen3-vl"]
    frozen, trained = build(reference), build(reference, freeze_vision=False)
    states = []
    for engine in (frozen, trained):
        before = engine.digest()
        step(engine, reference)
        after = engine.digest()
        changed = {key for key in before if before[key] != after[key]}
        assert changed >= before.keys() - vision_of(before).keys()
        assert bool(changed & vision_of(before).keys()) == (engine is trained)
        gradients = [getattr(param, "main_grad", None) for param in engine.chunks[0].vision.parameters()]
        assert all((gradient is not None and bool(gradient.any())) == (engine is trained) for gradient in gradients)
        [inner] = engine.optimizer.chained_optimizers
        states.append(sum(len(buffer.param_index_map) for buffer in inner.buffers))
    assert states[1] - states[0] == len(reference.shape.vision.tensor_shapes)

    names = frozen_parameters(reference.shape, None, None)
    assert names == vision_of(dict.fromkeys(reference.weights, "")).keys()
    assert frozen_parameters(reference.shape, ["embedding"], None) == names | {"embedding.word_embeddings.weight"}
    merger = frozen_parameters(reference.shape, None, [r"vision\.merger"], False)
    assert not any("vision.merger" in name for name in merger) and len(merger) == len(reference.weights) - 6
    with pytest.raises(OptionError, match="add --no-freeze-vision"):
        frozen_parameters(reference.shape, None, [r"vision\.merger"])


def test_tower_has_its_own_learning_rate(world: None, references: dict[str, Reference]) -> None:
    reference, digests = references["qwen2.5-vl"], []
    schedule = dict(lr_decay_style="linear", lr_warmup_iters=2, lr_decay_iters=10)
    for rates in (dict(lr=1e-2), dict(lr=1e-3), dict(lr=1e-2, vision_lr=1e-3)):
        engine = build(reference, freeze_vision=False, optimizer=OPTIMIZER | schedule | rates)
        engine.scheduler.step(1)
        engine.forward_backward(reference.packs, cross_entropy)
        learning_rates = engine.optimizer_step()[2]
        assert learning_rates == pytest.approx([rates["lr"] / 2, rates.get("vision_lr", rates["lr"]) / 2])
        digests.append(engine.digest())
    large, small, both = digests
    assert vision_of(both) == vision_of(small) and not vision_of(both).items() & vision_of(large).items()
    assert {key: value for key, value in both.items() if key not in vision_of(both)}.items() <= large.items()


def test_frozen_tower_leaves_the_other_gradients_as_they_are(world: None, references: dict[str, Reference]) -> None:
    reference = references["qwen3-vl"]
    engine = build(reference)
    engine.forward_backward(reference.packs, cross_entropy)
    trained = [param for param in engine.chunks[0].parameters() if param.requires_grad]
    replace_by_gradients(engine, trained)
    for key, tensor in engine.gather_weights().tensors:
        if not key.startswith("vision."):
            expected = reference.gradients[key]
            assert (tensor - expected).abs().max() < TOLERANCE * expected.abs().max(), key


def test_resumed_training_is_equal_bit_for_bit(world: None, references: dict[str, Reference], tmp_path: Path) -> None:
    reference = references["qwen2.5-vl"]
    options = dict(freeze_vision=False, optimizer=OPTIMIZER | {"vision_lr": 1e-3})
    engine, other = build(reference, **options), build(reference, **options, seed=5)
    step(engine, reference)
    engine.save(tmp_path, {"round": 1})
    assert other.load(tmp_path) == {"round": 1}
    for trainer in (engine, other):
        step(trainer, reference)
    assert other.digest() == engine.digest()
    assert other.optimizer_state_digest() == engine.optimizer_state_digest()


def test_weights_of_the_tower_are_published_unless_engines_have_them(world: None, references: Any) -> None:
    reference = references["qwen3-vl"]
    engine = make_engine(reference.shape)
    everything, language = (
        dict(published_tensors(engine, reference.shape, WeightTransport(without_vision=without)))
        for without in (False, True)
    )
    assert {name for name in everything if ".visual." in name} == everything.keys() - language.keys() != set()


def test_recomputation_does_not_change_results(world: None, references: dict[str, Reference]) -> None:
    reference = references["qwen2.5-vl"]
    full = FULL | {"recompute_num_layers": 2}
    digests = []
    for overrides in ({}, full):
        engine = build(reference, freeze_vision=False, overrides=overrides)
        step(engine, reference)
        digests.append(engine.digest())
    assert digests[0] == digests[1]


def test_critic_has_a_tower(world: None, references: dict[str, Reference]) -> None:
    reference = references["qwen2.5-vl"]
    critic, pack = build(reference, role="value"), reference.packs[0]

    def values(images: Any) -> torch.Tensor:
        changed = replace(pack, images=images)
        loss = lambda hidden, head, _: (None, {"values": head(hidden).detach()})
        [output] = critic.forward_backward([changed], loss, forward_only=True)
        return output["values"]

    assert pack.images is not None
    black = replace(pack.images, pixel_values=torch.zeros_like(pack.images.pixel_values))
    differs = (values(pack.images) != values(black))[:, 0]
    first = int(pack.images.starts[0])
    assert differs[first:].any() and not differs[:first].any()


def test_pipeline_that_splits_the_layers_with_deepstack_features_is_refused(references: dict[str, Reference]) -> None:
    shape = references["qwen3-vl"].shape  # 4 layers, features for 2
    check_pipeline(shape, 2)
    for sizes in ((4, None), (2, 2)):
        with pytest.raises(LayoutError, match=r"Qwen3VLForConditionalGeneration adds features .* the first 2"):
            check_pipeline(shape, *sizes)
        check_pipeline(references["qwen2.5-vl"].shape, *sizes)
    check_pipeline(shape, 3, None, {"num_layers_in_first_pipeline_stage": 2})
