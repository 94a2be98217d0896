"""SmolLM2-135M-Instruct with its real weights on a CPU: conversion, log-probs, greedy text, and the page of
examples/smollm2 as it is printed, up to the GPU. The tests take the packages of the page, from the package index if
they are not installed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from penstock_command import ROOT, penstock

from penstock.stages.plugins import load_function
from tests.docs.doc_pages import snippets_of, walk

if TYPE_CHECKING:
    from penstock.engines.cluster import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.full]
EXAMPLE = ROOT / "examples" / "smollm2"
PAGE = EXAMPLE / "README.md"


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the packages of the page on the import path, of this process and of those that it starts."""
    [names] = re.findall(r"pip install --no-deps (.*)", PAGE.read_text())
    missing = [name for name in names.split() if find_spec(name.partition("==")[0].replace("-", "_")) is None]
    with pytest.MonkeyPatch.context() as patch:
        if missing:
            folder = tmp_path_factory.mktemp("packages")
            install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), *missing]
            result = subprocess.run(install, capture_output=True, text=True)
            if result.returncode:
                pytest.skip(f"not installed, and pip cannot install them: {missing}; {result.stderr[-500:]}")
            patch.syspath_prepend(folder)
            patch.setenv("PYTHONPATH", f"{ROOT}:{folder}")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    functions = load_function(f"{EXAMPLE / 'model.py'}:write_model").__globals__
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    functions["write_model"](functions["packaged_gguf"](), directory)
    return directory


def test_conversion_is_exact_and_log_probs_equal_transformers(
    model: Path, prefect_api: dict[str, str], tmp_path: Path
) -> None:
    from penstock.engines.families import read_config
    from penstock.stages.convert.conversion_check import choose_part_to_compare, compare_logits

    words = ["--hf-checkpoint", str(model), "--save", str(tmp_path / "converted"), "--verify"]
    converted = penstock("convert", *words, "--check-logits", "false", env=prefect_api)
    assert "272 tensors" in converted.stdout
    whole = choose_part_to_compare(read_config(model / "config.json"), max_whole_parameters=10**9)
    compared = compare_logits(tmp_path / "converted" / "release", model, whole)
    assert whole.is_whole and compared.difference is not None and compared.difference < 1e-4


def test_greedy_text_of_the_engine_equals_transformers(model: Path, cluster: Cluster, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from penstock.engines.serving.pool import EnginePool
    from penstock.engines.serving.server import ServerSpec
    from penstock.engines.sglang.client import SGLangClient

    make_rows, tokenizer = load_function(f"{EXAMPLE / 'data.py'}:make_rows"), AutoTokenizer.from_pretrained(model)
    inputs = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        for task in ("sums", "sorting")
        for row in make_rows(task, 0)["heldout"][:4]
    ]
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 64, "ignore_eos": True}

    async def generate(urls: list[str]) -> list[list[int]]:
        async with SGLangClient(urls) as client:
            generations = await client.generate_each(inputs, [sampling] * len(inputs))
        return [generation.token_ids for generation in generations]

    pool = EnginePool(cluster, ServerSpec(model_path=str(model), log_dir=str(tmp_path)))
    try:
        of_engine = asyncio.run(generate(pool.urls))
    finally:
        pool.stop()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    reference.generation_config.eos_token_id = None  # the engine does not stop at it either
    for ids, generated in zip(inputs, of_engine, strict=True):
        prompt = torch.tensor([ids])
        # Without a mask transformers hides every padding token, and here that is the token that ends each turn.
        mask = torch.ones_like(prompt)
        expected = reference.generate(prompt, attention_mask=mask, max_new_tokens=64, do_sample=False)
        assert generated == expected[0, len(ids) :].tolist() and len(generated) == 64


def test_page_leads_to_two_rounds_that_are_equal_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    end = PAGE.read_text().split("\n").index("## 100 rounds on one GPU")
    printed, missing = walk(list(takewhile(lambda snippet: snippet.line < end, snippets_of(PAGE))), tmp_path)
    assert missing == [], printed[-20000:]
    gaps = [float(gap) for gap in re.findall(r"^round +[01] \([12]/2\) .* gap (\S+)", printed, re.MULTILINE)]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    assert "no problems found" in printed and "2 of 2 rounds are equal bit for bit" in printed
    exports = list(tmp_path.glob("penstock-store/runs/smollm2-cpu/exports/000002/*/config.json"))
    assert len(exports) == 1 and json.loads(exports[0].read_text())["vocab_size"] == 49152
    shutil.rmtree(tmp_path / "penstock-store")  # 3 GB
