"""Log samples and prompts in MLflow: data sets with previews, and samples of a round as traces.

A data set (a prompt file, the shards of a rollout, the samples of an evaluation) has a content digest, its number of
rows, its schema and the policy version; a preview is a table among the artifacts of the MLflow run that uses it.

A trace shows turns of the model and results of tools; the reward and its parts are assessments of the trace, which
MLflow shows as columns and can search. The ids of both are derived from the sample, so a trace that is logged again
replaces itself. The time of a single sample is not measured, so its spans have the time of the round and no duration.
Images are named as files of the store (`blobs/<SHA-256>`): MLflow's database would keep a copy for each trace.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow.entities import (
    Assessment,
    AssessmentSource,
    AssessmentSourceType,
    Dataset,
    DatasetInput,
    Expectation,
    Feedback,
    InputTag,
    Span,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.tracing.client import TracingClient

from penstock.storage.blobs import blob_key
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.samples.sample import SCHEMA, Status
from penstock.storage.store import Store
from penstock.storage.tracking.mlflow.mlflow_runs import MlflowRuns, replace_forbidden_characters
from penstock.storage.web.login import with_login

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from tokenizers import Tokenizer

Row = dict[str, Any]
Rows = list[Row]
logger = logging.getLogger(__name__)

PREVIEW_ROWS, _PREVIEW_TEXT = 20, 2000  # rows of a preview, and characters of a cell
_COLUMN_TYPES = {"int64": "long", "double": "double", "string": "string"}  # Arrow -> MLflow


def shards_dataset(key: str, commit: Commit, store_uri: str) -> Dataset:
    """Return the samples of a rollout or an evaluation as an MLflow data set, e.g. `my-run/rollout/000012`."""
    directory = commit.attempt.rpartition("/")[0] if commit.attempt else key.removesuffix(commit_key(""))
    run, kind, *rest = directory.removeprefix("runs/").split("/")
    profile = {
        "num_rows": commit.num_samples(),
        "num_files": len(commit.files),
        "num_bytes": sum(file.bytes for file in commit.files),
        "policy_version": commit.policy_version,
    }
    columns = [(column.name, _COLUMN_TYPES.get(str(column.type), "string")) for column in SCHEMA]
    digest = _hash("".join(file.xxh3 for file in commit.files))
    name = "/".join([run, kind.removesuffix("s"), *rest])
    return make_dataset(name, digest, f"{store_uri.rstrip('/')}/{commit.attempt}", columns, profile)


def prompt_dataset(commit: Commit, index: int, path: str, preview: Rows) -> Dataset:
    """Return a prompt file of a rollout or evaluation as an MLflow data set, the same for all rounds and policy
    versions. `index` is the number of the file among the prompt files of `commit`; `preview` are the file's first rows,
    from which the schema is taken."""
    segments = (commit.state.get("data_source") or {}).get("segments") or []
    segments = [segment for segment in segments if segment["file"] == index]
    profile = {"num_rows": sum(segment["rows"] for segment in segments)} if segments else {}
    digest = _hash(" ".join(segment["digest"] for segment in segments) or path)  # the same after the store was moved
    columns = [(name, "string") for name in dict.fromkeys(name for row in preview for name in row)]
    return make_dataset(path.rpartition("/")[2], digest, path, columns, profile)


def read_preview(path: str) -> Rows:
    """Return the first rows of a prompt file, with shortened texts; [] if the file cannot be read on this machine."""
    file = Path(path.partition("@[")[0])  # a path may end with a range of rows
    try:
        if file.suffix == ".parquet":
            batch = next(pq.ParquetFile(file).iter_batches(batch_size=PREVIEW_ROWS), None)
            rows = batch.to_pylist() if batch else []
        else:
            with file.open(encoding="utf-8") as lines:
                rows = [json.loads(line) for line in islice(lines, PREVIEW_ROWS) if line.strip()]
    except (OSError, ValueError, pa.ArrowException):
        return []
    return [{name: _preview(value) for name, value in row.items()} for row in rows if isinstance(row, dict)]


def dataset_input(dataset: Dataset, context: str, commit: Commit | None = None) -> DatasetInput:
    """Return a data set as an input of an MLflow run. `context` says what the data set was used for, e.g. "training";
    `commit` is the commit with its samples, whose policy version is tagged."""
    tags = [InputTag("mlflow.data.context", context)]
    if commit is not None:
        tags.append(InputTag("penstock.policy_version", str(commit.policy_version)))
    return DatasetInput(dataset, tags)


def make_dataset(name: str, digest: str, uri: str, columns: list[tuple[str, str]], profile: dict[str, Any]) -> Dataset:
    """Return an MLflow data set. Its source has one of MLflow's types (`local`, `s3`, ...), so that the UI can open it.
    `columns` are (name, MLflow type); `profile` are numbers that the UI shows, such as num_rows."""
    source_type = uri.split("://")[0] if "://" in uri else "local"
    specs = [{"type": type, "name": column, "required": False} for column, type in columns]
    schema = json.dumps({"mlflow_colspec": specs}) if specs else None
    return Dataset(
        replace_forbidden_characters(name), digest, source_type, json.dumps({"uri": uri}), schema, json.dumps(profile)
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _preview(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_describe_value)
    return _shorten(text, _PREVIEW_TEXT)


def _describe_value(value: Any) -> str:
    """Return a value that JSON cannot have as text: the bytes of an image only by their number."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


