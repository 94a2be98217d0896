"""Checkpoints that plain Megatron-core loads with its default strictness, and checkpoints of its own that load here,
bit for bit."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from converted import check_same_tensors, commit_of
from families import make_family
from plain_megatron import plain_model, weight
from torch import Tensor
from torch.distributed import checkpoint as dcp

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.megatron.checkpoints import layout as checkpoint_layouts
from penstock.engines.megatron.checkpoints.layout import checkpoint_layout
from penstock.engines.megatron.checkpoints.safe_load import read_common, read_metadata
from penstock.flows.options import flags
from penstock.flows.runtime.preflight import check_algorithm
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Origin, config_directory, megatron_directory
from penstock.stages.convert.to_hf import export_to
from penstock.stages.convert.to_torch_dist import (
    ConversionOptions,
    convert_hf,
    import_megatron_checkpoint,
)
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.storage.errors import ModelError
from penstock.storage.store import Store

# isort: split
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

full = pytest.mark.full
CASES = [  # family, names of the modules
    ("qwen3", "local"),
    ("moonlight", "te"),
    pytest.param(("llama3", "te"), marks=full),
    pytest.param(("qwen3-moe", "local"), marks=full),
    pytest.param(("glm4.5", "te"), marks=full),
    pytest.param(("deepseek-v3", "local"), marks=full),
]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with checkpoint_layouts._single_rank_process_groups():
        yield


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A model of a family, and the names under which it is converted."""
    family, names = request.param
    return make_family(tmp_path_factory.mktemp("hf") / family, family, num_hidden_layers=2), names


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("hf") / "moe", "qwen3-moe", num_hidden_layers=2)


