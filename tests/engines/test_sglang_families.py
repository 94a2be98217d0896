"""Every model family in the real SGLang on CPU: its log-probs equal transformers', before and after new weights.

None is left out: what SGLang lacks on CPU for latent attention is in `engines/sglang/cpu_site/penstock_cpu_models`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, hf_model, make_family
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.integration
HERE = Path(__file__).parent
# Measured 2e-6, but 8e-5 for the two with latent attention and rms_norm_eps 1e-5: SGLang gives that epsilon to the
# norms of the compressed queries and keys too, where transformers has 1e-6.
TOLERANCE = 2e-4
SERVED = [name for name in FAMILIES if name not in ("qwen2.5-7b", "llama3", "llama3.2", "glm4-32b")]  # the same code
PREDICTING = ("glm4.5", "deepseek-v3")  # their files hold a prediction layer (MTP), as the hub's do


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a directory with NAME/first, NAME/second (checkpoints) and NAME.json (SGLang's results) per family."""
    directory = tmp_path_factory.mktemp("sglang-families")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])),
        "PENSTOCK_SERVER_PARENT": str(os.getpid()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with (directory / "log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, str(HERE / "sglang_families.py"), str(directory)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        assert program.stdin is not None
        for name in SERVED:  # while it imports SGLang
            changes = {"num_nextn_predict_layers": 1} if name in PREDICTING else {}
            first = make_family(directory / name / "first", name, **changes)
            second = change_weights(first, directory / name / "second")
            assert program.poll() is None, (directory / "log").read_text()[-3000:]
            program.stdin.write(f"{name} {first} {second}\n")
        program.stdin.close()
        code = program.wait(timeout=300)
        assert code == 0, (directory / "log").read_text()[-3000:]
    finally:
        program.kill()
        program.wait()
    yield directory
    shutil.rmtree(directory)


def change_weights(checkpoint: Path, target: Path) -> Path:
    """Return the model with other weights: the rows of each tensor rotated by one."""
    shutil.copytree(checkpoint, target)
    file = target / "model.safetensors"
    changed = {name: tensor.roll(1, 0) for name, tensor in load_file(file).items()}
    save_file(changed, file, metadata={"format": "pt"})
    return target


def worst_difference(model: Any, prompts: list[list[int]], result: dict[str, Any]) -> float:
    """Return the largest difference between SGLang's and transformers' log-probs, over prompts and continuations."""
    worst = 0.0
    for prompt, generated, *theirs in zip(
        prompts, result["generated"], result["prompt_logprobs"], result["generated_logprobs"], strict=True
    ):
        tokens = torch.tensor([prompt + generated])
        with torch.no_grad():
            logprobs = model(tokens).logits[0, :-1].float().log_softmax(-1)  # [T - 1, V]
        ours = logprobs.gather(1, tokens[0, 1:, None])[:, 0]  # [T - 1]
        worst = max(worst, (ours - torch.tensor(theirs[0] + theirs[1])).abs().max().item())
    return worst


def answer_of(directory: Path, name: str) -> dict[str, Any]:
    answer = json.loads((directory / f"{name}.json").read_text())
    assert "error" not in answer, answer["error"]
    return answer


@pytest.mark.parametrize("name", SERVED)
def test_sglang_gives_transformers_logprobs_before_and_after_an_update(name: str, directory: Path) -> None:
    answer = answer_of(directory, name)
    config = json.loads((directory / name / "first/config.json").read_text())
    assert answer["model"].startswith("sglang.srt.models.") and answer["model"].endswith(config["architectures"][0])
    models = [hf_model(directory / name / which) for which in ("first", "second")]
    differences = [
        [worst_difference(model, answer["prompts"], result) for model in models] for result in answer["passes"]
    ]
    print(name, differences)
    assert max(differences[0][0], differences[1][1]) < TOLERANCE
    assert min(differences[0][1], differences[1][0]) > 1000 * TOLERANCE  # the check can fail


@pytest.mark.parametrize("name", SERVED)
def test_an_update_restores_every_overwritten_tensor(name: str, directory: Path) -> None:
    """--check-weight-update-equal overwrites every tensor of an engine and expects that an update restores all."""
    answer = answer_of(directory, name)
    before, overwritten, after = answer["checksums"]
    assert before == after and not [tensor for tensor in before if before[tensor] == overwritten[tensor]]


@pytest.mark.parametrize("name", PREDICTING)
def test_draft_layer_keeps_its_weights_over_an_update(name: str, directory: Path) -> None:
    """An update changes embedding and head, which the draft layer shares with the model, and nothing else in it."""
    answer = answer_of(directory, name)
    changed = ["lm_head.weight", "model.embed_tokens.weight"]
    assert answer["draft"] == {"loaded": True, "changed": changed, "shared": True}