# ---- traces ----------------------------------------------------------------------------------------------------------

_UNUSED = ("rollout_logprobs", "routed_experts", "teacher_logprobs")
_COLUMNS = [column for column in SCHEMA.names if column not in _UNUSED]
_TOKENIZER = "hf_assets/tokenizer.json"  # in the files of a converted model
_BATCH, _MAX_ROWS = 32, 1024  # rows per read, and in total, in which the first samples of groups are searched
_MAX_TEXT, _MAX_PREVIEW = 20_000, 500  # characters of a text in a trace, and in the list of traces
_THOUGHT = re.compile(r"\A.*</think>|<think>.*", re.DOTALL)  # the thought may begin in the prompt, or have no end
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class MlflowTraces:
    """Logs a sample of each round as traces."""

    def __init__(self, runs: MlflowRuns) -> None:
        self.client = TracingClient(with_login(runs.uri))
        self.runs = runs

    def log_round(self, main_run: str, commit: Commit, shards: str, model: LoggedModel | None) -> None:
        """Log the first sample of each of the first `num_traces` groups of a rollout as a trace.

        The traces are linked to the MLflow run `main_run` and to `model`, the last checkpoint before the rollout or the
        base model. `shards` is the name of the MLflow data set with the samples.
        """
        run = self.runs.run
        if run.store is None or not run.num_traces or commit.policy_version < 0:  # -1: demonstrations
            return
        links = {"mlflow.sourceRun": main_run} | ({"mlflow.modelId": model.model_id} if model else {})
        tags = {"penstock.round": str(commit.index), "penstock.shards": shards}
        tokenizer = self._tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=False) if tokenizer else lambda token_ids: None
        spans: list[Span] = []
        traces: list[TraceInfo] = []
        for row in read_first_samples(run.store, commit, run.num_traces):
            id = hashlib.sha256(f"{commit.attempt}/{row['sample_id']}".encode()).digest()[:16]
            failed, at = row["status"] == Status.FAILED, commit.created_at
            trace = TraceInfo(
                f"tr-{id.hex()}",
                TraceLocation.from_experiment_id(self.runs.experiment_id),
                request_time=int(at * 1000),
                state=TraceState.ERROR if failed else TraceState.OK,
                request_preview=row["prompt"][:_MAX_PREVIEW],
                response_preview=row["response"][:_MAX_PREVIEW],
                client_request_id=row["sample_id"],
                trace_metadata=links,
                tags={"mlflow.traceName": f"{run.name}/{row['sample_id']}", **tags},
                assessments=assess(row, id, at),
            )
            traces.append(trace)
            parts = split_sample(row, decode)
            spans += [to_span(id, number, part, at=at, failed=failed) for number, part in enumerate(parts)]
        if spans:
            self.client.log_spans(self.runs.experiment_id, spans)
        for trace in traces:  # after the spans, since this removes the duration that MLflow computes from spans
            self.client.start_trace(trace)

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer of the run's base model, or None if the store does not have it."""
        run = self.runs.run
        if run.store is None:
            return None
        from tokenizers import Tokenizer

        model = run.store.read_record(CheckpointRef, RunKeys(run.name).origin_key("base"))
        commit = run.store.read_record(Commit, model.key) if model else None
        if commit is None or f"{commit.attempt}/{_TOKENIZER}" not in [file.path for file in commit.files]:
            return None
        with run.store.reading(commit, only=[_TOKENIZER]) as directory:
            return Tokenizer.from_file(str(directory / _TOKENIZER))


def read_first_samples(store: Store, commit: Commit, num: int) -> list[Row]:
    """Return the first sample of each of the first `num` groups of a rollout, without log-probs. A missing or damaged
    shard causes only a warning, so that MLflow still receives the commit."""
    samples: dict[str, Row] = {}
    if not commit.shards():
        return []
    shard = commit.shards()[0].path
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
    inputs: Any
    outputs: Any
    attributes: dict[str, Any] = field(default_factory=dict)


