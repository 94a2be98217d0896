"""The shape of a model (`ModelShape`): sizes, layer variants, and numbers of parameters and FLOPs. Does not import
torch.

`penstock.engines.families.read_shape` reads the shape of the model in a Hugging Face directory.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.storage.errors import OptionError
from penstock.storage.samples.routed_experts import ExpertsFormat


class _Component(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Llama3Scaling(_Component):
    """Llama 3.1's scaling of long RoPE wavelengths (transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


class YarnScaling(_Component):
    """RoPE scaling by YaRN (Peng et al. 2023), with DeepSeek's mscale."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0  # used only if mscale_all_dim is set too; 0: absent from config.json
    mscale_all_dim: float = 0.0


class Rotary(_Component):
    """Settings of rotary position embedding (RoPE, Su et al. 2021)."""

    base: float  # Hugging Face's rope_theta
    fraction: float = 1.0  # fraction of each head's dimensions that are rotated, starting with the first
    interleaved: bool = False  # rotate the pairs (0, 1), (2, 3), ... instead of (i, i + half)
    scaling: Llama3Scaling | YarnScaling | None = None


class LatentAttention(_Component):
    """Sizes of multi-head latent attention (MLA, DeepSeek-V2). A query or key head has nope + rope dimensions."""

    q_lora_rank: int | None  # None: no low-rank projection of queries
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Experts(_Component):
    """Settings of a mixture of experts, which replaces the dense MLP."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int  # width of one routed expert's MLP
    shared_ffn_hidden_size: int = 0  # width of all shared experts of a layer together
    num_dense_layers: int = 0  # number of first layers, which have a dense MLP of size ModelShape.ffn_hidden_size
    score: Literal["softmax", "sigmoid"] = "softmax"  # softmax is over all experts, before top-k
    normalized: bool = True  # divide the scores of the top-k experts by their sum
    bias: bool = False  # add a frozen correction (e_score_correction_bias) to the scores for top-k only
    num_groups: int = 1  # groups of experts; for each token, top-k selects only from its best `top_groups` groups
    top_groups: int = 1
    scaling: float = 1.0  # factor by which the sum of the routed experts' outputs is multiplied


class ModelShape(BaseModel):
    """A decoder-only transformer, described in Megatron-core's terms."""

    model_config = ConfigDict(frozen=True)

    architecture: str  # exact entry of config.json's `architectures`
    family: str  # `Family.name`
    # --model-family-path of an external family
    family_path: str | None = Field(None, exclude_if=lambda path: path is None)
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int  # dimensions of a query or key head
    vocab_size: int
    max_position_embeddings: int
    rotary: Rotary
    norm_epsilon: float
    qk_layernorm: bool  # RMSNorm of each query and key head; True for MLA, which normalizes its low-rank vectors
    qkv_bias: bool
    tied_embeddings: bool
    sandwich_norms: bool = False  # also normalize the outputs of attention and MLP, before the residual add (GLM-4)
    latent: LatentAttention | None = None  # None: grouped-query attention
    experts: Experts | None = None  # None: every layer is dense
    num_mtp_layers: int = 0  # multi-token prediction layers after the last layer; not trained

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the model. Tied embeddings count once; multi-token prediction layers and
        frozen score corrections of routers are not counted."""
        return self._num_parameters(self.experts.num_experts if self.experts else 0)

    @property
    def num_active_parameters(self) -> int:
        """Return the number of parameters used for one token: all except routed experts that are not in the top-k."""
        return self._num_parameters(self.experts.top_k if self.experts else 0)

    def train_flops(self, tokens: int, sum_of_squared_lengths: int, *, frozen: bool = False) -> float:
        """Return the FLOPs of one forward and backward pass of the model (Narayanan et al. 2021, without
        recomputation). The squared lengths of the sequences count pairs of tokens; causal attention computes half of
        them. `frozen`: the weights have no gradients, because only adapters are trained, which are not counted."""
        widths = self.head_dim + (self.latent.v_head_dim if self.latent else self.head_dim)  # QK^T + attention x V
        attention = self.num_layers * self.num_attention_heads * widths * sum_of_squared_lengths
        products = 4.0 if frozen else 6.0  # forward, gradient of the input, gradient of the weight; 2 FLOPs each
        return products * self._num_matrix_weights(self.experts.top_k if self.experts else 0) * tokens + 3.0 * attention

    def _num_parameters(self, num_experts: int) -> int:
        """Return the number of parameters, counting `num_experts` routed experts per layer."""
        vectors = (4 if self.sandwich_norms else 2) * self.hidden_size  # weights of norms and biases of one layer
        if self.latent is not None:
            vectors += (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank
        else:
            vectors += (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim if self.qkv_bias else 0
            vectors += 2 * self.head_dim if self.qk_layernorm else 0
        embedding = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self._num_matrix_weights(num_experts) + embedding + self.num_layers * vectors + self.hidden_size

    def _num_matrix_weights(self, num_experts: int) -> int:
        """Return the number of weights in the matrices that a token is multiplied with, including the LM head and
        `num_experts` routed experts per layer."""
        hidden, heads, queries = self.hidden_size, self.num_attention_heads, self.num_attention_heads * self.head_dim
        if latent := self.latent:
            rank = latent.q_lora_rank
            attention = hidden * queries if rank is None else rank * (hidden + queries)
            attention += hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
            attention += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
            attention += heads * latent.v_head_dim * hidden
        else:
            attention = hidden * (2 * queries + 2 * self.num_query_groups * self.head_dim)
        total = self.num_layers * attention + self.vocab_size * hidden
        mlp = 3 * hidden
        if self.experts is None:
            return total + self.num_layers * mlp * self.ffn_hidden_size
        dense, experts = self.experts.num_dense_layers, self.experts
        routed = hidden * experts.num_experts + mlp * num_experts * experts.ffn_hidden_size
        mixture = routed + mlp * experts.shared_ffn_hidden_size
        return total + dense * mlp * self.ffn_hidden_size + (self.num_layers - dense) * mixture


def experts_format(shape: ModelShape, option: str) -> ExpertsFormat:
    """Return the format in which the routed expert ids of a model's tokens are stored. Raises OptionError about the
    option `option` if the model has no experts."""
    if shape.experts is None:
        raise OptionError(f"{option} needs an MoE model, but {shape.architecture} has no experts: omit the option")
    return ExpertsFormat(
        num_layers=shape.num_layers,
        num_dense_layers=shape.experts.num_dense_layers,
        num_experts=shape.experts.num_experts,
        top_k=shape.experts.top_k,
    )
