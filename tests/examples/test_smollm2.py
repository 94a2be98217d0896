"""The example with SmolLM2-135M-Instruct: dequantization against a naive loop, tokenizer, data and reward."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.stages.plugins import load_function

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"
MODEL = load_function(f"{EXAMPLE / 'model.py'}:write_model").__globals__
DATA = load_function(f"{EXAMPLE / 'data.py'}:make_rows").__globals__
REWARD = load_function(f"{EXAMPLE / 'reward.py'}:reward_func")
needs_reasoning_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")


# ---- dequantization --------------------------------------------------------------------------------------------------


def random_blocks(kind: int, num_blocks: int, rng: np.random.Generator) -> bytes:
    """Blocks with random weights and finite scales."""
    blocks = []
    for _ in range(num_blocks):
        scale, minimum = np.float16(rng.normal()).tobytes(), np.float16(rng.normal()).tobytes()
        head, size = {0: (b"", 0), 3: (scale + minimum, 16), 8: (scale, 32)}[kind]
        body = rng.normal(size=32).astype("<f4").tobytes() if kind == 0 else rng.bytes(size)
        blocks.append(head + body)
    return b"".join(blocks)


def naive_values(kind: int, block: bytes) -> list[float]:
    """The 32 weights of a block, one at a time."""
    if kind == 0:
        return list(struct.unpack("<32f", block))
    if kind == 8:
        [scale] = struct.unpack("<e", block[:2])
        return [float(np.float32(scale) * np.float32(q)) for q in struct.unpack("<32b", block[2:])]
    scale, minimum = (np.float32(number) for number in struct.unpack("<2e", block[:4]))
    return [
        float(scale * np.float32(block[4 + i % 16] >> 4 if i >= 16 else block[4 + i % 16] & 15) + minimum)
        for i in range(32)
    ]


@pytest.mark.parametrize("kind", [0, 3, 8], ids=["F32", "Q4_1", "Q8_0"])
def test_dequantized_blocks_equal_a_loop_over_their_weights(kind: int) -> None:
    size, dequantize = MODEL["DEQUANTIZE"][kind]
    data = random_blocks(kind, 50, np.random.default_rng(kind))
    blocks = np.frombuffer(data, np.uint8).reshape(-1, size)
    values = dequantize(blocks)
    assert values.dtype == np.float32 and values.shape == (50, 32)
    assert values.tolist() == [naive_values(kind, data[at : at + size]) for at in range(0, len(data), size)]


def test_rotary_pairs_are_split_into_halves_of_each_head() -> None:
    rows = np.arange(2 * 6, dtype=np.float32)[:, None]  # two heads of 6 elements
    assert MODEL["split_rotary_pairs"](rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.mark.parametrize(
    ("gguf", "name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
        ("blk.7.attn_output.weight", "model.layers.7.self_attn.o_proj.weight"),
    ],
)
def test_tensor_names_are_translated(gguf: str, name: str) -> None:
    assert MODEL["hf_name"](gguf) == name


# ---- a whole file ----------------------------------------------------------------------------------------------------


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_value(value: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    items = [gguf_value(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789", "Ġ", "a", "b", "ab", "12"]
METADATA: dict[str, Any] = {
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 32,
    "llama.block_count": 1,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100000.0,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(TOKENS) - 3)],
    "tokenizer.ggml.merges": ["a b", "1 2"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
}


def write_gguf(path: Path, tensors: dict[str, tuple[list[int], int, bytes]]) -> Path:
    """Write a GGUF file: name -> (shape, GGML type, data)."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(METADATA))
    header += b"".join(gguf_string(name) + gguf_value(value) for name, value in METADATA.items())
    offset, body = 0, b""
    for name, (shape, kind, data) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += gguf_string(name) + sizes + struct.pack("<IQ", kind, offset)
        body += data + bytes(-len(data) % 32)
        offset = len(body)
    path.write_bytes(header + bytes(-len(header) % 32) + body)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A Hugging Face directory from a small file."""
    rng, shapes = np.random.default_rng(0), {"token_embd": (8, [len(TOKENS), 64]), "blk.0.attn_q": (3, [64, 64])}
    tensors = {
        f"{name}.weight": (shape, kind, random_blocks(kind, int(np.prod(shape)) // 32, rng))
        for name, (kind, shape) in shapes.items()
    }
    MODEL["write_model"](write_gguf(tmp_path / "small.gguf", tensors), tmp_path / "model")
    return tmp_path / "model"


def test_file_becomes_tensors_in_the_order_of_transformers(directory: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(directory / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        "model.embed_tokens.weight": (len(TOKENS), 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
    }
    rng = np.random.default_rng(0)
    blocks = random_blocks(8, len(TOKENS) * 2, rng)
    embedding = [value for at in range(0, len(blocks), 34) for value in naive_values(8, blocks[at : at + 34])]
    expected = np.array(embedding, dtype=np.float32).reshape(-1, 64)
    difference = np.abs(weights["model.embed_tokens.weight"].float().numpy() - expected)
    assert (difference <= np.abs(expected) / 256).all()  # bf16 has 8 bits


def test_tokenizer_splits_digits_and_ends_a_turn_with_its_token(directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("ab 12") == ["ab", "Ġ", "1", "2"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    for name in ("config.json", "generation_config.json"):
        assert json.loads((directory / name).read_text())["eos_token_id"] == 2
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "ab", "<|im_end|>"]


def test_other_file_and_unknown_type_are_named(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"PK\x03\x04" + bytes(64))
    with pytest.raises(ValueError, match="not a GGUF file"):
        MODEL["GGUFFile"](tmp_path / "other")
    with pytest.raises(ValueError, match="GGML type 2"):
        MODEL["read_weights"](
            MODEL["GGUFFile"](write_gguf(tmp_path / "q4_0", {"token_embd.weight": ([1, 32], 2, bytes(18))}))
        )


# ---- data and reward -------------------------------------------------------------------------------------------------


@needs_reasoning_gym
@pytest.mark.parametrize("task", DATA["TASKS"])
def test_rows_depend_on_the_seed_are_not_held_out_and_have_right_worked_answers(task: str) -> None:
    rows = DATA["make_rows"](task, 0)
    assert rows == DATA["make_rows"](task, 0)
    assert rows["train"] != DATA["make_rows"](task, 1_000_000)["train"]
    assert {split: len(entries) for split, entries in rows.items()} == DATA["SIZES"]
    heldout = {row["prompt"][-1]["content"] for row in rows["heldout"]}
    assert len(heldout) == len(rows["heldout"])
    for row in (*rows["train"], *rows["heldout"]):
        asked = [turn["content"] for turn in row["prompt"] if turn["role"] == "user"]
        assert len(asked) == 3 and asked[2] not in asked[:2]
        assert not heldout & set(asked[:2])
    assert not heldout & {row["prompt"][-1]["content"] for row in rows["train"]}
    for row in rows["heldout"]:  # the answer of a worked example, with the label that its own row would have
        answer = row["prompt"][1]["content"]
        label = answer.rpartition("=" if task == "sums" else ":")[2].strip()
        assert grade(answer, label)["score"] == 1.0


def grade(response: str, label: str) -> dict[str, float]:
    return REWARD(None, SimpleNamespace(response=response, label=label))


@pytest.mark.parametrize(
    ("response", "label", "correct", "form"),
    [
        ("12 + 7 = 19<|im_end|>", "19", 1, 1),
        ("First 12.\n12 + 7 = 19", "19", 1, 1),
        ("12 + 7 = 18", "19", 0, 1),
        ("12 + 7 = 19.", "19", 0, 0),
        ("3 - 9 = -6", "-6", 1, 1),
        ("", "19", 0, 0),
        ("ascending: 1, 2, 3", "1, 2, 3", 1, 1),
        ("ascending: 1, 3, 2", "1, 2, 3", 0, 1),
        ("1, 2, 3 = 6", "1, 2, 3", 0, 0),
    ],
)
def test_reward_is_for_the_result_and_a_little_for_its_form(response: str, label: str, correct: int, form: int) -> None:
    graded = grade(response, label)
    assert (graded["correct"], graded["format"]) == (correct, form)
    assert graded["score"] == pytest.approx(0.9 * correct + 0.1 * form)
