"""Environment variables of the trainer's processes."""

import pytest

from penstock.engines.megatron.train_backend import MegatronBackend
from penstock.engines.parallel_layout import ParallelLayout

NAMES = ("NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_launch_order_is_kept_only_under_tensor_parallelism() -> None:
    assert MegatronBackend().rank_environment(ParallelLayout(tensor=2), 3)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in MegatronBackend().rank_environment(
        ParallelLayout(context=2, pipeline=2), 3
    )


@pytest.mark.parametrize("name", NAMES[:3])
def test_variables_of_the_driver_are_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    assert MegatronBackend().rank_environment(ParallelLayout(tensor=2), 3)[name] == "7"
    assert MegatronBackend().rank_environment(ParallelLayout(tensor=2), 3)["OMP_NUM_THREADS"] == "3"


def test_older_name_of_the_allocators_options_replaces_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pinned" in MegatronBackend().rank_environment(ParallelLayout(), 1)["PYTORCH_ALLOC_CONF"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_ALLOC_CONF" not in MegatronBackend().rank_environment(ParallelLayout(), 1)
