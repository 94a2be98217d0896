"""Runs that train adapters: resumed, replayed, forked from a full run, and exported, with real Megatron in this
process instead of a group of Ray actors."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_rollouts import commit_rollouts

from penstock.engines.families import read_shape
from penstock.engines.lora import CONFIG, WEIGHTS, LoraOptions, check_peft_directory
from penstock.stages.convert.exported_adapters import export_peft, import_peft
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_hf
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.stages.train.actor import TrainActor, published_tensors
from penstock.stages.train.build import build_models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.spec import Build, PolicyState, TrainerSpec
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.errors import ModelError
from penstock.storage.maintenance.deletion import expire_checkpoints
from penstock.storage.store import Store

KEYS = RunKeys("run")
OPTIONS: dict[str, Any] = dict(
    lr=1e-3, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", max_tokens_per_gpu=400
)
OF_ADAPTERS: dict[str, Any] = dict(lora_rank=8, lora_alpha=16)
LORA: dict[str, Any] = dict(lora=OF_ADAPTERS)


class OneRank:
    """Replaces a TrainerGroup: one rank in this process."""

    def __init__(self, store: Store, model: Path, **options: Any) -> None:
        self.spec = TrainerSpec(
            run=KEYS.run, shape=read_shape(model), config=TrainConfig(**OPTIONS, **options), store=store.uri
        )
        self.actor = TrainActor(Build(spec=self.spec, num_ranks=1, threads=1), 0, "incarnation", "owner")
        self.lock = nullcontext()
        self.has_models = False
        self.loads: list[int] = []

    def ensure_started(self) -> None:
        if not self.has_models:
            self.actor.models, self.has_models = build_models(self.spec.shape, self.spec.config), True

    def policy_state(self) -> PolicyState | None:
        return self.actor.state() if self.has_models else None

    def load(self, version: int, *commits: Any) -> None:
        self.loads.append(version)
        self.actor.load(version, *commits)

    def __getattr__(self, name: str) -> Any:  # train, save, digest, optimizer_digest, fingerprint
        return getattr(self.actor, name)


@pytest.fixture
def place(world: None, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A store with a converted model and four committed rollouts."""
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    store = Store(str(tmp_path / "store"))
    commit_rollouts(store, KEYS, 4)
    base = convert_hf(store, tiny_model)
    return SimpleNamespace(store=store, model=tiny_model, base=base, directory=tmp_path)


def run_of(place: SimpleNamespace, **options: Any) -> tuple[PolicyRestorer, OneRank]:
    group: Any = OneRank(place.store, place.model, **options)
    return PolicyRestorer(place.store, KEYS, group, place.base), group


def checkpoint_of(place: SimpleNamespace, version: int) -> Commit:
    commit = place.store.committed(KEYS.checkpoint_prefix(version))
    assert commit is not None
    return commit


def exported(place: SimpleNamespace, commit: Commit, prefix: str) -> dict[str, torch.Tensor]:
    export = export_hf(place.store, commit, Origin(place.model), prefix)
    with HFWeights(Path(place.store.path(export.attempt or ""))) as files:
        return {name: files.fetch(name) for name in files.info}


def test_adapter_run_resumes_replays_and_exports(place: SimpleNamespace) -> None:
    restorer, group = run_of(place, **LORA)
    steps = [restorer.train_round(rollout_id) for rollout_id in range(3)]
    assert group.actor.models.reference is None and group.actor.models.reference_is_base
    kl = [step.summary["train/kl_loss"] for step in steps]
    assert kl[0] == pytest.approx(0, abs=1e-9) and kl[-1] > 1e-6  # the reference is the model without adapters
    before, after = (step.state["digest"] for step in (steps[0], steps[2]))
    assert {name for name in after if after[name] != before[name]} == {name for name in after if ".lora_" in name}
    restorer.save_checkpoint(3)
    commit = checkpoint_of(place, 3)
    assert commit.inputs["base"] == place.base.key and commit.state["lora"]["lora_alpha"] == 16
    model = place.store.read(place.base.key)
    full = sum(file.bytes for file in Commit.model_validate_json(model or b"").files)
    assert sum(file.bytes for file in commit.files) < full

    again, other = run_of(place, **LORA)  # from the checkpoint: its digests are compared
    again.restore(3)
    assert other.loads == [3]
    assert other.digest() == after
    replayed, third = run_of(place, **LORA)
    replayed.load_checkpoint(0)
    assert [replayed.replay_round(rollout_id).verdict for rollout_id in range(3)] == ["equal bit for bit"] * 3
    assert third.loads == [0]

    merged = exported(place, commit, "exports/merged")
    with HFWeights(place.model) as start:
        assert merged.keys() == start.info.keys()
        assert not torch.equal(
            merged["model.layers.0.mlp.up_proj.weight"], start.fetch("model.layers.0.mlp.up_proj.weight")
        )
        assert torch.equal(merged["model.embed_tokens.weight"], start.fetch("model.embed_tokens.weight"))
    transport: Any = SimpleNamespace(adapter=None, without_vision=False)
    published = dict(published_tensors(group.actor.models.policy, group.spec.shape, transport))  # what `publish` sends
    assert published.keys() == merged.keys()
    assert all(torch.equal(merged[name], published[name]) for name in merged)


