"""`--model-family-path`: families in files outside the tree are converted, exported and checked like others."""

import json
from pathlib import Path

import pytest
from converted import check_same_tensors, commit_of
from families import make_family
from safetensors.torch import load_file, save_file

from penstock.engines.families import family, family_of, read_shape, tensor_layout
from penstock.engines.families.family import load_family
from penstock.engines.families.shape import ModelShape
from penstock.flows.config import config_hash
from penstock.flows.convert import translate_flags, with_hf_checkpoint
from penstock.flows.options import flags
from penstock.flows.options.paths import with_absolute_paths
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record, open_store
from penstock.stages.convert.conversion_check import TOLERANCE, compare_logits
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_to
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import ModelError, PluginError
from penstock.storage.store import Store

NAMES = {"model.layers.": "trunk.block.", "self_attn": "attn", "_layernorm": "_ln", "model.embed_tokens": "trunk.wte"}
ACORN = (
    f"NAMES = {NAMES}\n"
    + '''
"""Acorn: a Qwen3 with other tensor names and a logit scale, which must be 1."""

from penstock.engines.families.entries import POSITIVE
from penstock.engines.families.family import Family
from penstock.engines.families.llama import QWEN3
from penstock.engines.families.tensor_rows import decoder_rows, renamed

def read(config):
    if config["acorn_scale"] not in (None, 1):
        config.refuse(f"acorn_scale {config['acorn_scale']}", "but Penstock does not scale logits")
    return QWEN3.read(config)


FAMILY = Family(
    name="acorn",
    architecture="AcornForCausalLM",
    model_types=("acorn",),
    defaults=QWEN3.defaults,
    read=read,
    rows=lambda shape: renamed(decoder_rows(shape), NAMES),
    entry_types={"acorn_scale": POSITIVE},
)
'''
)
MISTRAL = """
from penstock.engines.families.family import Family

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    model_types=("mistral",),
    defaults=dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, rms_norm_eps=1e-6,
                  num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    read=lambda config: config.refuse("a window", "but Penstock has none") if config["sliding_window"] else {},
)
"""


@pytest.fixture(scope="module")
def acorn(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("plugins") / "acorn.py"
    file.write_text(ACORN)
    return str(file)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("hf") / "qwen3", "qwen3", seed=3, dtype="bfloat16")


