"""The order of a round in which trainer and engines take turns on the same devices, with scripted models behind the
real flow, trainer group and actor, engine pool, and HTTP client."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.training import STATE_KINDS, MemorySwitch, StateKind
from penstock.engines.weights.transfer import ProcessPlace
from penstock.flows import tasks
from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import processes
from penstock.flows.runtime.processes import Processes, wait_for_engines_on_trainer_gpus
from penstock.flows.runtime.publishing import PolicyEngines
from penstock.flows.runtime.runs import ActiveRun
from penstock.stages.train.actor import TrainActor
from penstock.stages.train.build import Models
from penstock.stages.train.spec import SaveResult, TrainResult
from penstock.stages.train.trainer_group import TrainerGroup, current_build
from penstock.storage.commit import CheckpointRef, Commit, RolloutRef, RunKeys, commit_key
from penstock.storage.store import Store
from tests.engines.real_models import REAL_MODELS
from tests.engines.small_servers import SmallReplica, SmallServer

KEYS = RunKeys("turns")
Events = list[str]


class ScriptedModel:
    """The state of a trained model, without tensors."""

    def __init__(self, name: str, events: Events) -> None:
        self.name, self.events, self.offloaded = name, events, set[StateKind]()

    def offload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        moved = [kind for kind in STATE_KINDS if kind in kinds and kind not in self.offloaded]
        self.offloaded |= set(moved)
        return self._record("offload", moved)

    def onload(self, kinds: Collection[StateKind]) -> MemorySwitch | None:
        moved = [kind for kind in STATE_KINDS if kind in kinds and kind in self.offloaded]
        self.offloaded -= set(moved)
        return self._record("onload", moved)

    def gather_weights(self) -> SimpleNamespace:
        assert "weights" not in self.offloaded
        return SimpleNamespace(tensors=iter(()))

    def _record(self, action: str, moved: list[StateKind]) -> MemorySwitch | None:
        if not moved:
            return None
        self.events.append(f"{self.name}: {action} {', '.join(moved)}")
        sizes = ("device_bytes_before", "device_bytes_after", "host_bytes_before", "host_bytes_after")
        return MemorySwitch(name=self.events[-1], seconds=0.0, **dict.fromkeys(sizes, 0))


class ScriptedActor(TrainActor):
    """A rank whose calls run in the test's process; the work on the models is only recorded."""

    def train(self, rollout: Commit, version: int, attempt: str | None = None, earlier: object = ()) -> TrainResult:
        self._record("train")
        self._state = self._state.model_copy(update={"version": version + 1})
        return TrainResult(metrics={}, steps=[], seconds={}, digest={}, fingerprint=self.fingerprint())

    def save(self, attempt: str) -> SaveResult:
        self._record("save")
        return SaveResult(files=[], digest={}, optimizer_digest={})

    def _record(self, event: str) -> None:
        models: list[Any] = [self.models.policy, self.models.critic]
        assert not any(model.offloaded for model in models)
        models[0].events.append(event)

    def fingerprint(self) -> dict[str, Any]:
        return {"bit_exact": True}

    def memory_use(self) -> tuple[int, int]:
        return 0, 0


class ScriptedCluster:
    """A Ray cluster whose actors run in the test's process: a call is its result."""

    num_gpus = 0

    def __init__(self, *, owned: bool = True) -> None:
        self.owned = owned

    def alive(self) -> bool:
        return True

    def check_alive(self) -> None: ...

    def find_actor(self, name: str) -> None: ...

    def place_processes(self, *sizes: int) -> list[Any]:
        return []

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return calls, []

    def get(self, call: Any, timeout: float | None = None) -> Any:
        return call


class World:
    """A run with a critic, whose engine serves policy 0 and whose trainer holds policy 0 on the device."""

    def __init__(self, directory: Path, flags: list[str], cluster: ScriptedCluster) -> None:
        real = REAL_MODELS["qwen3-0.6B"]
        (directory / "config.json").write_text(json.dumps({"architectures": [real.architecture], **real.config}))
        flags = ["--hf-checkpoint", str(directory), "--advantage-estimator", "ppo", "--num-rollout", "3", *flags]
        self.config = parse_config([*flags, "--save-interval", "1", "--update-weight-transport", "disk"])
        self.events: Events = []
        self.store = Store(str(directory / "store"))
        self.engine = SmallReplica(0, lambda: SmallServer("turns/0", self.events))
        self.run = ActiveRun(self.store, KEYS, Flow.TRAIN, self.config)
        self.processes = Processes(self.run, note=lambda text: None)
        self.engines = PolicyEngines(self.processes, on_published=lambda *published: None)
        self.cluster: Any = cluster
        self.processes._cluster = self.cluster
        self.processes.base_checkpoint = CheckpointRef(key="base", uri="", format="torch_dist", policy_version=0)

    def start_pool(self, *_: Any) -> EnginePool:
        pool = EnginePool(self.cluster, ServerSpec(model_path="/model"), num_engines=0)
        pool.replicas = [self.engine]
        return pool

    def start_trainer(self) -> None:
        group: TrainerGroup = self.processes.new_trainer(self.cluster, self.config)
        actor = ScriptedActor(current_build(group.spec), 0, "incarnation", group._owner)
        actor._state = actor._state.model_copy(update={"clean": True})
        models: list[Any] = [ScriptedModel(name, self.events) for name in ("policy", "critic")]
        actor.models = Models(*models)
        group._actors = [SimpleNamespace(call=SimpleNamespace(remote=actor.call))]
        group._built = True
        group.places = lambda: [ProcessPlace("")]  # type: ignore[method-assign]
        self.processes.started_trainer = group

    @property
    def session(self) -> Any:
        return SimpleNamespace(
            config=self.config,
            run=self.run,
            processes=self.processes,
            engines=self.engines,
            report_commit=lambda prefix, commit: commit,
            set_stage_message=lambda text: None,
        )

    def run_round(self, r: int) -> None:
        """Run the stages of a round as the flow does, without Prefect."""
        with self.engines.at(r):
            server = self.engine.server
            assert server is not None and not server.paused and server.version == f"turns/{r}"
            assert server.allocated == {"weights", "kv_cache"}
            self.events.append("generate")
            self.store.commit(KEYS.rollout_prefix(r), Commit(kind="rollout", index=r))
        rollout = RolloutRef(key=commit_key(KEYS.rollout_prefix(r)), rollout_id=r, num_samples=1, policy_version=r)
        tasks.train.body(self.session, rollout)
        for stage in tasks.build_stage_schedule(self.session)(r + 1):
            getattr(stage, "body", stage)(self.session, r + 1)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., World]:
    def make(*flags: str, owned: bool = True) -> World:
        made = World(tmp_path, list(flags), ScriptedCluster(owned=owned))
        request.addfinalizer(made.engine.kill)
        monkeypatch.setattr(processes, "start_pool", made.start_pool)
        monkeypatch.setattr(tasks, "save", tasks.save.body)
        return made

    return make


