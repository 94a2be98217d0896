"""LoRA (arXiv:2106.09685): its options, the linear layers that get adapters, and PEFT directories. Imports torch only
in functions, because preflight and the driver use this module.

An adapter adds scale * B (A x) to the output of a linear layer, whose own weight is frozen. Adapters are those of
PEFT: one pair of matrices A [r, in] and B [out, r] per linear layer of the Hugging Face model. Megatron joins some of
these layers into one (query, key and value; gate and up). The A matrices of a joined layer are stacked along their
rows; each B matrix belongs to the rows of the joined weight that come from its Hugging Face layer.

A PEFT directory has `adapter_model.safetensors` and `adapter_config.json`. Routed experts have PEFT's names of one
linear layer per projection (`mlp.experts.0.gate_proj`), as on the hub.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.engines.families import tensor_layout
from penstock.engines.families.entries import read_config
from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import TensorLayout
from penstock.storage.config import StageConfig, option
from penstock.storage.errors import ModelError, OptionError, check_rules

if TYPE_CHECKING:
    from torch import Tensor


TARGETS = "--lora-target-modules"
GROUPS = ("attention", "mlp", "experts", "all-linear")
LINEAR = re.compile(r"^decoder\.layers\.\d+\..*\b(linear_\w+)\.weight$")
EXPERT = ".mlp.experts."
EXPERT_INDEX = re.compile(r"\.local_experts\.(\d+)\.")


class LoraOptions(StageConfig):
    """Train LoRA adapters, and freeze the model's own weights."""

    lora_rank: int = option(ge=1)
    """Rank of the adapters."""

    lora_alpha: float | None = option(None, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank; default: --lora-rank."""

    lora_dropout: float = option(0.0, ge=0, lt=1)
    """Dropout of the adapters' inputs; only 0 is supported, because engines and replays apply no dropout."""

    lora_target_modules: list[str] = option(["all-linear"])
    """Layers with adapters: attention, mlp, experts, all-linear, or names such as o_proj."""

    lora_use_rslora: bool = option(False)
    """Multiply the adapters' output by alpha / sqrt(rank) (rsLoRA)."""

    lora_load: str | None = option(None)
    """PEFT directory with adapters to start from; its rank, alpha and layers must match the other --lora options."""

    lora_publish: Literal["adapter", "merged"] | None = option(None, mutability="placement")
    """What engines get: adapter sends only the adapters; merged sends all weights, with the adapters added to them.
    Default: adapter if the engines can apply them, else merged."""

    @property
    def adapters(self) -> dict[str, Any]:
        """Return the options that determine the adapters in a checkpoint: rank, scale and layers."""
        return {"rank": self.lora_rank, "scale": self.scale, "layers": self.lora_target_modules}

    @property
    def alpha(self) -> float:
        """Return --lora-alpha, or the rank if it was not given."""
        return self.lora_alpha or self.lora_rank

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's output: alpha / rank, or with rsLoRA alpha / sqrt(rank)
        (arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.lora_rank) if self.lora_use_rslora else self.lora_rank)


@dataclass(frozen=True)
class AdapterTarget:
    """A linear layer of the Megatron model that gets an adapter."""

    name: str  # global name of the layer, for instance decoder.layers.0.mlp.linear_fc1
    hf_modules: tuple[str, ...]  # the Hugging Face layers that are joined in it, in the order of their rows


def adapter_targets(shape: ModelShape, target_modules: Sequence[str]) -> dict[str, AdapterTarget]:
    """Return the linear layers that get adapters, by their global Megatron name, in the order of the model.

    Targets are "attention", "mlp" (dense MLPs and shared experts), "experts" (routed experts), "all-linear", or names
    of layers in Megatron (linear_qkv) or in the Hugging Face model (q_proj). Routers, embeddings and the LM head never
    get adapters.
    """
    layout = tensor_layout(shape)
    linears = [
        AdapterTarget(
            weight.removesuffix(".weight"), tuple(hf.removesuffix(".weight") for hf in layout.hf_names_of(weight))
        )
        for weight in layout.megatron_names()
        if LINEAR.match(weight)
    ]
    selected, unused = {}, set(target_modules)
    for target in linears:
        name = target.name
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
        modules = sorted({module.rpartition(".")[2] for target in linears for module in target.hf_modules})
        raise OptionError(
            f"{TARGETS} {min(unused)} matches no linear layer of {shape.architecture}: use {', '.join(GROUPS)}, or "
            f"some of {', '.join(modules)}"
        )
    return selected


