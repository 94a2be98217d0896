"""Samples of a round as traces: turns of the model, results of tools, and the parts of the reward.

A trace has an id that is derived from the sample, so a trace that is logged again replaces itself. Samples have no
times of their own: the turns divide the time in which the round was generated in proportion to their tokens.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.storage.refs import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.samples.sample import SCHEMA, Status
from penstock.storage.samples.shards import is_shard
from penstock.storage.store import Store
from penstock.storage.tracking.mlflow.runs import MlflowRuns

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Span
    from tokenizers import Tokenizer

_UNUSED = ("rollout_logprobs", "routed_experts", "teacher_logprobs")
_COLUMNS = [column for column in SCHEMA.names if column not in _UNUSED]
_TOKENIZER = "hf_assets/tokenizer.json"  # in the files of a converted model
_BATCH, _MAX_ROWS = 32, 1024  # rows that are read at once, and at most, to find the first samples of several groups
_MAX_TEXT, _MAX_PREVIEW = 20_000, 500  # characters of a text in a trace, and in the list of traces
_THOUGHT = re.compile(r"\A.*</think>|<think>.*", re.DOTALL)  # it may begin in the prompt, or have no end
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
Row = dict[str, Any]
logger = logging.getLogger(__name__)


class MlflowTraces:
    """Logs a sample of each round as traces.

    Args:
        runs: the MLflow runs of the Penstock run.
    """

    def __init__(self, runs: MlflowRuns) -> None:
        from mlflow.tracing.client import TracingClient

        self.client = TracingClient(runs.uri)
        self.runs = runs

    def log_round(self, main_run: str, commit: Commit, shards: str, model: LoggedModel | None) -> None:
        """Log the first sample of each of the first groups of a rollout as a trace.

        Args:
            main_run: MLflow run to which the traces are linked.
            commit: of the rollout.
            shards: name of the MLflow data set with the samples.
            model: the last checkpoint before the rollout, or the base model, to which the traces are linked.
        """
        run = self.runs.run
        if run.store is None or not run.num_traces or commit.policy_version < 0:  # -1: demonstrations
            return
        from mlflow.entities import TraceInfo, TraceLocation, TraceState

        links = {"mlflow.sourceRun": main_run} | ({"mlflow.modelId": model.model_id} if model else {})
        tags = {"penstock.round": str(commit.index), "penstock.shards": shards}
        spans: list[Span] = []
        for row in read_first_samples(run.store, commit, run.num_traces):
            id = hashlib.sha256(f"{commit.attempt}/{row['sample_id']}".encode()).digest()[:16]
            parts = split_sample(row, commit, self._decode)
            failed = row["status"] == Status.FAILED
            trace = TraceInfo(
                f"tr-{id.hex()}",
                TraceLocation.from_experiment_id(self.runs.experiment_id),
                request_time=int(parts[0].start * 1000),
                state=TraceState.ERROR if failed else TraceState.OK,
                request_preview=row["prompt"][:_MAX_PREVIEW],
                response_preview=row["response"][:_MAX_PREVIEW],
                client_request_id=row["sample_id"],
                execution_duration=int((parts[0].end - parts[0].start) * 1000),
                trace_metadata=links,
                tags={"mlflow.traceName": f"{run.name}/{row['sample_id']}", **tags, "reward": str(row["reward"])},
            )
            self.client.start_trace(trace)
            spans += [to_span(id, number, part, failed) for number, part in enumerate(parts)]
        if spans:
            self.client.log_spans(self.runs.experiment_id, spans)

    def _decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of tokens, or None if the store does not have the tokenizer of the run's base model."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False) if self._tokenizer else None

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's base model, or None if the store does not have it."""
        run = self.runs.run
        if run.store is None:
            return None
        from tokenizers import Tokenizer

        model = run.store.read_record(CheckpointRef, RunKeys(run.name).origin_key("base"))
        commit = run.store.committed(model.key.removesuffix(commit_key(""))) if model else None
        if commit is None or f"{commit.attempt}/{_TOKENIZER}" not in [file.path for file in commit.files]:
            return None
        with run.store.reading(commit, only=[_TOKENIZER]) as directory:
            return Tokenizer.from_file(str(directory / _TOKENIZER))


def read_first_samples(store: Store, commit: Commit, num: int) -> list[Row]:
    """Return the first sample of each of the first `num` groups of a rollout, without log-probs. A missing or damaged
    shard is logged, and does not keep MLflow from receiving the commit."""
    shard = next((file.path for file in commit.files if is_shard(file.path)), None)
    samples: dict[str, Row] = {}
    if shard is None:
        return []
    try:
        with pq.ParquetFile(store.path(shard), filesystem=store.fs) as file:
            for number, batch in enumerate(file.iter_batches(_BATCH, columns=_COLUMNS)):
                for row in batch.to_pylist():
                    samples.setdefault(row["group_id"], row)
                if len(samples) >= num or (number + 1) * _BATCH >= _MAX_ROWS:
                    break
    except (FileNotFoundError, pa.ArrowException) as error:
        logger.warning("%s cannot be read (%s); MLflow gets no traces of round %d", shard, error, commit.index)
    return list(samples.values())[:num]


