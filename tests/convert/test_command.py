"""`penstock convert`: its words in every spelling, which checkpoint they mean, several processes, and what --verify says."""

from pathlib import Path

import pytest
import torch
from families import make_family

from engines.cluster import Cluster
from flows import flags
from flows.config import PostTrainConfig
from flows.conversion import converted, exported, taken_in
from flows.convert import completed, flags_of, found_checkpoint, told
from flows.runs import create_record, open_store
from stages.convert.hf_files import HFWeights
from stages.convert.probe import TOLERANCE, Probe, compare_logits
from stages.convert.targets import committed_in
from stages.convert.to_torch_dist import convert_hf
from stages.convert.verify import verify_standing
from storage.refs import Commit, RunKeys
from storage.store import Store


def config_of(*words: str) -> PostTrainConfig:
    return completed(flags.parse(flags_of(words)))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("hf") / "glm", "glm4.5", num_nextn_predict_layers=1, num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converted into a directory."""
    out = tmp_path_factory.mktemp("out") / "model"
    convert_hf(Store(str(out.parent / "store")), source, save=str(out))
    return out


def test_every_spelling_of_both_directions(source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    there = config_of("--hf-checkpoint", str(source), "--save", "out", "--verify", "--num-layers", "2", "--vocab-size=61")
    assert (there.convert.convert_save, there.convert.convert_verify) == (str(tmp_path / "out"), True)
    assert there.train.megatron == {"num_layers": 2, "vocab_size": 61} and there.convert.export_vocab_size is None
    for words in (["--load", str(model), "--save=s3://b/x"], ["--input-dir", str(model), "--output-dir", "s3://b/x"]):
        back = config_of(*words, "--origin-hf-dir", str(source), "--vocab-size", "50", "--export-dtype", "fp8").convert
        assert (back.convert_load, back.convert_save, back.hf_checkpoint) == (str(model), "s3://b/x", str(source))
        assert (back.export_vocab_size, back.export_dtype) == (50, "fp8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load", "{model}"], "--load needs --save"),
        (["--load", "{model}", "--save", "x", "--verify"], "--verify goes with --hf-checkpoint"),
        (["--hf-checkpoint", "{source}", "--origin-hf-dir", "x"], "--origin-hf-dir goes with --load"),
        (
            ["--load", "nothing", "--save", "x"],
            r"--load nothing: no such directory, and store .* \(it has none of a run of this name\)",
        ),
        (["--load", "{source}", "--save", "x"], "does not say whose model it is: give --origin-hf-dir"),
        (["--hf-checkpoint", "{source}", "--mtp", "some"], "--mtp"),
        (["--hf-checkpoint", "{source}", "--megatron-names", "te"], "--megatron-names is for --save"),
        (["--load", "{model}", "--save", "x", "--megatron-names", "te", "--export-dtype", "fp8"], "--export-dtype is for"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], message: str, source: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        config_of(*(word.format(source=source, model=model) for word in words))


def test_a_checkpoint_is_found_by_directory_or_run(source: Path, model: Path, tmp_path: Path) -> None:
    trained = tmp_path / "trained" / "iter_0000012"
    trained.mkdir(parents=True)
    (trained / ".metadata").touch()
    (tmp_path / "trained" / "latest_checkpointed_iteration.txt").write_text("12\n")
    store_words = ["--store", str(tmp_path / "store"), "--save", str(tmp_path / "out")]
    assert found_checkpoint(config_of("--load", str(model), *store_words)) == str(model / "release")
    assert config_of("--load", str(model), *store_words).convert.hf_checkpoint == str(model / "release" / "hf_assets")
    words = ["--load", str(tmp_path / "trained"), "--origin-hf-dir", str(source), *store_words]
    assert found_checkpoint(config_of(*words)) == str(trained)

    run = flags.parse(["--store", str(tmp_path / "store"), "--run", "first", "--hf-checkpoint", str(source)])
    store, keys = open_store(run.run), RunKeys("first")
    create_record(store, "post_train", run)
    for version in (5, 10):
        store.commit(keys.checkpoint(version), Commit(kind="checkpoint", run="first", index=version, attempt=f"a{version}"))
    for named, attempt in (("first", "a10"), ("first/5", "a5")):
        config = config_of("--load", named, *store_words)
        commit = found_checkpoint(config)
        assert isinstance(commit, Commit) and commit.attempt == attempt and config.convert.hf_checkpoint == str(source)
    with pytest.raises(ValueError, match=r"--load first/7: .* \(it has first/5, first/10\)"):
        config_of("--load", "first/7", *store_words)


def test_verification_says_what_was_compared(source: Path, model: Path) -> None:
    store, commit = Store(str(model.parent)), committed_in(Store(str(model.parent)), "model")
    assert commit is not None
    names, _, bits, logits = (text for _, text in verify_standing(store, commit, source).rows())
    extra = sum(name.startswith("model.layers.2.") for name in HFWeights(source).info)
    assert names.startswith(f"{len(HFWeights(source).info) - extra} tensors") and bits.endswith("bytes came back as they were")
    assert 0 < float(logits.rsplit(" ", 1)[1]) < TOLERANCE / 10
    assert "not compared: no room" in str(Probe(reason="no room"))


def test_verification_finds_other_logits(model: Path, tmp_path: Path) -> None:
    other = make_family(tmp_path / "other", "glm4.5", seed=1, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"log-probabilities through the whole model differ by .* from transformers'"):
        compare_logits(model / "release", other)


def test_what_is_said_at_the_end(source: Path, model: Path) -> None:
    commit = committed_in(Store(str(model.parent)), "model")
    assert commit is not None
    ref = convert_hf(Store(str(model.parent / "store")), source, save=str(model))
    config = config_of("--hf-checkpoint", str(source), "--save", str(model))
    first, second = told(config, ref, commit, 1e6)
    assert first.startswith(f"{source} is converted and verified (torch_dist, ") and first.endswith(f": {model}")
    assert "left out: --mtp keep" in second
    assert next(iter(told(config, ref, commit, 0.0))).startswith(f"{source} was already converted")


@pytest.mark.integration
def test_processes_of_ray_share_both_directions(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    """Two ranks, with their progress, and back; the result is the source, prediction layers included."""
    store, heard = Store(str(tmp_path / "store")), []
    words = ["--hf-checkpoint", str(source), "--save", str(tmp_path / "there"), "--convert-ranks", "2", "--mtp", "keep"]
    ref = converted(cluster, store, config_of(*words).convert, verify=True, report=lambda *told: heard.append(told))
    assert heard and heard[-1][0] <= heard[-1][1]
    back = config_of("--load", ref.uri, "--save", str(tmp_path / "back"))
    again = exported(cluster, store, found_checkpoint(back), back.convert)
    for_megatron = config_of("--load", ref.uri, "--save", str(tmp_path / "te"), "--megatron-names", "te")
    te = exported(cluster, store, found_checkpoint(for_megatron), for_megatron.convert)
    taken = taken_in(cluster, store, back.convert, str(tmp_path / "te" / "release"))
    assert te.format == "torch_dist" and taken.key.startswith("models/megatron-")
    with HFWeights(source) as a, HFWeights(again.uri) as b:
        assert a.info == b.info and all(torch.equal(a.fetch(name), b.fetch(name)) for name in a.info)
    assert not list(tmp_path.glob(".*"))
