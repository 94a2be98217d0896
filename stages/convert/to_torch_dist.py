"""Hugging Face -> torch_dist: what a run starts from. Bytes go from file to file, so no model has to fit into memory.

The result lies under `models/<fingerprint>` in the store, shared by all runs that start from the same files, or where the user says. A
conversion is three calls: `prepare` plans it, `write_shares` writes (by as many processes as one likes), `finish` makes it visible.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from engines.megatron.shape import ModelShape
from engines.megatron.stored import StoredModel, describe_checkpoint, stored_model
from engines.megatron.stored_names import MegatronNames, extra_states, renamed
from stages.convert.export import Mtp
from stages.convert.hf_assets import CARRIED, copy_assets, fingerprint, headers, untouched
from stages.convert.hf_files import HFWeights
from stages.convert.hf_writer import Shard, write_shard
from stages.convert.plan import SHARE_BYTES, Box, Share, plan_shares
from stages.convert.shares import Parts, Progress, Record, Tally, write_files
from stages.convert.targets import ASSETS_DIRECTORY, AmongModels, InDirectory, Target, check_room
from stages.convert.torch_dist_files import write_boxes, write_metadata
from stages.convert.verify import check_source, verify_conversion
from storage.errors import ModelError
from storage.faults import reach
from storage.layouts import layout_for
from storage.refs import CheckpointRef, Commit, FileRecord
from storage.store import Store

FORMAT = 2  # of what an unfinished conversion leaves behind: another one is begun anew


@dataclass(frozen=True)
class SourceFile:
    """A part of the work: sum up one file of the source, on the way through it."""

    path: Path

    @property
    def name(self) -> str:
        return f"hash-{self.path.name}"

    @property
    def num_bytes(self) -> int:
        return 0  # progress counts what is written


@dataclass(frozen=True)
class Written:
    """A part of the work: write one share."""

    share: Share

    @property
    def name(self) -> str:
        return f"share-{self.share.index:05d}"

    @property
    def num_bytes(self) -> int:
        return self.share.num_bytes


@dataclass
class Conversion:
    """A planned conversion. Processes of any machine that sees source and store may work on it."""

    hf_dir: Path
    shape: ModelShape
    stored: StoredModel
    target: AmongModels | InDirectory
    parts: Parts[SourceFile | Written]
    lies: str  # `untouched` of the source
    fingerprint: str | None  # of the source, if it is known already
    carried: list[str]  # tensors to be copied as they are
    skipped: list[str]  # tensors that are not
    names: MegatronNames = "local"
    skipped_bytes: int = 0
    began: float = field(default_factory=time.time)

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        return sum(part.num_bytes for part in self.parts.parts)

    def identity(self, found: str) -> str:
        """What the result is, given the source's fingerprint."""
        return found + ("-mtp" if self.carried else "") + ("" if self.names == "local" else f"-{self.names}")


def convert_hf(
    store: Store,
    hf_dir: str | Path,
    on_progress: Progress | None = None,
    *,
    verify: bool = True,
    check_logits: bool = False,
    mtp: Mtp = "skip",
    save: str | None = None,
    names: MegatronNames = "local",
) -> CheckpointRef:
    """Convert a model in this process; a model that was converted before is only looked up.

    Args:
        store: where the result goes.
        hf_dir: Hugging Face directory.
        on_progress: called with the bytes done and the bytes in all, first of writing, then of verifying.
        verify: read the result back and compare it bit for bit.
        check_logits: compare a few logits with transformers', which imports it: `penstock` does so by default.
        mtp: whether tensors of multi-token prediction layers, which are not trained, are left out or carried along.
        save: directory or URI for the result, in place of the store.
        names: of the stored tensors, for `save`: those of Megatron's local layers or of TransformerEngine's.

    Raises:
        ModelError: an unknown architecture, damaged files, tensors that do not fit config.json, or other logits than transformers'.
        OptionError: a place that is taken.
        StoreError: no room, or the disk became full on the way.
    """
    work = prepare(store, hf_dir, mtp=mtp, save=save, names=names)
    if isinstance(work, CheckpointRef):
        return work
    write_shares(work, on_progress=on_progress and (lambda done, total: on_progress(done, total * (2 if verify else 1))))
    return finish(work, verify=verify, check_logits=check_logits, on_progress=on_progress)


