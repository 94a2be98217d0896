"""The shape of a model, read from its Hugging Face `config.json`. No torch here: preflight and the CLI use it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

FAMILIES = {"Qwen3ForCausalLM": "qwen3"}


class ModelShape(BaseModel):
    """A decoder-only transformer, in Megatron-core's words."""

    model_config = ConfigDict(frozen=True)

    architecture: str  # exact entry of config.json's `architectures`
    family: str  # row of storage.layouts
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: float
    norm_epsilon: float
    qk_layernorm: bool
    qkv_bias: bool
    tied_embeddings: bool

    @classmethod
    def from_hf(cls, directory: str | Path) -> ModelShape:
        """Read `<directory>/config.json`.

        Raises:
            ValueError: no config, or an architecture without a layout.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: give --hf-checkpoint a Hugging Face model directory (config.json, *.safetensors, "
                "tokenizer)"
            )
        config: dict[str, Any] = json.loads(path.read_text())
        architecture = (config.get("architectures") or ["none"])[0]
        if architecture not in FAMILIES:
            raise ValueError(
                f"{path} names the architecture {architecture!r}; Penstock converts {', '.join(FAMILIES)}: use a checkpoint of "
                "one of these"
            )
        rope = config.get("rope_parameters") or {}  # transformers 5 moved rope_theta here
        heads = config["num_attention_heads"]
        return cls(
            architecture=architecture,
            family=FAMILIES[architecture],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rotary_base=config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            qk_layernorm=True,
            qkv_bias=bool(config.get("attention_bias", False)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def num_parameters(self) -> int:
        """Parameters, embeddings included once if tied."""
        return (
            self.num_layers * self._layer_parameters
            + self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
            + self.hidden_size
        )

    @property
    def _layer_parameters(self) -> int:
        queries, keys = self.num_attention_heads * self.head_dim, self.num_query_groups * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys) + (queries + 2 * keys if self.qkv_bias else 0)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_layernorm else 0)
        return attention + 3 * self.hidden_size * self.ffn_hidden_size + norms

    def train_flops(self, tokens: int, squared_lengths: int) -> float:
        """Floating-point operations of one forward and backward pass (Narayanan et al. 2021, without recomputation).

        Args:
            tokens: number of tokens.
            squared_lengths: sum over sequences of length squared (causal attention does half of it).
        """
        matrices = self.num_layers * (self._layer_parameters - 2 * self.hidden_size) + self.vocab_size * self.hidden_size
        attention = 2 * self.num_layers * self.num_attention_heads * self.head_dim * squared_lengths
        return 6.0 * matrices * tokens + 3.0 * attention