def test_full_run_forked_into_adapters_keeps_its_checkpoint_as_base(place: SimpleNamespace) -> None:
    restorer, _ = run_of(place)
    for rollout_id in range(2):
        restorer.train_round(rollout_id)
    restorer.save_checkpoint(2)

    forked, group = run_of(place, **LORA)
    forked.restore(2)
    base = group.digest()
    committed = checkpoint_of(place, 2).state["digest"]
    assert {name: base[name] for name in committed} == committed
    assert group.actor.models.reference is not None  # the model that the run started with, not the base
    kl = [forked.train_round(2).summary["train/kl_loss"]]
    forked.save_checkpoint(3)
    kl.append(forked.train_round(3).summary["train/kl_loss"])
    assert min(kl) > 1e-6
    forked.save_checkpoint(4)
    assert checkpoint_of(place, 4).inputs["base"] == commit_key(KEYS.checkpoint_prefix(2))
    assert expire_checkpoints(place.store, KEYS, num_to_keep=1) == [3]
    trained = group.digest()
    resumed, other = run_of(place, **LORA)
    resumed.restore(4)
    assert other.loads == [4] and other.digest() == trained


def test_peft_directory_of_a_run_is_loaded_by_peft_and_starts_another_run(place: SimpleNamespace) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    restorer, group = run_of(place, **LORA)
    restorer.train_round(0)
    restorer.save_checkpoint(1)
    shape, commit = group.spec.shape, checkpoint_of(place, 1)
    target = place.directory / "peft"
    export_peft(place.store, commit, shape, str(place.model), str(target))
    assert {path.name for path in target.iterdir()} >= {CONFIG, WEIGHTS}
    assert not [path for path in target.parent.iterdir() if path.name.startswith(".peft")]

    tokens = torch.tensor([[2, 10, 11, 12, 13]])
    plain = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)
    start = plain(tokens).logits
    logits = peft.PeftModel.from_pretrained(plain, target)(tokens).logits
    merged = AutoModelForCausalLM.from_pretrained(place.model, dtype=torch.float32)
    merged.load_state_dict(exported(place, commit, "exports/merged"), strict=False)
    assert torch.allclose(merged(tokens).logits, logits, rtol=0, atol=2e-5)
    assert not torch.allclose(start, logits, rtol=0, atol=1e-4)

    check_peft_directory(target, shape, group.spec.config.lora)
    imported = import_peft(place.store, str(target))
    assert import_peft(place.store, str(target)) == imported
    place.store.create(KEYS.origin_key("adapter"), imported.model_dump_json().encode())
    other, second = run_of(place, lora=OF_ADAPTERS | {"lora_load": str(target)})
    other.load_checkpoint(0)
    assert second.digest() == group.digest()


@pytest.mark.parametrize(
    ("options", "entry", "message"),
    [
        ({"lora_rank": 4}, {}, "has r 8, but the run needs 4.*--lora-rank"),
        ({"lora_alpha": 3}, {}, "lora_alpha"),
        ({"lora_target_modules": ["attention"]}, {}, "tensors differ.*--lora-target-modules"),
        ({}, {"use_dora": True}, "use_dora True"),
        ({}, {"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
    ],
)
def test_peft_directory_that_differs_from_the_options_is_refused(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any], entry: dict[str, Any], message: str
) -> None:
    from safetensors.torch import save_file

    from penstock.engines.families import tensor_layout
    from penstock.engines.lora import adapter_targets, peft_config, to_peft

    shape, layout = read_shape(tiny_model), tensor_layout(read_shape(tiny_model))
    own = LoraOptions(**OF_ADAPTERS)
    tensors = {}
    for name, target in adapter_targets(shape, own.lora_target_modules).items():
        sizes = [layout.hf_shapes[f"{module}.weight"] for module in target.hf_modules]
        matrices = torch.zeros(8 * len(sizes), sizes[0][1]), torch.zeros(sum(out for out, _ in sizes), 8)
        tensors |= {key: tensor.contiguous() for key, tensor in to_peft(layout, name, *matrices)}
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps(peft_config(own, shape, "base") | entry))
    needed = LoraOptions(**OF_ADAPTERS | options)
    with pytest.raises(ModelError, match=message):
        check_peft_directory(tmp_path, shape, needed)


def test_peft_directory_without_files_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    options = LoraOptions(**OF_ADAPTERS)
    with pytest.raises(ModelError, match=r"adapter_config\.json does not exist: give --lora-load"):
        check_peft_directory(tmp_path, read_shape(tiny_model), options)