def prepare(
    store: Store,
    hf_dir: str | Path,
    *,
    mtp: Mtp = "skip",
    save: str | None = None,
    names: MegatronNames = "local",
    share_bytes: int = SHARE_BYTES,
) -> Conversion | CheckpointRef:
    """Look whether it is done already; if not, check the source by its headers and plan the work. See `convert_hf`."""
    hf_dir = Path(hf_dir).resolve()
    shape = ModelShape.from_hf(hf_dir)
    with HFWeights(hf_dir) as weights:
        layout, lies = layout_for(shape), untouched(hf_dir)
        extra = sorted(name for name in weights.info if layout.carried(name))
        form = f"{mtp if extra else ''}{'' if names == 'local' else f' {names}'}"
        name = xxhash.xxh3_64_hexdigest(f"{FORMAT} {share_bytes} {lies} {form}".encode())
        target = InDirectory(save, "torch_dist", name, store.options) if save else AmongModels(store, name)
        found = _known(store, target, hf_dir, lies)
        work = Conversion(
            hf_dir=hf_dir,
            shape=shape,
            stored=StoredModel(),
            target=target,
            parts=Parts(target, []),
            lies=lies,
            fingerprint=found,
            carried=extra if mtp == "keep" else [],
            skipped=[] if mtp == "keep" else extra,
            names=names,
            skipped_bytes=0 if mtp == "keep" else sum(weights.info[name].num_bytes for name in extra),
        )
        if found is not None and (standing := target.standing(work.identity(found))):
            return standing
        weights.read_ahead()
        work.stored = stored_model(shape)
        check_source(layout, work.stored, weights)
        work.stored = renamed(work.stored, names)
        work.parts = Parts(target, _parts(weights, plan_shares(layout, work.stored, weights, share_bytes), found is None))
    check_room(target.store, sum(part.num_bytes for part in work.parts.left()))
    return work


def _known(store: Store, target: AmongModels | InDirectory, hf_dir: Path, lies: str) -> str | None:
    """The source's fingerprint, if it is needed now or costs nothing.

    Reading all of a large source twice, first for its name and then for its content, would take longer than converting it. So it is
    summed up on the way, unless what is there already may be this very model.
    """
    if isinstance(target, InDirectory):
        return fingerprint(hf_dir) if target.is_taken() else None
    memo = store.read_json(_memo(lies))
    if memo is not None:
        return memo["fingerprint"]
    return fingerprint(hf_dir) if target.may_have(headers(hf_dir)) else None


def _memo(lies: str) -> str:
    """The key of what is known of files that nobody has touched since."""
    return f"models/sources/{lies}.json"


def _parts(weights: HFWeights, shares: list[Share], summed_up: bool) -> list[SourceFile | Written]:
    """Everything there is to do, in the order of the source's files: what is read twice is then read from memory."""
    files = {path: index for index, path in enumerate(weights.files)}
    last = {
        share.index: max(files[weights.places[rows.name].path] for box in share.boxes for rows in box.rows) for share in shares
    }
    order: list[tuple[int, int, SourceFile | Written]] = [(last[share.index], 1, Written(share)) for share in shares]
    if summed_up:
        order += [(index, 0, SourceFile(path)) for path, index in files.items()]
    return [part for _, _, part in sorted(order, key=lambda entry: entry[:2])]


def write_shares(work: Conversion, rank: int = 0, num_ranks: int = 1, on_progress: Progress | None = None) -> None:
    """Write this process's shares of a conversion, but for those that are written already.

    Args:
        work: from `prepare`.
        rank: of this process.
        num_ranks: how many processes write.
        on_progress: called with the bytes that this process has written, and the bytes of all.
    """
    counter = Tally(work.num_bytes, on_progress)
    with HFWeights(work.hf_dir) as weights:

        def do(part: SourceFile | Written) -> Record:
            if isinstance(part, SourceFile):
                return {"xxh3": weights.hash(part.path)}
            return _write(work, weights, part.share, counter.add)

        work.parts.do(do, counter, rank, num_ranks)
    reach("convert-writing")


def _write(work: Conversion, weights: HFWeights, share: Share, on_bytes: Callable[[int], object]) -> Record:
    def content(box: Box) -> Iterator[memoryview]:
        for rows in box.rows:
            yield from weights.rows(rows.name, rows.start, rows.stop)

    return write_share(work.target, share, content, on_bytes)


