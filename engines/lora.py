"""LoRA options and the linear layers that get adapters (arXiv:2106.09685). Does not import torch, because preflight and
the driver use this module.

An adapter adds scale * B (A x) to the output of a linear layer, whose own weight is frozen. Adapters are those of
PEFT: one pair of matrices A [r, in] and B [out, r] per linear layer of the Hugging Face model. Megatron joins some of
these layers in one (query, key and value; gate and up); the A of a joined layer are stacked, the B have the rows of the
joined weight.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from penstock.engines.families import tensor_layout
from penstock.engines.families.ops import TensorLayout
from penstock.engines.families.shape import ModelShape
from penstock.storage.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor

TARGETS = "--lora-target-modules"
GROUPS = ("attention", "mlp", "experts", "all-linear")
LINEAR = re.compile(r"^decoder\.layers\.\d+\..*\b(linear_\w+)\.weight$")
EXPERT = ".mlp.experts."
EXPERT_INDEX = re.compile(r"\.local_experts\.(\d+)\.")


class LoraOptions(BaseModel):
    """Rank, scaling and target layers of a policy's adapters."""

    model_config = ConfigDict(frozen=True)

    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    use_rslora: bool = False

    @property
    def scale(self) -> float:
        """Factor of an adapter's output: alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer of the Megatron model that gets an adapter."""

    name: str  # global name of the layer, for instance decoder.layers.0.mlp.linear_fc1
    hf_modules: tuple[str, ...]  # the Hugging Face layers that are joined in it, in the order of their rows

    @property
    def weight(self) -> str:
        """Global name of the layer's weight."""
        return f"{self.name}.weight"


def adapter_targets(shape: ModelShape, target_modules: tuple[str, ...]) -> dict[str, AdapterTarget]:
    """Return the linear layers that get adapters, by their global Megatron name, in the order of the model.

    Args:
        shape: shape of the model.
        target_modules: "attention", "mlp" (dense MLPs and shared experts), "experts" (routed experts), "all-linear", or
            names of layers in Megatron (linear_qkv) or in the Hugging Face model (q_proj). Routers, embeddings and the
            LM head never get adapters.
    """
    layout = tensor_layout(shape)
    linears = {
        name.removesuffix(".weight"): AdapterTarget(
            name.removesuffix(".weight"), tuple(hf.removesuffix(".weight") for hf in layout.hf_names_of(name))
        )
        for name in layout.megatron_names()
        if LINEAR.match(name)
    }
    selected, unused = {}, set(target_modules)
    for name, target in linears.items():
        group = "experts" if EXPERT in name else "attention" if ".self_attention." in name else "mlp"
        own = {"all-linear", group, name.rpartition(".")[2]}
        hf = [module.rpartition(".")[2] for module in target.hf_modules]
        unused -= {*own, *hf}
        named = [module for module in hf if module in target_modules]
        if own & set(target_modules) or len(named) == len(hf):
            selected[name] = target
        elif named:
            raise OptionError(
                f"{TARGETS} has {', '.join(named)}, but Megatron computes {', '.join(hf)} as one layer: name all of "
                "them, or none"
            )
    if unused:
        modules = sorted({module.rpartition(".")[2] for target in linears.values() for module in target.hf_modules})
        raise OptionError(
            f"{TARGETS} {min(unused)} matches no linear layer of {shape.architecture}: use {', '.join(GROUPS)}, or "
            f"some of {', '.join(modules)}"
        )
    return selected


def stored_matrix(layer: str, kind: str) -> tuple[str, int | None]:
    """Return the key of the tensor in a checkpoint that has a matrix of a layer, and the index of the layer's expert on
    its first axis (None: the layer is not of an expert).

    Args:
        layer: global name of the layer.
        kind: "lora_A" or "lora_B".
    """
    expert = EXPERT_INDEX.search(f"{layer}.")
    return EXPERT_INDEX.sub(".", f"{layer}.{kind}"), int(expert[1]) if expert else None


def part_of_row(layout: TensorLayout, target: AdapterTarget) -> Tensor | None:
    """Return, for each row of the full weight of a layer, the index of its layer in `target.hf_modules`, [out]; None if
    there is only one."""
    import torch

    if len(target.hf_modules) == 1:
        return None
    rows = sum(layout.hf_shapes[f"{module}.weight"][0] for module in target.hf_modules)
    parts = torch.empty(rows, dtype=torch.long)
    for part, (_, own) in enumerate(layout.to_hf(target.weight, torch.arange(rows)[:, None])):
        parts[own[:, 0]] = part
    return parts


def merge(weight: Tensor, first: Tensor, second: Tensor, parts: Tensor | None, scale: float) -> Tensor:
    """Return W + scale * B A, computed in fp32, in the dtype of W.

    Args:
        weight: [out, in] W.
        first: [parts * r, in] A.
        second: [out, r] B.
        parts: see `part_of_row`.
        scale: factor of the adapter's output.
    """
    import torch

    merged = weight.float()
    if parts is None:
        return torch.addmm(merged, second.float(), first.float(), alpha=scale).to(weight.dtype)
    delta = torch.empty_like(merged)
    for part, own in enumerate(first.float().split(second.shape[1])):
        rows = (parts == part).to(weight.device)
        delta[rows] = second[rows].float() @ own
    return (merged + scale * delta).to(weight.dtype)


def check_adapters(
    shape: ModelShape, options: LoraOptions, *, tensor: int, pipeline: int, expert_tensor: int | None, grouped: bool
) -> None:
    """Check that adapters of these options can be trained with the parallel sizes.

    Args:
        shape: shape of the model.
        options: the adapters.
        tensor: tensor-parallel size.
        pipeline: pipeline-parallel size.
        expert_tensor: tensor-parallel size of the experts; None: `tensor`.
        grouped: whether experts are computed by grouped GEMMs.
    """
    targets = adapter_targets(shape, options.target_modules)
    with_experts = [name for name in targets if EXPERT in name]
    if with_experts and (expert_tensor or tensor) not in (1, tensor):
        raise OptionError(
            f"adapters of experts need --expert-tensor-parallel-size 1 or {tensor} (--tensor-model-parallel-size), but "
            f"found {expert_tensor}: change it, or leave experts out of {TARGETS}"
        )
    if with_experts and grouped and options.rank % 8:
        raise OptionError(
            f"--lora-rank {options.rank} with grouped experts must be a multiple of 8 (rows of 16 bytes): change it, "
            f"or leave experts out of {TARGETS}"
        )
    if pipeline > 1 and len(with_experts) == len(targets):
        raise OptionError(
            f"{TARGETS} with only routed experts needs --pipeline-model-parallel-size 1, because every stage must "
            "train a parameter outside of the experts: add attention, or use one stage"
        )
