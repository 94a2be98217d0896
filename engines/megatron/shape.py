"""The shape of a model: all that building, converting and counting it needs to know. No torch here: preflight uses it too.

Reading it from a Hugging Face `config.json` is `hf_config.py`'s, naming it with Megatron's options `model_options.py`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


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
    mscale: float = 1.0  # both count only together; 0: absent from config.json
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
    score: Literal["softmax", "sigmoid"] = "softmax"  # softmax over all experts, before the best are chosen
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
    qk_layernorm: bool  # of whole heads; latent attention has norms of its own, and True here
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
            ModelError: no config, an architecture without a layout, or an entry that cannot be honoured.
        """
        from engines.megatron.hf_config import read_shape

        return read_shape(Path(directory) / "config.json")

    @property
    def num_parameters(self) -> int:
        """Parameters, embeddings included once if tied. Multi-token prediction layers and frozen router corrections are none."""
        return self._num_parameters(self.experts.num_experts if self.experts else 0)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that take part in one token: of the routed experts only the chosen ones."""
        return self._num_parameters(self.experts.top_k if self.experts else 0)

    def train_flops(self, tokens: int, squared_lengths: int) -> float:
        """Floating-point operations of one forward and backward pass (Narayanan et al. 2021, without recomputation).

        Args:
            tokens: number of tokens.
            squared_lengths: sum over sequences of length squared (causal attention does half of it).
        """
        widths = self.head_dim + (self.latent.v_head_dim if self.latent else self.head_dim)  # scores, then weighted values
        attention = self.num_layers * self.num_attention_heads * widths * squared_lengths
        return 6.0 * self._matrices(self.experts.top_k if self.experts else 0) * tokens + 3.0 * attention

    def _num_parameters(self, num_experts: int) -> int:
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self._matrices(num_experts) + embedding + self.num_layers * self._layer_vectors + self.hidden_size

    def _matrices(self, num_experts: int) -> int:
        """Numbers in the matrices that a token is multiplied with, the head included, if it meets so many routed experts."""
        mlp = 3 * self.hidden_size
        total = self.num_layers * self._attention_matrices + self.vocab_size * self.hidden_size
        if self.experts is None:
            return total + self.num_layers * mlp * self.ffn_hidden_size
        dense, experts = self.experts.num_dense_layers, self.experts
        routed = self.hidden_size * experts.num_experts + mlp * num_experts * experts.ffn_hidden_size
        mixture = routed + mlp * experts.shared_ffn_hidden_size
        return total + dense * mlp * self.ffn_hidden_size + (self.num_layers - dense) * mixture

    @property
    def _attention_matrices(self) -> int:
        hidden, queries = self.hidden_size, self.num_attention_heads * self.head_dim
        if self.latent is None:
            return hidden * (2 * queries + 2 * self.num_query_groups * self.head_dim)
        latent, heads = self.latent, self.num_attention_heads
        rank = latent.q_lora_rank
        query = hidden * queries if rank is None else rank * (hidden + queries)
        down = hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
        up = latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        return query + down + up + heads * latent.v_head_dim * hidden

    @property
    def _layer_vectors(self) -> int:
        """Numbers in a layer's norms and biases."""
        norms = (4 if self.sandwich_norms else 2) * self.hidden_size
        if self.latent is not None:
            return norms + (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank
        biases = (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim if self.qkv_bias else 0
        return norms + biases + (2 * self.head_dim if self.qk_layernorm else 0)
