"""--fp32-lm-head: logits in fp32 of a model in bf16, in trainer and engines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from small_servers import JsonServer
from torch import Tensor

from penstock.engines.backends import engine_backend
from penstock.engines.options import EngineOptions
from penstock.engines.serving.server import ServerSpec
from penstock.stages.train.build import build_models
from penstock.stages.train.config import TrainConfig
from penstock.storage.errors import EngineError
from tests.engines.megatron_reference import LENGTHS, SHAPE, UNTIED, make_pack

PACK = make_pack(LENGTHS)


def models_of(shape: Any = SHAPE, **options: Any) -> Any:
    return build_models(shape, TrainConfig(**{"params_dtype": "bf16", "fp32_lm_head": True} | options))


def logits_of(engine: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, logits, and the weight of the head."""
    kept: dict[str, Tensor] = {}

    def keep(hidden: Tensor, head: Any, packed: Any) -> Any:
        kept.update(hidden=hidden.detach(), logits=head(hidden).detach())
        return None, {}

    engine.forward_backward([PACK], keep, forward_only=True)
    chunk = engine.chunks[0]
    weight = chunk.shared_embedding_or_output_weight() if chunk.shape.tied_embeddings else chunk.output_layer.weight
    return kept["hidden"], kept["logits"], weight.detach()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def bf16_head(request: pytest.FixtureRequest) -> Any:
    """A head with bf16 weights [V, H], and hidden states [n, H], both with gradients."""
    generator = torch.Generator().manual_seed(3)
    tensors = (torch.randn(size, 32, generator=generator).to(request.param).bfloat16() for size in (40, 61))
    return [tensor.requires_grad_() for tensor in tensors]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("shape", [SHAPE, UNTIED], ids=["tied", "untied"])
def test_logits_of_a_bf16_model_are_the_fp32_product(shape: Any) -> None:
    hidden, logits, weight = logits_of(models_of(shape).policy)
    assert hidden.dtype == weight.dtype == torch.bfloat16 and logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), hidden.double() @ weight.double().T, atol=1e-5, rtol=1e-5)
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


@pytest.mark.usefixtures("world")
def test_only_a_policy_with_the_option_has_an_fp32_head() -> None:
    models, without = models_of(advantage_estimator="ppo"), models_of(fp32_lm_head=False).policy
    assert models.policy.fingerprint()["head"] == "fp32" and "head" not in models.critic.fingerprint()
    assert logits_of(without)[1].dtype == torch.bfloat16 and "head" not in without.fingerprint()


@pytest.mark.parametrize("frozen", [set(), {"hidden"}, {"weight"}], ids=["all", "hidden frozen", "weight frozen"])
def test_gradients_are_those_of_the_fp32_product(bf16_head: Any, frozen: set[str]) -> None:
    from penstock.engines.megatron.model.gpt import _Fp32Linear

    inputs = dict(zip(("hidden", "weight"), bf16_head))
    for name in frozen:
        inputs[name].requires_grad_(False)
    exact = {name: value.detach().double().requires_grad_(value.requires_grad) for name, value in inputs.items()}
    targets = (torch.arange(40) % 61).to(inputs["hidden"].device)
    _Fp32Linear.apply(*inputs.values()).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    (exact["hidden"] @ exact["weight"].T).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    for name, value in inputs.items():
        if name in frozen:
            assert value.grad is None
        else:
            grad, expected = value.grad.double(), exact[name].grad
            assert value.grad.dtype == torch.bfloat16
            assert (grad - expected).norm() < 0.01 * expected.norm()


def test_no_tokens_give_no_logits(bf16_head: Any) -> None:
    from penstock.engines.megatron.model.gpt import _Fp32Linear

    hidden, weight = bf16_head
    logits = _Fp32Linear.apply(hidden[:0], weight)
    logits.sum().backward()
    assert logits.shape == (0, 61) and logits.dtype == torch.float32 and not weight.grad.any()


@pytest.mark.integration
def test_layouts_of_two_ranks_agree_with_one(run_two_ranks: Callable[..., str]) -> None:
    run_two_ranks("fp32_head_ranks.py")


@pytest.mark.parametrize("fp32", [False, True])
def test_engines_get_the_flag_of_sglang(fp32: bool) -> None:
    options = EngineOptions(ServerSpec(model_path=""), fp32_head=fp32)
    assert engine_backend().server_args(options, has_gpus=False).get("enable_fp32_lm_head", False) is fp32


def test_the_flag_of_the_engine_alone_is_refused() -> None:
    from penstock.engines.sglang.passthrough import check_sglang_args

    with pytest.raises(EngineError, match="--fp32-lm-head, for trainer and engines"):
        check_sglang_args({"enable-fp32-lm-head": True})


@pytest.mark.parametrize(("engine", "accepted"), [({"enable_fp32_lm_head": True}, True), ({}, False)], ids=str)
def test_an_external_engine_needs_an_fp32_head_as_well(engine: dict[str, Any], accepted: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    answers = {
        "/server_info": {"version": "0.5.21", "tp_size": 1, **engine},
        "/model_info": {"model_path": str(tmp_path), "weight_version": "default"},
    }
    server = JsonServer(lambda path: answers[path])
    engine_backend().check_external_server(server.url, str(tmp_path), {})
    with nullcontext() if accepted else pytest.raises(EngineError, match="--enable-fp32-lm-head"):
        engine_backend().check_external_server(server.url, str(tmp_path), {"enable_fp32_lm_head": True})
    server.die()