@dataclass
class SamplePart:
    """A part of a sample, which is a span of its trace."""

    name: str
    type: str  # MLflow's span type
    start: float  # seconds since the epoch, as `end`
    end: float
    inputs: Any
    outputs: Any
    attributes: dict[str, Any] = field(default_factory=dict)


def split_sample(row: Row, commit: Commit, decode: Callable[[Sequence[int]], str | None]) -> list[SamplePart]:
    """Return the parts of a sample: the sample itself, then its turns, tool results and reward.

    Args:
        row: the sample, as in its shard.
        commit: of the rollout.
        decode: tokens -> text, or None without a tokenizer.
    """
    end = commit.created_at - commit.seconds.get("write", 0.0)
    generated = end - commit.seconds.get("reward", 0.0)
    start = generated - commit.seconds.get("generate", 0.0)
    num_prompt = row["loss_mask"].index(1) if 1 in row["loss_mask"] else len(row["token_ids"])
    num_tokens = len(row["token_ids"]) - num_prompt
    attributes = {name: row[name] for name in ("sample_id", "group_id", "status", "policy_versions", "label")}
    attributes |= {"num_prompt_tokens": num_prompt, "metadata": json.loads(row["metadata"] or "{}")}
    parts = [SamplePart("sample", "AGENT", start, end, row["prompt"], row["response"], attributes)]
    segments = list(split_by_mask(row["loss_mask"][num_prompt:]))
    previous, num_turns = row["prompt"], 0
    for is_reply, first, last in segments:
        tokens = row["token_ids"][num_prompt + first : num_prompt + last]
        text = row["response"] if len(segments) == 1 else decode(tokens)
        num_turns += is_reply
        name, type = (f"turn {num_turns}", "LLM") if is_reply else ("tool or environment", "TOOL")
        begin, stop = (start + (generated - start) * position / num_tokens for position in (first, last))
        attributes = {"num_tokens": last - first}
        if is_reply and (calls := tool_calls(text or "")):
            attributes["tool_calls"] = calls
        parts.append(SamplePart(name, type, begin, stop, previous, text, attributes))
        previous = text
    if row["reward"] is not None:
        reward = {"reward": row["reward"], **dict(row["rewards"] or [])}
        inputs = {"response": row["response"], "label": row["label"]}
        parts.append(SamplePart("reward", "EVALUATOR", generated, end, inputs, reward))
    return parts


def tool_calls(text: str) -> list[Any]:
    """Return the tool calls `<tool_call>{...}</tool_call>` in a reply. Calls that are drafted in a thought or are not
    JSON are left out."""
    calls = []
    for body in _TOOL_CALL.findall(_THOUGHT.sub("", text)):
        with suppress(ValueError):
            calls.append(json.loads(body, strict=False))
    return calls


def split_by_mask(mask: Sequence[int]) -> Iterator[tuple[bool, int, int]]:
    """Yield (trained on, first, last + 1) for each run of equal values in a loss mask."""
    position = 0
    for value, group in groupby(mask):
        length = sum(1 for _ in group)
        yield bool(value), position, position + length
        position += length


def to_span(trace: bytes, number: int, part: SamplePart, failed: bool) -> Span:
    """Return part `number` of a sample as a span of the trace with the id `trace` (16 bytes); number 0 is its root."""
    from mlflow.entities import Span

    attributes = {
        "mlflow.traceRequestId": f"tr-{trace.hex()}",
        "mlflow.spanType": part.type,
        "mlflow.spanInputs": _shorten(part.inputs),
        "mlflow.spanOutputs": _shorten(part.outputs),
        **part.attributes,
    }
    fields = {
        "trace_id": base64.b64encode(trace).decode(),
        "span_id": _span_id(trace, number),
        "parent_span_id": _span_id(trace, 0) if number else None,
        "name": part.name,
        "start_time_unix_nano": int(part.start * 1e9),
        "end_time_unix_nano": int(part.end * 1e9),
        "status": {"code": "STATUS_CODE_ERROR" if failed else "STATUS_CODE_OK", "message": ""},
        "attributes": {name: json.dumps(value, ensure_ascii=False) for name, value in attributes.items()},
    }
    return Span.from_dict(fields)


def _span_id(trace: bytes, number: int) -> str:
    return base64.b64encode(hashlib.sha256(trace + bytes([number % 256])).digest()[:8]).decode()


def _shorten(value: Any) -> Any:
    return f"{value[:_MAX_TEXT]} ..." if isinstance(value, str) and len(value) > _MAX_TEXT else value
