"""PEFT directories: `adapter_model.safetensors` and `adapter_config.json` of LoRA adapters. Imports torch only in
functions, because preflight uses this module.

Routed experts have PEFT's names of one linear layer per projection (`mlp.experts.0.gate_proj`), as on the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.families import tensor_layout
from penstock.engines.families.entries import read_config
from penstock.engines.families.ops import TensorLayout
from penstock.engines.families.shape import ModelShape
from penstock.engines.lora import AdapterTarget, LoraOptions, adapter_targets
from penstock.storage.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of PEFT's tensor names, before the name in the Hugging Face model


def to_peft(layout: TensorLayout, layer: str, first: Tensor, second: Tensor) -> list[tuple[str, Tensor]]:
    """Return the adapter of a Megatron layer as PEFT's (name, tensor) pairs: A and B of each joined Hugging Face layer.

    Args:
        layout: tensor names of the model.
        layer: global name of the layer.
        first: [parts * r, in] A of the layer.
        second: [out, r] B of the layer.
    """
    rows = layout.to_hf(f"{layer}.weight", second)
    pairs = []
    for (weight, own_second), own_first in zip(rows, first.chunk(len(rows)), strict=True):
        module = PREFIX + weight.removesuffix(".weight")
        pairs += [(f"{module}.lora_A.weight", own_first), (f"{module}.lora_B.weight", own_second)]
    return pairs


def from_peft(layout: TensorLayout, layer: str, fetch: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Return A and B of a Megatron layer, joined from PEFT's tensors; inverse of `to_peft`. `fetch` returns a tensor by
    its PEFT name."""
    import torch

    modules = [PREFIX + hf.removesuffix(".weight") for hf in layout.hf_names_of(f"{layer}.weight")]
    first = torch.cat([fetch(f"{module}.lora_A.weight") for module in modules])
    names = iter(modules)
    return first, layout.to_megatron(f"{layer}.weight", lambda _: fetch(f"{next(names)}.lora_B.weight"))


def peft_config(options: LoraOptions, shape: ModelShape, base_model: str) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        options: options of the adapters.
        shape: shape of the model.
        base_model: the model that PEFT loads the adapters on.
    """
    modules = [module for target in _targets(shape, options) for module in target.hf_modules]
    names = sorted({module.rpartition(".")[2] for module in modules})
    linears = [name for target in _targets(shape) for name in target.hf_modules]
    is_exact = {name for name in linears if name.rpartition(".")[2] in names} == set(modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": 0.0,
        "use_rslora": options.use_rslora,
        "target_modules": names if is_exact else modules,
        "bias": "none",
        "inference_mode": True,
    }


def served_config(options: LoraOptions, shape: ModelShape, base_model: str) -> dict[str, Any]:
    """Return `peft_config` for engines that compute the scale as lora_alpha / r in any case."""
    return peft_config(options, shape, base_model) | {"lora_alpha": options.scale * options.rank, "use_rslora": False}


def served_modules(options: LoraOptions, shape: ModelShape) -> tuple[str, ...]:
    """Return the last names of the Hugging Face layers with adapters, sorted: (down_proj, gate_proj, ...)."""
    return tuple(sorted({name.split(".")[-3] for name in served_tensors(options, shape)}))


def served_tensors(options: LoraOptions, shape: ModelShape) -> list[str]:
    """Return PEFT's names of the matrices of all adapters."""
    modules = [module for target in _targets(shape, options) for module in target.hf_modules]
    return [f"{PREFIX}{module}.{kind}.weight" for module in modules for kind in ("lora_A", "lora_B")]


def _targets(shape: ModelShape, options: LoraOptions | None = None) -> list[AdapterTarget]:
    """Return the layers with adapters; without `options` all layers that can have some."""
    return list(adapter_targets(shape, options.target_modules if options else ("all-linear",)).values())


@contextmanager
def open_peft(directory: Path, shape: ModelShape) -> Iterator[Callable[[str], tuple[Tensor, Tensor]]]:
    """Yield a function that returns A [parts * r, in] and B [out, r] of a Megatron layer from a PEFT directory."""
    from safetensors import safe_open

    layout = tensor_layout(shape)
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        yield lambda layer: from_peft(layout, layer, file.get_tensor)


def check_peft_directory(directory: Path, shape: ModelShape, options: LoraOptions) -> None:
    """Check that a PEFT directory has the adapters that `options` describe.

    Raises:
        ModelError: a file is missing, or the adapters differ.
    """
    from penstock.engines.weights.hf_headers import read_header

    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise ModelError(f"{directory / name} does not exist: give --lora-load a directory that PEFT has saved")
    config = read_config(directory / CONFIG)
    needed = {"r": options.rank, "lora_alpha": options.alpha, "use_rslora": options.use_rslora}
    neutral = dict.fromkeys(("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"))
    for name, value in {**needed, **neutral, "bias": "none", "fan_in_fan_out": False}.items():
        found = config.get(name)
        if found != value and not (value in (None, False, "none") and not found):
            raise ModelError(
                f"{directory / CONFIG} has {name} {found!r}, but the run needs {value!r}: change the options "
                "--lora-rank, --lora-alpha and --lora-use-rslora, or use another adapter"
            )
    layout = tensor_layout(shape)
    shapes = {}
    for target in _targets(shape, options):
        for module in target.hf_modules:
            out, size = layout.hf_shapes[f"{module}.weight"]
            shapes[f"{PREFIX}{module}.lora_A.weight"] = [options.rank, size]
            shapes[f"{PREFIX}{module}.lora_B.weight"] = [out, options.rank]
    found = {name: tensor["shape"] for name, tensor in read_header(directory / WEIGHTS)[0].items()}
    if differing := sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name)):
        name = differing[0]
        raise ModelError(
            f"{directory / WEIGHTS}: {name} has shape {found.get(name)}, but the run needs {shapes.get(name)} "
            f"({len(differing)} tensors differ): give --lora-target-modules of this adapter, or another adapter"
        )
