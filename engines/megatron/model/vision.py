"""The vision tower of Qwen2.5-VL and Qwen3-VL, and how its outputs enter the language model.

The tower is on the first pipeline stage and replicated over tensor- and context-parallel ranks. Each rank computes all
images of a micro-batch, and uses the outputs for the image tokens among its own rows of hidden states. Its gradients
are therefore those of these rows only; under sequence parallelism Megatron sums them over the tensor-parallel ranks, as
it does for norms, and DistributedDataParallel over context-parallel ranks. Without sequence parallelism all
tensor-parallel ranks have the same rows, and equal gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.engines.families.shape import Vision
from penstock.engines.megatron.model.attention import packed_attention
from penstock.engines.megatron.model.norm_and_rope import RMSNorm, apply_rope
from penstock.engines.megatron.packing import PackedStream, Segments, StreamImages, make_buckets

EPSILON = 1e-6  # of all norms in the tower; transformers has no option for it
ROPE_BASE = 10000.0
CosSin = tuple[Tensor, Tensor]


class VisionTower(nn.Module):
    """Map the patches of images to embeddings of image tokens, and to deepstack features."""

    def __init__(self, vision: Vision, config: Any) -> None:
        super().__init__()
        self.shape, self.recomputed = vision, config.recompute_granularity == "full"
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        options = dict(dtype=config.params_dtype, device=device)
        kernel = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        bias = vision.variant == "qwen3"
        self.patch_embed = nn.ModuleDict(
            {"proj": PatchProjection(vision.in_channels, vision.hidden_size, kernel, bias=bias, **options)}
        )
        if vision.positions_per_side:
            self.pos_embed = nn.Embedding(vision.positions_per_side**2, vision.hidden_size, **options)
        self.blocks = nn.ModuleList(VisionBlock(vision, config, options) for _ in range(vision.num_blocks))
        self.merger = Merger(vision, vision.hidden_size, config, options)
        self.deepstack_merger_list = nn.ModuleList(
            Merger(vision, vision.merged_size, config, options) for _ in vision.deepstack_blocks
        )
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, pixel_values: Tensor, grids: list[list[int]], kernel: str) -> list[Tensor]:
        """Return the embeddings of the image tokens, and the deepstack features in the order of decoder layers. [n,
        output_size] each

        Args:
            pixel_values: [P, patch_dim] patches of all images, in the order of transformers' image processors: block by
                block of merge_size x merge_size patches.
            grids: (frames, rows, columns) of patches of each image.
            kernel: attention kernel of the language model.
        """
        project: Any = self.patch_embed["proj"]
        x = pixel_values.to(project.weight.device, project.weight.dtype)
        plan = plan_patches(self.shape, grids, x.device, "padded" if kernel == "padded" else "torch")
        x = project(x if plan.order is None else x[plan.order])
        if self.shape.positions_per_side:
            corners, weights = plan.corners(self.shape.positions_per_side)
            x = x + (self.pos_embed(corners) * weights[:, :, None]).sum(0).to(x.dtype)
        cos_sin = plan.cos_sin(self.shape.hidden_size // self.shape.num_attention_heads)
        features: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            segments = plan.images if index in self.shape.full_attention_blocks else plan.windows
            if self.recomputed and torch.is_grad_enabled():
                x = checkpoint(block, x, segments, cos_sin, use_reentrant=False)
            else:
                x = block(x, segments, cos_sin)
            if index in self.shape.deepstack_blocks:
                features.append(self.deepstack_merger_list[len(features)](x))
        features = [self.merger(x), *features]
        return features if plan.restore is None else [feature[plan.restore] for feature in features]


class PatchProjection(nn.Conv3d):
    """A convolution with the size of a patch, applied to single patches: a matrix product."""

    def forward(self, patches: Tensor) -> Tensor:  # [P, patch_dim] -> [P, D]
        return F.linear(patches, self.weight.flatten(1), self.bias)


def make_norm(vision: Vision, size: int, config: Any, options: dict[str, Any]) -> nn.Module:
    """Return a norm of the tower's variant."""
    return RMSNorm(config, size, EPSILON) if vision.variant == "qwen2.5" else nn.LayerNorm(size, EPSILON, **options)


