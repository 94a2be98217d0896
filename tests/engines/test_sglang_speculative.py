"""Speculative decoding: options that are refused, flags of the server, memory, requests and counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_family
from real_models import REAL_MODELS
from safetensors.torch import load_file, save_file
from small_servers import answer

from penstock.engines.backends import engine_backend
from penstock.engines.generation import TokenCounts
from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.checks import DRAFT_MODEL, SIZES, THRESHOLDS
from penstock.engines.sglang.client import parse_generation
from penstock.engines.sglang.passthrough import sglang_flags
from penstock.engines.sglang.weight_update import FlatBucket, WeightUpdate
from penstock.storage.errors import EngineError, ModelError, OptionError

NEXTN = {"speculative_algorithm": "NEXTN"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with tiny models: DeepSeek-V3 and GLM-4.5 with an MTP layer, Moonlight and Qwen3 without."""
    directory = tmp_path_factory.mktemp("models")
    for name, count in (("deepseek-v3", 1), ("glm4.5", 1), ("moonlight", 0)):
        make_family(directory / name, name, num_nextn_predict_layers=count)
    make_family(directory / "qwen3", "qwen3")
    return directory


def options(model: Path, args: dict[str, Any], **more: Any) -> EngineOptions:
    return EngineOptions(ServerSpec(model_path=str(model), args=args), **more)


@pytest.mark.parametrize(("name", "algorithm"), [("deepseek-v3", "NEXTN"), ("glm4.5", "EAGLE"), ("glm4.5", "nextn")])
def test_models_with_an_mtp_layer_are_accepted(name: str, algorithm: str, models: Path) -> None:
    backend = engine_backend()
    for more in ({}, {"speculative_num_steps": 2, "speculative_eagle_topk": 1}, dict.fromkeys(SIZES, 4)):
        chosen = options(models / name, {"speculative_algorithm": algorithm, **more}, transport="disk")
        backend.check_options(chosen)
        backend.check_weight_updates(chosen, None)


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ({"speculative_num_steps": 3}, {}, "--sglang-speculative-num-steps has no effect"),
        ({"speculative_algorithm": "NGRAM"}, {}, "NGRAM is not supported"),
        ({"speculative_algorithm": "EAGLE3"}, {}, "EAGLE3 needs a draft model"),
        (NEXTN | {"speculative_num_steps": 3, "speculative_eagle_topk": 2}, {}, "depend on each other"),
        (NEXTN | {"speculative_accept_threshold_acc": 0.9}, {}, "accept-threshold-acc 0.9"),
        (NEXTN | {"speculative_draft_model": "/nowhere"}, {}, "/nowhere is not a model directory"),
        (NEXTN, {"sampling_seeds": True}, "--rollout-sampling-seeds cannot be combined"),
        (NEXTN, {"sampling": {"min_p": 0.1}}, "min_p has no effect"),
        (NEXTN | dict.fromkeys(SIZES, 2), {"return_experts": True}, "--sglang-speculative-eagle-topk 1"),
    ],
)
def test_options_that_cannot_work_are_refused(
    args: dict[str, Any], more: dict[str, Any], message: str, models: Path
) -> None:
    with pytest.raises(EngineError, match=message):
        engine_backend().check_options(options(models / "glm4.5", args, **more))


@pytest.mark.parametrize("name", ["moonlight", "qwen3"])
def test_models_without_an_mtp_layer_need_a_draft_model(name: str, models: Path) -> None:
    with pytest.raises(ModelError, match="has no multi-token prediction layer"):
        engine_backend().check_options(options(models / name, NEXTN))
    drafted = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": str(models / "qwen3")}
    engine_backend().check_options(options(models / name, drafted))
    with pytest.raises(EngineError, match="disk would load the policy's weights into the draft model"):
        engine_backend().check_options(options(models / name, drafted, transport="disk"))


