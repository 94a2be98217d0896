"""Checkpoints in Megatron-core's `torch_dist` format: model, optimizer, schedule and random state, loadable under another layout.

Where they lie, when they are made and what proves them complete is for the stages and `storage/`. Megatron-core's own writer
forks one process per file and spawns a manager beside them: that costs two seconds, hangs a parent without a `__main__` guard
and is no good idea in an actor full of threads. The files here are the same, written by torch's plain writer (0.3 s for a tiny model).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    _replace_sharded_keys_with_state_dict_keys,
    _replace_state_dict_keys_with_sharded_keys,
    _restore_dict_types,
    _unwrap_pyt_sharded_tensor,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException

from engines.megatron.model import HEAD
from engines.megatron.optimizer import inner_optimizers, load_state, reset_state, set_schedule
from engines.megatron.safe_load import SafeReader, read_common, read_metadata, read_object
from engines.megatron.stored_names import te_key
from engines.megatron.value import VALUE_HEAD, ValueModel
from storage.errors import ModelError, PenstockError
from storage.faults import reach

if TYPE_CHECKING:
    from engines.megatron.engine import MegatronEngine


class PlainWriter(TorchDistSaveShardedStrategy):
    """Megatron's planning, torch's writing."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        if (
            dist.get_rank() == 0
        ):  # it has written the common state; the tensors and the file that makes this a checkpoint are missing
            reach("checkpoint-saving")
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=8 if torch.cuda.is_available() else 1),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


class SafeLoadStrategy(TorchDistLoadShardedStrategy):
    """Megatron's loading of tensors and objects, with unpickling restricted to plain data (`safe_load.py`)."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        tensors = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor)]
        flat, paths, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        loaded = mcore_to_pyt_state_dict(flat, True)
        planner = _SafePlanner(
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch},
        )
        planner.directory = str(checkpoint_dir)
        reader = SafeReader(checkpoint_dir)
        try:
            dcp.load(loaded, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            _raise_cause(error, checkpoint_dir)
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
        result = _replace_sharded_keys_with_state_dict_keys(unwrapped, paths, renamed)
        _restore_dict_types(result, sharded_state_dict)
        return result


def _raise_cause(error: CheckpointException, directory: str | Path) -> NoReturn:
    """Raise what a rank has refused, out of torch's collection of all ranks' errors, which is not even an `Exception`."""
    failures = [failure for failure, _ in error.failures.values()]
    for failure in failures:
        if isinstance(failure, PenstockError):
            raise failure from error
        if isinstance(failure, (KeyError, CheckpointingException)) or "Missing key in checkpoint" in str(failure):
            reason = str(failure).partition("\n")[0][:150]
            raise ModelError(
                f"{directory} is a checkpoint of another model or another Megatron ({reason}): give another one"
            ) from error
    raise error


class _SafePlanner(MCoreLoadPlanner):
    directory = ""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        key = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[key], read_object(value, f"{self.directory}: {key}"))


class SafeCommonStrategy(TorchCommonLoadStrategy):
    """Megatron's loading of `common.pt`, restricted likewise."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        return read_common(checkpoint_dir)


def save_checkpoint(engine: MegatronEngine, directory: str | Path, step_state: dict[str, Any]) -> None:
    """Write everything that the next step depends on. Called by all ranks, each with a directory of its own or all with the same.

    A rank's files are `__<rank>_<n>.distcp`; rank 0 writes `common.pt`, `.metadata` and, last, `metadata.json` besides. They belong
    into one directory, where `load_checkpoint` finds them.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(engine, is_loading=False)
    state["num_scheduled_steps"] = engine.scheduler.num_steps
    state["random_layout"] = _random_layout(engine)
    state["step_state"] = json.dumps(step_state)
    state["random"] = _random_object(_random_state())
    dist_checkpointing.save(state, str(directory), PlainWriter(), content_metadata=_metadata())


def save_weights(engine: MegatronEngine, directory: str | Path) -> None:
    """Write the model alone, as `save_checkpoint` does. Called by all ranks."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_model_state(engine), str(directory), PlainWriter(), content_metadata=_metadata())


def written_by(rank: int, name: str) -> bool:
    """Whether the file of this name is this rank's, in a checkpoint or in one that lies in a folder of it (`critic/__0_0.distcp`)."""
    owner = re.fullmatch(r"(?:.+/)?__(\d+)_\d+\.distcp", name)
    return rank == (int(owner[1]) if owner else 0)


def load_checkpoint(engine: MegatronEngine, directory: str | Path) -> dict[str, Any]:
    """Continue from `save_checkpoint`. Called by all ranks.

    Returns:
        the `step_state` that was saved.
    """
    _check(directory)
    common = read_common(directory)
    if "step_state" not in common:
        raise ModelError(f"{directory} holds a model without an optimizer (a converted checkpoint): load its weights only")
    state = _sharded_state(engine, is_loading=True)
    same_layout = common["random_layout"] == _random_layout(engine)
    if same_layout:
        state["random"] = _random_object(None)
    loaded = _load(state, directory)
    _load_model(engine, loaded)
    load_state(engine.optimizer, loaded["optimizer"])
    set_schedule(engine.scheduler, loaded["num_scheduled_steps"])
    if same_layout:  # under another layout there is no state of "this rank"; with dropout 0 nothing draws from it
        _restore_random_state(loaded["random"])
    return json.loads(loaded["step_state"])