RELEASE = ["engine: pause", "engine: release kv_cache weights"]
ONLOAD = [f"{model}: onload weights, gradients, optimizer" for model in ("policy", "critic")]
# publishing needs the policy's weights only
OFFLOAD = ["policy: offload gradients, optimizer", "critic: offload weights, gradients, optimizer"]
RESUME = ["engine: resume weights", "engine: update"]
RESUME_CACHE = ["engine: resume kv_cache", "engine: continue"]
WORK = ["train", "save"]
UPDATE = ["engine: pause", "engine: update", "engine: continue"]
LAST_OFFLOAD = ["policy: offload weights"]


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--colocate", [*RELEASE, *ONLOAD, *WORK, *OFFLOAD, *RESUME, *LAST_OFFLOAD, *RESUME_CACHE]),
        ("--offload-train", [*ONLOAD, *WORK, *OFFLOAD, *UPDATE, *LAST_OFFLOAD]),
        ("--offload-rollout", [*RELEASE, *WORK, *RESUME, *RESUME_CACHE]),
    ],
)
def test_memory_moves_in_turn_between_generation_and_training(
    world: Callable[..., World], flag: str, expected: list[str]
) -> None:
    run = world(flag)
    run.start_trainer()
    for r in range(2):
        run.run_round(r)
    with run.engines.at(2):
        run.events.append("generate")
    first, second, third = (index for index, event in enumerate(run.events) if event == "generate")
    assert run.events[:first] == ([] if flag == "--offload-rollout" else [*OFFLOAD, *LAST_OFFLOAD])
    assert run.events[first + 1 : second] == expected
    assert run.events[second + 1 : third] == expected


@pytest.mark.parametrize("owned", [True, False], ids=["own Ray", "external Ray"])
def test_engines_of_a_killed_driver_release_their_memory_before_the_trainer_starts(
    world: Callable[..., World], owned: bool
) -> None:
    """Only an external Ray cluster can have engines of an earlier driver; else none are started just to be released."""
    run = world("--colocate", owned=owned)
    group = run.processes.new_trainer(run.cluster, run.config)
    group.before_onload()
    server = run.engine.server
    assert server is not None and server.allocated == ({"weights", "kv_cache"} if owned else set())


@pytest.mark.parametrize(
    ("num_gpus", "flags", "waits"),
    [(1, [], True), (0, [], False), (1, ["--rollout-num-gpus", "1"], False)],
    ids=["shared GPU", "no GPU", "own GPU"],
)
def test_trainer_takes_gpu_memory_after_the_engines_on_its_gpu_have_started(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, num_gpus: int, flags: list[str], waits: bool
) -> None:
    """An engine takes a share of the memory that is free while it starts, so a trainer that loads meanwhile makes its
    KV cache smaller, or its start fail."""
    run, waited = world(*flags), list[bool]()
    monkeypatch.setattr(run.cluster, "num_gpus", num_gpus)

    class StartingEngines:
        @property
        def urls(self) -> list[str]:
            waited.append(True)
            return []

    run.processes.pools["rollout"] = StartingEngines()  # type: ignore[assignment]
    wait_for_engines_on_trainer_gpus(run.processes)
    assert waited == [True] * waits
    del run.processes.pools["rollout"]


@pytest.mark.parametrize(
    ("flags", "has_engines", "expected"),
    [(["--colocate"], True, True), (["--colocate"], False, False), (["--offload-rollout"], True, False)],
    ids=["offloaded", "without engines", "only engines are offloaded"],
)
def test_trainer_allocates_host_memory_early_only_if_it_will_be_offloaded(
    world: Callable[..., World], flags: list[str], has_engines: bool, expected: bool
) -> None:
    """Without engines, as in a run that only trains, nothing calls `offload`; a trainer of a fork's parent only replays
    rounds."""
    run = world(*flags)
    if has_engines:
        run.processes.start_engines()
    group, calls = run.processes.trainer, list[tuple[Any, ...]]()
    answers = {"adopt": [SimpleNamespace(node="")], "path_exists": [True], "open_rendezvous": ["url"]}

    def record(method: str, *args: Any, **options: Any) -> list[Any]:
        calls.append((method, *args))
        return answers.get(method, [None])

    group._actors, group._call = [None], record  # type: ignore[method-assign]
    group.ensure_started()
    assert calls[-1] == ("connect_and_build", "url", expected)
    assert not run.processes.new_trainer(run.cluster, run.config).offloads