def test_mtp_layers_that_sglang_cannot_load_are_refused(models: Path, tmp_path: Path) -> None:
    weights = load_file(models / "glm4.5/model.safetensors")
    config = json.loads((models / "glm4.5/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({name: weights[name] for name in weights if "layers.4." not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.4\.eh_proj\.weight"):
        engine_backend().check_options(options(tmp_path, NEXTN))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    with pytest.raises(ModelError, match="2 multi-token prediction layers"):
        engine_backend().check_options(options(tmp_path, NEXTN))


def test_server_keeps_the_draft_layers_while_its_memory_is_released(models: Path) -> None:
    args = engine_backend().server_args(options(models / "glm4.5", NEXTN, offload=True), has_gpus=True)
    plain = engine_backend().server_args(options(models / "glm4.5", NEXTN), has_gpus=True)
    assert args == plain | {"enable_memory_saver": True, "enable_draft_weights_cpu_backup": True} and args != plain
    assert "enable_draft_weights_cpu_backup" not in engine_backend().server_args(
        options(models / "glm4.5", {}, offload=True), has_gpus=True
    )


@pytest.mark.parametrize(("args", "more"), [(NEXTN, {}), ({}, {"sampling_seeds": True})], ids=["drafts", "seeds"])
def test_engines_without_gpus_are_refused_unless_external(
    args: dict[str, Any], more: dict[str, Any], models: Path
) -> None:
    with pytest.raises(OptionError, match="no GPU was found"):
        engine_backend().server_args(options(models / "glm4.5", args, **more), has_gpus=False)
    external = options(models / "glm4.5", args, external=("10.0.0.7:30000",), **more)
    engine_backend().check_gpus(external, has_gpus=False)


def test_flags_exist_in_the_installed_sglang() -> None:
    assert {*NEXTN, *SIZES, *THRESHOLDS, *DRAFT_MODEL, "enable_draft_weights_cpu_backup"} <= sglang_flags().keys()


def test_memory_of_the_draft_layer_is_counted() -> None:
    shape = REAL_MODELS["glm4.5-106B-A12B"].shape
    plain, drafting, separate = (
        engine_backend().estimate_memory(options(Path("/model"), args), shape, 141 << 30)
        for args in ({}, NEXTN, NEXTN | {"speculative_draft_model_path": "/draft"})
    )
    assert drafting.bytes_per_token / plain.bytes_per_token == 47 / 46
    layer = (shape.num_parameters - 2 * shape.vocab_size * shape.hidden_size) / shape.num_layers
    assert drafting.weight_bytes - plain.weight_bytes == pytest.approx(2 * layer, rel=0.05)
    assert separate == plain


@pytest.mark.parametrize("release", [(0, 5, 15), (0, 5, 21)], ids=str)
def test_broadcasts_replace_the_target_model_only(release: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    update, bodies = WeightUpdate(["url"], "run/1"), []
    monkeypatch.setattr(update, "post", lambda url, path, body, **_: bodies.append((path, body)) or True)
    update.facts = {"url": (release, 1)}
    update.wait_until_loaded(update.load_broadcast(FlatBucket([("weight", torch.zeros(4))]), last=True))
    selectors = [(path, body.get("selector")) for path, body in bodies]
    path = "/update_weights_from_distributed"
    assert selectors == (
        [(path, None)] if release < (0, 5, 21) else [("/begin_weight_update", "target"), (path, "target")]
    )
    assert all("disable_draft_model" not in body for _, body in bodies)


def test_token_counts_are_read_and_added() -> None:
    """The fields that both releases of SGLang return; a response without verifications has none of them."""
    meta = {
        "spec_accept_rate": 7 / 12,
        "spec_accept_length": 12 / 4,
        "spec_num_correct_drafts": 7,
        "spec_num_proposed_drafts": 12,
        "spec_verify_ct": 4,
        "spec_correct_drafts_histogram": [0, 2, 1, 1],
    }
    generations = [parse_generation(answer([4, 5], **meta), None, 7), parse_generation(answer([4]), None, 6)]
    total = sum((generation.counts for generation in generations), TokenCounts(0, 0, 1, 3, 2))
    assert total == TokenCounts(prompt=13, cached=4, verifications=5, proposed=15, accepted=9)
