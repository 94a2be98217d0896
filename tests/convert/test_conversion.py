"""Hugging Face -> torch_dist -> Hugging Face on a tiny Qwen3: no bit changes, little is in memory, bad input is one
sentence."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converted import check_same_tensors, commit_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.megatron.checkpoints.layout import checkpoint_layout
from penstock.flows.commands.demo_model import make_tiny_model
from penstock.stages.convert.conversion_check import verify_conversion
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import ASSETS_DIRECTORY, Origin
from penstock.stages.convert.to_hf import export_hf, export_to
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.storage.errors import ModelError
from penstock.storage.store import Store

SIZES = dict(hidden=32, layers=3, heads=4, groups=2, head_dim=16, ffn=48, vocab=61)  # head_dim * heads is not hidden


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hf"), seed=3, tied=False, dtype="bfloat16", **SIZES)


@pytest.fixture
def spoiled(source: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the source whose tensors or config were tampered with."""

    def spoil(change: Callable[[dict[str, Tensor]], None] = lambda tensors: None, **config: object) -> Path:
        directory = Path(shutil.copytree(source, tmp_path / "spoiled"))
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return directory

    return spoil


def test_round_trip_is_exact_and_loads(tmp_path: Path, store: Store) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = make_tiny_model(tmp_path / "hf", seed=4, tied=True, **SIZES)
    model = convert_hf(store, source)
    commit = commit_of(store, model)
    assert commit.kind == "model" and model.policy_version == 0
    export = export_hf(store, commit, Origin(Path(model.uri) / ASSETS_DIRECTORY), "exports/000000", shard_bytes=20_000)
    target = Path(store.path(export.attempt or ""))
    assert len(list(target.glob("*.safetensors"))) > 1
    check_same_tensors(source, target)
    assert (target / "config.json").read_text() == (source / "config.json").read_text()
    token_ids = torch.arange(40).view(2, 20)  # [B, T]
    logits = [AutoModelForCausalLM.from_pretrained(path)(token_ids).logits for path in (source, target)]
    assert torch.equal(*logits)
    assert AutoTokenizer.from_pretrained(target).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()


def test_converted_model_is_reused(source: Path, store: Store, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    first = convert_hf(store, source, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0
    count = len(calls)
    assert convert_hf(store, source, lambda done, total: calls.append((done, total))) == first and len(calls) == count
    copy = Path(shutil.copytree(source, tmp_path / "copy"))  # the same content elsewhere
    assert convert_hf(store, copy) == first
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    second = convert_hf(store, copy)
    assert second.key != first.key and second.uri != first.uri
    assert sorted(name for name in store.list("models") if ".parts" in name) == []


def test_export_in_another_dtype(source: Path, store: Store) -> None:
    export = export_hf(store, convert_hf(store, source).uri, Origin(source, "float32"), "exports/1")
    target = Path(store.path(export.attempt or ""))
    found, expected = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    assert all(
        torch.equal(found[name], expected[name].float()) and found[name].dtype == torch.float32 for name in expected
    )
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert export_hf(store, "nowhere", Origin(source), "exports/1") == export  # committed: nothing is read again


@pytest.mark.integration
def test_memory_is_smaller_than_a_tensor(source: Path, tmp_path: Path) -> None:
    """A child converts a file larger than the room it gets beyond its imports, and says how much memory that took."""
    large = make_tiny_model(
        tmp_path / "hf", **{**SIZES, "hidden": 1024, "vocab": 40_000, "layers": 1, "dtype": "float32"}
    )
    size = (large / "model.safetensors").stat().st_size
    program = (
        "import resource, sys\n"
        "import penstock.engines.megatron.model.gpt\n"
        "from penstock.stages.convert.to_torch_dist import convert_hf\n"
        "from penstock.storage.store import Store\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "convert_hf(Store(sys.argv[1] + '/warm'), sys.argv[3], verify=False)\n"
        "before = peak()\n"
        "convert_hf(Store(sys.argv[1] + '/store'), sys.argv[2], verify=False)\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(large), str(source)]
    child = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, cwd=Path(__file__).parents[2]
    )
    assert size > 160_000_000 and int(child.stdout.split()[-1]) < size / 4


def test_changed_byte_is_found(source: Path, store: Store, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(convert_hf(store, source).uri, tmp_path / "changed"))
    shape = read_shape(source)
    layout, stored = tensor_layout(shape), checkpoint_layout(shape)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    wrong = TorchDistWeights(directory, stored).fetch(name).view(torch.int8).clone()
    content = (directory / "__0_0.distcp").read_bytes()
    place = content.index(wrong.numpy().tobytes())
    (directory / "__0_0.distcp").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    with (
        HFWeights(source) as weights,
        pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"),
    ):
        verify_conversion(weights, directory, layout, stored)


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda t: None, {"vocab_size": 64}, r"has shape \[61, 32\], config.json needs \[64, 32\]"),
        (lambda t: t.update({DOWN: t[DOWN].float()}), {}, r"torch\.float32.*torch\.bfloat16"),
        (lambda t: None, {"tie_word_embeddings": True}, r"lm_head\.weight.*model\.embed_tokens\.weight"),
        (lambda t: None, {"architectures": ["FooForCausalLM"]}, "'FooForCausalLM'"),
    ],
    ids=["vocabulary", "dtypes", "tied", "architecture"],
)
def test_bad_input_is_refused_in_one_line_and_leaves_no_commit(
    spoiled: Callable[..., Path],
    store: Store,
    change: Callable[[dict[str, Tensor]], None],
    config: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ModelError, match=message):
        convert_hf(store, spoiled(change, **config))
    assert not [name for name in store.list("models") if name.endswith(".commit.json")]


def test_copy_of_a_tied_head_is_accepted(spoiled: Callable[..., Path], store: Store) -> None:
    def tie(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = spoiled(tie, tie_word_embeddings=True)
    export = export_hf(store, convert_hf(store, source).uri, Origin(source), "exports/2")
    assert "lm_head.weight" not in load_file(Path(store.path(export.attempt or "")) / "model.safetensors")


def test_export_refuses_another_model(source: Path, store: Store, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        export_hf(store, tmp_path, Origin(source), "exports/3")
    other = make_tiny_model(tmp_path / "other", **{**SIZES, "layers": 2, "tied": False})
    with pytest.raises(ModelError, match=r"has shape \[3, .*config.json needs \[2, "):
        export_hf(store, convert_hf(store, source).uri, Origin(other), "exports/3")


def test_export_cuts_vocabulary_rows(source: Path, store: Store, tmp_path: Path) -> None:
    model = convert_hf(store, source)
    out = Path(export_to(store, model.uri, Origin(source, vocab_size=50), str(tmp_path / "cut")).uri)
    with HFWeights(out) as found, HFWeights(source) as expected:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(found.fetch(name), expected.fetch(name)[:50])
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 50
    with pytest.raises(ModelError, match=r"has shape \[61, 32\], config.json needs \[62, 32\]"):
        export_to(store, model.uri, Origin(source, vocab_size=62), str(tmp_path / "more"))
    assert not (tmp_path / "more").exists()


def test_lost_file_of_a_checkpoint_is_named(source: Path, store: Store, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(convert_hf(store, source).uri, tmp_path / "copy"))
    (directory / "__0_0.distcp").unlink()
    with pytest.raises(ModelError, match=r"__0_0\.distcp"):
        export_to(store, str(directory), Origin(source), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