def split_sample(row: Row, decode: Callable[[Sequence[int]], str | None]) -> list[SamplePart]:
    """Return the parts of a sample: the sample itself, then its turns and tool results. `decode` returns the text of
    token ids, or None without a tokenizer."""
    num_prompt = row["loss_mask"].index(1) if 1 in row["loss_mask"] else len(row["token_ids"])
    attributes = {name: row[name] for name in ("sample_id", "group_id", "status", "policy_versions", "label")}
    if row["images"]:
        attributes["images"] = [blob_key(digest) for digest in row["images"]]
    attributes |= {"num_prompt_tokens": num_prompt, "metadata": json.loads(row["metadata"] or "{}")}
    parts = [SamplePart("sample", "AGENT", row["prompt"], row["response"], attributes)]
    segments = [(trained == 1, len(list(group))) for trained, group in groupby(row["loss_mask"][num_prompt:])]
    previous, num_turns, last = row["prompt"], 0, num_prompt
    for is_reply, length in segments:
        first, last = last, last + length
        text = row["response"] if len(segments) == 1 else decode(row["token_ids"][first:last])
        num_turns += is_reply
        name, type = (f"turn {num_turns}", "LLM") if is_reply else ("tool or environment", "TOOL")
        attributes = {"num_tokens": length}
        if is_reply and (calls := tool_calls(text or "")):
            attributes["tool_calls"] = calls
        parts.append(SamplePart(name, type, previous, text, attributes))
        previous = text
    return parts


def assess(row: Row, trace: bytes, at: float) -> list[Assessment]:
    """Return the assessments of the trace with the id `trace` (16 bytes): the sample's reward and its parts, at the
    time `at` (seconds since the epoch), and the label, which is the expected response."""
    grader, time = AssessmentSource(AssessmentSourceType.CODE, "penstock"), int(at * 1000)
    rewards = {} if row["reward"] is None else {"reward": row["reward"], **dict(row["rewards"] or [])}
    found: list[Assessment] = [
        Feedback(name, value, source=grader, create_time_ms=time, last_update_time_ms=time)
        for name, value in rewards.items()
    ]
    if row["label"]:
        label = _shorten(row["label"], _MAX_PREVIEW)
        found.append(Expectation("expected_response", label, grader, create_time_ms=time, last_update_time_ms=time))
    for assessment in found:
        assessment.assessment_id = "a-" + hashlib.sha256(trace + assessment.name.encode()).hexdigest()[:32]
    return found


def tool_calls(text: str) -> list[Any]:
    """Return the tool calls `<tool_call>{...}</tool_call>` in a reply. Calls within a thought, and calls that are not
    JSON, are left out."""
    calls = []
    for body in _TOOL_CALL.findall(_THOUGHT.sub("", text)):
        with suppress(ValueError):
            calls.append(json.loads(body, strict=False))
    return calls


def to_span(trace: bytes, number: int, part: SamplePart, *, at: float, failed: bool) -> Span:
    """Return part `number` of a sample as a span of the trace with the id `trace` (16 bytes); part 0 is the root span.
    The span begins and ends at the time `at` (seconds since the epoch)."""
    attributes = {
        "mlflow.traceRequestId": f"tr-{trace.hex()}",
        "mlflow.spanType": part.type,
        "mlflow.spanInputs": _shorten(part.inputs, _MAX_TEXT),
        "mlflow.spanOutputs": _shorten(part.outputs, _MAX_TEXT),
        **part.attributes,
    }
    fields = {
        "trace_id": base64.b64encode(trace).decode(),
        "span_id": _span_id(trace, number),
        "parent_span_id": _span_id(trace, 0) if number else None,
        "name": part.name,
        "start_time_unix_nano": int(at * 1e9) + number,  # MLflow orders spans by their start times
        "end_time_unix_nano": int(at * 1e9) + number,
        "status": {"code": "STATUS_CODE_ERROR" if failed else "STATUS_CODE_OK", "message": ""},
        "attributes": {name: json.dumps(value, ensure_ascii=False) for name, value in attributes.items()},
    }
    return Span.from_dict(fields)


def _span_id(trace: bytes, number: int) -> str:
    return base64.b64encode(hashlib.sha256(trace + number.to_bytes(4)).digest()[:8]).decode()


def _shorten(value: Any, limit: int) -> Any:
    return f"{value[:limit]} ..." if isinstance(value, str) and len(value) > limit else value
