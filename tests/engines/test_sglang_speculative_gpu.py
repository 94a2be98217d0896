"""A real SGLang server on a GPU that drafts with the MTP layer of a tiny GLM-4.5: tokens, log-probs and routed experts
equal those of a server without speculation, and the draft layer survives weight updates and released memory.

The draft layer is made to predict what the model predicts: the model's layers change its hidden states little, so the
last token decides the most probable next one, and the draft layer passes the embedding of the last token to the LM
head. Drafts are therefore accepted only if the draft layer has its own weights, and embedding and head are those of
the updated model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import hf_model, logprob_error, make_family
from safetensors.torch import load_file, save_file
from small_servers import generate_once

from penstock.engines.backends import engine_backend
from penstock.engines.cluster import Cluster
from penstock.engines.generation import Generation, TokenCounts, WeightTransport
from penstock.engines.options import EngineOptions
from penstock.engines.serving.pool import EnginePool, start_pool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.client import SGLangClient
from penstock.storage.samples.routed_experts import ExpertsFormat

pytestmark = pytest.mark.gpu
LAYERS, HIDDEN = 2, 256
SIZES = dict(
    hidden_size=HIDDEN,
    num_hidden_layers=LAYERS,
    head_dim=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    moe_intermediate_size=128,
    vocab_size=64,
    max_position_embeddings=2048,
)
SERVER = {"dtype": "bfloat16", "mem_fraction_static": 0.3}
EXPERTS = ExpertsFormat(num_layers=LAYERS, num_dense_layers=1, num_experts=8, top_k=2)
PROMPT = [2, 9, 12, 16, 14, 21, 1, 3]
GREEDY = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}
TOLERANCE = 0.05  # of bf16 log-probs
MIN_ACCEPTED = 3.0  # tokens per verification; at most 4, and about 1 with a draft layer of random weights


def most_probable_next(token: Any, seed: int) -> Any:
    """Return the most probable token after `token`, of the model that `make_checkpoint` writes with this seed."""
    return (5 * token + 3 + 2 * seed) % 64


def make_checkpoint(directory: Path, seed: int) -> Path:
    """Write the tiny model that the module's docstring describes."""
    make_family(directory, "glm4.5", seed=seed, dtype="bfloat16", num_nextn_predict_layers=1, **SIZES)
    weights = load_file(directory / "model.safetensors")
    mtp = f"model.layers.{LAYERS}."
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = tensor * (0.0 if name.startswith(mtp) else 0.02)
    for name in ("model.norm.weight", f"{mtp}enorm.weight", f"{mtp}shared_head.norm.weight"):
        weights[name] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights[mtp + "eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN, dtype=torch.bfloat16)
    weights["lm_head.weight"][most_probable_next(torch.arange(64), seed)] = 0.2 * weights["model.embed_tokens.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_checkpoint(tmp_path_factory.mktemp("model") / str(seed), seed) for seed in range(2)]


@contextmanager
def serve(cluster: Cluster, model: Path, log_dir: Path, *, speculate: bool) -> Iterator[EnginePool]:
    backend = engine_backend()
    args = SERVER | ({"speculative_algorithm": "NEXTN"} if speculate else {})
    spec = ServerSpec(model_path=str(model), args=args, log_dir=str(log_dir))
    options = EngineOptions(spec, offload=True, return_experts=True)
    backend.check_options(options)
    pool = start_pool(cluster, options)
    try:
        yield pool
    finally:
        pool.stop()


def sample(pool: EnginePool, num: int = 1, **sampling: Any) -> list[Generation]:
    return generate_once(pool.urls, PROMPT, GREEDY | sampling, num, experts=EXPERTS)


def published(model: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that a trainer publishes: all but those of the MTP layer, which it does not train."""
    weights = load_file(model / "model.safetensors", device="cuda")
    return {name: tensor for name, tensor in weights.items() if not name.startswith(f"model.layers.{LAYERS}.")}


def accept_length(generations: list[Generation]) -> float:
    total = sum((generation.counts for generation in generations), TokenCounts())
    assert 0 <= total.accepted <= total.proposed == 3 * total.verifications > 0
    return 1 + total.accepted / total.verifications


def routed_experts(generation: Generation) -> np.ndarray:
    num_tokens = len(PROMPT) + len(generation.token_ids)
    return np.sort(EXPERTS.decode(generation.routed_experts, num_tokens)[:-1], axis=-1)


@pytest.mark.timeout(900)
def test_mtp_layer_drafts_for_the_updated_model(cluster: Cluster, checkpoints: list[Path], tmp_path: Path) -> None:
    first, second = checkpoints
    with serve(cluster, first, tmp_path, speculate=False) as pool:
        [plain] = sample(pool)
        SGLangClient(pool.urls).update_weights(published(second).items(), "test/1")
        [plain_second] = sample(pool)
        assert plain.counts.proposed == 0 and plain.token_ids != plain_second.token_ids

    def check(expected: Generation) -> None:
        [generation] = sample(pool)
        assert generation.token_ids == expected.token_ids and len(generation.token_ids) == GREEDY["max_new_tokens"]
        assert (routed_experts(generation) == routed_experts(expected)).mean() > 0.97  # bf16: a few may differ
        assert accept_length([generation]) > MIN_ACCEPTED

    with serve(cluster, first, tmp_path, speculate=True) as pool:
        client = SGLangClient(pool.urls)
        check(plain)
        client.update_weights(published(second).items(), "test/1")
        check(plain_second)
        client.release_memory()
        client.update_weights(published(first).items(), "test/2")
        client.resume_kv_cache()
        check(plain)
        over_disk = WeightTransport("disk", model_path=str(first), directory=str(tmp_path))
        client.update_weights(published(second).items(), "test/3", over_disk)
        check(plain_second)
        client.release_memory()
        client.update_weights(published(first).items(), "test/4", over_disk)
        client.resume_kv_cache()
        check(plain)

        generations = sample(pool, num=8, temperature=1.5)
        assert len({tuple(generation.token_ids) for generation in generations}) == 8
        model = hf_model(first)
        assert max(logprob_error(model, PROMPT, generation, 1.5) for generation in generations) < TOLERANCE
        assert logprob_error(model, PROMPT, generations[0]) > 2 * TOLERANCE  # the check can fail
        assert accept_length(generations) > 1.0
