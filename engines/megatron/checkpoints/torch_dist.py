"""Save and load checkpoints in Megatron-core's `torch_dist` format: model, optimizer, learning-rate scheduler and RNG
states. Checkpoints can be loaded with other parallel sizes.

Megatron-core's own writer forks a process per file and spawns a manager process. This takes 2 s for a tiny model, hangs
a parent process without a `__main__` guard, and is unsafe in a multi-threaded actor. `writer.py` writes the same files
in threads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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

from penstock.engines.families.shape import ModelShape
from penstock.engines.families.tensor_rows import HEAD
from penstock.engines.megatron.checkpoints.layout import to_transformer_engine_key
from penstock.engines.megatron.checkpoints.safe_load import SafeReader, read_common, read_metadata, read_object
from penstock.engines.megatron.checkpoints.writer import ParallelWriter
from penstock.engines.megatron.host_memory import hash_tensors
from penstock.engines.megatron.lora_layers import adapter_state, reset_adapters
from penstock.engines.megatron.model.gpt import VALUE_HEAD, PolicyModel, ValueModel
from penstock.engines.megatron.optimizer import (
    OptimizerOffload,
    inner_optimizers,
    load_moments_and_steps,
    set_scheduler_to_step,
    zero_adam_state,
)
from penstock.engines.megatron.parallel import ParallelLayout, device
from penstock.storage.errors import ModelError, PenstockError
from penstock.storage.failpoints import failpoint


class PlainWriter(TorchDistSaveShardedStrategy):
    """Megatron's save strategy, with `ParallelWriter` in place of Megatron's file writer. After `save`, `hashes` maps
    the names of this rank's files to their xxh3-128 hashes."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)
        self.hashes: dict[str, str] = {}

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        if dist.get_rank() == 0:  # common.pt exists by now; the tensors and metadata.json do not
            failpoint("checkpoint-saving")
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        writer = ParallelWriter(checkpoint_dir)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        dcp.save(mcore_to_pyt_state_dict(flat, False), storage_writer=writer, planner=planner)
        self.hashes = writer.hashes


class SafeLoadStrategy(TorchDistLoadShardedStrategy):
    """Megatron's load strategy for tensors and objects, except that it unpickles only plain data (`safe_load.py`)."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        tensors = [entry for entry in nested_values(sharded_state_dict) if isinstance(entry, ShardedTensor)]
        flat, paths, renamed = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        loaded = mcore_to_pyt_state_dict(flat, True)
        planner = _SafePlanner(
            shapes_validation_sharded_tensors=[tensor for tensor in tensors if not tensor.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={
                tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
            },
        )
        planner.directory = str(checkpoint_dir)
        reader = SafeReader(checkpoint_dir)
        try:
            dcp.load(loaded, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            # torch wraps the errors of all ranks in a CheckpointException, a BaseException that is not an Exception
            for failure, _ in error.failures.values():
                if isinstance(failure, PenstockError):
                    raise failure from error
                if isinstance(failure, (KeyError, CheckpointingException)) or "Missing key in" in str(failure):
                    reason = str(failure).partition("\n")[0][:150]
                    raise ModelError(
                        f"{checkpoint_dir} belongs to another model or Megatron version ({reason}): use a "
                        "checkpoint of this model"
                    ) from error
            raise
        unwrapped = {key: _unwrap_pyt_sharded_tensor(value) for key, value in loaded.items()}
        result = _replace_sharded_keys_with_state_dict_keys(unwrapped, paths, renamed)
        _restore_dict_types(result, sharded_state_dict)
        return result


class _SafePlanner(MCoreLoadPlanner):
    """Megatron's load planner, except that it unpickles only plain data."""

    directory = ""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        key = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[key], read_object(value, f"{self.directory}: {key}"))


class SafeCommonStrategy(TorchCommonLoadStrategy):
    """Megatron's load strategy for `common.pt`, except that it unpickles only plain data."""

    load_common = staticmethod(read_common)


