"""The promise: kill the whole process tree in the middle of a stage, give the same command again, and nothing is lost or done twice."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.demo_model import make_tiny_data
from storage.refs import RunKeys
from storage.shards import read_samples
from storage.store import Store

pytestmark = pytest.mark.integration

ROUNDS, PROMPTS, SAMPLES = 4, 16, 4
KEYS = RunKeys("killed")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> tuple[list[str], Store]:
    root = tmp_path_factory.mktemp("kill")
    make_tiny_data(root / "data")
    words = [
        *("--run", KEYS.run, "--store", str(root / "store"), "--hf-checkpoint", str(tiny_model)),
        *("--prompt-data", str(root / "data" / "train.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *(
            "--apply-chat-template",
            "--rollout-shuffle",
            "--rm-type",
            "random",
            "--num-rollout",
            str(ROUNDS),
            "--save-interval",
            "2",
        ),
        *("--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES), "--rollout-max-response-len", "200"),
        *("--lr", "1e-3", "--rollout-sampling", "ignore_eos=true"),
    ]
    return [sys.executable, "-m", "flows.cli", "train", *words], Store(str(root / "store"))


def run_until(command: list[str], log: Path, stop: Callable[[], bool], delay: float) -> None:
    """Start the command; `delay` seconds after `stop()` holds, SIGKILL it and everything below it."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 240
    while not stop():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.005)
    time.sleep(delay)
    victims = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue  # it died with another victim
    process.wait()
    psutil.wait_procs(victims, timeout=30)


def digest(store: Store, rollout_id: int) -> dict[str, str]:
    commit = store.committed(KEYS.step(rollout_id))
    assert commit is not None
    return commit.state["digest"]


def test_killed_anywhere_nothing_is_lost_or_done_twice(command: tuple[list[str], Store], tmp_path: Path) -> None:
    words, store = command
    log = tmp_path / "log"

    def has(prefix: str) -> bool:
        return store.exists(f"{prefix}.commit.json")

    # in the middle of a rollout: round 0 is trained, round 1 is being generated
    run_until(words, log, lambda: has(KEYS.step(0)), delay=0.3)
    assert not has(KEYS.rollout(1)), "the rollout was over before the kill; make it longer"
    first = store.read(f"{KEYS.rollout(0)}.commit.json"), store.read(f"{KEYS.step(0)}.commit.json")

    # in the middle of a train step: round 2 is generated, not trained
    run_until(words, log, lambda: has(KEYS.rollout(2)), delay=0.15)
    assert not has(KEYS.step(2)), "the step was over before the kill"
    assert first == (store.read(f"{KEYS.rollout(0)}.commit.json"), store.read(f"{KEYS.step(0)}.commit.json")), (
        "a committed stage ran again"
    )

    resume = [*words[: words.index("train")], "resume", KEYS.run, "--store", store.root]  # or the same command again
    finished = subprocess.run(resume, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]

    # no prompt lost or served twice: the groups of the rounds are the first prompts of the data source, each once
    groups, ids = [], []
    for r in range(ROUNDS):
        commit = store.committed(KEYS.rollout(r))
        assert commit is not None and commit.policy_version == r
        samples = read_samples(store, commit)
        assert {sample.policy_versions for sample in samples} == {(r, r)}
        groups += list(dict.fromkeys(sample.group_id for sample in samples))
        ids += [sample.sample_id for sample in samples]
    assert groups == sorted(set(groups)) and len(groups) == ROUNDS * PROMPTS
    assert len(set(ids)) == ROUNDS * PROMPTS * SAMPLES

    # the final weights are those that training gives from the committed rollouts, without any kill, bit for bit
    assert replayed_digest(store, words, tmp_path) == digest(store, ROUNDS - 1)


def replayed_digest(store: Store, words: list[str], tmp_path: Path) -> dict[str, str]:
    """Weights of a fresh trainer that trains all committed rollouts from the base model, in one go, in another process."""
    clean = tmp_path / "clean"
    without = shutil.ignore_patterns("checkpoints", "exports", "evals", "tracking", "mlflow")
    shutil.copytree(store.root, clean, ignore=without)
    flags = words[words.index("train") + 1 :]
    program = Path(__file__).with_name("replay.py")
    result = subprocess.run(
        [sys.executable, str(program), *flags, "--store", str(clean)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])
