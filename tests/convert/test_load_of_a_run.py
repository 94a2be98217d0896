"""--load STORE/RUN: the weights of a training checkpoint, without its optimizer, become the start of another run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engines.families import read_shape
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import create_run_record, open_store
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_hf
from penstock.stages.convert.to_torch_dist import import_megatron_checkpoint
from penstock.storage.commit import Commit, RunKeys
from penstock.storage.store import Store
from tests.engines.megatron_reference import make_engine


@pytest.mark.usefixtures("world")
def test_weights_of_a_training_checkpoint_are_imported(tiny_model: Path, tmp_path: Path) -> None:
    """Frozen weights, which have no optimizer state, are in the checkpoint as well."""
    freeze = ["embedding.word_embeddings.weight"]
    engine = make_engine(read_shape(tiny_model), dtype="bf16", freeze=freeze, seed=5)
    words = ["--hf-checkpoint", str(tiny_model), "--save"]
    old = parse_config([*words, str(tmp_path / "store" / "old")])
    store, keys = open_store(old.run), RunKeys("old")
    create_run_record(store, resolve("sft", old, store))
    attempt = store.new_attempt(keys.checkpoint_prefix(3))
    with store.writing(attempt) as out:
        engine.save(out.path, {"run": "old", "version": 3})
    fields = {"run": "old", "index": 3, "policy_version": 3}
    store.commit(keys.checkpoint_prefix(3), Commit(kind="checkpoint", attempt=attempt, files=out.files, **fields))

    new = parse_config([*words, str(tmp_path / "store" / "new"), "--load", str(tmp_path / "store" / "old")])
    model = import_megatron_checkpoint(store, resolve("sft", new, store).start_weights, Origin(tiny_model))
    commits = [store.committed(keys.checkpoint_prefix(3)), Commit.model_validate_json(store.read(model.key) or b"")]
    exports = [
        export_hf(store, commit, Origin(tiny_model), f"exports/{i}") for i, commit in enumerate(commits) if commit
    ]
    saved, imported = (HFWeights(Store(store.uri).path(export.attempt or "")) for export in exports)
    with saved, imported, HFWeights(tiny_model) as original:
        assert all(torch.equal(saved.fetch(name), imported.fetch(name)) for name in saved.info)
        assert not all(torch.equal(saved.fetch(name), original.fetch(name)) for name in saved.info)
