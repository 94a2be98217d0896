"""SGLang's unchanged classes of the model families that Penstock supports, and two patches for multi-head latent
attention (MLA) on CPU.

Without Intel's AMX kernels SGLang 0.5.21 fails in two places for the MLA families, which are patched here. With the
patches the log-probs of tiny models are equal to those of transformers (`tests/engines/test_sglang_families.py`).
"""

import inspect
from typing import Any

from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM
from sglang.srt.models.glm4 import Glm4ForCausalLM
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

EntryClass = [  # the name that SGLang looks for
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeForConditionalGeneration,
    LlamaForCausalLM,
    Glm4ForCausalLM,
    Glm4MoeForCausalLM,
    Glm4MoeLiteForCausalLM,
    DeepseekV3ForCausalLM,
]

# Patch 1: use absorbed MLA, as for decoding and cached prefixes, also for a prompt without a cached prefix. Unpatched,
# SGLang uses full heads (MHA) for such a prompt; their keys are not written to the KV cache that the torch_native
# backend reads, and scaled_dot_product_attention fails with "Expected size for first two dimensions of batch2 tensor".
attention_backend_handler.AttentionBackendRegistry.register(
    "torch_native", attention_backend_handler._dispatch_mla_subtype
)

yarn_only = factory.get_rope_cpu
signature = inspect.signature(yarn_only)


def rope_on_cpu(*args: Any, **kwargs: Any) -> Any:
    """Return the RoPE module of an MLA model on CPU (patch 2).

    SGLang's `get_rope_cpu` supports only YaRN; for a model without RoPE scaling (Moonlight) `get_rope` is used.
    """
    call = signature.bind(*args, **kwargs)
    if call.arguments.get("rope_scaling") is not None:
        return yarn_only(*args, **kwargs)
    call.arguments.pop("device", None)
    return factory.get_rope(*call.args, **call.kwargs)


factory.get_rope_cpu = rope_on_cpu
