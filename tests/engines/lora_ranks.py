"""Run as two processes by `test_lora.py`: adapters of a dense, an MoE and an MLA model under the layouts that adapters
depend on, compared with PEFT's adapters on transformers: logits, gradients, norm, merged weights; checkpoints of one
layout are loaded under another.

usage: lora_ranks.py RANK DIRECTORY
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.lora import LoraOptions, from_peft, to_peft
from penstock.engines.megatron.parallel import ParallelLayout, init_parallel, shutdown_parallel
from tests.engines.family_ranks import OPTIMIZER, PACKS, check_close, check_logits, check_norm, loss_of, save_alone
from tests.engines.megatron_reference import make_engine, replace_by_gradients, under_megatron_names
from tests.families import hf_model, make_family

TOLERANCE = 2e-5  # relative to the largest value of a tensor
DENSE, MOE, MLA = FAMILIES = ["qwen3", "qwen3-moe", "deepseek-v3"]
LORA = LoraOptions(lora_rank=8, lora_alpha=12.0, lora_target_modules=["all-linear"])
SEQUENCE = ParallelLayout(tensor=2, sequence_parallel=True)
GROUPED = {"moe_grouped_gemm": True}
CASES: dict[str, tuple[ParallelLayout, list[str], dict[str, Any]]] = {
    "data": (ParallelLayout(), FAMILIES, {}),
    "tensor": (ParallelLayout(tensor=2), [DENSE], {}),
    "sequence": (SEQUENCE, [DENSE, MLA], {}),
    "pipeline": (ParallelLayout(pipeline=2), [DENSE, MOE], {}),
    "context": (ParallelLayout(context=2), [DENSE], {}),
    "experts": (ParallelLayout(expert=2), [MLA], {}),
    "whole experts": (ParallelLayout(tensor=2, sequence_parallel=True, expert_tensor=1), [MOE], {}),
    "grouped": (ParallelLayout(expert=2), [MOE], GROUPED),
    "grouped tensor": (SEQUENCE, [MLA], GROUPED),
}


class Expert(nn.Module):
    """One expert of transformers' stacked ones, as the hub names it."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone())
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.ModuleList):
    """transformers' experts one by one, so that PEFT adapts their projections."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self):
            token, slot = torch.where(top_k_index == index)
            out = out.index_add(0, token, expert(hidden[token]) * top_k_weights[token, slot, None])
        return out


class Plain(nn.Module):
    """A causal language model of which PEFT does not know that it is transformers': PEFT would adapt joined experts."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        self.model, self.lm_head, self.call = hf.model, hf.lm_head, hf.forward

    def forward(self, tokens: Tensor) -> Tensor:
        return self.call(input_ids=tokens[None]).logits[0]


def prepare(directory: Path, name: str) -> None:
    """Save a Hugging Face checkpoint, its Megatron checkpoint, and the results of PEFT's adapters on it."""
    import peft

    source = make_family(directory / name, name, num_hidden_layers=2)
    shape, hf = read_shape(source), hf_model(source)
    full = under_megatron_names(shape, {key: tensor.detach() for key, tensor in hf.state_dict().items()})
    save_alone(shape, full, source / "saved")
    for layer in hf.model.layers:
        stacked = getattr(layer.mlp, "experts", None)
        if stacked is not None:
            layer.mlp.experts = Experts(map(Expert, stacked.gate_up_proj.detach(), stacked.down_proj.detach()))
    linears = [key for key, module in hf.named_modules() if isinstance(module, nn.Linear) and key != "lm_head"]
    config = peft.LoraConfig(r=LORA.lora_rank, lora_alpha=LORA.alpha, target_modules=linears)
    model = peft.get_peft_model(Plain(hf), config)
    generator = torch.Generator().manual_seed(5)
    for key, param in model.named_parameters():
        if ".lora_B." in key:
            param.data.copy_(0.1 * torch.randn(param.shape, generator=generator))
    logits = [
        torch.cat([model(x) for x in pack.token_ids.tensor_split(pack.cu_seqlens[1:-1].long())]) for pack in PACKS
    ]
    torch.stack([loss_of(x, pack) for x, pack in zip(logits, PACKS)]).sum().backward()
    trained = {key.replace(".default", ""): param for key, param in model.named_parameters() if param.requires_grad}
    zero = {key: torch.zeros_like(param) for key, param in trained.items()}  # of experts without tokens
    gradients = {key: zero[key] if param.grad is None else param.grad for key, param in trained.items()}
    reference = {
        "logits": [x.detach() for x in logits],
        "adapters": {key: param.detach() for key, param in trained.items()},
        "gradients": gradients,
    }
    with torch.no_grad():
        merged = model.merge_and_unload().state_dict()
    reference["merged"] = {key: tensor.clone() for key, tensor in merged.items()}
    torch.save(reference, directory / f"{name}.pt")


