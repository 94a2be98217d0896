"""Export LoRA adapters as a PEFT directory, or merged with their base weights into full weights; import a PEFT
directory.

The checkpoint of a run with adapters has only the adapters; its commit names the base weights, which are a converted
model or another checkpoint.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from safetensors.torch import save as to_safetensors
from torch import Tensor

from penstock.engines.families import tensor_layout
from penstock.engines.families.shape import ModelShape
from penstock.engines.lora import (
    CONFIG,
    WEIGHTS,
    LoraOptions,
    adapter_targets,
    merge,
    part_of_row,
    peft_config,
    stored_matrix,
    to_peft,
)
from penstock.engines.megatron.checkpoints.layout import CheckpointLayout, ShardSlice
from penstock.stages.convert.targets import DirectoryTarget
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.stages.convert.work import WorkItems, write_files
from penstock.storage.commit import ADAPTERS, CheckpointRef, Commit, commit_key
from penstock.storage.errors import ModelError
from penstock.storage.store import Store


class StoredAdapters:
    """The adapters of a checkpoint that has only adapters."""

    def __init__(self, directory: Path, shape: ModelShape, options: LoraOptions) -> None:
        self.options, self.layout = options, tensor_layout(shape)
        self.targets = adapter_targets(shape, options.lora_target_modules)
        slices: dict[str, list[ShardSlice]] = {}
        num_experts = shape.experts.num_experts if shape.experts else 0
        for target in self.targets.values():
            rows = [self.layout.hf_shapes[f"{module}.weight"] for module in target.hf_modules]
            sizes = {
                "lora_A": (len(rows) * options.lora_rank, rows[0][1]),
                "lora_B": (sum(out for out, _ in rows), options.lora_rank),
            }
            for kind, size in sizes.items():
                key, expert = stored_matrix(target.name, kind)
                full = size if expert is None else (num_experts, *size)
                whole = tuple(slice(0, length) for length in full)
                slices[key] = [ShardSlice(key, (0,) * len(full), full, full, False, whole)]
        self._weights = TorchDistWeights(directory, CheckpointLayout(slices, {}, shape.num_layers))

    def matrices(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return the LoRA matrices A [parts * rank, in] and B [out, rank] of a layer, which may join several Hugging
        Face modules (parts)."""
        matrices = []
        for kind in ("lora_A", "lora_B"):
            key, expert = stored_matrix(layer, kind)
            with self._weights.open_parameter(key) as stored:  # the matrices of all experts are stacked
                matrices.append((stored if expert is None else stored[expert]).clone())
        return matrices[0], matrices[1]


class MergedWeights:
    """Base weights with adapters added to them, read one parameter at a time as from `TorchDistWeights`."""

    def __init__(self, base: TorchDistWeights, adapters: StoredAdapters) -> None:
        self.base, self.adapters, self.meta = base, adapters, base.meta

    @contextmanager
    def open_parameter(self, name: str) -> Iterator[Tensor]:
        """Yield a full parameter with its adapter added, on the CPU, valid inside the `with` block only."""
        layer, adapters = name.removesuffix(".weight"), self.adapters
        with self.base.open_parameter(name) as weight:
            if layer in adapters.targets:
                parts = part_of_row(adapters.layout, adapters.targets[layer])
                weight = merge(weight, *adapters.matrices(layer), parts, adapters.options.scale)
            yield weight


def base_commit(store: Store, checkpoint: Commit) -> Commit:
    """Return the commit with the base weights of a checkpoint of adapters. Raises ModelError if it is missing."""
    key = checkpoint.inputs["base"]
    commit = store.read_record(Commit, key)
    if commit is None:
        raise ModelError(
            f"{checkpoint.attempt} has adapters for the weights {key}, which are not in the store: restore them from a "
            "backup"
        )
    return commit


def adapter_options(checkpoint: Commit | str | Path) -> LoraOptions | None:
    """Return the options of a checkpoint's adapters, or None if the checkpoint has full weights."""
    options = checkpoint.state.get(ADAPTERS) if isinstance(checkpoint, Commit) else None
    return None if options is None else LoraOptions.model_validate(options)


def export_peft(store: Store, checkpoint: Commit, shape: ModelShape, base_model: str, save: str) -> CheckpointRef:
    """Write the adapters of a checkpoint as a PEFT directory to `save`; return the existing result, if there is one.
    `base_model`: Hugging Face directory or hub name of the base, which adapter_config.json names."""
    options = adapter_options(checkpoint)
    if options is None:
        raise ModelError(f"{checkpoint.attempt} has no LoRA adapters: export it with --format hf")
    identity = xxhash.xxh3_64_hexdigest(f"peft {checkpoint.attempt} {base_model}".encode())
    target = DirectoryTarget(save, "hf", identity, store.options)
    if existing := target.find_published(identity):
        return existing
    with store.reading(checkpoint) as directory:
        adapters = StoredAdapters(directory, shape, options)
        tensors = {
            name: tensor.contiguous()
            for layer in adapters.targets
            for name, tensor in to_peft(adapters.layout, layer, *adapters.matrices(layer))
        }

    def write(out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / WEIGHTS).write_bytes(to_safetensors(tensors, metadata={"format": "pt"}))
        (out / CONFIG).write_text(json.dumps(peft_config(options, shape, base_model), indent=2) + "\n")

    commit = Commit(
        kind="export",
        run=checkpoint.run,
        index=checkpoint.index,
        policy_version=checkpoint.policy_version,
        attempt=target.attempt,
        files=write_files(target, write),
        inputs={"checkpoint": checkpoint.attempt or ""},
        summary={"export/num_bytes": sum(tensor.nbytes for tensor in tensors.values())},
    )
    ref = target.publish(identity, commit)
    WorkItems(target, []).delete_records()
    return ref


def import_peft(store: Store, path: str) -> CheckpointRef:
    """Copy a PEFT directory to the store's models, so that a run can start from it again, and return its reference.
    Call `check_peft_directory` first."""
    digest, source = xxhash.xxh3_128(), Path(path)
    for name in (CONFIG, WEIGHTS):
        digest.update((source / name).read_bytes())
    prefix = f"models/adapter-{digest.hexdigest()}"
    commit = store.committed(prefix)
    if commit is None:
        attempt = store.new_attempt(prefix)
        with store.writing(attempt) as out:
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(source / name, out.path / name)
        inputs = {"source": str(source.absolute())}
        commit = store.commit(prefix, Commit(kind="model", attempt=attempt, files=out.files, inputs=inputs))
    return CheckpointRef(key=commit_key(prefix), uri=f"{store.uri}/{commit.attempt}", format="hf", policy_version=0)