def load_weights(engine: MegatronEngine, directory: str | Path) -> None:
    """Take the model out of a converted or a training checkpoint, with a fresh optimizer. Called by all ranks."""
    _check(directory)
    state, keys = _model_state(engine), read_metadata(directory).state_dict_metadata
    for entry in (entry for chunk in state.values() for entry in chunk.values() if entry.key not in keys):
        entry.key = te_key(engine.shape, entry.key)  # names of a checkpoint that was converted for TransformerEngine
    heads = _heads_missing_in(directory, engine)
    for key in heads:
        del state[key][HEAD]
    loaded = _load(state, directory)
    for key, head in heads.items():
        loaded[key][HEAD] = head
    _load_model(engine, loaded)
    engine.optimizer.reload_model_params()  # the fp32 copies of bf16 weights
    reset_state(engine.optimizer)
    set_schedule(engine.scheduler, 0)


def state_digest(engine: MegatronEngine) -> dict[str, str]:
    """xxh3-64 of everything a checkpoint holds but the weights, by name and rank. Not collective.

    The fp32 copies of weights, the moments and step counts (this rank's shards), the place in the schedule, random states. Learning
    rates and other hyperparameters are no state: they are the run's.
    """
    hashes: dict[str, xxhash.xxh3_64] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        hashes.setdefault(name, xxhash.xxh3_64()).update(content.numpy().data)

    for inner in inner_optimizers(engine.optimizer):
        for param in (param for group in inner.param_groups for param in group["params"]):
            add("main_params", param)
            for name, value in sorted(inner.state[param].items()):
                add(name, value)
    random = _random_state()
    for value in (random["torch"], random["cuda"], *(state for _, state in sorted(random["trackers"].items()))):
        if value is not None:
            add("random", value)
    place = f"@{dist.get_rank()}/{dist.get_world_size()}"
    scheduled = {f"num_scheduled_steps{place}": str(engine.scheduler.num_steps)}
    return {name + place: found.hexdigest() for name, found in hashes.items()} | scheduled


def _check(directory: str | Path) -> None:
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise ModelError(
            f"{directory} is not a torch_dist checkpoint (no metadata.json in it): give a converted or a training checkpoint"
        )


def _load(state: dict[str, Any], directory: str | Path) -> dict[str, Any]:
    return dist_checkpointing.load(state, str(directory), SafeLoadStrategy(), SafeCommonStrategy())


def _metadata() -> dict[str, Any]:
    return dict(
        distrib_optim_sharding_type="fully_reshardable",
        distrib_optim_fully_reshardable_mem_efficient=False,
        singleton_local_shards=False,
        chained_optim_avoid_prefix=True,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _heads_missing_in(directory: str | Path, engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Initial heads of a value model that begins at a policy, by the key of their chunk in `_model_state`."""
    if engine.role == "policy" or VALUE_HEAD in read_metadata(directory).state_dict_metadata:
        return {}
    chunks = zip(_model_keys(engine), engine.chunks, strict=True)
    return {key: chunk.initial_head() for key, chunk in chunks if isinstance(chunk, ValueModel) and chunk.post_process}


def _model_keys(engine: MegatronEngine) -> list[str]:
    return ["model"] if len(engine.chunks) == 1 else [f"model{index}" for index in range(len(engine.chunks))]


def _model_state(engine: MegatronEngine) -> dict[str, Any]:
    """Keys of the tensors are global names whichever chunk they are in."""
    chunks = zip(_model_keys(engine), engine.chunks, strict=True)
    return {key: chunk.sharded_state_dict(metadata=_metadata()) for key, chunk in chunks}


def _sharded_state(engine: MegatronEngine, is_loading: bool) -> dict[str, Any]:
    state = _model_state(engine)
    model = state["model"] if "model" in state else dict(state)
    return {**state, "optimizer": engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_metadata())}


def _load_model(engine: MegatronEngine, loaded: dict[str, Any]) -> None:
    for key, chunk in zip(_model_keys(engine), engine.chunks, strict=True):
        missing, unexpected = chunk.load_state_dict(loaded[key], strict=False)
        missing = [name for name in missing if not name.endswith("_extra_state")]
        assert not missing and not unexpected, f"missing {missing}, unexpected {unexpected}"
        chunk.zero_padding()  # a checkpoint of another vocabulary padding leaves these rows as they were


def _random_layout(engine: MegatronEngine) -> str:
    return f"{dist.get_world_size()} ranks, {engine.layout.model_dump_json()}, {engine.device.type}"


def _random_object(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))


def _random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "trackers": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    tensor_parallel.get_cuda_rng_tracker().set_states(state["trackers"])
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    torch.set_rng_state(state["torch"])