class VisionBlock(nn.Module):
    """A pre-norm transformer layer of the tower."""

    def __init__(self, vision: Vision, config: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm1, self.norm2 = (make_norm(vision, vision.hidden_size, config, options) for _ in range(2))
        self.attn = VisionAttention(vision, options)
        self.mlp = VisionMLP(vision, options)

    def forward(self, x: Tensor, segments: Segments, cos_sin: CosSin) -> Tensor:  # [P, D] -> [P, D]
        x = x + self.attn(self.norm1(x), segments, cos_sin)
        return x + self.mlp(self.norm2(x))


class VisionAttention(nn.Module):
    """Bidirectional attention with RoPE among the patches of an image or of a window."""

    def __init__(self, vision: Vision, options: dict[str, Any]) -> None:
        super().__init__()
        size, self.num_heads = vision.hidden_size, vision.num_attention_heads
        self.qkv, self.proj = nn.Linear(size, 3 * size, **options), nn.Linear(size, size, **options)

    def forward(self, x: Tensor, segments: Segments, cos_sin: CosSin) -> Tensor:
        query, key, value = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)  # [P, heads, head_dim] each
        query, key = (apply_rope(part, cos_sin, interleaved=False) for part in (query, key))
        out = packed_attention(query, key, value, segments, query.shape[-1] ** -0.5, causal=False)
        return self.proj(out.flatten(1))


class VisionMLP(nn.Module):
    """SwiGLU ("qwen2.5"), whose first matrix has the rows of gate, then of up; or GELU ("qwen3")."""

    def __init__(self, vision: Vision, options: dict[str, Any]) -> None:
        super().__init__()
        self.is_gated = vision.variant == "qwen2.5"
        size, ffn = vision.hidden_size, vision.ffn_hidden_size
        self.linear_fc1 = nn.Linear(size, 2 * ffn if self.is_gated else ffn, **options)
        self.linear_fc2 = nn.Linear(ffn, size, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.is_gated:
            gate, up = x.chunk(2, dim=-1)
            return self.linear_fc2(F.silu(gate) * up)
        return self.linear_fc2(F.gelu(x, approximate="tanh"))


class Merger(nn.Module):
    """The projector: concatenate the patches of a block, and map them to one embedding. `norm_size` is that of a patch
    or of a block: the norm comes before or after the concatenation."""

    def __init__(self, vision: Vision, norm_size: int, config: Any, options: dict[str, Any]) -> None:
        super().__init__()
        self.merged_size, self.norm_size = vision.merged_size, norm_size
        self.norm = make_norm(vision, norm_size, config, options)
        self.linear_fc1 = nn.Linear(vision.merged_size, vision.merged_size, **options)
        self.linear_fc2 = nn.Linear(vision.merged_size, vision.output_size, **options)

    def forward(self, x: Tensor) -> Tensor:  # [P, D] -> [n, output_size]
        x = self.norm(x.view(-1, self.norm_size)).view(-1, self.merged_size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))


# ---- patches ---------------------------------------------------------------------------------------------------------