def put_adapters(engine: Any, tensors: dict[str, Tensor]) -> None:
    """Copy full matrices, by PEFT's names, into a rank's shards."""
    layout = tensor_layout(engine.shape)
    engine.load_adapters(lambda layer: from_peft(layout, layer, tensors.__getitem__))


def full_adapters(engine: Any) -> dict[str, Tensor]:
    layout = tensor_layout(engine.shape)
    named = engine.named_adapters()
    return {name: x.clone() for layer, *pair in named for name, x in to_peft(layout, layer, *pair)}


def full_gradients(engine: Any) -> dict[str, Tensor]:
    """Return the reduced gradients by PEFT's names, in place of the adapters."""
    replace_by_gradients(engine, (param for chunk in engine.chunks for param in chunk.adapters.parameters()))
    return full_adapters(engine)


def run(case: str, family: str, directory: Path) -> None:
    layout, _, overrides = CASES[case]
    reference = torch.load(directory / f"{family}.pt")
    shape = read_shape(directory / family)
    engine = make_engine(shape, overrides, layout=layout, optimizer=OPTIMIZER, lora=LORA)
    engine.load_weights(directory / family / "saved")
    initial = full_adapters(engine)
    assert all(not x.any() for name, x in initial.items() if "lora_B" in name)
    put_adapters(engine, reference["adapters"])
    assert all(torch.equal(x, reference["adapters"][key]) for key, x in full_adapters(engine).items())
    merged = {
        name: tensor
        for key, full in engine.gather_weights().tensors
        for name, tensor in tensor_layout(shape).to_hf(key, full)
    }
    check_close("merged weights", merged, {name: reference["merged"][name] for name in merged}, TOLERANCE)

    rank, size = engine.data_parallel_rank_and_size
    logits = reference["logits"][rank::size]
    check_logits(engine, PACKS[rank::size], logits, TOLERANCE * max(x.abs().max().item() for x in logits))

    saved = directory / f"{family} adapters"
    if case == "data":
        engine.save(saved, {"version": 3})
        keys = {path.name for path in saved.iterdir()}
        size = sum(path.stat().st_size for path in saved.iterdir())
        assert "metadata.json" in keys and size < 40 * sum(x.numel() for x in reference["adapters"].values()), size
    put_adapters(engine, initial)
    dist.barrier()
    assert engine.load(saved) == {"version": 3}
    assert all(torch.equal(x, reference["adapters"][key]) for key, x in full_adapters(engine).items()), case

    error, key = check_close("gradients", full_gradients(engine), reference["gradients"], TOLERANCE)
    check_norm(engine, reference["gradients"], 1e-5)
    if rank == 0 and engine.is_last_stage:
        print(f"{case}, {family}: gradients {error:.1e} {key}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, directory = int(sys.argv[1]), Path(sys.argv[2])
    init_parallel(0, 1, f"file://{directory}/alone-{rank}")
    for name in FAMILIES[rank::2]:
        prepare(directory, name)
    gc.freeze()
    shutdown_parallel()
    for case, (layout, families, _) in CASES.items():
        init_parallel(rank, 2, f"file://{directory}/{case}", layout)
        for family in families:
            run(case, family, directory)
        shutdown_parallel()
