"""Checkpoints that have only adapters: `penstock export`, `penstock fork` and --load of such a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.lora import LoraOptions, check_peft_directory, open_peft, to_peft
from penstock.flows.commands.fork import plan_fork
from penstock.flows.config import PostTrainConfig
from penstock.flows.inspect import export
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record, open_store
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_hf
from penstock.stages.convert.to_torch_dist import export_megatron
from penstock.storage.commit import ADAPTERS, Commit, RunKeys, commit_key
from penstock.storage.errors import ModelError, OptionError
from penstock.storage.history.lineage_graph import read_lineage
from penstock.storage.store import Store
from tests.engines.megatron_reference import make_engine
from tests.families import make_family

KEYS = RunKeys("old")
LORA = LoraOptions(lora_rank=8, lora_alpha=12, lora_target_modules=["all-linear"])


def config_of(model: Path, store: Path, run: str = "old", *words: str) -> PostTrainConfig:
    return parse_config(["--hf-checkpoint", str(model), "--store", str(store), "--run", run, *words])


def commit_checkpoint(store: Store, prefix: str, save: Any, **fields: Any) -> Commit:
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        save(out.path)
    return store.commit(prefix, Commit(run="old", attempt=attempt, files=out.files, **fields))


def save_run(model: Path, store: Store, overrides: dict[str, Any]) -> Any:
    """Commit a base and a checkpoint of random adapters on it; return their engine."""
    engine = make_engine(read_shape(model), overrides, lora=LORA, seed=5)
    generator = torch.Generator().manual_seed(7)
    for param in engine.chunks[0].adapters.parameters():
        param.data.copy_(0.1 * torch.randn(param.shape, generator=generator))
    config = config_of(model, Path(store.root), "old", "--lora-rank", "8", "--lora-alpha", "12")
    create_run_record(store, resolve("sft", config, store))
    commit_checkpoint(store, "models/base", lambda path: engine.save(path, None), kind="model")
    commit_checkpoint(
        store,
        KEYS.checkpoint_prefix(3),
        lambda path: engine.save(path, {"run": "old", "version": 3}),
        kind="checkpoint",
        index=3,
        policy_version=3,
        inputs={"base": commit_key("models/base")},
        state={ADAPTERS: LORA.model_dump(mode="json")},
    )
    return engine


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3-moe", {}), pytest.param("deepseek-v3", {"moe_grouped_gemm": True}, marks=pytest.mark.full)],
    ids=["experts", "latent, grouped experts"],
)
def test_exports_have_the_adapters_of_experts(
    tmp_path: Path, family: str, overrides: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_family(tmp_path / "model", family)
    store = open_store(config_of(model, tmp_path / "store").run)
    engine = save_run(model, store, overrides)
    layout, commit = tensor_layout(engine.shape), store.committed(KEYS.checkpoint_prefix(3))
    assert commit is not None
    merged = export_hf(store, commit, Origin(model), "exports/merged")
    live = export_hf(store, commit, Origin(model), "exports/live", weights=engine.gather_weights())
    files = [HFWeights(Path(store.path(made.attempt or ""))) for made in (merged, live)]
    with files[0] as stored, files[1] as gathered:
        assert stored.info.keys() == gathered.info.keys()
        assert all(torch.equal(stored.fetch(name), gathered.fetch(name)) for name in stored.info)

    target = tmp_path / "peft"
    words = ["old/3", "--format", "peft", "--output", str(target), "--store", store.root]
    assert export.main(words) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first == "writing the adapters of old, policy version 3: 2 files"
    assert last.startswith("adapters of policy 3 of old") and f"{target} (peft.PeftModel.from_pretrained" in last
    assert export.main(words) == 0  # the existing result
    check_peft_directory(target, engine.shape, LORA)
    from safetensors.torch import load_file

    written = load_file(target / "adapter_model.safetensors")
    expected = {
        name: tensor for layer, *pair in engine.named_adapters() for name, tensor in to_peft(layout, layer, *pair)
    }
    assert written.keys() == expected.keys() and all(torch.equal(written[name], expected[name]) for name in written)
    digest = engine.digest()
    engine.load_weights(store.path(store.committed("models/base").attempt))  # type: ignore[union-attr,arg-type]
    assert engine.digest() != digest
    with open_peft(target, engine.shape) as matrices_of:
        engine.load_adapters(matrices_of)
    assert engine.digest() == digest


@pytest.mark.usefixtures("world")
def test_what_needs_all_weights_of_a_run_with_adapters_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = config_of(tiny_model, tmp_path / "store")
    store = open_store(config.run)
    save_run(tiny_model, store, {})
    commit = store.committed(KEYS.checkpoint_prefix(3))
    assert commit is not None
    inputs = read_lineage(store).nodes[commit_key(KEYS.checkpoint_prefix(3))].inputs
    assert ("base", commit_key("models/base")) in inputs
    loading = config_of(tiny_model, tmp_path / "store", "new", "--load", str(tmp_path / "store" / "old"))
    with pytest.raises(OptionError, match=r"only LoRA adapters.*penstock export old"):
        resolve("sft", loading, store)
    with pytest.raises(OptionError, match="--format hf"):
        export_megatron(store, commit, Origin(tiny_model), str(tmp_path / "out"), "te")
    whole = commit.model_copy(update={"state": {}})
    store.commit(KEYS.checkpoint_prefix(4), whole)
    with pytest.raises(ModelError, match="no LoRA adapters"):
        export.main(["old/4", "--format", "peft", "--output", str(tmp_path / "out"), "--store", store.root])


def test_fork_keeps_the_options_of_adapters_or_adds_adapters(tiny_model: Path, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), probe=False)
    full, adapters = (
        config_of(tiny_model, tmp_path / "store", "old", "--num-rollout", "9", *words)
        for words in ([], ["--lora-rank", "8"])
    )
    for options in ([], ["--lr", "1e-4"]):
        assert plan_fork(store, "sft", adapters, options, "new", 3).train.lora == adapters.train.lora
    for config, version in ((full, 3), (adapters, 0)):
        assert plan_fork(store, "sft", config, ["--lora-rank", "4"], "new", version).train.lora is not None
    with pytest.raises(OptionError, match=r"cannot change at round 3.*adapters of old"):
        plan_fork(store, "sft", adapters, ["--lora-rank", "4"], "new", 3)
