"""Models written by `penstock convert --save` are copied into a store."""

from pathlib import Path

import pytest
from converted import commit_of

from penstock.engines.families import read_shape
from penstock.stages.convert.targets import config_directory, import_converted_model, is_converted
from penstock.stages.convert.to_torch_dist import ConversionOptions, convert_hf
from penstock.storage.errors import ModelError, StoreError
from penstock.storage.store import Store


def test_converted_directory_is_copied_once(tiny_model: Path, store: Store, tmp_path: Path) -> None:
    directory = str(tmp_path / "converted")
    convert_hf(store, tiny_model, options=ConversionOptions(save=directory))
    assert is_converted(directory) and not is_converted(str(tiny_model))
    config = config_directory(directory)
    assert config is not None and read_shape(config) == read_shape(tiny_model)

    ref = import_converted_model(store, directory)
    with store.reading(commit_of(store, ref)) as files:
        assert {"metadata.json", ".metadata"} < {path.name for path in files.iterdir()}
    assert import_converted_model(store, directory) == ref
    other = Store(str(tmp_path / "other"))
    assert (
        import_converted_model(other, directory).key
        == convert_hf(other, tiny_model).key
        == convert_hf(store, tiny_model).key
    ), "one model, one key"


def test_damaged_and_foreign_directories_are_refused(tiny_model: Path, store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "converted"
    convert_hf(store, tiny_model, options=ConversionOptions(save=str(directory)))
    weights = next((directory / "release").glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(StoreError, match=weights.name):
        import_converted_model(store, str(directory))
    assert not store.list("models") or not [name for name in store.list("models") if name.endswith(".commit.json")]
    (tmp_path / "foreign" / "release").mkdir(parents=True)
    with pytest.raises(ModelError, match="foreign"):
        import_converted_model(store, str(tmp_path / "foreign"))
