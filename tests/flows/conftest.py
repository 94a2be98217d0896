"""Checks that hold for every run, on a CPU and on a GPU, commands in the process of a test, and stores to change."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.flows import cli
from penstock.storage.commit import RunKeys
from penstock.storage.store import Store

sys.path.append(str(Path(__file__).parents[1] / "storage"))


@pytest.fixture(scope="session")
def bad_input_root(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The directory that bad inputs name `{root}` (bad_place.py). Read only, but for row.toml."""
    from bad_place import make_place

    root = tmp_path_factory.mktemp("bad")
    make_place(root, tiny_model)
    return root


@pytest.fixture
def agrees() -> Callable[..., None]:
    """Checks that in every round trainer and engine held the same policy, and that the reference stayed where the
    run began."""

    def check(store: Store, keys: RunKeys, *, num_rounds: int, gap: float) -> None:
        for r in range(num_rounds):
            rollout, step = store.committed(keys.rollout_prefix(r)), store.committed(keys.step_prefix(r))
            assert rollout is not None and rollout.policy_version == r
            assert step is not None and step.policy_version == r + 1
            assert step.summary["train/train_rollout_logprob_abs_diff"] < gap
            kl = step.summary["train/kl_loss"]
            assert kl < 1e-8 if r == 0 else kl > 1e-6, f"round {r}: KL {kl}"

    return check


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `penstock` in this process and checks its exit code. Returns its output, or its errors if it fails."""

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        exit_code = cli.main(words)
        out, err = capsys.readouterr()
        assert exit_code == code, err
        return err if code else out

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Writes the config.json of a published model, without weights, and returns its directory."""
    from tests.engines.real_models import REAL_MODELS

    root = tmp_path_factory.mktemp("models")

    def write(name: str) -> str:
        model, directory = REAL_MODELS[name], root / name
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"architectures": [model.architecture], **model.config}))
        return str(directory)

    return write


@pytest.fixture(scope="session")
def fork_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose `template` is to be copied to `now`, where it was made: records hold the path of the data."""
    from made_run import config_of, make_run, roll_one, write_data

    directory = tmp_path_factory.mktemp("fork")
    (directory / "now").mkdir()
    store = Store(str(directory / "now" / "store"))
    config = config_of(store, write_data(directory / "now" / "data.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory / "now")  # the model is a relative path
        roll_one(store, make_run(store, config, 5, save=(2, 4), score=(0, 3, 4)), config, 5, "")
    (directory / "now").rename(directory / "template")
    return directory


@pytest.fixture
def fork_data(fork_template: Path) -> Path:
    """The prompts of the run in `fork_store`."""
    shutil.rmtree(fork_template / "now", ignore_errors=True)
    return shutil.copytree(fork_template / "template", fork_template / "now") / "data.jsonl"


@pytest.fixture
def fork_store(fork_data: Path) -> Store:
    """A store with the run `r` of five rounds, and a sixth rollout that is not trained."""
    return Store(str(fork_data.parent / "store"))
