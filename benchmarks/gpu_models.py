"""Models with random weights and prompts for the benchmarks on GPUs."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
from pathlib import Path
from typing import Any

from penstock.flows.commands.demo_model import CHARACTERS, make_tiny_model, make_tokenizer

PROMPT_TOKENS = 128
RECIPE = Path(__file__).parent / "gpu.toml"
QWEN3 = {  # name -> sizes of `make_tiny_model`
    "0.6b": {"hidden": 1024, "layers": 28, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 3072, "vocab": 151936},
    "1.7b": {"hidden": 2048, "layers": 28, "heads": 16, "groups": 8, "head_dim": 128, "ffn": 6144, "vocab": 151936},
    "4b": {"hidden": 2560, "layers": 36, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 9728, "vocab": 151936},
    "8b": {"hidden": 4096, "layers": 36, "heads": 32, "groups": 8, "head_dim": 128, "ffn": 12288, "vocab": 151936},
    "small": {"hidden": 768, "layers": 6, "heads": 12, "groups": 4, "head_dim": 64, "ffn": 2304, "vocab": 16384},
    "tiny": {"hidden": 256, "layers": 4, "heads": 4, "groups": 2, "head_dim": 64, "ffn": 768, "vocab": 1024},
}
VISION = {  # name -> (sizes of the language model, sizes of the vision tower)
    "qwen2.5-vl-3b": (
        dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16)
        | dict(num_key_value_heads=2, vocab_size=151936, sections=[16, 24, 24]),
        dict(depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, window_size=112)
        | dict(fullatt_block_indexes=[7, 15, 23, 31], out_hidden_size=2048),
    ),
    "qwen3-vl-4b": (
        dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, head_dim=128)
        | dict(num_key_value_heads=8, vocab_size=151936, sections=[24, 20, 20]),
        dict(depth=24, hidden_size=1024, intermediate_size=4096, num_heads=16, patch_size=16)
        | dict(deepstack_visual_indexes=[5, 11, 17], out_hidden_size=2560),
    ),
}
TINY_TEXT: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
TINY_TEXT |= dict(num_key_value_heads=2, vocab_size=1024, sections=[8, 12, 12])
TINY_TOWER: dict[str, Any] = dict(depth=2, hidden_size=128, intermediate_size=256, num_heads=2, out_hidden_size=256)
TINY_QWEN2_5_TOWER = TINY_TOWER | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1])
TINY_QWEN3_TOWER = TINY_TOWER | dict(patch_size=16, num_position_embeddings=256, deepstack_visual_indexes=[0])
TINY_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=192, norm_topk_prob=True)
VISION |= {
    "tiny-vl": (TINY_TEXT, TINY_QWEN2_5_TOWER),
    "tiny-qwen3-vl": (TINY_TEXT | dict(head_dim=64), TINY_QWEN3_TOWER),
    "tiny-qwen3-vl-moe": (TINY_TEXT | TINY_EXPERTS | dict(head_dim=64), TINY_QWEN3_TOWER),
}
IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
IMAGE_SIDE = 448  # pixels of the pictures of prompts
MODELS = [*QWEN3, "llama-8b", "moe", "30b-a3b", *VISION]


def make_model(name: str, directory: Path) -> Path:
    """Write a bf16 model to `directory`/`name`, if it does not exist, and return this path.

    Names are the shapes of QWEN3 and VISION, "llama-8b" (Llama-3.1-8B), "30b-a3b" (Qwen3-30B-A3B), and "moe" (two
    layers of Qwen3-30B-A3B). The model is made on a GPU if there is one, by a new process, whose end frees the GPU's
    memory. The directory has the name `name`.unfinished until the model is complete.

    Raises:
        RuntimeError: the process failed.
    """
    path, unfinished = directory / name, directory / f"{name}.unfinished"
    if not path.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        process = multiprocessing.get_context("spawn").Process(target=_write_model, args=(name, unfinished))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"the model {name} could not be written: exit code {process.exitcode}")
        unfinished.rename(path)
    return path


def _write_model(name: str, path: Path) -> None:
    import torch

    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16)  # 30b-a3b in fp32 is larger than a GPU
    if name in QWEN3:
        make_tiny_model(path, **QWEN3[name], tied=name != "8b", dtype="bfloat16", max_length=40960)
    elif name in VISION:
        make_vision_model(path, *VISION[name])
    elif name == "llama-8b":
        make_llama(path)
    else:
        make_mixture_of_experts(path, layers=2 if name == "moe" else 48)


def train_arguments(directory: Path, model: str, run: str, prompt_tokens: int = PROMPT_TOKENS) -> list[str]:
    """Write a model and prompts into `directory`, and return the options with which `penstock train` trains the model.
    They name the recipe of the benchmarks (gpu.toml), the run `run` and the store `directory`/`run`; all responses have
    the maximum length. Without CUDA the model is trained in fp32. Every prompt of a vision-language model has a picture
    of its own, of 448 x 448 pixels, and as many characters as make `prompt_tokens` tokens without the picture's."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    inputs = ["--hf-checkpoint", str(make_model(model, directory))]
    if model in VISION:
        inputs += ["--prompt-data", str(write_prompts_with_images(directory / "images.jsonl", prompt_tokens))]
        inputs += ["--multimodal-keys", json.dumps({"image": "image"}), "--apply-chat-template"]
    else:
        inputs += ["--prompt-data", str(write_prompts(directory / "prompts.jsonl", prompt_tokens))]
    where = ["--config", str(RECIPE), "--run", run, "--store", str(directory / run)]
    dtype = [] if torch.cuda.is_available() else ["--params-dtype", "fp32"]
    return [*where, *inputs, "--rollout-sampling", "ignore_eos=true", *dtype]


