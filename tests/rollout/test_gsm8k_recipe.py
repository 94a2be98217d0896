"""The GSM8K recipes: prepared rows are rendered by a chat template with Qwen3's habits. No weights."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from chat_templates import chat_tokenizer
from sft_templates import QWEN3

from penstock.flows.options.flags import parse_config
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.text.tokenizer import check_tokenizer

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "examples" / "gsm8k" / "prepare.py"))
ROWS = [
    {"question": "Two bags hold 600 nails each. How many nails?", "answer": "600+600=<<600+600=1200>>1200\n#### 1,200"},
    {"question": "It was 3 degrees and fell by 8.", "answer": "3 - 8 = -5\n#### -5"},
]


@pytest.mark.parametrize("model", ["0.6B", "4B"])
def test_recipe_renders_prompts_without_thoughts(model: str, tmp_path: Path) -> None:
    source = tmp_path / "gsm8k" / "main"
    source.mkdir(parents=True)
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    script["prepare"](tmp_path / "gsm8k", tmp_path / "data")
    recipe = ROOT / "configs" / "recipes" / f"gsm8k-qwen3-{model}.toml"
    config = parse_config(["--config", str(recipe), "--prompt-data", str(tmp_path / "data/train.jsonl")]).rollout
    chat_tokenizer(QWEN3).inner.save_pretrained(tmp_path / "model")
    tokenizer = check_tokenizer(
        tmp_path / "model",
        apply_chat_template=config.apply_chat_template,
        template_options=config.apply_chat_template_kwargs,
    )
    prompts, _ = PromptSource.open(config).take(PromptSource.open(config).restore(None), 2)
    questions = {"1200": ROWS[0]["question"], "-5": ROWS[1]["question"]}
    assert {prompt.label for prompt in prompts} == {*questions}
    for prompt, text in zip(prompts, tokenizer.render([prompt.content for prompt in prompts])):
        question = f"{questions[prompt.label]}\n\n{script['INSTRUCTION']}"
        # The empty thoughts are what `enable_thinking = false` adds.
        assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
