"""Models that load but cannot be trained are refused by the dry run and before a run's name is taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.stages.rollout.text.tokenizer import PromptTokenizer, check_vocabulary
from penstock.storage.errors import ModelError
from penstock.storage.store import Store

NAN, INF = float("nan"), float("inf")
Change = Callable[[Path], None]


def weight(name: str, value: float, dtype: torch.dtype = torch.float32, row: int = -1) -> Change:
    def change(model: Path) -> None:
        tensors = {key: tensor.to(dtype) for key, tensor in load_file(model / "model.safetensors").items()}
        key = next(key for key in tensors if name in key)
        tensors[key].view(-1)[row] = value
        save_file(tensors, model / "model.safetensors", {"format": "pt"})

    return change


def entry(file: str, **values: Any) -> Change:
    def change(model: Path) -> None:
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | values))

    return change


def text(file: str, content: str) -> Change:
    return lambda model: (model / file).write_text(content) and None


def token(id: int, *, added: bool) -> Change:
    """Add a token to the tokenizer, either as one that is added to its vocabulary or to the vocabulary itself."""

    def change(model: Path) -> None:
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        if added:
            tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": id, "content": "<|new|>"})
        else:
            tokenizer["model"]["vocab"]["~"] = id
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))

    return change


def index(*, without: str = "", file: str = "model-1.safetensors") -> Change:
    def change(model: Path) -> None:
        (model / "model.safetensors").rename(model / file)
        names = [name for name in load_file(model / file) if not without or without not in name]
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))

    return change


DAMAGED: dict[str, tuple[Change, str]] = {
    "NaN at the end of a matrix": (weight("mlp.down_proj", NAN), "mlp.down_proj.weight has values that are NaN"),
    "NaN in bf16": (weight("q_proj", NAN, torch.bfloat16), "q_proj.weight has values that are NaN"),
    "infinite in fp16": (weight("o_proj", INF, torch.float16, row=5), "o_proj.weight has values that are NaN"),
    "minus infinite in a norm": (weight("input_layernorm", -INF), "input_layernorm.weight has values that are NaN"),
    "index lacks a layer": (index(without="layers.1."), "index.json does not list the tensor"),
    "end token beyond the vocabulary": (entry("config.json", eos_token_id=64), "eos_token_id 64, but vocab_size"),
    "one of the end tokens": (entry("generation_config.json", eos_token_id=[1, 99]), "eos_token_id 99, but vocab_size"),
    "padding beyond the vocabulary": (entry("generation_config.json", pad_token_id=64), "pad_token_id 64, but"),
    "end token as true": (entry("generation_config.json", eos_token_id=True), "eos_token_id True, which is not a"),
    "negative end token": (entry("config.json", eos_token_id=-1), "eos_token_id -1, which is not a token id"),
    "broken generation_config.json": (text("generation_config.json", "{"), "generation_config.json is not a JSON"),
    "a list as generation_config.json": (text("generation_config.json", "[]"), "generation_config.json is not a JSON"),
    "added token beyond the vocabulary": (
        token(900, added=True),
        "the token '<|new|>' the id 900, but it is loaded with",
    ),
    "token beyond the vocabulary": (
        token(64, added=False),
        "has token id 64 ('~'), but vocab_size in config.json is 64",
    ),
}
SOUND: dict[str, Change] = {
    "no generation_config.json": lambda model: (model / "generation_config.json").unlink(),
    "several end tokens": entry("generation_config.json", eos_token_id=[1, 63]),
    "the next added token": token(54, added=True),
    "an index": index(),
    "the largest bf16": weight("q_proj", torch.finfo(torch.bfloat16).max, torch.bfloat16),
}


@pytest.fixture
def words(tiny_model: Path, tmp_path: Path) -> list[str]:
    """The arguments of a start with a copy of the tiny model in `model`."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"input": "1+1="}\n')
    words = f"train --run r --store {tmp_path}/store --hf-checkpoint {tmp_path}/model --num-rollout 1 --rm-type random"
    return [*words.split(), "--prompt-data", f"{tmp_path}/data.jsonl", "--rollout-max-response-len", "16"]


@pytest.mark.parametrize(
    ("name", "starts"),
    [*((name, False) for name in DAMAGED), ("NaN in bf16", True), ("one of the end tokens", True)],
)
def test_damaged_model_is_refused(
    name: str, starts: bool, words: list[str], tmp_path: Path, printed: Callable[..., str]
) -> None:
    change, said = DAMAGED[name]
    change(tmp_path / "model")
    error = printed(*words, *([] if starts else ["--dry-run"]), code=2)
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "store" / "runs").exists()


@pytest.mark.parametrize("name", SOUND)
def test_sound_model_is_accepted(name: str, words: list[str], tmp_path: Path, printed: Callable[..., str]) -> None:
    SOUND[name](tmp_path / "model")
    assert printed(*words, "--dry-run").splitlines()[-1].startswith("ready: ")


def test_conversion_checks_all_values(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    weight("mlp.down_proj", NAN)(model)
    store = Store(str(tmp_path / "store"))
    with pytest.raises(ModelError, match=r"mlp.down_proj.weight has values that are NaN"):
        convert_hf(store, model)
    assert not [key for key in store.walk("models") if key.key.endswith(".commit.json")]


@pytest.mark.parametrize("ids", [(7, None), (None, [7, 8])])
def test_end_token_that_ends_no_generation_is_a_warning(
    ids: tuple[Any, Any], tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    check_vocabulary(PromptTokenizer(model, apply_chat_template=True), 64, model)
    assert caplog.text == ""
    for file, id in zip(("config.json", "generation_config.json"), ids):
        entry(file, eos_token_id=id)(model)
    check_vocabulary(PromptTokenizer(model, apply_chat_template=True), 64, model)
    assert "ends a turn with '<|end|>' (id 1), but config.json and generation_config.json name " in caplog.text
