"""The tiny model and data of `penstock demo` and the tests.

The model is a Qwen3 of 402,176 random parameters with one token per character, the data two-digit plus or minus
one-digit problems. The SFT data first teaches the exact answer, then plants a habit (units dropped), so that GRPO shows
a gain within a minute on two cores: the reward curve shows RL removing a planted habit, not learning arithmetic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing flows must not import torch and transformers
    from transformers import PreTrainedTokenizerFast

PAD, END = 0, 1  # token ids
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|unk|>"]
CHARACTERS = "0123456789+-*= ?.,:()\nabcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SPLIT_SEED = 1234  # fixed: every run seed has the same training and held-out problems
NUM_HELDOUT = 256
MAX_LENGTH = 256
SIZES = {"hidden": 128, "layers": 2, "heads": 4, "groups": 2, "head_dim": 32, "ffn": 384, "vocab": 64}

Row = dict[str, Any]


def make_tiny_model(
    directory: str | Path,
    seed: int = 0,
    *,
    tied: bool = True,
    dtype: str = "float32",
    max_length: int = MAX_LENGTH,
    **sizes: int,
) -> Path:
    """Write a Qwen3 with random weights and its tokenizer as a Hugging Face directory. The same arguments give the same
    bytes. With `tied`, embedding and output head are the same matrix. `sizes` replace values in SIZES, where `groups`
    is the number of key/value heads and `vocab` the number of rows of the embedding (the tokenizer has 54 tokens)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    assert sizes.keys() <= SIZES.keys(), f"unknown sizes {sizes.keys() - SIZES.keys()}"
    size = SIZES | sizes
    disable_progress_bar()  # saving the model would print one
    config = Qwen3Config(
        vocab_size=size["vocab"],
        hidden_size=size["hidden"],
        intermediate_size=size["ffn"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["groups"],
        head_dim=size["head_dim"],
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        attention_dropout=0.0,
        initializer_range=0.02,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    make_tokenizer(max_length).save_pretrained(directory)
    return Path(directory)


def make_tokenizer(max_length: int = MAX_LENGTH, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and six special tokens; its chat template turns a problem into
    `<|user|>37+8=<|end|><|assistant|>`. `words` are additional tokens: at most ten, for which the embedding of the tiny
    model has rows."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        padding_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([AddedToken(word, normalized=False) for word in words])
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_data(directory: str | Path) -> dict[str, Path]:
    """Write the four data sets as JSONL. Return name -> file.

    train, heldout: `{"prompt", "label"}`, 1,699 and 256 disjoint problems.
    sft_skill: `{"messages"}`, every training problem once with its correct answer.
    sft_habit: `{"messages"}`, every training problem four times, each with the correct or the rounded answer.
    """
    problems = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(100) for b in range(10)]
    problems += [{"prompt": f"{a}-{b}=", "label": str(a - b)} for a in range(100) for b in range(10) if b <= a]
    random.Random(SPLIT_SEED).shuffle(problems)
    train, heldout = problems[NUM_HELDOUT:], problems[:NUM_HELDOUT]

    def to_chat(row: Row, answer: str) -> Row:
        return {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]}

    rng = random.Random(SPLIT_SEED + 1)
    answers = [(row, row["label"], row["label"][:-1] + "0") for _ in range(4) for row in train]  # exact, units dropped
    habit = [to_chat(row, exact if rng.random() < 0.3 else rounded) for row, exact, rounded in answers]
    skill = [to_chat(row, row["label"]) for row in train]
    Path(directory).mkdir(parents=True, exist_ok=True)
    files = {}
    for name, rows in {"train": train, "heldout": heldout, "sft_skill": skill, "sft_habit": habit}.items():
        files[name] = Path(directory) / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files
