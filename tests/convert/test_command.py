"""`penstock convert`: spellings of its options, the checkpoint they name, several processes, and --verify's report."""

from pathlib import Path

import pytest
from converted import check_same_tensors
from families import make_family

from penstock.engines.cluster import Cluster
from penstock.flows.config import PostTrainConfig
from penstock.flows.convert import describe_result, find_checkpoint, translate_flags, with_hf_checkpoint
from penstock.flows.options import flags
from penstock.flows.runtime.conversion import import_model, run_conversion, run_export
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record, open_store
from penstock.stages.convert.conversion_check import TOLERANCE, LogitsComparison, verify_existing
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import read_record
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.errors import OptionError
from penstock.storage.store import Store


def config_of(*words: str) -> PostTrainConfig:
    return with_hf_checkpoint(flags.parse_config(translate_flags(words)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("hf") / "glm", "glm4.5", num_nextn_predict_layers=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted into a directory."""
    out = tmp_path_factory.mktemp("out") / "model"
    convert_hf(Store(str(out.parent / "store")), source, options=ConversionOptions(save=str(out)))
    return out


def test_every_spelling_of_both_directions(
    source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = config_of("--hf-checkpoint", str(source), "--save", "out", "--verify")
    assert (there.convert.convert_save, there.convert.convert_verify) == ("out", True)
    assert there.convert.export_vocab_size is None
    for words in (["--load", str(model), "--save=s3://b/x"], ["--input-dir", str(model), "--output-dir", "s3://b/x"]):
        back = config_of(*words, "--origin-hf-dir", str(source), "--vocab-size", "50", "--export-dtype", "fp8").convert
        assert (back.convert_load, back.convert_save, back.hf_checkpoint) == (str(model), "s3://b/x", str(source))
        assert (back.export_vocab_size, back.export_dtype) == (50, "fp8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load", "{source}", "--save", "x"], "--origin-hf-dir"),
        (["--hf-checkpoint", "{source}", "--megatron-names", "te"], "--megatron-names .*--save"),
        (["--load", "{model}", "--save", "x", "--megatron-names", "te", "--export-dtype", "fp8"], "--export-dtype"),
    ],
)
def test_options_that_exclude_each_other(
    words: list[str], message: str, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=message):
        config_of(*(word.format(source=source, model=model) for word in words))


def test_checkpoint_is_found_by_directory_or_run(source: Path, model: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained" / "iter_0000012"
    trained.mkdir(parents=True)
    (trained / ".metadata").touch()
    (tmp_path / "trained" / "latest_checkpointed_iteration.txt").write_text("12\n")
    store_words = ["--store", str(tmp_path / "store"), "--save", str(tmp_path / "out")]
    assert find_checkpoint(config_of("--load", str(model), *store_words)) == str(model / "release")
    assert config_of("--load", str(model), *store_words).convert.hf_checkpoint == str(model / "release" / "hf_assets")
    words = ["--load", str(tmp_path / "trained"), "--origin-hf-dir", str(source), *store_words]
    assert find_checkpoint(config_of(*words)) == str(trained)

    run = flags.parse_config(["--store", str(tmp_path / "store"), "--run", "first", "--hf-checkpoint", str(source)])
    store, keys = open_store(run.run), RunKeys("first")
    create_run_record(store, resolve("train", run, store))
    for version in (5, 10):
        commit = Commit(kind="checkpoint", run="first", index=version, attempt=f"a{version}")
        store.commit(keys.checkpoint_prefix(version), commit)
    for named, attempt in (("first", "a10"), ("first/5", "a5")):
        config = config_of("--load", named, *store_words)
        found = find_checkpoint(config)
        assert isinstance(found, Commit) and found.attempt == attempt and config.convert.hf_checkpoint == str(source)
    with pytest.raises(OptionError, match=r"--load first/7.*first/5, first/10"):
        config_of("--load", "first/7", *store_words)


def test_verification_reports_what_was_compared(source: Path, model: Path) -> None:
    store, commit = Store(str(model.parent)), read_record(Store(str(model.parent)), "model")
    assert commit is not None
    names, _, bits, logits = (text for _, text in verify_existing(store, commit, source).report_rows())
    extra = sum(name.startswith("model.layers.2.") for name in HFWeights(source).info)
    assert names.startswith(f"{len(HFWeights(source).info) - extra} tensors")
    assert bits.startswith(f"{int(commit.summary['convert/num_bytes']):,} bytes")
    assert 0 < float(logits.rsplit(" ", 5)[1]) < TOLERANCE / 10
    assert "not compared: no room" in str(LogitsComparison(reason="no room"))


def test_summary_lines(source: Path, model: Path) -> None:
    commit = read_record(Store(str(model.parent)), "model")
    assert commit is not None
    ref = convert_hf(Store(str(model.parent / "store")), source, options=ConversionOptions(save=str(model)))
    config = config_of("--hf-checkpoint", str(source), "--save", str(model))
    first, second = describe_result(config, ref, commit, 1e6)
    assert first.startswith(f"{source} is converted and verified (torch_dist, ") and first.endswith(f": {model}")
    assert "left out: --mtp keep" in second
    assert next(iter(describe_result(config, ref, commit, 0.0))).startswith(f"{source} was already converted")


@pytest.mark.integration
def test_ray_processes_split_both_directions(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    """Two ranks, with their progress, and back; the result is the source, prediction layers included."""
    store, heard = Store(str(tmp_path / "store")), []
    words = ["--hf-checkpoint", str(source), "--save", str(tmp_path / "there"), "--convert-ranks", "2", "--mtp", "keep"]
    ref = run_conversion(
        cluster, store, config_of(*words).convert, verify=True, report=lambda *told: heard.append(told)
    )
    assert heard and heard[-1][0] <= heard[-1][1]
    back = config_of("--load", ref.uri, "--save", str(tmp_path / "back"))
    again = run_export(cluster, store, find_checkpoint(back), back.convert)
    check_same_tensors(source, again.uri)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.integration
@pytest.mark.full
def test_ray_process_exports_te_names_and_imports_them(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    store, options = Store(str(tmp_path / "store")), ConversionOptions(save=str(tmp_path / "there"), mtp="keep")
    ref = convert_hf(store, source, options=options)
    config = config_of("--load", ref.uri, "--save", str(tmp_path / "te"), "--megatron-names", "te")
    exported = run_export(cluster, store, find_checkpoint(config), config.convert)
    imported = import_model(cluster, store, config.convert, str(tmp_path / "te" / "release"))
    assert exported.format == "torch_dist" and imported.key.startswith("models/megatron-")
    assert not list(tmp_path.glob(".*"))
