"""The commands of the examples' READMEs, run as they are printed, and what the READMEs say that they show."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from penstock_command import HANG

from penstock.flows.install.command import sglang_site
from penstock.storage.commit import RunKeys
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

pytestmark = [pytest.mark.integration, pytest.mark.full]
REPOSITORY = Path(__file__).parents[2]
Run = Callable[..., tuple[Path, list[str]]]
PENSTOCK = """penstock() {
    case $1 in train*) set -- "$@" ${ROUNDS:+--num-rollout $ROUNDS} ;; esac
    python -m penstock "$@"
}"""


def commands(readme: Path) -> list[str]:
    """The shell blocks of a README, before its section about a real model."""
    text = readme.read_text(encoding="utf-8")
    return re.findall(r"```bash\n(.*?)```", re.split(r"## (A|Another).* real model", text)[0], re.DOTALL)


def shell(block: str, directory: Path, env: dict[str, str]) -> str:
    """Run a shell block in a directory, and return its output."""
    script = Path(env["SCRATCH"]) / "block.sh"
    script.write_text(f"set -e\n{PENSTOCK}\n{block}")
    with script.with_suffix(".out").open("w+") as output:
        result = subprocess.run(
            ["bash", str(script)], cwd=directory, env=env, stdout=output, stderr=output, timeout=HANG, check=False
        )
        output.seek(0)
        text = output.read()
    assert result.returncode == 0, f"{block}\n{text[-4000:]}"
    return text


@pytest.fixture(scope="module")
def environment(prefect_api: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    python, scratch = str(Path(sys.executable).parent), str(tmp_path_factory.mktemp("shell"))
    path = f"{python}:{os.environ['PATH']}"
    return {**prefect_api, "PYTHONPATH": str(REPOSITORY), "PATH": path, "SCRATCH": scratch}


@pytest.fixture(scope="module")
def demo(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models and data that examples/README.md makes with the demo."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # one for all xdist workers
    [block] = commands(REPOSITORY / "examples/README.md")
    with (folder / "demo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "demo").exists():
            making = tmp_path_factory.mktemp("making")
            shell(block, making, environment)
            making.rename(folder / "demo")
    return folder / "demo/tiny"


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """A function that runs all commands of an example in an empty directory; if `rounds` are given, it trains as many
    instead of the recipe's."""

    def run_example(name: str, rounds: int | None = None) -> tuple[Path, list[str]]:
        env = {**environment, **({"ROUNDS": str(rounds)} if rounds else {})}
        for folder in ("examples", "configs", "Makefile"):
            (tmp_path / folder).symlink_to(REPOSITORY / folder)
        if name == "verifiers":
            shell("make verifiers-environment", REPOSITORY, environment)
            (tmp_path / ".venv-verifiers").symlink_to(REPOSITORY / ".venv-verifiers")
        readme = REPOSITORY / "examples" / name / "README.md"
        if "../README.md for tiny/" in readme.read_text(encoding="utf-8"):
            shutil.copytree(request.getfixturevalue("demo"), tmp_path / "tiny")
        return tmp_path / "penstock-store", [shell(block, tmp_path, env) for block in commands(readme)]

    return run_example


def curve(store: Path, run: str, metric: str = "rollout/raw_reward", kind: str = "rollouts") -> list[float]:
    """A metric of each round."""
    opened, prefix = Store(str(store)), f"{RunKeys(run).prefix}/{kind}"
    commits = [opened.committed(f"{prefix}/{index:06d}") for index in opened.committed_indices(prefix)]
    return [commit.summary[metric] for commit in commits if commit is not None]


def samples_of(store: Path, run: str, round_id: int) -> list[Sample]:
    opened = Store(str(store))
    return read_samples(opened, opened.committed(f"{RunKeys(run).prefix}/rollouts/{round_id:06d}"))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("name", "rounds", "run_name", "metric", "first", "last"),
    [
        ("search", 30, "search", "rollout/raw_reward", 0.3, 0.5),
        ("multi_agent", None, "agents", "rollout/rewards/answer", 0.06, 0.1),
        ("on_policy_distillation", 20, "distilled", "rollout/rewards/right", 0.5, 0.65),
    ],
)
def test_example_learns(
    run: Run, name: str, rounds: int | None, run_name: str, metric: str, first: float, last: float
) -> None:
    store, _ = run(name, rounds)
    values = curve(store, run_name, metric)
    assert mean(values[:3]) < first and mean(values[-5:]) > last, values


@pytest.mark.parametrize("name", ["retool", "customer"])
def test_example_trains_on_the_models_tokens_only(run: Run, name: str) -> None:
    """What a random tiny model learns here within minutes is not claimed."""
    store, _ = run(name, rounds=2)
    assert len(curve(store, name)) == 2
    samples = samples_of(store, name, 0)
    assert any(0 in sample.loss_mask[sample.loss_mask.index(1) :] for sample in samples if 1 in sample.loss_mask)
    for sample in samples:
        assert [logprob < 0 for logprob in sample.rollout_logprobs] == [mask == 1 for mask in sample.loss_mask]