@pytest.fixture(scope="module")
def source(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of `qwen3` as an Acorn."""
    directory = tmp_path_factory.mktemp("hf") / "acorn"
    directory.mkdir()
    for path in qwen3.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    tensors = {}
    for name, tensor in load_file(qwen3 / "model.safetensors").items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, architectures=["AcornForCausalLM"], model_type="acorn", acorn_scale=1.0)
    return directory


def edit_config(directory: Path, **entries: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries, indent=2, sort_keys=True) + "\n")


def test_round_trip_is_exact_and_logits_equal_transformers(
    acorn: str, source: Path, qwen3: Path, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    ref = convert_hf(store, source, check_logits=True, options=ConversionOptions(family_path=acorn))
    assert "transformers does not have AcornForCausalLM" in commit_of(store, ref).state["logits"]
    assets = Path(ref.uri) / "hf_assets"
    back = export_to(store, ref.uri, Origin(assets, family_path=acorn), str(tmp_path / "back"))
    check_same_tensors(source, back.uri)
    assert (source / "config.json").read_text() == (Path(back.uri) / "config.json").read_text()
    # under Megatron's names it is the same model, so transformers' Qwen3 is the reference
    result = compare_logits(Path(ref.uri), qwen3)
    assert result.difference is not None and result.difference < TOLERANCE / 10
    assert commit_of(store, ref).state["shape"]["family_path"] == acorn
    assert "family_path" not in commit_of(store, convert_hf(store, qwen3)).state["shape"]


def test_external_family_that_transformers_has_is_compared_with_it(tmp_path: Path) -> None:
    file = tmp_path / "mistral.py"
    file.write_text(MISTRAL)
    directory = make_family(tmp_path / "hf", "llama3", architecture="MistralForCausalLM", sliding_window=None)
    store = Store(str(tmp_path / "store"))
    options = ConversionOptions(family_path=str(file))
    commit = commit_of(store, convert_hf(store, directory, check_logits=True, options=options))
    assert 0 < commit.summary["convert/logits_difference"] < TOLERANCE / 10
    edit_config(directory, sliding_window=16)
    with pytest.raises(ModelError, match="a window"):
        read_shape(directory, str(file))


def test_another_source_of_the_family_makes_another_model(acorn: str, source: Path, tmp_path: Path) -> None:
    changed, store = tmp_path / "acorn.py", Store(str(tmp_path / "store"))
    changed.write_text(ACORN + "# changed\n")
    paths = (acorn, str(changed), acorn)
    keys = [convert_hf(store, source, options=ConversionOptions(family_path=path)).key for path in paths]
    assert len(set(keys)) == 2 and all("-family-" in key for key in keys)


@pytest.mark.parametrize(
    ("entries", "found"),
    [
        ({"acorn_scale": 2.0}, r"acorn_scale 2\.0"),
        ({"acorn_scale": "large"}, r"acorn_scale .*a positive number"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_entries_are_refused(acorn: str, source: Path, tmp_path: Path, entries: dict[str, object], found: str) -> None:
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    edit_config(tmp_path, **entries)
    with pytest.raises(ModelError, match=found):
        read_shape(tmp_path, acorn)


@pytest.mark.parametrize("content", ["raise RuntimeError('no')", "import sys\nsys.exit(3)", "FAMILY = 1", "x = 1"])
def test_bad_family_files_are_plugin_errors(content: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(content)
    for path in (str(file), str(tmp_path / "absent.py"), "no_such_module.family"):
        with pytest.raises(PluginError, match="--model-family-path"):
            load_family(path)


@pytest.mark.parametrize("result", ["{}['no']", "{'num_layers': 'many'}"])
def test_failing_read_is_a_plugin_error(result: str, source: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(ACORN.replace("return QWEN3.read(config)", f"return {result}"))
    with pytest.raises(PluginError, match="--model-family-path") as error:
        read_shape(source, str(file))
    assert "\n" not in str(error.value)


def test_option_is_needed_for_other_families_and_ignored_for_built_in_ones(
    acorn: str, source: Path, qwen3: Path
) -> None:
    with pytest.raises(ModelError, match=r"AcornForCausalLM.*--model-family-path"):
        read_shape(source)
    assert read_shape(qwen3, acorn) == read_shape(qwen3) and read_shape(qwen3, acorn).family_path is None


def test_module_on_the_python_path(acorn: str, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(acorn).parent))
    shape = read_shape(source, "acorn")
    assert shape.family_path == "acorn" and family_of(shape).name == "acorn"


def test_table_of_a_shape_is_found_by_its_family_path(acorn: str, source: Path) -> None:
    """As in a trainer's rank, which receives the shape alone."""
    shape = read_shape(source, acorn)
    received = ModelShape.model_validate_json(shape.model_dump_json())
    family._import_module.cache_clear()
    assert received == shape and tensor_layout(received).hf_shapes == tensor_layout(shape).hf_shapes


def test_option_is_recorded_as_absolute_path_and_not_part_of_identity(
    acorn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(acorn).parent)
    config = with_absolute_paths(flags.parse_config(["--model-family-path", "acorn.py"]))
    assert config.convert.model_family_path == acorn
    module = with_absolute_paths(flags.parse_config(["--model-family-path", "pkg.acorn"]))
    assert module.convert.model_family_path == "pkg.acorn"
    assert config_hash(config) == config_hash(flags.parse_config([]))


def test_export_of_a_run_uses_the_family_of_the_run(acorn: str, source: Path, tmp_path: Path) -> None:
    words = ["--store", str(tmp_path / "store"), "--model-family-path", acorn, "--hf-checkpoint", str(source)]
    run = flags.parse_config([*words, "--run", "first"])
    store = open_store(run.run)
    create_run_record(store, resolve("train", run, store))
    store.commit(RunKeys("first").checkpoint_prefix(1), Commit(kind="checkpoint", run="first", index=1, attempt="a1"))
    config = with_hf_checkpoint(
        flags.parse_config(translate_flags(["--load", "first", "--save", str(tmp_path / "out"), *words[:2]]))
    )
    assert (config.convert.hf_checkpoint, config.convert.model_family_path) == (str(source), acorn)