@dataclass
class RankState:
    """Save and load the training state of one rank. All methods except `digest` are collective: every rank must call
    them. A checkpoint of a model with adapters has the adapters and their optimizer states, but not the base weights.
    """

    shape: ModelShape
    layout: ParallelLayout
    role: Literal["policy", "value"]
    chunks: list[PolicyModel]
    optimizer: Any
    scheduler: Any
    adapter_seed: int | None = None  # seed of the adapters' initial values; None: the model has no adapters

    def save(self, directory: str | Path, step_state: dict[str, Any] | None) -> dict[str, str]:
        """Write a checkpoint with all state that the next training step depends on, and return file name -> xxh3-128
        of this rank's `.distcp` files. `step_state` has JSON values of the caller, which `load` returns; None: write
        only the model weights.

        Ranks may write to one shared directory, or each to its own; `load` needs all files in one. The files of a rank
        are named `__<rank>_<n>.distcp`; rank 0 also writes `common.pt`, `.metadata` and, last, `metadata.json`.
        """
        Path(directory).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        if step_state is None:
            state = self._model_state()
        else:
            state = self._training_state(is_loading=False) | {
                "num_scheduled_steps": self.scheduler.num_steps,
                "random_layout": self._describe_ranks_and_devices(),
                "step_state": json.dumps(step_state),
                "random": ShardedObject("random", _rng_states(), (dist.get_world_size(),), (dist.get_rank(),)),
            }
        writer = PlainWriter()
        dist_checkpointing.save(state, str(directory), writer, content_metadata=_content_metadata())
        return writer.hashes

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Load a checkpoint that `save` wrote and return its `step_state`."""
        _check_complete(directory)
        common = read_common(directory)
        if "step_state" not in common:
            raise ModelError(
                f"{directory} has model weights but no optimizer state (a converted model): load it "
                "with `load_weights` instead of `load`"
            )
        state = self._training_state(is_loading=True)
        same_layout = common["random_layout"] == self._describe_ranks_and_devices()
        if same_layout:
            state["random"] = ShardedObject("random", None, (dist.get_world_size(),), (dist.get_rank(),))
        loaded = dist_checkpointing.load(state, str(directory), SafeLoadStrategy(), SafeCommonStrategy())
        if self.adapter_seed is None:
            self._load_model(loaded)
        else:
            with torch.no_grad():
                for adapter in (adapter for chunk in self.chunks for adapter in chunk.adapters):
                    for kind, param in adapter.named_parameters():
                        param.copy_(loaded["adapters"][f"{adapter.names[0]}.{kind}"])
        load_moments_and_steps(self.optimizer, loaded["optimizer"])
        set_scheduler_to_step(self.scheduler, loaded["num_scheduled_steps"])
        if same_layout:  # RNG states are per rank; with dropout 0 no operation uses them
            tensor_parallel.get_cuda_rng_tracker().set_states(loaded["random"]["trackers"])
            if loaded["random"]["cuda"] is not None:
                torch.cuda.set_rng_state(loaded["random"]["cuda"])
            torch.set_rng_state(loaded["random"]["torch"])
        return json.loads(loaded["step_state"])

    def load_weights(self, directory: str | Path) -> None:
        """Load only the weights of a converted model or training checkpoint; reset adapters, optimizer and
        scheduler."""
        _check_complete(directory)
        state, keys = self._model_state(), read_metadata(directory).state_dict_metadata
        for entry in (entry for chunk in state.values() for entry in chunk.values() if entry.key not in keys):
            entry.key = to_transformer_engine_key(self.shape, entry.key)  # the checkpoint has TransformerEngine's keys
        heads: dict[str, torch.Tensor] = {}  # initial value heads, if a critic starts from a policy's weights
        if self.role == "value" and VALUE_HEAD not in keys:
            for key, chunk in self._chunks_by_key().items():
                if isinstance(chunk, ValueModel) and chunk.post_process:
                    heads[key] = chunk.initial_head()
                    del state[key][HEAD]
        loaded = dist_checkpointing.load(state, str(directory), SafeLoadStrategy(), SafeCommonStrategy())
        for key, head in heads.items():
            loaded[key][HEAD] = head
        self._load_model(loaded)
        if self.adapter_seed is not None:
            reset_adapters(self.chunks, self.adapter_seed)
        self.optimizer.reload_model_params()  # update the fp32 copies of the bf16 weights
        zero_adam_state(self.optimizer)
        set_scheduler_to_step(self.scheduler, 0)

    def digest(self) -> dict[str, str]:
        """Return hashes (xxh3-64) of this rank's training state except the model weights, keyed `name@rank/world_size`:
        its shards of the fp32 weights, optimizer moments and step counts, and the RNG states; and the number of
        scheduled steps. Hyperparameters are excluded, because they belong to the run's config. Not collective."""
        tensors: list[tuple[str, torch.Tensor]] = []
        for inner in inner_optimizers(self.optimizer):
            offload: OptimizerOffload | None = getattr(inner, "offload", None)
            for param in (param for group in inner.param_groups for param in group["params"]):
                main = offload.main_params.get(param, param) if offload else param
                tensors += [("main_params", main), *sorted(inner.state[param].items())]
        random = _rng_states()
        states = (random["torch"], random["cuda"], *(state for _, state in sorted(random["trackers"].items())))
        tensors += [("random", state) for state in states if state is not None]
        rank = f"@{dist.get_rank()}/{dist.get_world_size()}"
        scheduled = {f"num_scheduled_steps{rank}": str(self.scheduler.num_steps)}
        return {name + rank: value for name, value in hash_tensors(tensors).items()} | scheduled

    def _chunks_by_key(self) -> dict[str, PolicyModel]:
        """Return this rank's pipeline chunks by their key in the checkpoint: "model", or "model0", "model1", ..."""
        if len(self.chunks) == 1:
            return {"model": self.chunks[0]}
        return {f"model{index}": chunk for index, chunk in enumerate(self.chunks)}

    def _model_state(self, **changes: Any) -> dict[str, Any]:
        """Return Megatron's sharded state dict of the model weights, with `changes` to Megatron's metadata."""
        metadata = _content_metadata() | changes
        return {key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in self._chunks_by_key().items()}

    def _training_state(self, is_loading: bool) -> dict[str, Any]:
        """Return Megatron's sharded state dict of the trained model weights and the optimizer."""
        if self.adapter_seed is not None:
            trained = adapter_state(self.chunks)
            state = {"adapters": trained}
        else:
            state = trained = self._model_state()
            if any(not param.requires_grad for chunk in self.chunks for param in chunk.parameters()):
                # One key per layer: a tensor that stacks all layers would lack the optimizer state of frozen layers.
                trained = self._model_state(non_homogeneous_layers=True)
        model = trained["model"] if "model" in trained else dict(trained)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_content_metadata())
        return {**state, "optimizer": optimizer}

    def _load_model(self, loaded: dict[str, Any]) -> None:
        for key, chunk in self._chunks_by_key().items():
            missing, unexpected = chunk.load_state_dict(loaded[key], strict=False)
            missing = [
                name for name in missing if not name.endswith("_extra_state") and not name.startswith("adapters.")
            ]
            assert not missing and not unexpected, (
                f"the loaded state dict does not fit the model: weights missing {missing}, unexpected {unexpected}"
            )
            chunk.zero_vocab_padding()  # the checkpoint may have less vocabulary padding

    def _describe_ranks_and_devices(self) -> str:
        """Describe ranks and devices. RNG states are restored only from a checkpoint with the same description."""
        return f"{dist.get_world_size()} ranks, {self.layout.model_dump_json()}, {device().type}"


def _check_complete(directory: str | Path) -> None:
    """Raise ModelError if a checkpoint directory is incomplete: `metadata.json`, which is written last, is missing."""
    if not dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise ModelError(
            f"{directory} is not a torch_dist checkpoint (metadata.json is missing): use a converted model or a "
            "completely saved training checkpoint"
        )


def _content_metadata() -> dict[str, Any]:
    return dict(
        distrib_optim_sharding_type="fully_reshardable",
        distrib_optim_fully_reshardable_mem_efficient=False,
        singleton_local_shards=False,
        chained_optim_avoid_prefix=True,
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


def _rng_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "trackers": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
