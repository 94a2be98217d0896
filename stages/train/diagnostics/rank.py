"""Diagnostics of one trainer rank: profiler traces, memory snapshots and a dump of the training data, as files in local
directories.

A file that cannot be written is reported, and training continues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from penstock.stages.torch_files import fill_template, save_torch_file
from penstock.stages.train.batching import Batch
from penstock.stages.train.diagnostics.config import DiagnosticsConfig
from penstock.stages.train.step import TrainedRound

logger = logging.getLogger(__name__)
MAX_MEMORY_EVENTS = 1_000_000  # maximum number of allocations and frees in a snapshot


class RankDiagnostics:
    """Traces rounds and records memory on one rank, as `config` requests. `run`, the name of the run, is a directory
    below --profile-dir."""

    def __init__(self, config: DiagnosticsConfig, run: str, rank: int) -> None:
        self.config, self.run, self.rank = config, run, rank
        self.notes: list[str] = []  # one line per file written since the last call of `take_notes`
        self._recorder: Any = None  # memray's tracker
        self._is_recording = False
        self._num_rounds = 0  # number of rounds since recording began

    def take_notes(self) -> list[str]:
        """Return one line for each file that this rank has written since the last call."""
        notes, self.notes = self.notes, []
        return notes

    # ---- profiler ----------------------------------------------------------------------------------------------------

    @contextmanager
    def traced(self, target: str, rollout_id: int) -> Iterator[None]:
        """Trace the `with` block with torch.profiler if the options select the part `target` of this round."""
        config = self.config
        rounds = range(config.profile_step_start, config.profile_step_end)
        if not config.use_pytorch_profiler or target not in config.profile_target or rollout_id not in rounds:
            yield
            return
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        with profile(
            activities=activities, record_shapes=True, profile_memory=True, with_stack=True, with_flops=True
        ) as profiler:
            yield
        directory = Path(config.profile_dir or "profiles").expanduser() / self.run
        path = directory / f"{target}_round{rollout_id:06d}_rank{self.rank}.pt.trace.json.gz"
        temporary = path.with_name(f".{path.name}")  # the suffix .gz makes torch compress it
        try:
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            self._report_failure(path, error)
        else:
            self.notes.append(f"wrote the profiler trace {path} (one per rank; open it in https://ui.perfetto.dev)")

    # ---- memory ------------------------------------------------------------------------------------------------------

    def start_recording_memory(self) -> None:
        """With --record-memory-history, record the allocations of this process from now on. If the GPU's memory is
        exhausted, a snapshot is written before the error is raised."""
        config = self.config
        if not config.record_memory_history or self._is_recording:
            return
        self._is_recording = True
        if config.memory_recorder == "memray":
            import memray

            path = self._snapshot_path("all")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            self._recorder = memray.Tracker(path, native_traces=True)
            self._recorder.__enter__()
            return
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS, stacks="all")
        attach_observer: Any = vars(torch._C)["_cuda_attach_out_of_memory_observer"]  # absent from torch's type stubs
        attach_observer(lambda *sizes: self._write_snapshot("oom"))

    # ---- end of a round ----------------------------------------------------------------------------------------------

    def end_round(self, rollout_id: int, table: pa.Table, batch: Batch, trained: TrainedRound) -> None:
        """Write the memory snapshot and the data that the round was trained on, if they are requested. `table` has the
        committed samples of the round, `batch` the same samples as arrays."""
        self._num_rounds += 1
        self._end_recording_memory(rollout_id)
        template = self.config.save_debug_train_data
        if template is None or self.rank > 0:
            return
        try:
            path = save_train_data(template, rollout_id, table, batch, trained)
        except OSError as error:
            self._report_failure(Path(template), error)
        else:
            self.notes.append(f"wrote the training data of round {rollout_id} to {path}")

    def _end_recording_memory(self, rollout_id: int) -> None:
        """After --memory-snapshot-num-steps rounds, write a snapshot and stop recording memory."""
        if not self._is_recording or self._num_rounds != self.config.memory_snapshot_num_steps:
            return
        self._is_recording = False
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None
            self.notes.append(f"wrote the memory of the host to {self._snapshot_path('all')} (memray flamegraph FILE)")
            return
        self._write_snapshot(f"round{rollout_id:06d}")
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write_snapshot(self, name: str) -> None:
        path = self._snapshot_path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        except (OSError, RuntimeError) as error:
            self._report_failure(path, error)
        else:
            note = f"wrote the memory snapshot {path} (one per rank; open it in https://pytorch.org/memory_viz)"
            self.notes.append(note)
            logger.warning(note)  # logged at once, because the rank may be about to run out of memory

    def _snapshot_path(self, name: str) -> Path:
        path = Path(self.config.memory_snapshot_dir or ".", self.config.memory_snapshot_path).expanduser()
        return path.with_name(f"memory_{self.run}_{name}_rank{self.rank}_{path.name}")

    def _report_failure(self, path: Path, error: Exception) -> None:
        self.notes.append(f"{path} could not be written ({type(error).__name__}: {error}); training continues")


def save_train_data(template: str, rollout_id: int, table: pa.Table, batch: Batch, trained: TrainedRound) -> Path:
    """Write the training data of a round for --save-debug-train-data, and return the path. Raises OSError.

    The file has {"rollout_id", "rank", "samples"}, with a dictionary per sample, in the order of the rollout's samples.
    Every rank holds the data of all samples, so rank 0 writes them.
    """
    path = fill_template(template, rollout_id=rollout_id, rank=0)
    experience, estimate = trained.experience, trained.estimate
    per_token = {  # name -> [N], values of the trained tokens
        "log_probs": trained.tokens.get("trainer_logprobs"),
        "rollout_log_probs": experience.rollout_logprobs,
        "ref_log_probs": experience.ref_logprobs,
        "teacher_log_probs": experience.teacher_logprobs,
        "values": experience.values,
        "advantages": estimate.advantages,
        "returns": estimate.returns,
    }
    fields = {}  # name -> [S] float32, with 0 at tokens that are not trained
    for name, values in per_token.items():
        if values is not None:
            fields[name] = torch.zeros(len(batch.token_ids))
            fields[name][torch.from_numpy(batch.trained_positions)] = values.float()
    masks = table["loss_mask"].to_pylist()
    samples = [row_of_sample(batch, fields, masks[index], index) for index in range(len(batch.lengths))]
    save_torch_file(path, {"rollout_id": rollout_id, "rank": 0, "samples": samples})
    return path


def row_of_sample(batch: Batch, fields: dict[str, Tensor], mask: list[int], index: int) -> dict[str, Any]:
    """Return the tokens of sample `index`, and its per-token data (`fields`: name -> values of all tokens) from the
    first trained token on. `mask`: the sample's loss mask in the commit."""
    start, end = int(batch.offsets[index]), int(batch.offsets[index + 1])
    num_prompt = mask.index(1) if 1 in mask else len(mask)
    first = start + num_prompt
    reward = float(batch.rewards[index])
    return {
        "sample_index": index,
        "group_index": int(batch.group_index[index]),
        "tokens": torch.from_numpy(batch.token_ids[start:end].copy()),
        "response_length": end - first,
        "loss_mask": torch.from_numpy(batch.loss_mask[first:end].astype(np.int64)),
        "reward": None if np.isnan(reward) else reward,
        **{name: values[first:end].clone() for name, values in fields.items()},
    }
