"""The hub's models as they are published: entries of their config.json, in the hub's spelling, and their sizes.

Facts, no weights: `test_shapes.py` builds each on meta tensors. Sizes are in billions, to the digits that the hub, the
model card or the report gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.engines.families import shape_from_config
from penstock.engines.families.shape import ModelShape


@dataclass(frozen=True)
class RealModel:
    architecture: str
    config: dict[str, Any]
    size: str = ""  # billions of parameters, rounded
    size_with_mtp: str = ""  # likewise, with the multi-token prediction layer and its copies of embedding and head

    @property
    def shape(self) -> ModelShape:
        return shape_from_config({"architectures": [self.architecture], **self.config})


def _entries(  # noqa: PLR0913, a row of a published table
    layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, theta: float, eps: float
) -> dict[str, Any]:
    return dict(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        rope_theta=theta,
        rms_norm_eps=eps,
        hidden_act="silu",
    )


def _qwen2(
    layers: int, hidden: int, ffn: int, heads: int, groups: int, *, size: str, tied: bool, **changes: Any
) -> RealModel:
    window = dict(use_sliding_window=False, sliding_window=131072, max_window_layers=layers)
    entries = _entries(layers, hidden, ffn, heads, groups, 151936 if tied else 152064, 1e6, 1e-6)
    config = dict(max_position_embeddings=32768, tie_word_embeddings=tied, **window)
    return RealModel("Qwen2ForCausalLM", entries | config | changes, size)


def _qwen3(
    layers: int, hidden: int, ffn: int, heads: int, groups: int = 8, *, size: str, tied: bool = False, **changes: Any
) -> RealModel:
    entries = _entries(layers, hidden, ffn, heads, groups, 151936, 1e6, 1e-6)
    window = dict(use_sliding_window=False, sliding_window=None, max_window_layers=layers)
    config = dict(
        head_dim=128, max_position_embeddings=40960, tie_word_embeddings=tied, attention_bias=False, rope_scaling=None
    )
    architecture = "Qwen3MoeForCausalLM" if "num_experts" in changes else "Qwen3ForCausalLM"
    return RealModel(architecture, entries | window | config | changes, size)


def _qwen3_experts(width: int) -> dict[str, Any]:
    return dict(
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _llama(
    layers: int, hidden: int, ffn: int, heads: int, *, size: str, factor: float | None = None, tied: bool = False
) -> RealModel:
    scaling = dict(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return RealModel(
        "LlamaForCausalLM",
        _entries(layers, hidden, ffn, heads, 8, 128256, 500000.0, 1e-5)
        | dict(
            head_dim=128,
            max_position_embeddings=131072 if factor else 8192,
            rope_scaling=scaling if factor else None,
            tie_word_embeddings=tied,
            attention_bias=False,
            mlp_bias=False,
        ),
        size,
    )


def _glm4(layers: int, hidden: int, ffn: int, heads: int, *, bias: bool, size: str) -> RealModel:
    entries = _entries(layers, hidden, ffn, heads, 2, 151552, 10000.0, 1e-5)
    more = dict(
        head_dim=128,
        partial_rotary_factor=0.5,
        max_position_embeddings=32768,
        attention_bias=bias,
        tie_word_embeddings=False,
    )
    return RealModel("Glm4ForCausalLM", entries | more, size)


def _routed(  # noqa: PLR0913
    num: int, top: int, width: int, dense: int, scaling: float, shared: int = 1, groups: int = 1, top_groups: int = 1
) -> dict[str, Any]:
    return dict(
        n_routed_experts=num,
        num_experts_per_tok=top,
        moe_intermediate_size=width,
        n_shared_experts=shared,
        first_k_dense_replace=dense,
        routed_scaling_factor=scaling,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        attention_bias=False,
    )


def _glm4_moe(
    layers: int, hidden: int, ffn: int, *, norms: bool, experts: dict[str, Any], size_with_mtp: str
) -> RealModel:
    entries = _entries(layers, hidden, ffn, 96, 8, 151552, 1e6, 1e-5)
    more = dict(
        head_dim=128,
        partial_rotary_factor=0.5,
        max_position_embeddings=131072,
        use_qk_norm=norms,
        num_nextn_predict_layers=1,
    )
    return RealModel(
        "Glm4MoeForCausalLM",
        entries | more | experts | dict(attention_bias=True),
        size_with_mtp=size_with_mtp,
    )


def _latent(q: int | None, nope: int, value: int) -> dict[str, Any]:
    return dict(q_lora_rank=q, kv_lora_rank=512, qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=value)


DEEPSEEK = dict(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)


def _yarn(factor: float, fast: float) -> dict[str, Any]:
    return dict(
        rope_scaling=dict(
            type="yarn",
            factor=factor,
            beta_fast=fast,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=4096,
        )
    )


REAL_MODELS: dict[str, RealModel] = {
    "qwen2.5-0.5B": _qwen2(24, 896, 4864, 14, 2, size="0.49", tied=True),
    "qwen2.5-math-1.5B": _qwen2(28, 1536, 8960, 12, 2, size="1.54", tied=True, rope_theta=10000.0),
    "qwen2.5-3B": _qwen2(36, 2048, 11008, 16, 2, size="3.09", tied=True),
    "qwen2.5-32B": _qwen2(64, 5120, 27648, 40, 8, size="32.8", tied=False, rms_norm_eps=1e-5),
    "qwen3-0.6B": _qwen3(28, 1024, 3072, 16, size="0.6", tied=True),
    "qwen3-1.7B": _qwen3(28, 2048, 6144, 16, size="1.7", tied=True),
    "qwen3-4B": _qwen3(36, 2560, 9728, 32, size="4.0", tied=True),
    "qwen3-8B": _qwen3(36, 4096, 12288, 32, size="8.2"),
    "qwen3-32B": _qwen3(64, 5120, 25600, 64, size="32.8"),
    "qwen3-30B-A3B": _qwen3(48, 2048, 6144, 32, 4, size="30.5", **_qwen3_experts(768)),
    "qwen3-235B-A22B": _qwen3(94, 4096, 12288, 64, 4, size="235", **_qwen3_experts(1536)),
    "llama3-8B": _llama(32, 4096, 14336, 32, size="8.03"),
    "llama3.1-8B-Instruct": _llama(32, 4096, 14336, 32, size="8.03", factor=8.0),
    "llama3.2-3B-Instruct": _llama(28, 3072, 8192, 24, size="3.21", factor=32.0, tied=True),
    "glm4-9B": _glm4(40, 4096, 13696, 32, bias=True, size="9.4"),
    "glm4-32B": _glm4(61, 6144, 23040, 48, bias=False, size="32.57"),
    "glm4.5-106B-A12B": _glm4_moe(
        46, 4096, 10944, norms=False, experts=_routed(128, 8, 1408, 1, 1.0), size_with_mtp="110"
    ),
    "glm4.5-355B-A32B": _glm4_moe(
        92, 5120, 12288, norms=True, experts=_routed(160, 8, 1536, 3, 2.5), size_with_mtp="358"
    ),
    "glm4.7-30B-A3B": RealModel(
        "Glm4MoeLiteForCausalLM",
        _entries(47, 2048, 10240, 20, 20, 154880, 1e6, 1e-5)
        | dict(
            max_position_embeddings=202752,
            num_nextn_predict_layers=1,
            partial_rotary_factor=1.0,
            topk_method="noaux_tc",
        )
        | _latent(768, 192, 256)
        | _routed(64, 4, 1536, 1, 1.8),
        size_with_mtp="31.2",
    ),
    "deepseek-v3": RealModel(
        "DeepseekV3ForCausalLM",
        _entries(61, 7168, 18432, 128, 128, 129280, 10000.0, 1e-6)
        | dict(max_position_embeddings=163840, num_nextn_predict_layers=1)
        | _latent(1536, 128, 128)
        | _routed(256, 8, 2048, 3, 2.5, groups=8, top_groups=4)
        | DEEPSEEK
        | _yarn(40, 32),
        size="671",
        size_with_mtp="684",  # the hub shows 685 for the fp8 files, whose scales it counts too
    ),
    "kimi-k2": RealModel(
        "DeepseekV3ForCausalLM",
        _entries(61, 7168, 18432, 64, 64, 163840, 50000.0, 1e-6)
        | dict(model_type="kimi_k2", max_position_embeddings=131072, num_nextn_predict_layers=0)
        | _latent(1536, 128, 128)
        | _routed(384, 8, 2048, 1, 2.827)
        | DEEPSEEK
        | _yarn(32.0, 1.0),
        size="1026",
    ),
    "moonlight": RealModel(
        "DeepseekV3ForCausalLM",
        _entries(27, 2048, 11264, 16, 16, 163840, 50000.0, 1e-5)
        | dict(max_position_embeddings=8192, num_nextn_predict_layers=0, rope_scaling=None)
        | _latent(None, 128, 128)
        | _routed(64, 6, 1408, 1, 2.446, shared=2)
        | DEEPSEEK,
        size="16.0",
    ),
}
