"""References for the Megatron tests: a tiny random Qwen3 of Hugging Face, its weights under Megatron's names, naive
losses.

The mapping of names is repeated here on purpose, so that an error in `engines/families` cannot hide one in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from penstock.engines.families.shape import Experts, LatentAttention, ModelShape, Rotary
from penstock.engines.training import EngineBuild

SHAPE = ModelShape(
    architecture="Qwen3ForCausalLM",
    family="qwen3",
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    vocab_size=61,  # odd: tensor parallelism must pad it
    max_position_embeddings=256,
    rotary=Rotary(base=10000.0),
    norm_epsilon=1e-6,
    qk_layernorm=True,
    qkv_bias=False,
    tied_embeddings=True,
)
UNTIED = SHAPE.model_copy(update={"tied_embeddings": False})
EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=16, num_dense_layers=1)
MIXTURE = SHAPE.model_copy(update={"experts": EXPERTS})
LATENT_ATTENTION = LatentAttention(
    q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
)
LATENT = SHAPE.model_copy(update={"head_dim": 24, "num_query_groups": 4, "latent": LATENT_ATTENTION})
FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
OPTIMIZER: dict[str, Any] = dict(
    lr=1e-2,
    min_lr=0.0,
    weight_decay=0.01,
    adam_beta1=0.9,
    adam_beta2=0.98,
    adam_eps=1e-8,
    clip_grad=1.0,
    lr_decay_style="constant",
    lr_warmup_iters=0,
    lr_decay_iters=None,
)
LENGTHS = [5, 40, 1, 17, 9, 33, 2]


@dataclass
class Pack:
    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [B + 1]
    max_seqlen: int
    images: None = None
    stream: Any = None  # PackedStream | None
    routing: dict[int, Tensor] | None = None


def make_pack(lengths: list[int], seed: int = 0, vocab_size: int = SHAPE.vocab_size) -> Pack:
    generator = torch.Generator().manual_seed(seed)
    return Pack(
        token_ids=torch.randint(0, vocab_size, (sum(lengths),), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        max_seqlen=max(lengths),
    )


PACKS = [make_pack(LENGTHS, 0), make_pack([3, 4, 50], 1)]


def make_engine(shape: ModelShape = SHAPE, overrides: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Build an engine with these fields of `EngineBuild`; `overrides` are options of Megatron."""
    from penstock.engines.megatron.engine import MegatronEngine

    fields = {"dtype": "fp32", "optimizer": OPTIMIZER, "options": overrides or {}, **fields}
    return MegatronEngine(EngineBuild(shape, **fields))


def cross_entropy(hidden: Tensor, head: Any, packed: Pack) -> tuple[Tensor, dict[str, Tensor]]:
    logits = head(hidden)
    targets, counted = (x.to(hidden.device) for x in targets_of(packed))
    loss = F.cross_entropy(logits.float()[counted], targets[counted], reduction="sum")
    return loss, {"loss": loss.detach().cpu(), "logits": logits.detach().cpu()}


def train(engine: Any, seeds: range) -> tuple[list[float], list[float], dict[str, str], dict[str, str]]:
    """Return the loss and the gradient norm of one step per seed, and digests of weights and optimizer state."""
    losses, norms = [], []
    for seed in seeds:
        outputs = engine.forward_backward([make_pack(LENGTHS, seed), make_pack([9, 30], seed)], cross_entropy)
        losses.append(sum(output["loss"].item() for output in outputs))
        norms.append(engine.optimizer_step()[1])
    return losses, norms, engine.digest(), engine.optimizer_state_digest()


def hf_model(shape: ModelShape = SHAPE, seed: int = 7) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_query_groups,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn_hidden_size,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=shape.max_position_embeddings,
        rope_theta=shape.rotary.base,
        initializer_range=0.15,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).float().train()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(0.1 * torch.randn_like(param))
    return model