def stored_matrix(layer: str, kind: str) -> tuple[str, int | None]:
    """Return where a checkpoint stores one adapter matrix of a layer: the key of the tensor and, for a layer of an
    expert, the index of the expert on the tensor's first axis (else None)."""
    expert = EXPERT_INDEX.search(f"{layer}.")
    return EXPERT_INDEX.sub(".", f"{layer}.{kind}"), int(expert[1]) if expert else None


def part_of_row(layout: TensorLayout, target: AdapterTarget) -> Tensor | None:
    """Return, for each row of the layer's full weight, which of `target.hf_modules` the row comes from: indices, [out].
    None if the layer is a single Hugging Face layer."""
    import torch

    if len(target.hf_modules) == 1:
        return None
    rows = sum(layout.hf_shapes[f"{module}.weight"][0] for module in target.hf_modules)
    parts = torch.empty(rows, dtype=torch.long)
    for part, (_, own) in enumerate(layout.to_hf(f"{target.name}.weight", torch.arange(rows)[:, None])):
        parts[own[:, 0]] = part
    return parts


def merge(weight: Tensor, first: Tensor, second: Tensor, parts: Tensor | None, scale: float) -> Tensor:
    """Return `weight` [out, in] + scale * B A in the dtype of `weight`, computed in fp32. `first` is A [parts * r, in],
    `second` is B [out, r]. With `parts` (from `part_of_row`), each row of B is multiplied by the A of its part."""
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
    """Check that these adapters fit these parallel sizes. `grouped`: grouped GEMMs compute the experts."""
    targets = adapter_targets(shape, options.lora_target_modules)
    with_experts = [name for name in targets if EXPERT in name]
    rules = (
        (
            with_experts and (expert_tensor or tensor) not in (1, tensor),
            f"adapters of experts need --expert-tensor-parallel-size 1 or {tensor} (--tensor-model-parallel-size), but "
            f"found {expert_tensor}: change it, or leave experts out of {TARGETS}",
        ),
        (
            with_experts and grouped and options.lora_rank % 8,
            f"--lora-rank {options.lora_rank} with grouped experts must be a multiple of 8 (rows of 16 bytes): change "
            f"it, or leave experts out of {TARGETS}",
        ),
        (
            pipeline > 1 and len(with_experts) == len(targets),
            f"{TARGETS} with only routed experts needs --pipeline-model-parallel-size 1, because every pipeline stage "
            f"must train a parameter outside of the experts: add `attention` to {TARGETS}, or give "
            "--pipeline-model-parallel-size 1",
        ),
    )
    check_rules(rules)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # PEFT's tensor names are this prefix and the name in the Hugging Face model


def to_peft(layout: TensorLayout, layer: str, first: Tensor, second: Tensor) -> list[tuple[str, Tensor]]:
    """Return the adapter of a Megatron layer (A [parts * r, in], B [out, r]) as PEFT's (name, tensor) pairs: A and B of
    each joined Hugging Face layer."""
    rows = layout.to_hf(f"{layer}.weight", second)
    pairs = []
    for (weight, own_second), own_first in zip(rows, first.chunk(len(rows)), strict=True):
        module = PREFIX + weight.removesuffix(".weight")
        pairs += [(f"{module}.lora_A.weight", own_first), (f"{module}.lora_B.weight", own_second)]
    return pairs