def write_share(
    target: Target, share: Share, content: Callable[[Box], Iterator[memoryview]], on_bytes: Callable[[int], object]
) -> Record:
    """Write one file of a torch_dist checkpoint; `content` gives the bytes of a box. Returns its record and where its boxes lie."""
    hashes: dict[str, str] = {}
    spans: list[tuple[int, int]] = []

    def write(directory: Path) -> None:
        written = write_boxes(directory / share.file, share, content, on_bytes)
        hashes[share.file] = written.xxh3
        spans.extend(written.spans)

    files = write_files(target, write, lambda: hashes)
    return {"files": [file.model_dump() for file in files], "spans": spans}


def finish(
    work: Conversion, *, verify: bool = True, check_logits: bool = False, on_progress: Progress | None = None
) -> CheckpointRef:
    """Write what makes the shares a checkpoint, check it, and make it visible. See `convert_hf`."""
    records, written = work.parts.records(), time.time()
    if untouched(work.hf_dir) != work.lies:
        raise ModelError(f"{work.hf_dir} was changed while it was converted: leave it alone and convert again")
    files = [FileRecord.model_validate(file) for _, record in records for file in record.get("files", [])]
    spans = [(part.share, record["spans"]) for part, record in records if isinstance(part, Written)]
    hashes = {part.path.name: record["xxh3"] for part, record in records if isinstance(part, SourceFile)}
    found = work.fingerprint or fingerprint(work.hf_dir, hashes)

    def describe(directory: Path) -> None:
        describe_checkpoint(directory, work.shape)
        in_store = isinstance(work.target, AmongModels)  # its readers ask for tensors only
        write_metadata(directory, work.stored, spans, [] if in_store else extra_states(work.stored, work.names))
        copy_assets(work.hf_dir, directory / ASSETS_DIRECTORY)
        _carry(work, directory / ASSETS_DIRECTORY)

    files += write_files(work.target, describe)
    commit = Commit(
        kind="model",
        policy_version=0,
        attempt=work.target.attempt,
        files=files,
        inputs={"hf_checkpoint": str(work.hf_dir)},
        seconds={"write": written - work.began},
        summary={"convert/num_bytes": work.num_bytes},
        state={
            "shape": work.shape.model_dump(),
            "headers": headers(work.hf_dir),
            "carried": len(work.carried),
            "skipped": {"count": len(work.skipped), "bytes": work.skipped_bytes},
        },
    )
    if verify or check_logits:
        with work.target.store.reading(commit) as directory:
            commit = _verified(work, commit, directory, on_progress) if verify else commit
            commit = _with_logits(work, commit, directory) if check_logits else commit
    return _published(work, commit, found)


def _carry(work: Conversion, directory: Path) -> None:
    """Copy the tensors that are not Megatron's beside the small files, from where `to_hf` writes them back."""
    if work.carried:
        with HFWeights(work.hf_dir) as weights:
            shard = Shard(CARRIED, [[(name, weights.info[name])] for name in work.carried])
            write_shard(directory / CARRIED, shard, ((name, weights.fetch(name)) for name in work.carried))


def _verified(work: Conversion, commit: Commit, directory: Path, on_progress: Progress | None) -> Commit:
    """The commit with what was found, after reading everything back."""
    start, total = time.time(), work.num_bytes
    counter = Tally(2 * total, on_progress)
    counter.add(total)
    with HFWeights(work.hf_dir) as weights:
        report = verify_conversion(weights, directory, layout_for(work.shape), work.stored, counter.add)
    return commit.model_copy(
        update={
            "seconds": {**commit.seconds, "verify": time.time() - start},
            "summary": {**commit.summary, "convert/num_tensors": report.num_tensors},
        }
    )


def _with_logits(work: Conversion, commit: Commit, directory: Path) -> Commit:
    """The commit with the result of comparing logits, so that it is done once."""
    from stages.convert.probe import compare_logits

    start, probe = time.time(), compare_logits(directory, work.hf_dir)
    difference = {} if probe.difference is None else {"convert/logits_difference": probe.difference}
    return commit.model_copy(
        update={
            "seconds": {**commit.seconds, "logits": time.time() - start},
            "summary": {**commit.summary, **difference},
            "state": {**commit.state, "logits": str(probe)},
        }
    )


def _published(work: Conversion, commit: Commit, found: str) -> CheckpointRef:
    ref = work.target.publish(work.identity(found), commit)
    if isinstance(work.target, AmongModels):
        work.target.store.create(_memo(work.lies), json.dumps({"fingerprint": found}).encode())
    work.parts.forget()
    return ref
