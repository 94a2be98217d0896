"""The shape of a model, read from its Hugging Face `config.json`. No torch here: preflight and the CLI use it too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FAMILIES = {"Qwen3ForCausalLM": "qwen3"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Llama3Scaling(_Part):
    """Llama 3.1's stretching of long wavelengths (transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnScaling(_Part):
    """YaRN (Peng et al. 2023), with DeepSeek's mscale."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


class Rotary(_Part):
    """Rotary position embedding (Su et al. 2021)."""

    base: float  # Hugging Face's rope_theta
    fraction: float = 1.0  # of a head's dimensions that turn; the first ones
    interleaved: bool = False  # pairs (0, 1), (2, 3), ... turn together, instead of (i, i + half)
    scaling: Llama3Scaling | YarnScaling | None = None


class LatentAttention(_Part):
    """Multi-head latent attention (DeepSeek-V2). A head has `nope + rope` query and key dimensions."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Experts(_Part):
    """A mixture of experts in place of the MLP."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # of one routed expert
    shared_ffn_hidden_size: int = 0  # of all shared experts together
    num_dense_layers: int = 0  # the first ones have an ordinary MLP of the model's ffn_hidden_size
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True  # the chosen experts' scores are divided by their sum
    bias: bool = False  # a frozen correction is added to the scores for choosing, not for weighting
    num_groups: int = 1  # experts are chosen from the best `top_groups` groups only
    top_groups: int = 1
    scaling: float = 1.0  # of the routed experts' sum


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
    head_dim: int  # of queries and keys
    vocab_size: int
    max_position_embeddings: int
    rotary: Rotary
    norm_epsilon: float
    qk_layernorm: bool
    qkv_bias: bool
    tied_embeddings: bool
    sandwich_norms: bool = False  # norms also after attention and after the MLP, before the residual is added (GLM-4)
    latent: LatentAttention | None = None  # None: grouped-query attention
    experts: Experts | None = None  # None: every layer is dense
    num_mtp_layers: int = 0  # multi-token prediction layers after the last one; not trained

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
            rotary=Rotary(base=config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
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
