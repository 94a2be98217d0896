"""Compare the generated tokens per second with and without speculative decoding, on one GPU.

    python benchmarks/gpu/speculative.py DIRECTORY --requests 1 16 48 [--output FILE] [-- OPTIONS OF penstock train]

The model has the shape of GLM-4.5 with an MTP layer, cut in depth and width, with random weights that make every token
predictable from the one before. Its copy "accepted" has an MTP layer that predicts what the model predicts, so that
nearly all drafts are accepted; the MTP layer of "rejected" is random, so that nearly none is. The speed-ups of the two
are what speculative decoding can gain and lose; a real MTP layer lies between the two, depending on its accepted
length.

Floor: the responses need at least as many forward passes of the model as there are verifications, so the speed-up is at
most the accepted length.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from penstock.engines.backends import connect
from penstock.engines.cluster import Cluster
from penstock.engines.generation import TokenCounts
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.flows.commands.demo_model import make_tokenizer
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment

sys.path.insert(0, str(Path(__file__).parent.parent))

from report import make_parser, parse_options, write_report

REPETITIONS = 3
PROMPT_TOKENS = 128
VOCAB = 16384
SIZES: dict[str, Any] = dict(
    hidden_size=2048,
    intermediate_size=8192,
    moe_intermediate_size=1024,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for the models")
    parser.add_argument("--layers", type=int, default=8, help="depth of the model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 48], help="responses at the same time")
    parser.add_argument("--length", type=int, default=512, help="tokens of a response")
    options = parse_options(parser)
    environment.set_default_variables()
    models = make_models(options.directory, options.layers)
    words = ["--run", "r", "--hf-checkpoint", str(models["accepted"]), *options.train_options]
    args = {"mem_fraction_static": 0.6, "skip_tokenizer_init": True, **parse_config(words).rollout.engine_options}
    drafting = args | {"speculative_algorithm": "NEXTN"}
    cluster = Cluster.start()
    measured = {"plain": measure(cluster, models["accepted"], args, options)}
    measured |= {name: measure(cluster, model, drafting, options) for name, model in models.items()}
    cluster.stop()
    plain = measured["plain"]["tokens/s"]
    speedups = {}
    for name in models:
        speedups[name] = {num: round(measured[name]["tokens/s"][num] / speed, 3) for num, speed in plain.items()}
    write_report(options, {"engines": measured, "speed-up": speedups})
    return 0


def make_models(directory: Path, layers: int) -> dict[str, Path]:
    """Write the two models that the module's docstring describes, and return their directories."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    paths = {name: directory / f"glm-{layers}-{name}" for name in ("accepted", "rejected")}
    if (paths["rejected"] / "config.json").exists():
        return paths
    config = Glm4MoeConfig(
        **SIZES,
        vocab_size=VOCAB,
        num_hidden_layers=layers,
        num_nextn_predict_layers=1,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        n_group=1,
        topk_group=1,
        dtype="bfloat16",
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = Glm4MoeForCausalLM(config)
    accepted, rejected = paths.values()
    model.to(torch.bfloat16).save_pretrained(accepted, max_shard_size="1TB")
    make_tokenizer(8192).save_pretrained(accepted)
    weights = load_file(accepted / "model.safetensors")
    hidden, mtp = SIZES["hidden_size"], f"model.layers.{layers}."
    last = f"model.layers.{layers - 1}."
    weights |= {name.replace(last, mtp): tensor.clone() for name, tensor in weights.items() if last in name}
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights |= {mtp + name: ones.clone() for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    for name, tensor in weights.items():  # the layers change the hidden states little: the last token decides the next
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = tensor * (0.0 if name.startswith(mtp) else 0.02)
    embedding = torch.randn(VOCAB, hidden, dtype=torch.bfloat16)
    head = torch.empty_like(embedding)
    head[(5 * torch.arange(VOCAB) + 3) % VOCAB] = embedding
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    for path, projection in (
        (accepted, torch.eye(hidden, 2 * hidden)),
        (rejected, torch.randn(hidden, 2 * hidden)),
    ):
        if path != accepted:
            shutil.copytree(accepted, path)
        weights[mtp + "eh_proj.weight"] = projection.to(torch.bfloat16)
        weights[mtp + "embed_tokens.weight"] = embedding.clone()
        weights[mtp + "shared_head.head.weight"] = head.clone()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return paths


def measure(cluster: Cluster, model: Path, args: dict[str, Any], options: Any) -> dict[str, Any]:
    """Return tokens per second and accepted length of one engine, for each number of requests at the same time."""
    with tempfile.TemporaryDirectory() as logs:
        pool = EnginePool(cluster, ServerSpec(model_path=str(model), args=args, log_dir=logs))
        try:
            runs = {
                num: [asyncio.run(generate(pool.urls, num, options.length)) for _ in range(1 + REPETITIONS)]
                for num in options.requests
            }
        finally:
            pool.stop()
    result: dict[str, Any] = {"tokens/s": {}, "accepted length": {}, "seconds": {}}
    for num, measured in runs.items():
        seconds, counts = [run[0] for run in measured[1:]], sum((run[1] for run in measured[1:]), TokenCounts())
        result["tokens/s"][num] = round(num * options.length / statistics.median(seconds))
        result["seconds"][num] = [round(value, 3) for value in seconds]
        result["accepted length"][num] = round(1 + counts.accepted / max(1, counts.verifications), 3)
    print(json.dumps(result), flush=True)
    return result


async def generate(urls: list[str], num_requests: int, length: int) -> tuple[float, TokenCounts]:
    """Return the seconds in which the engine generates `length` tokens for each of `num_requests` prompts that are not
    in its prefix cache, and the counts of drafted and accepted tokens."""
    generator = torch.Generator().manual_seed(time.monotonic_ns())
    prompts = torch.randint(4, VOCAB, (num_requests, PROMPT_TOKENS), generator=generator).tolist()
    sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
    async with connect(urls) as client:
        start = time.perf_counter()
        generations = await client.generate_each(prompts, [sampling] * num_requests)
        return time.perf_counter() - start, sum((generation.counts for generation in generations), TokenCounts())


if __name__ == "__main__":
    sys.exit(main())
