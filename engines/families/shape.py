"""The shape of a model (`ModelShape`): sizes, layer variants, and numbers of parameters and FLOPs. Does not import
torch.

`penstock.engines.families.read_shape` reads the shape of the model in a Hugging Face directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock.storage.errors import DataError, OptionError
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
    # M-RoPE (arXiv 2409.12191): numbers of pairs that are rotated by a token's position in time, height and width
    sections: tuple[int, int, int] | None = Field(default=None, exclude_if=lambda sections: sections is None)
    # the pairs of the three sections alternate (time, height, width, time, ...), and the rest belongs to time
    alternating_sections: bool = Field(default=False, exclude_if=lambda alternating: not alternating)


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


VisionVariant = Literal["qwen2.5", "qwen3"]


class Vision(_Component):
    """The vision tower of a Qwen-VL model: a transformer over the patches of images, and mergers, which map a block of
    `merge_size` x `merge_size` patches to the embedding of one image token.

    The variant "qwen2.5" has RMSNorm, SwiGLU and attention within windows, "qwen3" LayerNorm, GELU, learned position
    embeddings, and deepstack features (arXiv 2406.04334), which are added to hidden states of the language model.
    """

    variant: VisionVariant
    image_token_id: int  # token that the prompt has once for each embedding of an image
    num_blocks: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    output_size: int  # hidden size of the language model
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    window_size: int = 0  # side of an attention window, in patches after merging; 0: full attention
    full_attention_blocks: tuple[int, ...] = ()  # blocks without windows
    positions_per_side: int = 0  # learned position embeddings per side of an image, interpolated to its size
    deepstack_blocks: tuple[int, ...] = ()  # the output of the i-th of these blocks is added after decoder layer i

    @property
    def patch_dim(self) -> int:
        """Return the number of values of a patch in `pixel_values`."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    def num_image_tokens(self, grid: Sequence[int]) -> int:
        """Return the number of tokens of an image with `grid` = (frames, rows, columns) of patches."""
        return prod(map(int, grid)) // self.merge_size**2

    @property
    def merged_size(self) -> int:
        """Return the size of the concatenated hidden vectors of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by their name in the tower."""
        hidden, merged, is_qwen3 = self.hidden_size, self.merged_size, self.variant == "qwen3"
        frame = (self.temporal_patch_size, self.patch_size, self.patch_size)
        weights: dict[str, tuple[int, ...]] = {"patch_embed.proj": (hidden, self.in_channels, *frame)}
        weights |= {"pos_embed": (self.positions_per_side**2, hidden)} if self.positions_per_side else {}
        for block in (f"blocks.{index}." for index in range(self.num_blocks)):
            weights |= {f"{block}norm1": (hidden,), f"{block}norm2": (hidden,)}
            weights |= {f"{block}attn.qkv": (3 * hidden, hidden), f"{block}attn.proj": (hidden, hidden)}
            weights[f"{block}mlp.linear_fc1"] = (self.ffn_hidden_size * (1 if is_qwen3 else 2), hidden)
            weights[f"{block}mlp.linear_fc2"] = (hidden, self.ffn_hidden_size)
        mergers = {"merger.": hidden} | {
            f"deepstack_merger_list.{index}.": merged for index in range(len(self.deepstack_blocks))
        }
        for merger, norm_size in mergers.items():
            weights |= {f"{merger}norm": (norm_size,), f"{merger}linear_fc1": (merged, merged)}
            weights[f"{merger}linear_fc2"] = (self.output_size, merged)
        no_bias = {"pos_embed"} | (set() if is_qwen3 else {"patch_embed.proj"})
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in weights.items():
            shapes[f"{name}.weight"] = shape
            if name not in no_bias and (is_qwen3 or len(shape) > 1):  # RMSNorm has no bias
                shapes[f"{name}.bias"] = shape[:1]
        return shapes

    def train_flops(self, grids: Iterable[Sequence[int]], *, trained: bool) -> float:
        """Return the FLOPs of one forward pass over images with these (frames, rows, columns) of patches; `trained`: of
        a forward and a backward pass."""
        side = self.window_size * self.merge_size  # of a window, in patches
        windowed = self.num_blocks - len(self.full_attention_blocks) if side else 0  # number of blocks with windows
        matrices = {name: prod(size) for name, size in self.tensor_shapes.items() if len(size) > 1}
        matrices.pop("pos_embed.weight", None)
        # weights per patch: mergers multiply blocks of patches
        weights = sum(count / (self.merge_size**2 if "merger" in name else 1) for name, count in matrices.items())
        forward = 0.0
        for frames, rows, columns in grids:
            pairs = (self.num_blocks - windowed) * (rows * columns) ** 2  # pairs of patches, of all blocks
            if windowed:
                pairs += windowed * prod(length // side * side**2 + (length % side) ** 2 for length in (rows, columns))
            forward += frames * (2 * weights * rows * columns + 4 * self.hidden_size * pairs)
        return forward * (3.0 if trained else 1.0)

    def image_starts(self, token_ids: np.ndarray, grids: Sequence[Sequence[int]]) -> list[int]:
        """Return the index of each image's first token in a sequence, as the function `image_starts` does. `grids` has
        (frames, rows, columns) of patches of each image."""
        return image_starts(token_ids, self.image_token_id, [*map(self.num_image_tokens, grids)])

    def token_positions(self, num_tokens: int, starts: Sequence[int], grids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the M-RoPE positions (time, height, width) of a sequence's tokens. [3, num_tokens] int64

        The three positions of a text token are equal. An image token has its frame, row and column, counted from the
        position after the preceding text; the text after an image continues after the image's longer side. `starts` has
        the index of each image's first token, and `grids` its (frames, rows, columns) of patches.
        """
        positions, end, following = np.empty((3, num_tokens), np.int64), 0, 0
        for start, (frames, rows, columns) in zip(starts, grids, strict=True):
            size = (int(frames), int(rows) // self.merge_size, int(columns) // self.merge_size)
            positions[:, end:start] = following + np.arange(start - end)
            following, end = following + start - end, start + prod(size)
            positions[:, start:end] = following + np.indices(size).reshape(3, -1)
            following += max(size[1:])
        positions[:, end:] = following + np.arange(num_tokens - end)
        return positions


def image_starts(token_ids: np.ndarray, image_token_id: int, num_tokens: Sequence[int]) -> list[int]:
    """Return the index of each image's first token in a sequence. `num_tokens` has the number of tokens of
    each image. Raises DataError if the sequence has more or fewer image tokens than that, or if the tokens of an image
    are not consecutive."""
    tokens, firsts = np.flatnonzero(token_ids == image_token_id), np.cumsum([0, *num_tokens])
    if len(tokens) == firsts[-1]:
        starts = tokens[firsts[:-1]].tolist()
        spans = [np.arange(start, start + count) for start, count in zip(starts, num_tokens)]
        if np.array_equal(tokens, np.concatenate([tokens[:0], *spans])):
            return starts
    raise DataError(
        f"a prompt has {len(tokens)} image tokens (id {image_token_id}), but its {len(num_tokens)} images need "
        f"{firsts[-1]}: give each image as many consecutive image tokens as it has blocks of merged patches"
    )


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
    vision: Vision | None = Field(default=None, exclude_if=lambda vision: vision is None)  # None: a model of text only

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the model. Tied embeddings count once; multi-token prediction layers and
        frozen score corrections of routers are not counted."""
        return self._num_parameters(self.experts.num_experts if self.experts else 0)

    @property
    def num_active_parameters(self) -> int:
        """Return the number of parameters used for one token: all except routed experts that are not in the top-k."""
        return self._num_parameters(self.experts.top_k if self.experts else 0)

    def train_flops(
        self,
        tokens: int,
        sum_of_squared_lengths: int,
        grids: Iterable[Sequence[int]] = (),
        *,
        frozen: bool = False,
        trains_vision: bool = False,
    ) -> float:
        """Return the FLOPs of one forward and backward pass of the model (Narayanan et al. 2021, without
        recomputation). The squared lengths of the sequences count pairs of tokens; causal attention computes half of
        them. `grids`: (frames, rows, columns) of patches of each image; a vision tower that is not trained has no
        backward pass. `frozen`: the weights have no gradients, because only adapters are trained, which are not
        counted."""
        widths = self.head_dim + (self.latent.v_head_dim if self.latent else self.head_dim)  # QK^T + attention x V
        attention = self.num_layers * self.num_attention_heads * widths * sum_of_squared_lengths
        products = 4.0 if frozen else 6.0  # forward, gradient of the input, gradient of the weight; 2 FLOPs each
        matrices = self._num_matrix_weights(self.experts.top_k if self.experts else 0)
        tower = self.vision.train_flops(grids, trained=trains_vision) if self.vision else 0.0
        return products * matrices * tokens + 3.0 * attention + tower

    def _num_parameters(self, num_experts: int) -> int:
        """Return the number of parameters, counting `num_experts` routed experts per layer."""
        vectors = (4 if self.sandwich_norms else 2) * self.hidden_size  # weights of norms and biases of one layer
        if self.latent is not None:
            vectors += (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank
        else:
            vectors += (self.num_attention_heads + 2 * self.num_query_groups) * self.head_dim if self.qkv_bias else 0
            vectors += 2 * self.head_dim if self.qk_layernorm else 0
        outside = self.hidden_size + (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)
        outside += sum(map(prod, self.vision.tensor_shapes.values())) if self.vision else 0
        return self._num_matrix_weights(num_experts) + outside + self.num_layers * vectors

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
