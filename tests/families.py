"""Tiny random checkpoints of every model family, written by transformers and named as the hub names them.

`make_family(directory, name)` writes a Hugging Face directory that converts, loads and generates like the real one, in
a few hundred kilobytes; `hf_model(directory)` is transformers' eager float32 model of it, the reference for all others.
Sizes are chosen to reveal mistakes: norms, biases and router corrections are random too, no two widths are equal, the
vocabulary is odd, the first layer of a mixture is dense (Qwen3's have none), and layers, key heads and experts are
divisible by two.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COMMON: dict[str, Any] = dict(
    vocab_size=61,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_dropout=0.0,
    bos_token_id=None,
    initializer_range=0.12,
)
NORM_SPREAD, BIAS_SPREAD = 0.2, 0.1  # standard deviations of norms about 1 and of biases about 0


def _rope(theta: float, rope_type: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **more}}


SCALE = dict(mscale=1.0, mscale_all_dim=1.0)
LLAMA_ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
GLM_DENSE = dict(head_dim=16, rms_norm_eps=1e-5, **_rope(10000.0, partial_rotary_factor=0.5))
MIXTURE: dict[str, Any] = dict(  # entry names of GLM and DeepSeek
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
)
DEEPSEEK = MIXTURE | dict(  # in the hub's configs, read by SGLang; transformers does not write them
    first_k_dense_replace=1, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid"
)
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
)
GLM_MOE = MIXTURE | dict(
    head_dim=12, first_k_dense_replace=1, **_rope(1e6, partial_rotary_factor=0.5), rms_norm_eps=1e-5
)

# architecture and its config beyond COMMON; `model_type` only where the hub's differs
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": dict(architecture="Qwen2ForCausalLM", tie_word_embeddings=True, **_rope(1e6)),
    "qwen2.5-7b": dict(architecture="Qwen2ForCausalLM", **_rope(1e6)),
    "qwen3": dict(architecture="Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True, **_rope(1e6)),
    "qwen3-moe": dict(
        architecture="Qwen3MoeForCausalLM",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        **_rope(1e6),
    ),
    "llama3": dict(architecture="LlamaForCausalLM", rms_norm_eps=1e-5, **_rope(500000.0)),
    "llama3.1": dict(
        architecture="LlamaForCausalLM", head_dim=16, rms_norm_eps=1e-5, **_rope(500000.0, "llama3", **LLAMA_ROPE)
    ),
    "llama3.2": dict(
        architecture="LlamaForCausalLM",
        head_dim=16,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **_rope(500000.0, "llama3", **LLAMA_ROPE | {"factor": 32.0}),
    ),
    "glm4": dict(architecture="Glm4ForCausalLM", attention_bias=True, **GLM_DENSE),
    "glm4-32b": dict(architecture="Glm4ForCausalLM", attention_bias=False, **GLM_DENSE),
    "glm4.5": dict(
        architecture="Glm4MoeForCausalLM", attention_bias=True, use_qk_norm=False, routed_scaling_factor=1.0, **GLM_MOE
    ),
    "glm4.5-355b": dict(
        architecture="Glm4MoeForCausalLM", attention_bias=True, use_qk_norm=True, routed_scaling_factor=2.5, **GLM_MOE
    ),
    "glm4.7-flash": dict(
        architecture="Glm4MoeLiteForCausalLM",
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        rms_norm_eps=1e-5,
        **_rope(1e6),
        **MIXTURE | LATENT | {"v_head_dim": 24},  # equal to queries and keys, as in the real model
    ),
    "deepseek-v3": dict(
        architecture="DeepseekV3ForCausalLM",
        routed_scaling_factor=2.5,
        **_rope(10000.0, "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1, **SCALE),
        **DEEPSEEK | LATENT | dict(n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2),
    ),
    "kimi-k2": dict(
        architecture="DeepseekV3ForCausalLM",
        model_type="kimi_k2",
        routed_scaling_factor=2.827,
        **_rope(
            50000.0, "yarn", factor=32.0, original_max_position_embeddings=8, beta_fast=1.0, beta_slow=1.0, **SCALE
        ),
        **DEEPSEEK | LATENT,
    ),
    "moonlight": dict(
        architecture="DeepseekV3ForCausalLM",
        routed_scaling_factor=2.446,
        rms_norm_eps=1e-5,
        **_rope(50000.0),
        **DEEPSEEK | LATENT | dict(q_lora_rank=None, n_shared_experts=2, num_experts_per_tok=3),
    ),
}

VISION: dict[str, Any] = dict(  # more blocks than one window, and images of other sizes than the position embeddings
    depth=3, hidden_size=24, intermediate_size=28, num_heads=2, patch_size=4, out_hidden_size=40
)
QWEN3_VISION = VISION | dict(num_position_embeddings=25, deepstack_visual_indexes=[0, 2])
IMAGE_TOKEN = 58
# Words of the tokenizer beside its 54 characters and special tokens. "ab" is also the text of two other tokens.
VISION_WORDS = ("<|vision_start|>", "<|vision_end|>", "ab", "<|video_pad|>", "<|image_pad|>")
VISION_START, VISION_END, AB = 54, 55, 56
VISION_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VISION_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": dict(
        architecture="Qwen2_5_VLForConditionalGeneration",
        vision_config=VISION | dict(window_size=16, fullatt_block_indexes=[1]),
        tie_word_embeddings=True,
        **_rope(1e6, mrope_section=[1, 2, 2]),
    ),
    "qwen3-vl": dict(
        architecture="Qwen3VLForConditionalGeneration",
        vision_config=QWEN3_VISION,
        head_dim=16,
        **_rope(5e6, mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
    "qwen3-vl-moe": dict(
        architecture="Qwen3VLMoeForConditionalGeneration",
        vision_config=QWEN3_VISION,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        **_rope(5e6, mrope_section=[3, 3, 2], mrope_interleaved=True),
    ),
}


def make_family(directory: str | Path, name: str, seed: int = 0, dtype: str = "float32", **config_changes: Any) -> Path:
    """Write a tiny random checkpoint of a family, with the demo's character tokenizer. Deterministic.

    Args:
        directory: created if it does not exist.
        name: in FAMILIES or VISION_FAMILIES.
        seed: of the weights.
        dtype: of all weights except router corrections, which stay float32 as in the hub's files.
        config_changes: replace entries of the Hugging Face config, or the architecture. `num_nextn_predict_layers=1`
            (GLM-4.5 and later, DeepSeek-V3) also writes a multi-token prediction layer, which transformers
            does not have: its attention and experts are those of the last layer.
    """
    made = _made() / hashlib.sha256(repr((name, seed, dtype, config_changes)).encode()).hexdigest()
    if not made.exists():
        _write_family(made.with_suffix(".making"), name, seed, dtype, config_changes).rename(made)
    return Path(shutil.copytree(made, directory, dirs_exist_ok=True))


@cache
def _made() -> Path:
    """Return the directory of the checkpoints that this process has made, from which `make_family` copies."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-tests-families-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _write_family(path: Path, name: str, seed: int, dtype: str, config_changes: dict[str, Any]) -> Path:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    from penstock.flows.commands.demo_model import END, PAD, make_tokenizer

    disable_progress_bar()
    fields = COMMON | (FAMILIES | VISION_FAMILIES)[name] | config_changes | dict(eos_token_id=END, pad_token_id=PAD)
    model_class = getattr(transformers, fields.pop("architecture"))
    model_type = fields.pop("model_type", None)
    if "vision_config" in fields:
        outer = {key: fields.pop(key) for key in ("vision_config", "tie_word_embeddings")}
        fields = outer | dict(text_config=fields, image_token_id=IMAGE_TOKEN, video_token_id=57)
        fields |= dict(vision_start_token_id=VISION_START, vision_end_token_id=VISION_END)
    config = model_class.config_class(dtype=dtype, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _randomise(model)
        extra = _prediction_layer(model) if fields.get("num_nextn_predict_layers") else {}
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    _cast(model, getattr(torch, dtype))
    model.save_pretrained(path)
    words = VISION_WORDS if name in VISION_FAMILIES else ()
    tokenizer = make_tokenizer(config.get_text_config().max_position_embeddings, words)
    tokenizer.chat_template = VISION_TEMPLATE if words else tokenizer.chat_template
    tokenizer.save_pretrained(path)
    _as_on_the_hub(path, model_type)
    if words:
        _add_processors(path)
    if extra:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in extra.items()}
        _add(path, tensors, config.num_hidden_layers)
    return path


