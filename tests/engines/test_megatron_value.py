"""The critic's model: one rank compared with Hugging Face, and checkpoints. `tests/train/layout_ranks.py` has
layouts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engines.megatron.train_backend import MegatronBackend
from tests.engines import megatron_reference
from tests.engines.megatron_reference import PACKS, SHAPE, Pack, hf_model, put_weights, to_megatron


def make_engine(**options: Any) -> Any:
    return megatron_reference.make_engine(**{"role": "value", **options})


def targets(packed: Pack) -> Tensor:  # [T]
    return torch.sin(packed.token_ids.double() + packed.position_ids).float()


def squared_error(hidden: Tensor, head: Any, packed: Pack) -> tuple[Tensor, dict[str, Tensor]]:
    values = head(hidden)[:, 0]
    assert values.dtype == torch.float32
    return (values - targets(packed).to(values.device)).square().sum(), {"values": values.detach().cpu()}


@pytest.fixture(scope="module")
def base(world: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return a policy with tied embeddings, as Hugging Face's model and as a checkpoint."""
    hf, directory = hf_model(), tmp_path_factory.mktemp("base")
    policy = make_engine(role="policy")
    put_weights(policy, to_megatron(dict(hf.state_dict())))
    policy.save(directory, None)
    return hf, directory


def test_values_and_gradients_equal_hugging_face(base: tuple[Any, Path]) -> None:
    hf, directory = base
    engine = make_engine()
    engine.load_weights(directory)
    weight = engine.chunks[0].output_layer.weight.detach().cpu().clone().requires_grad_()
    assert weight.shape == (1, SHAPE.hidden_size) and 0.01 < weight.std() < 0.03
    outputs = engine.forward_backward(PACKS, squared_error)

    hf.zero_grad()
    loss = torch.zeros(())
    for packed, output in zip(PACKS, outputs):
        sequences = torch.tensor_split(packed.token_ids, packed.cu_seqlens[1:-1].long())
        values = torch.cat([hf.model(input_ids=tokens[None]).last_hidden_state[0] @ weight[0] for tokens in sequences])
        torch.testing.assert_close(output["values"], values.detach(), atol=1e-5, rtol=1e-5)
        loss = loss + (values - targets(packed)).square().sum()
    loss.backward()
    grads = to_megatron({name: param.grad for name, param in hf.named_parameters()}) | {
        "output_layer.weight": weight.grad
    }
    for name, param in engine.chunks[0].named_parameters():
        assert (param.main_grad.cpu() - grads[name]).abs().max() < 2e-5 * grads[name].abs().max(), name
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm().item()
    assert engine.optimizer_step()[:2] == (True, pytest.approx(norm, rel=1e-5))


def test_head_is_initialized_by_the_seed_unless_the_checkpoint_has_one(base: tuple[Any, Path], tmp_path: Path) -> None:
    first, again, other = make_engine(seed=5), make_engine(seed=5), make_engine(seed=6)
    head = "output_layer.weight"
    torch.rand(3)
    for engine in (first, again, other):
        engine.load_weights(base[1])
    assert again.digest() == first.digest()
    assert {name for name, digest in other.digest().items() if first.digest()[name] != digest} == {head}

    for engine in (first, again):
        train(engine)
    assert again.digest() == first.digest()
    first.save(tmp_path, None)
    other.load_weights(tmp_path)
    assert other.digest() == first.digest()
    first.load_weights(base[1])
    assert first.digest() == load_engine(base[1], seed=5).digest()


def test_every_file_of_a_checkpoint_is_written_by_one_rank() -> None:
    is_written_by_rank = MegatronBackend().is_written_by_rank
    second = ["__1_0.distcp", "critic/__1_2.distcp"]
    first = ["reference/__0_1.distcp", "critic/.metadata", "reference/metadata.json", "common.pt"]
    assert [name for name in second + first if is_written_by_rank(1, name)] == second
    assert [name for name in second + first if is_written_by_rank(0, name)] == first


def test_bf16_values_are_float32(base: tuple[Any, Path]) -> None:
    exact, engine = load_engine(base[1]), load_engine(base[1], dtype="bf16")
    values = [
        torch.cat([output["values"] for output in each.forward_backward(PACKS, squared_error, forward_only=True)])
        for each in (exact, engine)
    ]
    assert (values[0] - values[1]).abs().max() < 0.05 * values[0].abs().max()  # how sums are rounded depends on the CPU
    assert len(values[1].bfloat16().float().sub(values[1]).nonzero()) > len(values[1]) // 2, "rounded to bf16"


def load_engine(directory: Path, **options: Any) -> Any:
    engine = make_engine(**options)
    engine.load_weights(directory)
    return engine


def train(engine: Any) -> list[float]:
    """Return summed values and gradient norms of two steps."""
    results = []
    for _ in range(2):
        outputs = engine.forward_backward(PACKS, squared_error)
        results += [*(output["values"].sum().item() for output in outputs), engine.optimizer_step()[1]]
    return results
