"""torch_dist -> torch_dist under other names: a run's checkpoint for Megatron, or Megatron's checkpoint for a store.

Only the model is carried over, one parameter at a time; optimizer and random state are not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from engines.megatron.shape import ModelShape
from engines.megatron.stored import StoredModel, StoredPiece, describe_checkpoint, stored_model
from engines.megatron.stored_names import MegatronNames, extra_states, renamed
from stages.convert.adopt import megatron_directory
from stages.convert.hf_assets import CARRIED, copy_assets, small_files
from stages.convert.plan import SHARE_BYTES, Box, Share
from stages.convert.shares import Parts, Progress, Record, Tally, write_files
from stages.convert.targets import ASSETS_DIRECTORY, AmongModels, InDirectory, Target, check_room
from stages.convert.to_hf import checkpoint_files, checkpoint_state
from stages.convert.to_torch_dist import Written, write_share
from stages.convert.torch_dist_files import TorchDistWeights, write_metadata
from storage.refs import CheckpointRef, Commit, FileRecord, commit_key
from storage.store import Store

FORMAT = 1  # of what an unfinished export leaves behind: another one is begun anew


def export_megatron(
    store: Store,
    checkpoint: Commit | str,
    assets_dir: str | Path,
    save: str,
    names: MegatronNames,
    on_progress: Progress | None = None,
) -> CheckpointRef:
    """Write the model of a checkpoint as a directory that Megatron-core loads, at `save`.

    Args:
        store: that `checkpoint` is in, if it is a commit.
        checkpoint: commit, or a directory with a torch_dist checkpoint.
        assets_dir: directory with the model's config.json, tokenizer and so on; they are carried over.
        save: directory or URI.
        names: of Megatron's local layers or of TransformerEngine's.
        on_progress: called with the bytes written and the bytes in all.

    Raises:
        ModelError: no checkpoint, or one that does not fit config.json.
        StoreError: the disk became full on the way.
    """
    assets_dir = Path(assets_dir)
    identity = _identity(checkpoint, assets_dir, names)
    target = InDirectory(save, "torch_dist", identity, store.options)
    if standing := target.standing(identity):
        return standing
    with checkpoint_files(store, checkpoint) as source:
        return rewrite(source, assets_dir, target, identity, names, on_progress, extra=True)


def rewrite(
    source: Path,
    assets_dir: Path,
    target: Target,
    identity: str | None,
    names: MegatronNames,
    on_progress: Progress | None = None,
    *,
    extra: bool = False,
) -> CheckpointRef:
    """Write the model of a torch_dist directory into a target. What a killed process has finished is kept.

    Args:
        source: with `.metadata`, under any of Megatron's names.
        assets_dir: as in `export_megatron`.
        target: of the result.
        identity: of the result; None: told by its content.
        names: of the tensors in it.
        on_progress: called with the bytes written and the bytes in all.
        extra: also write the empty objects that plain Megatron asks for.
    """
    shape = ModelShape.from_hf(assets_dir)
    stored = stored_model(shape)
    weights, result = TorchDistWeights(source, stored), renamed(stored, names)
    plan = _plan(weights, result)
    parts = Parts(target, [Written(share) for share in plan.shares])
    check_room(target.store, sum(part.num_bytes for part in parts.left()))
    counter = Tally(sum(part.num_bytes for part in parts.parts), on_progress)

    parts.do(lambda part: _write(target, weights, plan, part.share, counter.add), counter)
    records = parts.records()

    def describe(directory: Path) -> None:
        describe_checkpoint(directory, shape)
        spans = [(part.share, record["spans"]) for part, record in records]
        write_metadata(directory, result, spans, extra_states(result, names) if extra else [])
        copy_assets(assets_dir, directory / ASSETS_DIRECTORY)
        if (assets_dir / CARRIED).is_file():
            shutil.copyfile(assets_dir / CARRIED, directory / ASSETS_DIRECTORY / CARRIED)

    files = [FileRecord.model_validate(file) for _, record in records for file in record["files"]]
    files += write_files(target, describe)
    commit = Commit(
        kind="model",
        policy_version=0,
        attempt=target.attempt,
        files=files,
        inputs={"checkpoint": str(source)},
        summary={"convert/num_bytes": sum(part.num_bytes for part in parts.parts)},
        state={"shape": shape.model_dump(), "headers": "", "carried": 0, "skipped": {"count": 0, "bytes": 0}},
    )
    ref = target.publish(identity or _content_identity([record for _, record in records], assets_dir), commit)
    parts.forget()
    return ref


def _identity(checkpoint: Commit | str, assets_dir: Path, names: MegatronNames) -> str:
    return xxhash.xxh3_64_hexdigest(f"{FORMAT} {checkpoint_state(checkpoint)} {small_files(assets_dir)} {names}".encode())


def _content_identity(records: list[Record], assets_dir: Path) -> str:
    hashes = [file["xxh3"] for record in records for file in record["files"]]
    return f"megatron-{xxhash.xxh3_128_hexdigest(f'{hashes} {small_files(assets_dir)}'.encode())}"


@dataclass(frozen=True)
class _Plan:
    """Files to be written, and what is in their boxes."""

    shares: list[Share]
    contents: dict[tuple[str, tuple[int, ...]], tuple[str, StoredPiece]]  # key and offset of a box -> parameter and its piece


def _plan(weights: TorchDistWeights, result: StoredModel) -> _Plan:
    shares: list[list[Box]] = [[]]
    filled, contents = 0, {}
    for name, pieces in result.pieces.items():
        for piece in pieces:
            box = Box(piece.key, piece.offset, piece.sizes, weights.dtype(name), ())
            contents[piece.key, piece.offset] = name, piece
            if shares[-1] and filled + box.num_bytes > SHARE_BYTES:
                shares.append([])
                filled = 0
            shares[-1].append(box)
            filled += box.num_bytes
    return _Plan([Share(index, tuple(boxes)) for index, boxes in enumerate(shares)], contents)


def _write(target: Target, weights: TorchDistWeights, plan: _Plan, share: Share, on_bytes: Callable[[int], object]) -> Record:
    def content(box: Box) -> Iterator[memoryview]:
        name, piece = plan.contents[box.key, box.offset]
        with weights.lent(name) as tensor:
            yield tensor[piece.part].contiguous().view(-1).view(torch.uint8).numpy().data

    return write_share(target, share, content, on_bytes)


def adopt_megatron(store: Store, directory: str, assets_dir: str | Path) -> CheckpointRef:
    """Copy the model of a Megatron checkpoint into the store, unless it is there already.

    Args:
        store: where the result goes.
        directory: as `megatron_directory` accepts it.
        assets_dir: Hugging Face directory of a model of the same sizes, whose config.json counts.

    Raises:
        ModelError: the checkpoint does not fit config.json.
    """
    source = megatron_directory(directory)
    assert source is not None, f"{directory} holds no torch_dist checkpoint"
    assets_dir = source / ASSETS_DIRECTORY if (source / ASSETS_DIRECTORY / "config.json").is_file() else Path(assets_dir)
    untouched = _identity(str(source), assets_dir, "local")
    target, memo = AmongModels(store, untouched), f"models/sources/megatron-{untouched}.json"
    known = store.read_json(memo)
    if known and (standing := target.standing(known["identity"])):
        return standing
    ref = rewrite(source, assets_dir, target, None, "local")
    identity = ref.key.removeprefix("models/").removesuffix(commit_key(""))
    store.create(memo, json.dumps({"identity": identity}).encode())
    return ref
