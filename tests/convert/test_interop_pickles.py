"""Files of a checkpoint that name functions to call: refused with the file and the name, and nothing runs."""

from __future__ import annotations

import argparse
import enum
import io
import os
import pickle
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engines.families import read_shape
from penstock.engines.megatron.checkpoints.layout import _single_rank_process_groups, checkpoint_layout
from penstock.engines.megatron.checkpoints.safe_load import (
    COMMON,
    METADATA,
    SafeReader,
    read_common,
    read_metadata,
    read_object,
)
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.stages.convert.torch_dist_files import TorchDistWeights
from penstock.storage.errors import ModelError
from penstock.storage.store import Store


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "payload-ran"


@pytest.fixture(scope="module")
def original(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert_hf(Store(str(directory / "store")), tiny_model, options=ConversionOptions(save=str(directory / "model")))
    return directory / "model" / "release"


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


def check_refused(error: pytest.ExceptionInfo[ModelError], where: Path | str, marker: Path) -> None:
    assert error.value.code == "model" and str(where) in str(error.value)
    assert "posix.system" in str(error.value) or "os.system" in str(error.value)
    assert not marker.exists()


def test_metadata_with_a_payload_is_refused(checkpoint: Path, marker: Path, tiny_model: Path) -> None:
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload runs in an unrestricted load"
    marker.unlink()
    found = pickle.loads((checkpoint / METADATA).read_bytes())
    found.planner_data = {"decoder": Payload(marker)}
    layout = checkpoint_layout(read_shape(tiny_model))
    for content, protocol in ((found, 2), (found, 5), (Payload(marker), 4)):
        (checkpoint / METADATA).write_bytes(pickle.dumps(content, protocol=protocol))
        for read in (lambda: TorchDistWeights(checkpoint, layout), lambda: SafeReader(checkpoint)):
            with pytest.raises(ModelError) as error:
                read()
            check_refused(error, checkpoint / METADATA, marker)


@pytest.mark.parametrize("name", ["builtins.eval", "torch.load", "torch.distributed.run", "collections.namedtuple"])
def test_unlisted_names_are_refused_before_import(checkpoint: Path, name: str) -> None:
    module, _, attribute = name.rpartition(".")
    (checkpoint / METADATA).write_bytes(f"c{module}\n{attribute}\n(tR.".encode())
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        read_metadata(checkpoint)


def test_metadata_that_points_outside_its_directory_is_refused(checkpoint: Path) -> None:
    found = pickle.loads((checkpoint / METADATA).read_bytes())
    next(iter(found.storage_data.values())).relative_path = "../other.distcp"
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(ModelError, match=r"\.\./other\.distcp"):
        read_metadata(checkpoint)


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"N."])
def test_damaged_metadata_is_refused_in_one_line(checkpoint: Path, content: bytes) -> None:
    (checkpoint / METADATA).write_bytes(content)
    with pytest.raises(ModelError, match="metadata"):
        read_metadata(checkpoint)


def test_common_state_with_a_payload_is_refused(checkpoint: Path, marker: Path) -> None:
    path = checkpoint / COMMON
    for content in ({"args": argparse.Namespace(hook=Payload(marker))}, Payload(marker)):
        torch.save(content, path)
        with pytest.raises(ModelError) as error:
            read_common(checkpoint)
        check_refused(error, path, marker)
        for write in (
            lambda content=content: torch.save(content, path, _use_new_zipfile_serialization=False),
            lambda content=content: torch.save(content, path, pickle_protocol=4),
            lambda content=content: path.write_bytes(pickle.dumps(content)),
        ):
            write()
            with pytest.raises(ModelError, match=COMMON):
                read_common(checkpoint)
            assert not marker.exists()


def test_byte_entry_with_a_payload_is_refused(tmp_path: Path, marker: Path) -> None:
    with _single_rank_process_groups():
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        from penstock.engines.megatron.checkpoints import torch_dist as checkpoints

        def load() -> Any:
            strategies = checkpoints.SafeLoadStrategy(), checkpoints.SafeCommonStrategy()
            return checkpoints.dist_checkpointing.load(state(), str(directory), *strategies)

        def state(content: Any = None) -> dict[str, Any]:
            return {"random": ShardedObject("random", content, (1,), (0,))}

        directory = tmp_path / "training"
        directory.mkdir()
        checkpoints.dist_checkpointing.save(
            state({"torch": torch.arange(3)}), str(directory), checkpoints.PlainWriter()
        )
        assert load()["random"]["torch"].tolist() == [0, 1, 2]
        found = pickle.loads((directory / METADATA).read_bytes())
        (place,) = found.storage_data.values()
        planted = io.BytesIO()
        torch.save([{"torch": Payload(marker)}], planted)
        (directory / place.relative_path).write_bytes(planted.getvalue())
        place.offset, place.length = 0, len(planted.getvalue())
        (directory / METADATA).write_bytes(pickle.dumps(found))
        with pytest.raises(ModelError) as error:
            load()
        check_refused(error, f"{directory}: random/shard_0_1", marker)


def test_tensor_entry_with_a_payload_is_refused(checkpoint: Path, marker: Path, tiny_model: Path) -> None:
    planted = io.BytesIO()
    torch.save([Payload(marker)], planted)
    found = read_metadata(checkpoint)
    for place in found.storage_data.values():
        place.offset, place.length = 0, len(planted.getvalue())
    for path in checkpoint.glob("*.distcp"):
        path.write_bytes(planted.getvalue())
    (checkpoint / METADATA).write_bytes(pickle.dumps(found))
    stored = checkpoint_layout(read_shape(tiny_model))
    with pytest.raises(ModelError, match=r"\.distcp"):
        TorchDistWeights(checkpoint, stored).fetch(next(iter(stored.slices)))
    assert not marker.exists()


def test_classes_of_training_scripts_become_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megatron.foreign")
    Backend = enum.Enum("Backend", {"flash": 1}, module="megatron.foreign")
    module.Backend = Backend  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "megatron.foreign", module)
        stream = io.BytesIO()
        torch.save(
            {"args": argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16, backend=Backend.flash)}, stream
        )
    stream.seek(0)
    args = read_object(stream, "common.pt")["args"]
    assert (args.num_layers, args.params_dtype) == (2, torch.bfloat16)
    assert args.backend.args == (1,) and not isinstance(args.backend, enum.Enum)
    assert "megatron.foreign" not in sys.modules


def test_reading_does_not_change_torchs_safe_globals(checkpoint: Path) -> None:
    """Megatron registers `argparse.Namespace` for its own loader; torch's context manager would remove it."""
    torch.serialization.add_safe_globals([argparse.Namespace])
    read_common(checkpoint)
    assert torch.load(checkpoint / COMMON)["args"].num_layers == 2