def test_verifiers_environment_trains(run: Run) -> None:
    store, _ = run("verifiers")
    values = curve(store, "verifiers")
    assert mean(values[:3]) < 0.5 and mean(values[-5:]) > 0.75, values
    samples = [sample for r in range(len(values)) for sample in samples_of(store, "verifiers", r)]
    assert {sample.reward for sample in samples} >= {0.0, 0.5, 1.0}  # few second answers are right, in some rounds none
    assert all(sample.reward == 1.0 or "no. " in sample.response for sample in samples if sample.reward)
    for sample in samples:  # the environment's words are not trained on, both answers are
        assert not (sample.reward == 1.0 and "no. " in sample.response)
        assert [logprob < 0 for logprob in sample.rollout_logprobs] == [mask == 1 for mask in sample.loss_mask]


def test_agent_of_strands_is_trained(
    run: Run, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path_factory.mktemp("strands")  # sees all packages of this environment, and takes the additional ones
    venv.create(own, with_pip=True)
    [packages] = own.glob("lib/python*/site-packages")
    (packages / "penstock.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (own / "sglang-site").symlink_to(sglang_site())  # torchvision for the engine
    monkeypatch.setitem(environment, "PATH", f"{own / 'bin'}:{environment['PATH']}")
    store, _ = run("strands_agent", rounds=2)
    samples = samples_of(store, "strands", 0)
    assert sum("<|system|>" in sample.response for sample in samples) > 3, (
        "the agent runs the tool"
    )  # of a random model
    for sample in samples:
        assert [logprob < 0 for logprob in sample.rollout_logprobs] == [mask == 1 for mask in sample.loss_mask]
    assert len(curve(store, "strands")) == 2


def test_geometry_removes_the_mistake(run: Run) -> None:
    store, _ = run("geometry")
    values = curve(store, "geometry")
    assert mean(values[-5:]) > mean(values[:3]) + 0.1, values
    triangles = [
        [mean([s.reward or 0.0 for s in samples_of(store, "geometry", r) if s.metadata["kind"] == "triangle area"])]
        for r in (0, 39)
    ]
    assert triangles[0][0] < 0.6 and triangles[1][0] > 0.8, triangles


def test_shapes_learns_to_name_the_colour_of_a_picture(run: Run) -> None:
    store, outputs = run("shapes", rounds=30)
    values = curve(store, "shapes")
    assert mean(values[:3]) < 0.35 and mean(values[-3:]) > 0.7, values
    assert max(curve(store, "shapes", "train/train_rollout_logprob_abs_diff", kind="steps")) < 1e-5
    assert "no problems found" in outputs[-1] and "30 of 30" in outputs[-1]


def test_geometry3k_trains_in_one_turn_and_in_several(run: Run) -> None:
    store, _ = run("geometry3k")
    for name in ("geometry3k", "geometry3k-turns"):
        assert max(curve(store, name, "train/train_rollout_logprob_abs_diff", kind="steps")) < 1e-5
        samples = [sample for r in range(4) for sample in samples_of(store, name, r)]
        assert len(samples) == 4 * 8 * 4 and all(len(sample.images) == 1 for sample in samples)
    several = [sample for sample in samples if sample.metadata["num_turns"] > 1]
    assert len(several) > len(samples) / 4 and any(sample.reward for sample in several)
    for sample in several:  # the messages of the environment are not trained on
        assert "at the figure again" in sample.response
        assert [logprob < 0 for logprob in sample.rollout_logprobs] == [mask == 1 for mask in sample.loss_mask]


def test_streaming_is_stale_within_its_bound_and_learns(run: Run) -> None:
    store, _ = run("fully_async", rounds=20)
    values = curve(store, "stream")
    assert mean(values[:3]) < 0.5 and mean(values[-5:]) > 0.7, values
    assert 0 < max(curve(store, "stream", "rollout/staleness/max")) <= 2


def test_two_runs_are_equal_bit_for_bit(run: Run, environment: dict[str, str]) -> None:
    store, [output] = run("reproducibility")
    assert "same-a and same-b are equal bit for bit" in output and "4 of 4" in output
    compare = [sys.executable, str(REPOSITORY / "examples/reproducibility/compare.py"), str(store), "same-a", "same-c"]
    fork = ["fork", "same-a", "--at", "2", "--name", "same-c", "--rollout-seed", "8", "--store", str(store)]
    shell(f"penstock {' '.join(fork)}\npenstock resume same-c --store {store}\n", store.parent, environment)
    differing = subprocess.run(compare, env=environment, capture_output=True, text=True, check=False)
    assert differing.returncode == 1 and differing.stdout.split("\n")[0] == "round 2: samples"


def test_evaluations_compare_two_checkpoints(run: Run) -> None:
    _, [output] = run("evaluation_only")
    assert "pass@8" in output and "majority@8" in output
    for name in ("first", "heldout"):  # the teacher is better
        [row] = re.findall(rf"^{name} +\d+ +([\d.]+) +([\d.]+)", output, re.MULTILINE)
        assert float(row[0]) < float(row[1])


def test_bf16_learns_and_fp8_is_planned(run: Run) -> None:
    store, [_, plan] = run("low_precision", rounds=20)
    values, gaps = curve(store, "bf16"), curve(store, "bf16", "train/train_rollout_logprob_abs_diff", kind="steps")
    assert mean(values[:3]) < 0.5 and mean(values[-5:]) > 0.7, values
    assert all(1e-4 < gap < 0.05 for gap in gaps), gaps
    assert "not ready here: the engines: engines with the fp8 weights" in plan and not (store / "runs/fp8").exists()
