"""Check that the installed SGLang can run a model: its architecture, and block fp8 weights.

The architecture is looked up in SGLang's source without importing it. For other architectures SGLang falls back to the
model code of transformers; the weights of such a model cannot be updated by their Hugging Face names, so Penstock
rejects it.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.sglang.passthrough import package_directory
from penstock.engines.sources import parse_source
from penstock.engines.weights.fp8_blocks import BLOCK, fp8_weights
from penstock.storage.errors import EngineError, LayoutError

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.options import EngineOptions

# Architectures for which SGLang 0.5.21 reads original_max_position_embeddings at the top level of config.json.
READ_AT_TOP_LEVEL = ("LlamaForCausalLM",)
# Flags with which the GPUs of an engine do not all shard the same weights.
OTHER_SHARDING = {"enable_dp_attention", "ep_size", "expert_parallel_size", "moe_dense_tp_size", "pp_size"}


def check_model(values: dict[str, Any]) -> None:
    """Check that the installed SGLang implements the model that a config.json describes, with its RoPE scaling."""
    architecture = values["architectures"][0]
    check_architecture(architecture)
    name = "original_max_position_embeddings"
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    scaled = (rope.get("rope_type") or rope.get("type") or "default") != "default"
    top, read = values.get(name), rope.get(name, values.get("max_position_embeddings"))
    if scaled and top not in (None, read) and architecture not in READ_AT_TOP_LEVEL:
        raise EngineError(
            f"config.json has {name} {top} at the top level, where SGLang does not read it for {architecture} (SGLang "
            f"uses {read}): move the entry into rope_parameters (or rope_scaling)"
        )


def check_architecture(architecture: str) -> None:
    """Check that the installed SGLang implements an architecture. Do nothing if SGLang is not installed."""
    root = package_directory("sglang")
    if root is not None and not implements_architecture(architecture, root):
        raise EngineError(
            f"SGLang {version('sglang')} does not implement {architecture}: give --hf-checkpoint a model of another "
            f"architecture, or install a release that implements {architecture}; `penstock sft` and `penstock convert` "
            "work without SGLang"
        )


@cache
def implements_architecture(architecture: str, root: Path) -> bool:
    """Return whether the `sglang` package at `root` implements an architecture: whether a file in srt/models lists it
    in `EntryClass`."""
    for path in sorted((root / "srt" / "models").glob("*.py")):
        source = path.read_bytes()
        if architecture.encode() not in source or b"EntryClass" not in source:
            continue
        for node in parse_source(source, str(path)).body:
            if not isinstance(node, ast.Assign | ast.AugAssign):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            classes = (name.id for name in ast.walk(node.value) if isinstance(name, ast.Name))
            if "EntryClass" in map(ast.unparse, targets) and architecture in classes:
                return True
    return False


def check_fp8_widths(options: EngineOptions, shape: ModelShape) -> None:
    """Check that an engine's GPUs get whole blocks of merged fp8 weights (query with key and value, gate with up)."""
    size, names = options.gpus_per_engine, fp8_weights(options.spec.model_path)
    if not names or options.external or options.spec.args.keys() & OTHER_SHARDING:
        return
    heads, groups = shape.num_attention_heads // size, max(1, shape.num_query_groups // size)
    widths = {  # part of a weight's name -> name of the width, its size on a GPU
        ".self_attn.q_proj.": ("num_attention_heads x head_dim", heads * shape.head_dim),
        ".self_attn.k_proj.": ("num_key_value_heads x head_dim", groups * shape.head_dim),
        ".mlp.gate_proj.": ("intermediate_size", shape.ffn_hidden_size // size),
    }
    if shape.latent:
        latent = shape.latent
        widths |= {
            ".self_attn.q_b_proj.": ("num_attention_heads x qk head dim", heads * shape.head_dim),
            ".self_attn.kv_b_proj.": (
                "num_attention_heads x (qk_nope_head_dim + v_head_dim)",
                heads * (latent.qk_nope_head_dim + latent.v_head_dim),
            ),
            ".self_attn.o_proj.": ("num_attention_heads x v_head_dim", heads * latent.v_head_dim),
        }
    if shape.experts:
        widths[".experts.0.gate_proj."] = ("moe_intermediate_size", shape.experts.ffn_hidden_size // size)
    for part, (width, num_rows) in widths.items():
        if num_rows % BLOCK and any(part in name for name in names):
            raise LayoutError(
                f"{options.spec.model_path} has fp8 weights in blocks of {BLOCK}, but {width} gives {num_rows} "
                f"rows for each of the {size} GPUs of an engine (--rollout-num-gpus-per-engine), and SGLang needs a "
                f"multiple of {BLOCK}: use fewer GPUs per engine, or a bf16 checkpoint"
            )


def check_fp8_hardware(options: EngineOptions, capabilities: list[tuple[int, int]]) -> None:
    """Check that fp8 weights can be updated on GPUs of these compute capabilities.

    Updates need parameters in the checkpoint's layout. SGLang changes it on GPUs before Ada, whose kernels compute in
    bf16, and the layout of the scales on GPUs after Hopper.
    """
    if not fp8_weights(options.spec.model_path):
        return
    if not capabilities or not all((8, 9) <= capability < (10, 0) for capability in capabilities):
        names = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))
        found = f"GPUs of compute capability {names}" if names else "no GPU"
        raise EngineError(
            f"engines with the fp8 weights of --hf-checkpoint {options.spec.model_path} need GPUs of compute "
            f"capability 8.9 or 9.0 (Ada, Hopper); found {found}: hide others with CUDA_VISIBLE_DEVICES, or use a bf16 "
            "checkpoint"
        )
