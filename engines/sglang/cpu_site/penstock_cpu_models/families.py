"""SGLang's own classes of the families that Penstock converts, and what two of its CPU paths need for latent attention (MLA).

The classes are unchanged. Without Intel's AMX kernels SGLang 0.5.21 serves the MLA families on CPU but for two places, put right
here; both were seen with tiny models whose log-probs then equal transformers' (`tests/engines/test_sglang_families.py`).
"""

from typing import Any

from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.glm4 import Glm4ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

EntryClass = [  # the name that SGLang looks for
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    LlamaForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    DeepseekV3ForCausalLM,
]

# A prompt without a cached prefix would go through full heads (MHA), whose keys never reach the cache that the backend reads:
# scaled_dot_product_attention fails with "Expected size for first two dimensions of batch2 tensor". Through the latent cache
# (absorbed MLA), as decoding and cached prefixes go anyway, it is right.
attention_backend_handler.AttentionBackendRegistry.register("torch_native", attention_backend_handler._dispatch_mla_subtype)

_yarn_only = factory.get_rope_cpu


def _rope_on_cpu(
    head_size: int,
    rotary_dim: int,
    max_position: int,
    base: int,
    is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None,
    dtype: Any = None,
    partial_rotary_factor: float = 1.0,
    device: str | None = None,
) -> Any:
    """SGLang's rotation for MLA on CPU asserts YaRN; a model without it (Moonlight) takes the one that every other model takes."""
    common = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    return factory.get_rope(*common) if rope_scaling is None else _yarn_only(*common, device)


factory.get_rope_cpu = _rope_on_cpu
