"""Models with random weights and prompts for the benchmarks on GPUs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from penstock.flows.commands.demo_model import CHARACTERS, make_tiny_model, make_tokenizer

PROMPT_TOKENS = 128
RECIPE = Path(__file__).parent.parent / "configs/recipes/1gpu.toml"
QWEN3 = {  # name -> sizes of `make_tiny_model`
    "0.6b": {"hidden": 1024, "layers": 28, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 3072, "vocab": 151936},
    "1.7b": {"hidden": 2048, "layers": 28, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 6144, "vocab": 151936},
    "4b": {"hidden": 2560, "layers": 36, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 9728, "vocab": 151936},
    "small": {"hidden": 768, "layers": 6, "heads": 12, "groups": 4, "head_dim": 64, "ffn": 2304, "vocab": 16384},
    "tiny": {"hidden": 256, "layers": 4, "heads": 4, "groups": 2, "head_dim": 64, "ffn": 768, "vocab": 1024},
}
MODELS = [*QWEN3, "moe"]


def make_model(name: str, directory: Path) -> Path:
    """Write the bf16 model `name` to `directory`/`name`, if it is not there, and return this path: a shape of Qwen3, or
    "moe", Qwen3-30B-A3B cut to two layers."""
    path = directory / name
    if not (path / "config.json").exists():
        if name == "moe":
            make_mixture_of_experts(path)
        else:
            make_tiny_model(path, **QWEN3[name], dtype="bfloat16", max_length=40960)
    return path


def train_arguments(directory: Path, model: str, run: str, prompt_tokens: int = PROMPT_TOKENS) -> list[str]:
    """Make a model and prompts in `directory`, and return the options of `penstock train` with which the run `run`
    trains it by the recipe for one GPU, in the store `directory`/`run`, on responses of exactly the maximum length;
    without CUDA in fp32."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    inputs = ["--hf-checkpoint", str(make_model(model, directory))]
    inputs += ["--prompt-data", str(write_prompts(directory / "prompts.jsonl", prompt_tokens))]
    where = ["--config", str(RECIPE), "--run", run, "--store", str(directory / run)]
    dtype = [] if torch.cuda.is_available() else ["--params-dtype", "fp32"]
    return [*where, *inputs, "--rollout-sampling", "ignore_eos=true", *dtype]


def make_mixture_of_experts(path: Path, layers: int = 2) -> None:
    """Write Qwen3-30B-A3B cut to `layers` layers: 128 experts of width 768, 8 for each token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = make_tokenizer(40960)
    sizes: dict[str, Any] = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, head_dim=128)
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=151936,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def write_prompts(path: Path, prompt_tokens: int = PROMPT_TOKENS) -> Path:
    """Write 256 random prompts of `prompt_tokens` tokens as JSON lines to `path`, and return it."""
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices(CHARACTERS, k=prompt_tokens)), "label": ""} for _ in range(256)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
