"""A harness that kills a running pipeline at failpoints, and checks afterwards that nothing was lost or done twice.

`World` owns what outlives a run: model, data, a Prefect server, an MLflow server, an S3 server, a Ray cluster.
`Pipeline` is one run in it: started, killed, restarted. Processes stop at the points of storage/failpoints.py; the
callers (matrix.py, soak.py, the tests) choose points and targets.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from penstock_command import penstock

from penstock.engines.network import reserve_free_port
from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model
from penstock.flows.runtime.prefect_api import LAUNCHER
from penstock.stages.rollout.group import policy_spans
from penstock.storage.commit import RunKeys, commit_key
from penstock.storage.failpoints import VARIABLE
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store, committed_prefixes

FAULTY = Path(__file__).parents[1] / "storage" / "faulty.py"
TARGETS = ("driver", "driver, standing Ray", "engine", "trainer", "ray", "prefect", "mlflow", "tree")
POINTS = (  # in an order that lets a killed trainer restart before it is killed again
    "convert-writing",
    "eval-generating",
    "train-mid-step",
    "publish-before",
    "publish-after",
    "rollout-before-upload",
    "checkpoint-saving",
    "rollout-after-upload",
    "checkpoint-before-commit",
    "rollout-after-commit",
    "export-writing",
)
ROUNDS = 6  # enough for every point to be reached after the previous one in POINTS
MODES = {  # options of `penstock train`, and the limit of the staleness of trained tokens
    "synchronous": ("--over-sampling-batch-size 12 --partial-rollout", ROUNDS),
    "plain": ("", 0),
    "ahead": ("--async-buffer-size 2", 2),
    "streaming": ("--async-mode streaming --max-staleness 2", 2),
}
RAY = (sys.executable, "-m", "ray.scripts.scripts")
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Sizes of the model on a GPU, and further options that a machine's SGLang needs, for instance --engine-pythonpath.
GPU_MODEL: dict[str, Any] = dict(
    hidden=256, heads=4, groups=2, head_dim=64, ffn=768, vocab=64, dtype="bfloat16", max_length=40960
)
GPU_OPTIONS = ("--deterministic-mode", *shlex.split(os.environ.get("PENSTOCK_TRAIN_OPTIONS", "")))
START_TIMEOUT = 600.0  # seconds; only a service that hangs exceeds it
REACH_TIMEOUT = END_TIMEOUT = 900.0  # a run hangs, on any machine


class World:
    """The services and data of runs. A context manager, which kills its services on exit.

    Args:
        root: an empty directory for all of it.
        model: sizes for `make_tiny_model`.
    """

    def __init__(self, root: Path, **model: Any) -> None:
        self.root = root
        self.model = make_tiny_model(root / "model", seed=0, **model)
        make_tiny_data(root / "data")
        rows = (root / "data" / "train.jsonl").read_text().splitlines()
        self.train_data, self.eval_data = root / "train.jsonl", root / "eval.jsonl"
        self.train_data.write_text("\n".join(rows[:12]) + "\n")  # 1.5 rounds an epoch
        self.eval_data.write_text("\n".join(rows[12:16]) + "\n")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name.lower() != "http_proxy"},
            "PREFECT_HOME": str(root / "prefect"),
            "XDG_STATE_HOME": str(root / "state"),
            "OMP_NUM_THREADS": "1",
            VARIABLE: str(root / "faults"),  # also of a standing Ray cluster, where ranks are not the driver's children
        }
        (root / "faults").mkdir()
        self.environment.pop("PREFECT_API_URL", None)
        self._services: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> World:
        return self

    def __exit__(self, *details: object) -> None:
        for name in list(self._services):
            self.stop(name)

    # ---- services ----------------------------------------------------------------------------------------------------

    def start_prefect(self) -> None:
        """Start the Prefect server of all further runs, again at the same address after a kill. Without it every run
        has its own."""
        address = self.environment.setdefault("PREFECT_API_URL", f"http://127.0.0.1:{reserve_free_port()}/api")
        port = address.rpartition(":")[2].removesuffix("/api")
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", port]
        self._start("prefect", command, f"{address}/health", PREFECT_SERVER_ANALYTICS_ENABLED="false")

    def flow_states(self) -> list[str]:
        """Return the kinds of states of all flow runs on the Prefect server, the oldest first."""
        return [run["state_type"].capitalize() for run in self.ask_prefect("flow_runs", sort="START_TIME_ASC")]

    def ask_prefect(self, kind: str, **query: Any) -> list[dict[str, Any]]:
        """Return the flow runs or task runs (`kind`) on the Prefect server that match a query."""
        request = urllib.request.Request(
            f"{self.environment['PREFECT_API_URL']}/{kind}/filter",
            data=json.dumps(query).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)

    def start_mlflow(self) -> None:
        """Start the MLflow server of all runs, again at the same address after a kill."""
        if "MLFLOW_TRACKING_URI" not in self.environment:
            self.environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{reserve_free_port()}"
        address = self.environment["MLFLOW_TRACKING_URI"]
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1"]
        command += ["--port", address.rpartition(":")[2], "--backend-store-uri", f"sqlite:///{self.root / 'mlflow.db'}"]
        command += ["--artifacts-destination", str(self.root / "mlartifacts")]
        self._start("mlflow", command, f"{address}/health", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")

    def start_s3(self, faults: float = 0.0) -> dict[str, Any]:
        """Start a real S3 API with the bucket `bucket`, of whose calls a fraction fails. Return the options of its file
        system."""
        from s3fs import S3FileSystem

        address = f"http://127.0.0.1:{reserve_free_port()}"
        options: dict[str, Any] = {"endpoint_url": address, "key": "test", "secret": "test"}
        server = str(Path(sys.executable).with_name("moto_server"))
        self._start("s3", [server, "-H", "127.0.0.1", "-p", address.rpartition(":")[2]], address)
        S3FileSystem(**options).call_s3("create_bucket", Bucket="bucket")
        if faults:
            port_file = self.root / "faulty.port"
            command = [sys.executable, str(FAULTY), "--target", address, "--port-file", str(port_file)]
            self._start("faulty", [*command, "--rate", str(faults), "--hang-seconds", "3"], None)
            while not port_file.exists() or not port_file.read_text().strip():
                time.sleep(0.1)
            self._faulty = options["endpoint_url"] = f"http://127.0.0.1:{port_file.read_text().strip()}"
            options["config_kwargs"] = {"read_timeout": 2}
        return options

    def injected(self) -> dict[str, int]:
        """Return the number of injected faults by kind; `calls` is the number of all calls."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{self._faulty}/-/faults") as answer:
            return json.load(answer)

    def start_ray(self, dashboard_port: int | None = None, **environment: str) -> str:
        """Start a Ray cluster, with a dashboard if its port is given, and return the address of the cluster. Runs get
        its token through the environment."""
        self.environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": os.urandom(32).hex(),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        port = reserve_free_port()
        command = [*RAY, "start", "--head", "--block", "--node-ip-address", "127.0.0.1"]
        dashboard = ["--include-dashboard", "false"]
        if dashboard_port is not None:
            dashboard = ["--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)]
            # Jobs are started by the node's agent, whose default port any other Ray of this machine may have.
            dashboard += ["--dashboard-agent-listen-port", str(reserve_free_port())]
        command += ["--port", str(port), *dashboard, "--object-store-memory", str(200 << 20)]
        command += ["--temp-dir", str(Path("/tmp") / f"penstock-ray-{os.getpid()}"), "--num-cpus", "4"]
        self._start("ray", command, None, **environment)
        deadline = time.monotonic() + START_TIMEOUT
        while not any("raylet" in process.name() for process in self.family("ray")):
            assert time.monotonic() < deadline, (self.root / "ray.log").read_text()[-2000:]
            time.sleep(0.2)
        time.sleep(2)
        return f"127.0.0.1:{port}"

    def start_node(self, address: str) -> None:
        """Add a second node, on another loopback address and with GPU 1 if there is one, to the Ray cluster of
        `start_ray`; again after its death."""
        self.stop("node")
        command = [*RAY, "start", "--block", "--address", address]
        command += ["--node-ip-address", "127.0.0.2", "--object-store-memory", str(100 << 20), "--num-cpus", "4"]
        self._start("node", command, None, CUDA_VISIBLE_DEVICES="1")
        deadline = time.monotonic() + START_TIMEOUT
        while not self.raylets_of_node():
            assert self._services["node"].poll() is None, (self.root / "node.log").read_text()[-2000:]
            assert time.monotonic() < deadline, (self.root / "node.log").read_text()[-2000:]
            time.sleep(0.2)

    def raylets_of_node(self) -> list[psutil.Process]:
        """Return the raylet of the second node, in a list; empty if it does not run."""
        return [process for process in self.family("node") if "raylet" in name(process)]

    def family(self, name: str) -> list[psutil.Process]:
        """Return a service's process and its descendants."""
        return family(self._services[name].pid) if name in self._services else []

    def stop(self, name: str) -> None:
        """Kill a service."""
        if name in self._services:
            kill(self.family(name))
            self._services.pop(name).wait()

    def _start(self, name: str, command: list[str], ready: str | None, **environment: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self._services[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.environment, **environment},
                preexec_fn=die_with_parent,
            )
        deadline = time.monotonic() + START_TIMEOUT
        while ready and not answers(ready):
            assert self._services[name].poll() is None and time.monotonic() < deadline, f"{name} does not start"
            time.sleep(0.2)


class Pipeline:
    """A run of `penstock train` (or another `command`) that is killed and restarted until it finishes.

    Args:
        world: its services and data.
        run: its name.
        store: URI of the store.
        flags: of the run.
        options: of the store's file system.
        ray_address: of an existing Ray cluster.
    """

    def __init__(
        self,
        world: World,
        run: str,
        store: str,
        flags: Sequence[str],
        options: dict[str, Any] | None = None,
        ray_address: str | None = None,
    ) -> None:
        self.world = world
        self.keys = RunKeys(run)
        self.store = Store(store, options)
        self.faults = world.root / "faults"
        self.log = world.root / f"{run}.log"
        where = ["--store", store]
        if options:
            where += ["--store-options", *(f"{name}={json.dumps(value)}" for name, value in options.items())]
        self.place = [*where, *(["--ray-address", ray_address] if ray_address else [])]
        # tests/convert/test_logits.py compares logits; here it would be 3 s of processor time for every run
        self._flags = ["--run", run, "--check-logits", "false", *self.place, *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self.command = "train"
        self.num_starts = 0

    # ---- start and end -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start or resume the run, alternately by the same command and by `penstock resume`."""
        words = ["resume", self.keys.run, *self.place] if self.num_starts % 2 else [self.command, *self._flags]
        self.num_starts += 1
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.world.environment,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        """Return the process id of the driver."""
        assert self._process is not None
        return self._process.pid

    def returncode(self) -> int | None:
        """Return the exit code, or None while the driver runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self, timeout: float = END_TIMEOUT) -> int:
        """Wait for the end of the driver and return its exit code."""
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout:.0f} s:\n{self.tail()}") from None

    def tail(self, size: int = 4000) -> str:
        """Return the end of the output."""
        return self.log.read_text(errors="replace")[-size:]

    def run_until(self, reached: Callable[[], bool], timeout: float = REACH_TIMEOUT) -> bool:
        """Run until `reached()`, restarting the driver if needed. Return False if the run finished before."""
        deadline = time.monotonic() + timeout
        while not reached():
            if self._process is None or (self.returncode() or 0) != 0:
                assert self.num_starts < 60, f"too many restarts:\n{self.tail()}"
                self.start()
            if self.returncode() == 0:
                return reached()
            assert time.monotonic() < deadline, f"not reached within {timeout:.0f} s:\n{self.tail()}"
            time.sleep(0.01)
        return True

    # ---- faults ------------------------------------------------------------------------------------------------------

    def arm(self, point: str) -> None:
        """Make the next process that reaches `point` wait there."""
        (self.faults / point).touch()

    def is_at(self, point: str) -> bool:
        """Return whether a process waits at `point`."""
        return (self.faults / f"{point}.reached").exists()

    def release(self, point: str) -> None:
        """Release the process that waits at `point`."""
        (self.faults / f"{point}.reached").unlink()

    def strike(self, target: str, patience: float | None = None) -> int:
        """Kill the target's processes. Return their number, 0 if none appeared within `patience` seconds."""
        deadline = time.monotonic() + ((60 if target == "prefect" else 15) if patience is None else patience)
        while not (victims := self.victims(target)):  # being started
            if time.monotonic() > deadline:
                return 0
            time.sleep(0.1)
        everything = {process: command(process) for process in family(self.pid)}
        kill(victims)
        if target == "mlflow":
            self.world.start_mlflow()
        if target in ("driver", "tree", "driver, standing Ray"):
            self.wait(30)
        if target in ("driver", "tree"):
            # Ray's two agents retry for a minute to reach their dead server before they exit.
            waiting = [process for process, words in everything.items() if not words.startswith(RAY_AGENTS)]
            _, alive = psutil.wait_procs([process for process in waiting if process.pid != self.pid], timeout=30)
            assert not alive, f"outlived their killed driver: {[everything[process] for process in alive]}"
        return len(victims)

    def victims(self, target: str) -> list[psutil.Process]:  # noqa: C901, a row per target
        """Return the processes of a target."""
        ours, ray = family(self.pid), self.world.family("ray")

        def running(*words: str) -> list[psutil.Process]:
            return [process for process in ours + ray if any(word in command(process) for word in words)]

        match target:
            case "driver" | "driver, standing Ray":
                return ours[:1]
            case "tree":
                return ours
            case "engine":
                return running("engines/sglang/launch.py")
            case "teacher":  # the engine of --opd-teacher-engine
                return [process for process in running("engines/sglang/launch.py") if "/teacher " in command(process)]
            case "scheduler":  # the engine's process with the model
                return running("sglang::scheduler")
            case "trainer":  # conversion and export run in their own processes
                return running("ray::convert_hf", "ray::export_hf") or running("ray::TrainActor")
            case "ray":
                return [process for process in ours if name(process) in ("gcs_server", "raylet")]
            case "raylet" | "gcs":
                return [process for process in ours if name(process).startswith(target)]
            case "runtime-env-agent":
                return running("ray::RuntimeEnvAgent")
            case "prefect":
                return [process for process in ours if str(LAUNCHER) in command(process)]
            case "mlflow":
                return self.world.family("mlflow")
        raise AssertionError(f"unknown target {target!r}")

    # ---- checks ----------------------------------------------------------------------------------------------

    def commits(self) -> dict[str, bytes]:
        """Return all commit records of the run."""
        keys = [commit_key(prefix) for prefix in committed_prefixes(self.store, self.keys)]
        return {key: data for key in keys if (data := self.store.read(key)) is not None}

    def check(self) -> dict[str, int]:
        """Check that nothing was lost or done twice, by the audit. Return its counts."""
        result = audit_run(self.store, self.keys)
        assert not result.problems, "\n".join(result.problems)
        return {name: value for name, value in vars(result).items() if name.startswith("num_")}

    def check_consumption(self, max_staleness: int) -> None:
        """Check that every step trained the rollout of its number, every sample was trained once, and no trained token
        was more than `max_staleness` policy versions older than the policy that it trained."""
        trained: set[str] = set()
        for rollout_id in self.store.committed_indices(f"{self.keys.prefix}/steps"):
            step = self.store.committed(self.keys.step_prefix(rollout_id))
            rollout = self.store.committed(self.keys.rollout_prefix(rollout_id))
            assert step is not None and rollout is not None
            assert step.inputs == {"rollout": commit_key(self.keys.rollout_prefix(rollout_id))}
            for sample in read_samples(self.store, rollout):
                assert sample.sample_id not in trained, f"{sample.sample_id} was trained twice"
                trained.add(sample.sample_id)
                for version, num_tokens in policy_spans(sample):
                    age = rollout_id - version
                    assert 0 <= age <= max_staleness, f"{num_tokens} tokens of {sample.sample_id} have age {age}"

    def replay(self) -> int:
        """Check that a replay of the commits gives the same weights, bit for bit. Return the number of rounds."""
        report = self.world.root / f"{self.keys.run}-replay.json"
        penstock("replay", self.keys.run, *self.place, "--json", str(report), env=self.world.environment)
        replayed = json.loads(report.read_text())
        for rollout_id, round in replayed.items():
            commit = self.store.committed(self.keys.step_prefix(int(rollout_id)))
            assert commit is not None and commit.state["digest"] == round["digest"], f"round {rollout_id} differs"
            assert round["verdict"] == "equal bit for bit", f"round {rollout_id}: {round['verdict']}"
        return len(replayed)


def points_of(mode: str) -> tuple[str, ...]:
    """Return the points of a run in a mode of `MODES`: `POINTS`, and those that only this mode has."""
    own = {"publish-after": ("publish-in-flight", "stream-round-taken")} if mode == "streaming" else {}
    return tuple(name for point in POINTS for name in (point, *own.get(point, ())))


def tiny_flags(world: World, rounds: int = ROUNDS, mode: str = "synchronous") -> list[str]:
    """Return the flags of a run of a few rounds of one second, with everything that can be killed."""
    text = f"""
        --hf-checkpoint {world.model} --prompt-data {world.train_data} --input-key prompt --label-key label
        --apply-chat-template --rollout-shuffle --rm-type random --num-rollout {rounds} --save-interval 1
        --keep-checkpoints 2 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 24
        --rollout-sampling ignore_eos=true {MODES[mode][0]}
        --num-steps-per-rollout 2 --lr 1e-3 --lr-warmup-iters 3 --use-kl-loss --kl-loss-coef 0.01
        --max-tokens-per-gpu 1024 --eval-prompt-data tiny {world.eval_data} --eval-interval 3 --trainer-threads 1
        --rollout-journal-interval 0.2
    """
    return text.split()


# ---- processes -------------------------------------------------------------------------------------------------------


def family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; empty if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def command(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def name(process: psutil.Process) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait for the end of those that are not our children (Popen must collect their exit codes)."""
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue  # it ended with another process
    children = {child.pid for child in psutil.Process().children()}
    psutil.wait_procs([process for process in processes if process.pid not in children], timeout=30)


def answers(address: str) -> bool:
    """Return whether a server answers at an address, with any status."""
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, OSError):
        return False
    return True


def die_with_parent() -> None:
    """Make a child process end with the harness."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
