"""Draw pictures of one shape, and create a tiny vision-language model to train on them: `python data.py DIRECTORY`.

The model must name the colour of the shape. It is a Qwen2.5-VL of about 160,000 random parameters; each of the four
answers is one token. The demonstrations in sft.jsonl name a random colour: they teach the form of an answer, but
nothing about pictures, so that RL starts at chance.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from penstock.flows.commands.demo_model import END, PAD, make_tokenizer

SIDE = 56  # pixels: 4 x 4 patches of 14 pixels, of which 2 x 2 become one token
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 50)}
NUM_TRAIN, NUM_HELDOUT, NUM_DEMONSTRATIONS = 512, 128, 1280
POSITIONS = 1024
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_model(directory: Path, words: Sequence[str] = (*COLOURS,)) -> None:
    """Write a random Qwen2.5-VL, its tokenizer and the settings of its image processor. Each of `words`, six at most,
    is one token."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = make_tokenizer(max_length=POSITIONS, words=[*SPECIAL, *words])
    tokenizer.chat_template = TEMPLATE
    start, end, image, video = tokenizer.convert_tokens_to_ids(SPECIAL)
    text = dict(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=PAD,
        initializer_range=0.08,  # with 0.02, the usual value of larger models, learning takes several times as long
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    )
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        patch_size=14,
        window_size=56,
        fullatt_block_indexes=[1],
        out_hidden_size=64,
        initializer_range=0.08,
    )
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, PAD
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 448 * 448},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    video_settings = settings | {"video_processor_type": "Qwen2VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video_settings))


def draw(rng: random.Random, colour: str) -> Image.Image:
    """Return a picture of a circle, a square or a triangle, of random size and place, on grey of random brightness."""
    picture = Image.new("RGB", (SIDE, SIDE), (rng.randrange(110, 256),) * 3)
    size = rng.randrange(20, 45)
    left, top = rng.randrange(SIDE - size), rng.randrange(SIDE - size)
    box, pen = (left, top, left + size, top + size), ImageDraw.Draw(picture)
    shade = tuple(max(0, min(255, value + rng.randrange(-30, 31))) for value in COLOURS[colour])
    match rng.choice(("circle", "square", "triangle")):
        case "circle":
            pen.ellipse(box, fill=shade)
        case "square":
            pen.rectangle(box, fill=shade)
        case "triangle":
            pen.polygon([(left, top + size), (left + size, top + size), (left + size / 2, top)], fill=shade)
    return picture


def main(directory: str) -> None:
    """Write model/, pictures/, train.jsonl, heldout.jsonl and sft.jsonl into `directory`."""
    root, rng, rows = Path(directory), random.Random(0), []
    (root / "pictures").mkdir(parents=True)
    make_model(root / "model")
    for number in range(NUM_TRAIN + NUM_HELDOUT):
        label, name = rng.choice([*COLOURS]), f"pictures/{number:04d}.png"
        draw(rng, label).save(root / name)
        rows.append({"prompt": "<image>colour?", "images": [name], "label": label})
    train, heldout = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    sft = []
    for row in rng.choices(train, k=NUM_DEMONSTRATIONS):
        question = {"role": "user", "content": row["prompt"]}
        answer = {"role": "assistant", "content": rng.choice([*COLOURS])}
        sft.append({"messages": [question, answer], "images": row["images"]})
    for name, content in (("train", train), ("heldout", heldout), ("sft", sft)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


if __name__ == "__main__":
    main(sys.argv[1])
