"""The smaller commands in a process each: convert, eval, runs, doctor."""

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import penstock_command
import pytest

from penstock.flows.commands.demo_model import make_tiny_data
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

pytestmark = pytest.mark.integration


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A TMPDIR of the test's own; a short one, for sockets have room for 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as directory:
        yield Path(directory)


@pytest.fixture
def penstock(prefect_api: dict[str, str], tmp_path: Path, temporary: Path) -> Callable[..., str]:
    """Calls the command, which must succeed; what it prints."""
    environment = {**prefect_api, "TMPDIR": str(temporary)}

    return lambda *words: penstock_command.penstock(*words, env=environment, cwd=tmp_path).stdout


def test_convert_eval_and_runs_write_only_their_results(
    penstock: Callable[..., str], temporary: Path, tiny_model: Path, tmp_path: Path
) -> None:
    store = Store(str(tmp_path / "store"))
    said = penstock("convert", "--hf-checkpoint", str(tiny_model), "--store", store.uri)
    assert "is converted" in said and len([name for name in store.list("models") if name.endswith("commit.json")]) == 1

    data = make_tiny_data(tmp_path / "data")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data["heldout"].read_text().splitlines(keepends=True)[:8]))
    words = f"--run look --store {store.uri} --hf-checkpoint {tiny_model} --eval-prompt-data few {few}"
    words += f" --eval-prompt-data again {few} --input-key prompt --label-key label --apply-chat-template"
    words += " --rm-type exact_number --n-samples-per-eval-prompt 4 --eval-max-response-len 8"
    penstock("eval", *words.split())
    for name in ("few", "again"):
        commit = store.committed(RunKeys("look").eval_prefix(0, name))
        assert commit is not None and commit.files[0].rows == 32
        assert {f"eval/{name}", f"eval/{name}-pass@1", f"eval/{name}-pass@4"} <= set(commit.summary)
    assert json.loads(store.read("runs/look/run.json") or b"{}")["flow"] == "evaluate"
    assert "look" in penstock("runs", "--store", store.uri)
    assert list(temporary.iterdir()) == []
    assert not list(Path(store.root).rglob("*.journal")) and not [path for path in Path(store.root).rglob("*.tmp")]


def test_doctor_passes_all_checks_in_the_test_environment(penstock: Callable[..., str]) -> None:
    said = penstock("doctor")
    assert "its server starts" in said and "trains on" in said and "all checks passed" in said