def from_peft(layout: TensorLayout, layer: str, fetch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B of a Megatron layer from PEFT's tensors, which `fetch` returns; inverse of `to_peft`."""
    import torch

    modules = [PREFIX + hf.removesuffix(".weight") for hf in layout.hf_names_of(f"{layer}.weight")]
    first = torch.cat([fetch(f"{module}.lora_A.weight") for module in modules])
    names = iter(modules)
    return first, layout.to_megatron(f"{layer}.weight", lambda _: fetch(f"{next(names)}.lora_B.weight"))


def peft_config(options: LoraOptions, shape: ModelShape, base_model: str) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    modules = adapted_modules(shape, options.lora_target_modules)
    names = sorted({module.rpartition(".")[2] for module in modules})
    is_exact = {name for name in adapted_modules(shape) if name.rpartition(".")[2] in names} == set(modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": options.lora_rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "use_rslora": options.lora_use_rslora,
        "target_modules": names if is_exact else modules,
        "bias": "none",
        "inference_mode": True,
    }


def served_config(options: LoraOptions, shape: ModelShape, base_model: str) -> dict[str, Any]:
    """Return the content of adapter_config.json for engines that always scale by lora_alpha / r. Its lora_alpha is
    chosen to give the right scale, also for rsLoRA."""
    return peft_config(options, shape, base_model) | {
        "lora_alpha": options.scale * options.lora_rank,
        "use_rslora": False,
    }


def served_modules(options: LoraOptions, shape: ModelShape) -> tuple[str, ...]:
    """Return the last names of the Hugging Face layers with adapters, sorted: (down_proj, gate_proj, ...)."""
    return tuple(sorted({name.split(".")[-3] for name in served_tensors(options, shape)}))


def served_tensors(options: LoraOptions, shape: ModelShape) -> list[str]:
    """Return the names, in PEFT's format, of all adapter matrices that engines load."""
    modules = adapted_modules(shape, options.lora_target_modules)
    return [f"{PREFIX}{module}.{kind}.weight" for module in modules for kind in ("lora_A", "lora_B")]


def adapted_modules(shape: ModelShape, target_modules: Sequence[str] = ("all-linear",)) -> list[str]:
    """Return the names of the Hugging Face layers that get adapters, by default of all that can get one."""
    return [module for target in adapter_targets(shape, target_modules).values() for module in target.hf_modules]


@contextmanager
def open_peft(directory: Path, shape: ModelShape) -> Iterator[Callable[[str], tuple[Tensor, Tensor]]]:
    """Yield a function that returns A [parts * r, in] and B [out, r] of a Megatron layer from a PEFT directory."""
    from safetensors import safe_open

    layout = tensor_layout(shape)
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        yield lambda layer: from_peft(layout, layer, file.get_tensor)


def check_peft_directory(directory: Path, shape: ModelShape, options: LoraOptions) -> None:
    """Check that a PEFT directory has the adapters that `options` describe."""
    from penstock.engines.weights.hf_headers import read_header

    files = [directory / name for name in (CONFIG, WEIGHTS)]
    absent = (
        (not file.is_file(), f"{file} does not exist: give --lora-load a directory that PEFT has saved")
        for file in files
    )
    check_rules(absent, ModelError)
    config = read_config(directory / CONFIG)
    needed = {"r": options.lora_rank, "lora_alpha": options.alpha, "use_rslora": options.lora_use_rslora}
    neutral = dict.fromkeys(("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"))
    rules = (
        (
            config.get(name) != value and not (value in (None, False, "none") and not config.get(name)),
            f"{directory / CONFIG} has {name} {config.get(name)!r}, but the run needs {value!r}: change the options "
            "--lora-rank, --lora-alpha and --lora-use-rslora, or use another adapter",
        )
        for name, value in {**needed, **neutral, "bias": "none", "fan_in_fan_out": False}.items()
    )
    check_rules(rules, ModelError)
    layout = tensor_layout(shape)
    shapes = {}
    for module in adapted_modules(shape, options.lora_target_modules):
        out, size = layout.hf_shapes[f"{module}.weight"]
        shapes[f"{PREFIX}{module}.lora_A.weight"] = [options.lora_rank, size]
        shapes[f"{PREFIX}{module}.lora_B.weight"] = [out, options.lora_rank]
    found = {name: tensor["shape"] for name, tensor in read_header(directory / WEIGHTS)[0].items()}
    if differing := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        name = differing[0]
        raise ModelError(
            f"{directory / WEIGHTS}: {name} has shape {found.get(name)}, but the run needs {shapes.get(name)} "
            f"({len(differing)} tensors differ): set --lora-target-modules to the layers of this adapter, or use "
            "another one"
        )
