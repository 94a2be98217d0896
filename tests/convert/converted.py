"""What tests of conversions look up and compare."""

from pathlib import Path

import torch

from penstock.stages.convert.hf_checkpoint import HFWeights
from penstock.storage.commit import CheckpointRef, Commit
from penstock.storage.store import Store


def commit_of(store: Store, ref: CheckpointRef) -> Commit:
    commit = store.committed(ref.key.removesuffix(".commit.json"))
    assert commit is not None
    return commit


def check_same_tensors(one: Path | str, other: Path | str) -> None:
    """Check that two Hugging Face directories have the same names, dtypes, shapes and bits."""
    with HFWeights(one) as a, HFWeights(other) as b:
        assert a.info == b.info
        for name in a.info:
            assert torch.equal(a.fetch(name).view(torch.int8), b.fetch(name).view(torch.int8)), name
