"""The GSM8K recipes from rows of the data set to rewards: prepared, rendered by a chat template with Qwen3's habits,
answered from a script, and graded. No weights."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chat_templates import chat_tokenizer
from scripted_engine import KEYS, ScriptedClient
from sft_templates import QWEN3

from penstock.engines.generation import Generation
from penstock.flows.options.flags import parse_config
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer, check_tokenizer
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store
from tests.forked_worker import forked_workers  # noqa: F401 fixture

ROOT = Path(__file__).parents[2]
script = runpy.run_path(str(ROOT / "examples" / "gsm8k" / "prepare.py"))
ROWS = [
    {"question": "Two bags hold 600 nails each. How many nails?", "answer": "600+600=<<600+600=1200>>1200\n#### 1,200"},
    {"question": "It was 3 degrees and fell by 8.", "answer": "3 - 8 = -5\n#### -5"},
]
# Each prompt gets these eight responses: text, and the reward if the label is 1200 and if it is -5.
RESPONSES: list[tuple[str, float, float]] = [
    (r"600+600=1200. So \boxed{1200}.", 1.0, 0.0),
    (r"\boxed{1,200}", 1.0, 0.0),
    (r"First \boxed{1200}, no: \boxed{-5}", 0.0, 1.0),
    (r"\boxed{-5}", 0.0, 1.0),
    (r"\boxed{3-8}", 0.0, 0.0),  # not calculated
    (r"\boxed{600+600}", 0.0, 0.0),
    ("1200", 0.0, 0.0),  # not in a box
    ("-5", 0.0, 0.0),
]


class Answers(ScriptedClient):
    """Answers the samples of a prompt with RESPONSES, the last of them cut off."""

    tokenizer: PromptTokenizer

    def answer(self, input_ids: list[int], index: int) -> Generation:
        end = "<|im_end|>" if index < 7 else ""
        [token_ids] = self.tokenizer.encode([RESPONSES[index][0] + end])
        reason = "stop" if end else "length"
        return Generation(token_ids, [-0.5] * len(token_ids), reason, [(self.served_version, len(token_ids))])  # type: ignore[arg-type]


def rollout(model: str, folder: Path) -> tuple[PromptTokenizer, list[Sample], Mapping[str, Any]]:
    """Prepare ROWS and do a round of a recipe on them. Return the tokenizer, the samples and the round's metrics."""
    source = folder / "gsm8k" / "main"
    source.mkdir(parents=True)
    for split in ("train", "test"):
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    script["prepare"](folder / "gsm8k", folder / "data")
    recipe = ROOT / "configs" / "recipes" / f"gsm8k-qwen3-{model}.toml"
    config = parse_config(["--config", str(recipe), "--prompt-data", str(folder / "data/train.jsonl")]).rollout
    config = config.model_copy(update={"rollout_batch_size": 2, "over_sampling_batch_size": 2})
    chat_tokenizer(QWEN3).inner.save_pretrained(folder / "model")
    tokenizer = check_tokenizer(
        folder / "model",
        apply_chat_template=config.apply_chat_template,
        template_options=config.apply_chat_template_kwargs,
    )
    Answers.tokenizer = tokenizer
    store = Store(str(folder / "store"))

    connect = partial(Answers, weight_version="run/0")
    context = RolloutContext(store, config, PromptSource.open(config), tokenizer, ["http://engine"], connect=connect)
    first = RolloutRound("run", rollout_id=0, policy_version=0)
    commit = rollout_stage(context, KEYS.rollout_prefix(0), first, read_resume_point(store, KEYS, 0))
    return tokenizer, read_samples(store, commit), commit.summary


@pytest.mark.parametrize("model", ["0.6B", "4B"])
def test_recipe_renders_prompts_and_grades_answers(model: str, tmp_path: Path) -> None:
    tokenizer, samples, summary = rollout(model, tmp_path)
    assert len(samples) == 16
    groups = {sample.label: [s for s in samples if s.group_id == sample.group_id] for sample in samples}
    for row, (label, group) in zip(ROWS, sorted(groups.items(), reverse=True), strict=True):
        question = f"{row['question']}\n\n{script['INSTRUCTION']}"
        # The empty thoughts are what `enable_thinking = false` adds.
        rendered = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert {sample.prompt for sample in group} == {rendered}
        length = group[0].prompt_length
        assert group[0].token_ids[:length] == tokenizer.encode([rendered])[0]
        assert [sample.reward for sample in group] == [response[1 if label == "1200" else 2] for response in RESPONSES]
        assert [sample.status for sample in group] == 7 * [Status.COMPLETED] + [Status.TRUNCATED]
    assert summary["rollout/raw_reward"] == 4 / 16
