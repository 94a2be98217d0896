"""A converted model in real Megatron ranks, and their training checkpoint back as a Hugging Face model, bit for bit."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.multiprocessing as mp

from penstock.engines.families import read_shape, tensor_layout
from penstock.engines.megatron.parallel import ParallelLayout
from penstock.flows.commands.demo_model import make_tiny_model
from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.stages.convert.targets import Origin
from penstock.stages.convert.to_hf import export_hf
from penstock.stages.convert.to_torch_dist import convert_hf
from penstock.storage.commit import Commit
from penstock.storage.store import Store
from tests.engines.megatron_reference import make_engine

FROM_MEMORY = "exports/memory"


def file_hashes(commit: Commit) -> dict[str, str]:
    return {Path(file.path).name: file.xxh3 for file in commit.files}


def rank_main(rank: int, world_size: int, scratch: Path, layout: ParallelLayout, converted: str, source: Path) -> None:
    """Load the converted model, compare every gathered weight with the source, save a training checkpoint."""
    from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel

    init_parallel(rank, world_size, f"file://{scratch}/world", layout)
    shape = read_shape(source)
    engine = make_engine(shape, layout=layout)
    engine.load_weights(converted)
    names = tensor_layout(shape)
    with HFWeights(source) as weights:
        seen = []
        for name, tensor in engine.gather_weights().tensors:
            assert torch.equal(tensor, names.to_megatron(name, weights.fetch)), f"{name} differs on rank {rank}"
            seen.append(name)
    assert seen == names.megatron_names()
    engine.save(scratch / "training", {"version": 0})
    gathered = engine.gather_weights()
    if rank == 0:
        store = Store(str(scratch / "store"), probe=False)
        with patch("penstock.stages.convert.hf_checkpoint.hash_file") as hash_file:
            export_hf(store, scratch / "training", Origin(source), FROM_MEMORY, shard_bytes=20_000, weights=gathered)
        assert not hash_file.called, "a file was read to hash it, although its tensors were written in order"
    assert list(gathered.tensors) == [] or rank > 0
    shutdown_parallel()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (ParallelLayout(tensor=2, sequence_parallel=True), False),  # 61 vocabulary rows: padded to 62
        pytest.param(ParallelLayout(pipeline=2), True, marks=pytest.mark.full),  # the embedding is on both ranks
    ],
    ids=["tensor-2", "pipeline-2"],
)
def test_trainer_loads_a_converted_model_and_its_checkpoint_exports(
    layout: ParallelLayout, tied: bool, tmp_path: Path
) -> None:
    source = make_tiny_model(
        tmp_path / "hf", seed=5, tied=tied, hidden=32, layers=4, heads=4, groups=2, head_dim=16, ffn=48, vocab=61
    )
    store = Store(str(tmp_path / "store"))
    converted = convert_hf(store, source)
    world_size = layout.tensor * layout.pipeline
    mp.spawn(rank_main, (world_size, tmp_path, layout, converted.uri, source), nprocs=world_size)
    export = export_hf(store, tmp_path / "training", Origin(source), "exports/000000", shard_bytes=20_000)
    from_memory = store.committed(FROM_MEMORY)
    assert from_memory is not None and len(export.files) > 4 and file_hashes(from_memory) == file_hashes(export)
    with store.reading(from_memory):  # checks that the hashes are those of the files
        pass
    with HFWeights(source) as expected, HFWeights(Path(store.path(export.attempt or ""))) as found:
        assert expected.info == found.info
        for name in expected.info:
            assert torch.equal(expected.fetch(name), found.fetch(name)), name