@dataclass
class PatchPlan:
    """Positions and attention segments of the P patches of some images, in the order in which the tower has them."""

    places: Tensor  # [P, 2] row and column in the image
    last: Tensor  # [P, 2] last row and column of the image
    images: Segments  # frames of images
    windows: Segments  # windows within frames; without windows the same as `images`
    order: Tensor | None = None  # [P] index of each patch in `pixel_values`; None: the same order
    restore: Tensor | None = None  # [n] index of each block of `pixel_values`, to undo `order` after merging

    def cos_sin(self, head_dim: int) -> CosSin:
        """Return the RoPE cosines and sines: one half of a head's pairs for rows, the other for columns. [P, 1,
        head_dim] each"""
        half = head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=self.places.device) / half
        angles = (self.places[:, :, None] / ROPE_BASE**exponents).flatten(1)
        angles = torch.cat((angles, angles), dim=1)[:, None]
        return angles.cos(), angles.sin()

    def corners(self, side: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the four learned position embeddings next to each patch, in a square of `side` x
        `side`, and their weights. [4, P] each"""
        at = self.places * ((side - 1) / self.last.clamp_min(1))
        low = at.floor()
        high, share = (low + 1).clamp_max(side - 1), at - low
        rows, columns = ((low[:, axis], 1 - share[:, axis], high[:, axis], share[:, axis]) for axis in (0, 1))
        corners = [(rows[i], columns[j]) for i in (0, 2) for j in (0, 2)]
        weights = [rows[i] * columns[j] for i in (1, 3) for j in (1, 3)]
        return torch.stack([row * side + column for row, column in corners]).long(), torch.stack(weights)


def plan_patches(vision: Vision, grids: list[list[int]], device: torch.device, kernel: Any) -> PatchPlan:
    """Return the plan of the images with these (frames, rows, columns) of patches."""
    merge, window = vision.merge_size, vision.window_size
    places, last, lengths, window_ids, num_windows = [], [], [], [], 0
    for frames, rows, columns in grids:
        cell = torch.arange(rows * columns).view(rows // merge, merge, columns // merge, merge)
        cell = cell.transpose(1, 2).flatten()  # block by block
        places.append(torch.stack((cell // columns, cell % columns), dim=1).repeat(frames, 1))
        last.append(torch.tensor([[rows - 1, columns - 1]]).expand_as(places[-1]))
        lengths += [rows * columns] * frames
        if window:
            row, column = (places[-1][:: merge**2] // merge // window).unbind(1)  # of each block
            across = -(-columns // merge // window)
            per_frame = across * -(-rows // merge // window)
            frame = torch.arange(frames).repeat_interleave(len(row) // frames)
            window_ids.append(num_windows + frame * per_frame + row * across + column)
            num_windows += frames * per_frame
    images = make_segments(lengths, device, kernel)
    plan = PatchPlan(torch.cat(places).float(), torch.cat(last).float(), images, images)
    if window:
        ids = torch.cat(window_ids)
        blocks = ids.argsort(stable=True)
        order = (blocks[:, None] * merge**2 + torch.arange(merge**2)).flatten()
        plan.places, plan.last = plan.places[order], plan.last[order]
        plan.windows = make_segments((ids.bincount() * merge**2).tolist(), device, kernel)
        plan.order, plan.restore = order.to(device), blocks.argsort().to(device)
    plan.places, plan.last = plan.places.to(device), plan.last.to(device)
    return plan


def make_segments(lengths: list[int], device: torch.device, kernel: Any) -> Segments:
    """Return consecutive segments of these lengths."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    buckets = make_buckets(starts, device, exact=True) if kernel == "padded" else None
    return Segments(torch.tensor(starts, dtype=torch.int32, device=device), max(lengths), buckets, kernel)


# ---- in the language model -------------------------------------------------------------------------------------------


def insert_images(hidden: Tensor, tower: VisionTower, stream: PackedStream) -> Tensor:
    """Return the embeddings of tokens, with those of image tokens replaced by the tower's output; set the deepstack
    features of `stream`. [t, 1, H] -> [t, 1, H]

    If the tower is trained and the micro-batch has no image, the tower computes a blank one that no token uses: with
    overlapped gradient reduction Megatron waits for the gradient of every trained parameter.
    """
    trained = torch.is_grad_enabled() and any(param.requires_grad for param in tower.parameters())
    images = stream.images
    if images is None:
        if not trained:
            return hidden
        merge = tower.shape.merge_size
        patches = torch.zeros(merge**2, tower.shape.patch_dim)
        no_rows = torch.empty(0, dtype=torch.long, device=hidden.device)
        images = StreamImages(patches, [[1, merge, merge]], no_rows, no_rows)
    stream.images = images = replace(images)  # the features of this pass are freed with it
    with torch.set_grad_enabled(trained):
        features = tower(images.pixel_values, images.grids, stream.kernel)
    return _InsertImages.apply(hidden, images, *(feature[images.features] for feature in features))


class _InsertImages(torch.autograd.Function):
    """Replace the rows of image tokens. The gradients of deepstack features come from `AddDeepstack`, and enter the
    tower's graph here, after the backward pass of all layers: layers may be recomputed, each with a graph of its own,
    and the tower's graph can be passed only once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, images: StreamImages, *features: Tensor) -> Tensor:
        ctx.images = images
        images.deepstack = [feature.detach() for feature in features[1:]]
        images.gradients = [None] * len(images.deepstack)
        out = hidden.clone()
        out[images.rows, 0] = features[0]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        images, grad = ctx.images, grads[0].clone()
        grad[images.rows] = 0
        return grad, None, grads[0][images.rows, 0], *images.gradients


class AddDeepstack(torch.autograd.Function):
    """Add the deepstack features with the index `index` to the hidden states of image tokens, and leave their gradient
    to `_InsertImages`. [t, 1, H] -> [t, 1, H]"""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, images: StreamImages, index: int) -> Tensor:
        ctx.images, ctx.index = images, index
        out = hidden.clone()
        out[images.rows, 0] += images.deepstack[index]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.images.gradients[ctx.index] = grads[0][ctx.images.rows, 0]
        return grads[0], None, None
