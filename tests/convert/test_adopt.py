"""A converted model in a directory is as good as its Hugging Face original."""

from pathlib import Path

import pytest

from engines.megatron.shape import ModelShape
from stages.convert.adopt import adopt, config_directory, is_converted
from stages.convert.to_torch_dist import convert_hf
from storage.errors import StoreError
from storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def test_what_convert_saved_becomes_the_stores_own_and_is_found_again(tiny_model: Path, store: Store, tmp_path: Path) -> None:
    directory = str(tmp_path / "converted")
    convert_hf(store, tiny_model, save=directory)
    assert is_converted(directory) and not is_converted(str(tiny_model))
    config = config_directory(directory)
    assert config is not None and ModelShape.from_hf(config) == ModelShape.from_hf(tiny_model)

    ref = adopt(store, directory)
    commit = store.committed(ref.key.removesuffix(".commit.json"))
    assert commit is not None
    with store.reading(commit) as files:
        assert {"metadata.json", ".metadata"} < {path.name for path in files.iterdir()}
    assert adopt(store, directory) == ref
    other = Store(str(tmp_path / "other"))
    assert adopt(other, directory).key == convert_hf(other, tiny_model).key == convert_hf(store, tiny_model).key, (
        "one model, one key"
    )


def test_a_damaged_and_a_foreign_directory_are_refused(tiny_model: Path, store: Store, tmp_path: Path) -> None:
    directory = tmp_path / "converted"
    convert_hf(store, tiny_model, save=str(directory))
    weights = next((directory / "release").glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(StoreError, match=weights.name):
        adopt(store, str(directory))
    assert not store.list("models") or not [name for name in store.list("models") if name.endswith(".commit.json")]
    (tmp_path / "foreign" / "release").mkdir(parents=True)
    with pytest.raises(ValueError, match="was not made by `penstock convert --save`"):
        adopt(store, str(tmp_path / "foreign"))