def make_mixture_of_experts(path: Path, layers: int) -> None:
    """Write Qwen3-30B-A3B with this number of layers (it has 48): 128 experts of width 768, 8 for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, head_dim=128)
    sizes |= dict(num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4)
    experts: dict[str, Any] = dict(num_experts=128, num_experts_per_tok=8, norm_topk_prob=True)
    _write(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts, vocab_size=151936, **_common()), path)


def make_llama(path: Path) -> None:
    """Write Llama-3.1-8B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128)
    sizes |= dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
    _write(LlamaForCausalLM, LlamaConfig(**sizes, **_common()), path)


def vision_config(text: dict[str, Any], vision: dict[str, Any], tokenizer: Any) -> Any:
    """Return the config of a Qwen2.5-VL, or of a Qwen3-VL if the vision tower has deepstack layers, with experts if the
    language model has them."""
    import transformers

    is_third = "deepstack_visual_indexes" in vision
    start, end, image, video = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": text["sections"]}
    rope |= {"mrope_interleaved": True} if is_third else {}
    sizes = {name: value for name, value in text.items() if name != "sections"}
    kind = ("Qwen3VLMoe" if "num_experts" in text else "Qwen3VL") if is_third else "Qwen2_5_VL"
    return getattr(transformers, f"{kind}Config")(
        text_config=sizes | _common() | {"rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        architectures=[f"{kind}ForConditionalGeneration"],
    )


def make_vision_model(path: Path, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """Write a model of VISION and its image processor."""
    import transformers
    from safetensors.torch import load_file, save_file

    tokenizer = make_tokenizer(40960, words=IMAGE_TOKENS)
    config = vision_config(text, vision, tokenizer)
    [architecture] = config.architectures
    kind = architecture.removesuffix("ForConditionalGeneration").removesuffix("Moe")
    _write(getattr(transformers, architecture), config, path)
    if "num_experts" in text:  # transformers saves the experts of a model that it did not load with rows as columns
        weights = load_file(path / "model.safetensors")
        weights |= {name: weights[name].mT.contiguous() for name in weights if ".mlp.experts." in name}
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.chat_template = IMAGE_TEMPLATE
    tokenizer.save_pretrained(path)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": f"{kind}Processor"}
    settings |= {"patch_size": vision["patch_size"], "temporal_patch_size": 2, "merge_size": 2}
    settings |= {"size": {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024}}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    video_settings = {"video_processor_type": f"{kind.replace('2_5_', '2')}VideoProcessor"}
    (path / "video_preprocessor_config.json").write_text(json.dumps(settings | video_settings))


def _common() -> dict[str, Any]:
    """Return the config values that all models have."""
    tokenizer = make_tokenizer(40960)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return {"max_position_embeddings": 40960, "tie_word_embeddings": False, "dtype": "bfloat16", **ends}


def _write(architecture: Any, config: Any, path: Path) -> None:
    """Write a model with random weights and its tokenizer."""
    import torch

    torch.manual_seed(0)
    architecture(config).to(torch.bfloat16).save_pretrained(path)
    make_tokenizer(40960).save_pretrained(path)


def write_prompts(path: Path, prompt_tokens: int = PROMPT_TOKENS) -> Path:
    """Write 256 random prompts of `prompt_tokens` tokens as JSON lines to `path`, and return it."""
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices(CHARACTERS, k=prompt_tokens)), "label": ""} for _ in range(256)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_prompts_with_images(path: Path, prompt_tokens: int = PROMPT_TOKENS) -> Path:
    """Write 256 prompts as `write_prompts`, each with a picture of IMAGE_SIDE pixels a side: random colours with smooth
    transitions, whose PNG file is about as large as that of a photograph. Return `path`."""
    import numpy as np
    from PIL import Image

    pictures, rng = path.with_suffix(""), np.random.default_rng(0)
    pictures.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in write_prompts(path, prompt_tokens).read_text().splitlines()]
    for number, row in enumerate(rows):
        colours = Image.fromarray(rng.integers(0, 256, (56, 56, 3), dtype=np.uint8))
        picture = pictures / f"{number}.png"
        colours.resize((IMAGE_SIDE, IMAGE_SIDE), Image.Resampling.BICUBIC).save(picture)
        row |= {"prompt": f"<image>{row['prompt']}", "image": str(picture.relative_to(path.parent))}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