def to_megatron(tensors: dict[str, Tensor], shape: ModelShape = SHAPE) -> dict[str, Tensor]:
    """Return weights or gradients of Hugging Face under Megatron's names."""
    out = {
        "embedding.word_embeddings.weight": tensors["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    if not shape.tied_embeddings:
        out["output_layer.weight"] = tensors["lm_head.weight"]
    for layer in range(shape.num_layers):
        hf, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        q, k, v = (
            tensors[f"{hf}self_attn.{x}_proj.weight"].view(shape.num_query_groups, -1, shape.hidden_size) for x in "qkv"
        )
        out[ours + "self_attention.linear_qkv.weight"] = torch.cat([q, k, v], 1).reshape(-1, shape.hidden_size)
        out[ours + "self_attention.linear_proj.weight"] = tensors[hf + "self_attn.o_proj.weight"]
        out[ours + "self_attention.q_layernorm.weight"] = tensors[hf + "self_attn.q_norm.weight"]
        out[ours + "self_attention.k_layernorm.weight"] = tensors[hf + "self_attn.k_norm.weight"]
        out[ours + "input_layernorm.weight"] = tensors[hf + "input_layernorm.weight"]
        out[ours + "pre_mlp_layernorm.weight"] = tensors[hf + "post_attention_layernorm.weight"]
        out[ours + "mlp.linear_fc1.weight"] = torch.cat([tensors[f"{hf}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        out[ours + "mlp.linear_fc2.weight"] = tensors[hf + "mlp.down_proj.weight"]
    return out


def under_megatron_names(shape: ModelShape, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers' model of any family, named and shaped as in memory, under Megatron's names.
    Correction biases have no gradients, and are left out of them."""
    from penstock.engines.families import tensor_layout

    hub: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shape.family == "qwen2_5_vl":
            name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        at, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, (gate, up) in enumerate(x.chunk(2) for x in tensor):
                hub |= {f"{at}.{expert}.gate_proj.weight": gate, f"{at}.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            hub |= {f"{at}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            hub[name] = tensor
    layout = tensor_layout(shape)
    known = [name for name in layout.megatron_names() if hub.keys() >= set(layout.hf_names_of(name))]
    return {name: layout.to_megatron(name, hub.__getitem__) for name in known}


def shard(name: str, full: Tensor, param: Any, rank: int, ranks: int) -> Tensor:
    """Return the shard of a full tensor on one tensor-parallel rank."""
    if ranks == 1 or not getattr(param, "tensor_model_parallel", False):
        return full
    if "linear_fc1" in name:
        return torch.cat(
            [half.chunk(ranks, param.partition_dim)[rank] for half in full.chunk(2, param.partition_dim)],
            param.partition_dim,
        )
    if missing := -full.shape[param.partition_dim] % ranks:  # only the vocabulary, along its rows
        full = torch.cat([full, full.new_zeros(missing, full.shape[1])])
    return full.chunk(ranks, param.partition_dim)[rank]


def put_weights(engine: Any, full: dict[str, Tensor]) -> None:
    """Copy full weights into a rank's shards."""
    from penstock.engines.megatron.weights import local_parameters

    group = engine.tensor_group
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    with torch.no_grad():
        for chunk in engine.chunks:
            for name, param in local_parameters(chunk):
                param.copy_(shard(name, full[name], param, rank, ranks))
            output = getattr(chunk, "output_layer", None)
            if chunk.share_embeddings_and_output_weights and output is not None and output.weight is not None:
                embedding = full["embedding.word_embeddings.weight"]
                output.weight.copy_(shard("", embedding, output.weight, rank, ranks))
    engine.optimizer.reload_model_params()


def targets_of(packed: Pack) -> tuple[Tensor, Tensor]:
    """Return the next token of every token, and which tokens have one. [T], [T]"""
    has_next = torch.ones(len(packed.token_ids), dtype=torch.bool)
    has_next[packed.cu_seqlens[1:].long() - 1] = False
    return packed.token_ids.roll(-1), has_next


def full_logits(engine: Any, logits: Tensor) -> Tensor:
    """Return the logits of the whole padded vocabulary, of which tensor-parallel ranks have shards."""
    if not engine.tensor_group:
        return logits
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits, engine.tensor_group)


@torch.no_grad()
def replace_by_gradients(engine: Any, params: Iterable[Any]) -> None:
    """Put gradients in the place of parameters, to be gathered like these. After the distributed optimizer's reduction
    each rank has only the shard that it updates: the shards are joined."""
    for param in params:
        inner = next(
            x for x in engine.optimizer.chained_optimizers if any(param in b.param_index_map for b in x.buffers)
        )
        whole = torch.zeros_like(param)
        if param in inner.model_param_gbuf_map:
            shard = inner._get_model_param_range_map(param)["param"]
            whole.view(-1)[shard.start : shard.end] = param.main_grad.view(-1)[shard.start : shard.end]
        dist.all_reduce(whole, group=inner.data_parallel_group)
        param.copy_(whole)


def hf_loss(model: Any, packs: list[Pack]) -> Tensor:
    """Return the sum over all tokens of -log p, computed per sequence."""
    total = torch.zeros(())
    for packed in packs:
        for tokens in torch.tensor_split(packed.token_ids, packed.cu_seqlens[1:-1].long()):
            if len(tokens) > 1:
                logits = model(input_ids=tokens[None]).logits[0, :-1]
                total = total + F.cross_entropy(logits, tokens[1:], reduction="sum")
    return total