def loaded_model(source: Path, directory: Path, names: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Plain Megatron's model with the weights of a checkpoint, through its own `load` as it is called without
    options."""
    model = plain_model(read_shape(source), names, monkeypatch)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)
    state = dist_checkpointing.load(model.sharded_state_dict(**options), str(directory))
    model.load_state_dict({name: value for name, value in state.items() if name in model.state_dict()})
    return model


def check_weights(model: Any, source: Path, names: str) -> None:
    shape = read_shape(source)
    layout = tensor_layout(shape)
    with HFWeights(source) as weights:
        for name in layout.megatron_names():
            assert torch.equal(weight(model, shape, names, name), layout.to_megatron(name, weights.fetch)), name


def test_plain_megatron_loads_our_checkpoint_and_we_load_its(
    case: tuple[Path, str], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, names = case
    convert_hf(store, family, options=ConversionOptions(save=str(tmp_path / "ours"), names=names))  # type: ignore[arg-type]
    model = loaded_model(family, tmp_path / "ours" / "release", names, monkeypatch)
    check_weights(model, family, names)
    check_keys(model.sharded_state_dict(), tmp_path / "ours" / "release", names)

    theirs = tmp_path / "theirs" / "iter_0000007"
    theirs.mkdir(parents=True)
    (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").write_text("7")
    dist_checkpointing.save({"iteration": 7, **model.sharded_state_dict()}, str(theirs), ("torch_dist", 1))
    export_to(store, str(theirs), Origin(family), str(tmp_path / "hf"))
    check_same_tensors(tmp_path / "hf", family)

    shape = read_shape(family)
    ref = import_megatron_checkpoint(store, str(tmp_path / "theirs"), Origin(family))
    assert import_megatron_checkpoint(store, str(tmp_path / "theirs"), Origin(family)) == ref
    (theirs.parent / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "theirs").rename(tmp_path / "moved")
    assert import_megatron_checkpoint(store, str(tmp_path / "moved" / "iter_0000007"), Origin(family)) == ref
    local, layout = checkpoint_layout(shape), tensor_layout(shape)
    with store.reading(commit_of(store, ref)) as directory, HFWeights(family) as weights:
        own = TorchDistWeights(directory, local)
        assert set(own.tensors) == {piece.key for piece in local.all_slices()}
        for name in layout.megatron_names():
            assert torch.equal(own.fetch(name), layout.to_megatron(name, weights.fetch)), name


def check_keys(state: dict[str, Any], directory: Path, names: str) -> None:
    """Check that a checkpoint has the keys that Megatron's layer specification asks for, and no others."""
    asked = {entry.unique_key if isinstance(entry, ShardedObject) else entry.key for entry in state.values()}
    found = set(read_metadata(directory).state_dict_metadata)
    assert asked <= found
    # some versions of TransformerEngine keep a state of the attention; megatron-core 0.16.1 does not ask for it
    attention = re.compile(r"decoder\.layers\..*core_attention\._extra_state")
    assert [key for key in found - asked if not attention.match(key)] == []
    if names == "local":
        dist_checkpointing.load(state, str(directory), strict="raise_all")


@full
def test_stacked_layers_of_a_mixture_convert(
    moe: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Megatron stores them if `moe_layer_freq` is a number; a dense model's one by one, if it is told to."""
    shape = read_shape(moe)
    convert_hf(store, moe, options=ConversionOptions(save=str(tmp_path / "ours"), names="te"))
    model = loaded_model(moe, tmp_path / "ours" / "release", "te", monkeypatch)
    model.config.moe_layer_freq = 1
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(theirs), ("torch_dist", 1))
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight" in read_metadata(theirs).state_dict_metadata
    export_to(store, str(theirs), Origin(moe), str(tmp_path / "hf"))
    check_same_tensors(tmp_path / "hf", moe)
    layered = read_common(tmp_path / "ours" / "release")["content_metadata"]
    assert layered["non_homogeneous_layers"] and shape.experts is not None
    check_weights(
        loaded_model(moe, tmp_path / "ours" / "release", "te", monkeypatch, metadata=dict(layered)), moe, "te"
    )


@full
def test_single_layers_of_a_dense_model_convert(
    tiny_model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert_hf(store, tiny_model, options=ConversionOptions(save=str(tmp_path / "ours")))
    model = loaded_model(tiny_model, tmp_path / "ours" / "release", "local", monkeypatch)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    dist_checkpointing.save(
        model.sharded_state_dict(metadata={"non_homogeneous_layers": True}), str(theirs), ("torch_dist", 1)
    )
    assert "decoder.layers.1.mlp.linear_fc1.weight" in read_metadata(theirs).state_dict_metadata
    export_to(store, str(theirs), Origin(tiny_model), str(tmp_path / "hf"))
    check_same_tensors(tmp_path / "hf", tiny_model)


def test_tracker_names_the_directory(tiny_model: Path, tmp_path: Path) -> None:
    release, tracker = tmp_path / "model" / "release", tmp_path / "model" / "latest_checkpointed_iteration.txt"
    shutil.copytree(tiny_model, release / "hf_assets")
    (release / ".metadata").touch()
    tracker.write_text("release")
    assert megatron_directory(tmp_path / "model") == megatron_directory(release) == release
    assert config_directory(str(tmp_path / "model")) == release / "hf_assets"
    assert megatron_directory(tiny_model) is None and config_directory(str(tiny_model)) == tiny_model
    release.rename(tmp_path / "model" / "iter_0000012")
    tracker.write_text("12\n")
    assert megatron_directory(tmp_path / "model") == tmp_path / "model" / "iter_0000012"
    for word, message in (
        ("release", "names 'release', but .*/release is not a torch_dist checkpoint"),
        ("13", "names '13', but .*/iter_0000013 is not a torch_dist checkpoint"),
        ("../x", r"contains '\.\./x', which is neither a number of iterations nor 'release'"),
    ):
        tracker.write_text(word)
        with pytest.raises(ModelError, match=f"latest_checkpointed_iteration.txt {message}"):
            megatron_directory(tmp_path / "model")
    (tmp_path / "model" / "iter_0000012").rename(release)
    tracker.write_text("garbage")
    with pytest.raises(ModelError, match="contains 'garbage'"):  # also beside a complete checkpoint
        megatron_directory(tmp_path / "model")


def test_preflight_accepts_a_megatron_reference(tiny_model: Path, store: Store, tmp_path: Path) -> None:
    convert_hf(store, tiny_model, options=ConversionOptions(save=str(tmp_path / "model")))
    (tmp_path / "model" / "release" / "hf_assets" / "config.json").unlink()  # Megatron writes none
    words = ["--hf-checkpoint", str(tiny_model), "--ref-load", str(tmp_path / "model"), "--use-kl-loss"]
    check_algorithm(flags.parse_config(words), read_shape(tiny_model))
    (tmp_path / "model" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(ModelError, match="iter_0000005"):
        check_algorithm(flags.parse_config(words), read_shape(tiny_model))


def test_checkpoint_of_another_model_is_refused(moe: Path, tiny_model: Path, store: Store, tmp_path: Path) -> None:
    convert_hf(store, tiny_model, options=ConversionOptions(save=str(tmp_path / "ours")))
    (tmp_path / "ours" / "release" / "hf_assets" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no tensor|has shape"):
        import_megatron_checkpoint(store, str(tmp_path / "ours"), Origin(moe))


# ---- the way in which convert_torch_dist_to_hf reads -----------------------------------------------------------------


def tensors_by_layer_and_expert(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """Every tensor of a checkpoint as such converters take it apart: by `args` and the index alone, without any
    model."""
    args = torch.load(directory / "common.pt", weights_only=False)["args"]
    index = pickle.loads((directory / ".metadata").read_bytes())
    assert index.storage_meta is not None
    entries = {key: entry for key, entry in index.state_dict_metadata.items() if "_state" not in key}
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), planner=dcp.DefaultLoadPlanner(), no_dist=True)
    out: dict[str, Tensor] = {}
    for key, tensor in state.items():
        layers = [(key, tensor)]
        if key.startswith("decoder.layers.") and not key.split(".")[2].isdigit():
            assert len(tensor) == args.num_layers
            layers = [(key.replace(".layers.", f".layers.{layer}."), part) for layer, part in enumerate(tensor)]
        for name, part in layers:
            if ".experts.experts." not in name:
                out[name] = part
                continue
            assert len(part) == args.num_experts
            for expert, weights in enumerate(part):
                out[name.replace(".experts.experts.", f".experts.{expert}.")] = weights
    return args, out


HF_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.layers": "model.layers",
    "self_attention.linear_proj.": "self_attn.o_proj.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "mlp.router.": "mlp.gate.",
    "self_attention.q_layernorm.": "self_attn.q_norm.",
    "self_attention.k_layernorm.": "self_attn.k_norm.",
    "linear_fc2": "down_proj",
}


def under_hf_names(args: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    for megatron, hf in HF_NAMES.items():
        name = name.replace(megatron, hf)
    if "linear_fc1" in name:
        return {name.replace("linear_fc1", f"{part}_proj"): half for part, half in zip(("gate", "up"), tensor.chunk(2))}
    if "linear_qkv" in name:
        queries = args.num_attention_heads // args.num_query_groups
        groups = tensor.view(args.num_query_groups, queries + 2, args.kv_channels, *tensor.shape[1:])
        split = zip("qkv", groups.split([queries, 1, 1], dim=1))
        return {name.replace("self_attention.linear_qkv", f"self_attn.{x}_proj"): w.flatten(0, 2) for x, w in split}
    return {name: tensor[: args.vocab_size] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor}


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_converter_that_reads_args_and_index_finds_every_tensor(name: str, store: Store, tmp_path: Path) -> None:
    family = make_family(tmp_path / "hf", name, num_hidden_layers=2)
    convert_hf(store, family, options=ConversionOptions(save=str(tmp_path / "ours"), names="te"))
    args, state = tensors_by_layer_and_expert(tmp_path / "ours" / "release")
    config = json.loads((family / "config.json").read_text())
    assert (args.hidden_size, args.num_layers) == (config["hidden_size"], config["num_hidden_layers"])
    assert args.q_lora_rank is None and args.swiglu and args.ckpt_format == "torch_dist"
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        found |= under_hf_names(args, key, tensor)
    with HFWeights(family) as weights:
        assert found.keys() == weights.info.keys()
        assert all(torch.equal(found[name], weights.fetch(name)) for name in found)