def _add_processors(directory: Path) -> None:
    """Write the settings of the image and video processors of a vision-language model."""
    config = json.loads((directory / "config.json").read_text())
    kind = "Qwen3VL" if config["model_type"].startswith("qwen3") else "Qwen2_5_VL"
    sizes = {name: config["vision_config"][name] for name in ("patch_size", "temporal_patch_size")}
    sizes |= {"merge_size": config["vision_config"]["spatial_merge_size"]}
    side = sizes["patch_size"] * sizes["merge_size"]
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{kind}Processor", **sizes}
    image |= {"size": {"shortest_edge": side**2, "longest_edge": 400 * side**2}}
    (directory / "preprocessor_config.json").write_text(json.dumps(image))
    video = {"video_processor_type": f"{kind.replace('2_5_', '2')}VideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps({**image, **video}))
    file = directory / "tokenizer_config.json"
    tokenizer = json.loads(file.read_text()) | {"processor_class": f"{kind}Processor"}
    file.write_text(json.dumps(tokenizer, indent=2))


def hf_model(directory: str | Path) -> Any:
    """Return transformers' model of a checkpoint: float32, eager attention, evaluation mode.

    The class is chosen by architecture: for the model type `kimi_k2`, transformers would leave the experts random.
    """
    import transformers

    fields = json.loads((Path(directory) / "config.json").read_text())
    model_class = getattr(transformers, fields["architectures"][0])
    config = model_class.config_class(**{key: value for key, value in fields.items() if key != "model_type"})
    model, report = model_class.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    return model.eval()


@torch.no_grad()
def logprob_error(model: Any, prompt: list[int], generation: Any, temperature: float = 1.0) -> float:
    """Return the largest difference between an engine's log-probs of one response and those of transformers' model."""
    ids = torch.tensor(prompt + generation.token_ids)
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
    return (logprobs - torch.tensor(generation.logprobs)).abs().max().item()


def _randomise(model: torch.nn.Module) -> None:
    """Randomize norms, biases, weights and router corrections, which would start at one or zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.split(".")[-2]:
                parameter.copy_(1 + NORM_SPREAD * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(BIAS_SPREAD * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.copy_(COMMON["initializer_range"] * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(BIAS_SPREAD * torch.randn_like(buffer))


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model.to(dtype)
    for name, buffer in kept.items():
        module, _, last = name.rpartition(".")
        model.get_submodule(module)._buffers[last] = buffer


def _as_on_the_hub(directory: Path, model_type: str | None) -> None:
    """Rename entries of a config.json, and store experts of Qwen3-VL-MoE, as in the hub's checkpoints."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    if "num_local_experts" in text:  # transformers 5's name of Qwen3's `num_experts`
        text["num_experts"] = text.pop("num_local_experts")
        if "text_config" in config:
            _transpose_experts(directory / "model.safetensors")
    config["model_type"] = model_type or config["model_type"]
    if config["model_type"] == "qwen2_5_vl":  # no `text_config`
        rope = text.pop("rope_parameters")
        del text["model_type"], config["text_config"]
        config |= text | {"rope_theta": rope["rope_theta"]}
        config["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _transpose_experts(file: Path) -> None:
    """Store stacked experts as [experts, in, out]; a model that transformers did not load is saved as [experts, out,
    in]."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _prediction_layer(model: Any) -> dict[str, Tensor]:
    """Return the hub's tensors beyond the last layer, except those of attention and experts: norms, projection, and
    copies of embedding and head."""
    hidden, last = model.config.hidden_size, model.config.num_hidden_layers
    layer = f"model.layers.{last}."
    return {
        layer + "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        layer + "shared_head.head.weight": model.lm_head.weight.detach().clone(),
        layer + "shared_head.norm.weight": 1 + NORM_SPREAD * torch.randn(hidden),
        layer + "enorm.weight": 1 + NORM_SPREAD * torch.randn(hidden),
        layer + "hnorm.weight": 1 + NORM_SPREAD * torch.randn(hidden),
        layer + "eh_proj.weight": COMMON["initializer_range"] * torch.randn(hidden, 2 * hidden),
        layer + "input_layernorm.weight": 1 + NORM_SPREAD * torch.randn(hidden),
    }


def _add(directory: Path, tensors: dict[str, Tensor], last: int) -> None:
    """Add tensors to a checkpoint, and copies of the tensors of layer `last` - 1 as those of layer `last`."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    written = load_file(file)
    before, new = f"model.layers.{last - 1}.", f"model.layers.{last}."
    copies = {name.replace(before, new): tensor.clone() for name, tensor in written.items() if before in name}
    save_file(written | copies | tensors, file, metadata={"format": "pt"})
