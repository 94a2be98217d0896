"""`penstock deploy` and scheduled runs with a real server, a real worker and real flow runs (SFT: no engine).

The tests of access control use the same `penstock up`.
"""

import base64
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from chromium import browser, installed_browser
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId, FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.sorting import FlowRunSort
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import StateType

from penstock.flows.runtime import prefect_api
from penstock.flows.runtime.prefect_api import LAUNCHER
from penstock.flows.runtime.retries import NO_RETRY
from penstock.flows.services import deploy
from penstock.storage.commit import RunKeys
from penstock.storage.errors import OptionError
from penstock.storage.failpoints import VARIABLE
from penstock.storage.history.run_record import read_starts
from penstock.storage.maintenance.audit import audit_run
from penstock.storage.store import Store

ROOT = Path(__file__).parents[2]
KEYS = RunKeys("n")
STORE_KEY = "the-key-of-the-store-of-a-test"
HANGS = 600.0  # seconds after which a condition is never met, on any machine

pytestmark = pytest.mark.timeout(3600)
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.mark.parametrize(
    ("state", "message", "is_covered"),
    [
        ("Running", "", True),  # the trigger waits for it first
        ("Failed", "EngineError: engine 1 died", True),
        ("Failed", f"rounds 1 to 2; --lr is\nmissing {NO_RETRY}; the next start resumes after 2 rounds", False),
    ],
)
def test_retry_automation_excludes_failures_that_are_not_retried(
    state: str, message: str, is_covered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent

    made: list[Any] = []
    monkeypatch.setattr(deploy, "replace_automation", lambda name, automation: made.append(automation))
    deployment = uuid.uuid4()
    deploy.set_retry_automation("sft/n", deployment, 2)
    trigger = EventTrigger.model_validate(made[0].trigger.model_dump())
    labels = {"prefect.resource.id": f"prefect.flow-run.{uuid.uuid4()}", "prefect.state-message": message}
    related = {"prefect.resource.id": f"prefect.deployment.{deployment}", "prefect.resource.role": "deployment"}
    event = ReceivedEvent(
        id=uuid.uuid4(),
        occurred=datetime.now(UTC),
        event=f"prefect.flow-run.{state}",
        resource=labels,
        related=[related],
    )
    assert trigger.covers(event) == is_covered
    assert trigger.expects(event.event) == (state != "Running")


# ---- a server, a worker and a deployment -----------------------------------------------------------------------------


def prefect_environment(home: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PREFECT_HOME": str(home / "prefect"), "XDG_STATE_HOME": str(home / "state"), **more}


def until(what: Callable[[], Any], log: Path) -> Any:
    deadline = time.monotonic() + HANGS
    while not (found := what()):
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.2)
    return found


class Up(NamedTuple):
    """A running `penstock up`."""

    api: str  # of its Prefect server
    process: psutil.Process
    log: Path

    def child(self, part: str) -> psutil.Process:
        """Return the child process that has `part` in its command line."""
        return next(child for child in self.process.children() if part in child.cmdline())


@pytest.fixture(scope="module")
def up(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`penstock up`. At the end it is killed, and nothing outlives it."""
    home = tmp_path_factory.mktemp("up")
    shutil.copytree(prefect_home, home / "prefect")
    command = [sys.executable, "-m", "penstock", "up", "--store", str(home / "store")]
    command += ["--prefect-port", "0", "--mlflow-port", "0"]
    log = home / "out"
    # also of the flow runs, which work in the folder of the deployment
    environment = prefect_environment(home, PYTHONPATH=str(ROOT), STORE_KEY_OF_A_TEST=STORE_KEY)
    environment[VARIABLE] = str(home / "faults")
    (home / "faults").mkdir()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    try:
        until(lambda: "`penstock down`" in log.read_text() or process.poll() is not None, log)
        text = log.read_text()
        assert process.poll() is None, text
        for link in re.findall(r"http://\S+", text)[:2]:
            assert b"<html" in OPENER.open(link.split("#")[0], timeout=30).read().lower()
        yield Up(re.findall(r"Prefect +(http://[^/]+)", text)[0] + "/api", psutil.Process(process.pid), log)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        assert not psutil.wait_procs(family, timeout=60)[1]
    finally:
        process.kill()


def profile_of(log: Path) -> Path:
    """The profile that `penstock up` has printed."""
    return Path(re.findall(r"PREFECT_PROFILES_PATH=(\S+) PREFECT_PROFILE=penstock", log.read_text())[0])


def mlflow_of(log: Path) -> tuple[str, dict[str, str]]:
    """The URL of the MLflow that `penstock up` has started, and the header with its login."""
    text = log.read_text()
    login = Path(re.findall(r"USER:PASSWORD in (\S+)", text)[0]).read_bytes()
    return re.findall(r"MLflow +(http://[^/]+)", text)[0], {
        "Authorization": f"Basic {base64.b64encode(login).decode()}"
    }


@pytest.fixture(scope="module")
def login(up: Up) -> str:
    return tomllib.loads(profile_of(up.log).read_text())["profiles"]["penstock"]["PREFECT_API_AUTH_STRING"]


@pytest.fixture(scope="module")
def client(up: Up, login: str) -> Iterator[SyncPrefectClient]:
    with (
        temporary_settings({PREFECT_API_URL: up.api, PREFECT_API_AUTH_STRING: login}),
        get_client(sync_client=True) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def deployed(up: Up, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """`penstock deploy sft --name nightly ...`, from a folder that is not the checkout; paths are relative to it."""
    folder = tmp_path_factory.mktemp("work")
    add_rows(folder / "data.jsonl", 0, 48)
    words = (
        f"sft --name nightly --timezone Europe/Berlin --run {KEYS.run} --store store --num-rollout-per-start 2 "
        f"--save-interval 2 --hf-checkpoint {tiny_model} --prompt-data data.jsonl --input-key messages "
        "--rollout-batch-size 16 --n-samples-per-prompt 1 --loss-type sft_loss --lr 1e-3 --stage-retries 0 "
        "--store-options key=env:STORE_KEY_OF_A_TEST"
    ).split()
    words += ["--cron", "0 2 * * *"]
    out = penstock_deploy(up.log, folder, words)
    assert up.api in out and "Run it now:  prefect deployment run 'sft/nightly' --watch" in out
    return "sft/nightly", folder


def penstock_deploy(log: Path, folder: Path, words: list[str]) -> str:
    """Run `penstock deploy` in a folder, on the server whose `penstock up` writes to `log`. Return its output."""
    command = [sys.executable, "-m", "penstock", "deploy", *words]
    profile = {"PREFECT_PROFILES_PATH": str(profile_of(log)), "PREFECT_PROFILE": "penstock"}
    environment = prefect_environment(folder, **profile, PYTHONPATH=str(ROOT), STORE_KEY_OF_A_TEST=STORE_KEY)
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def add_rows(path: Path, start: int, stop: int) -> None:
    with path.open("a", encoding="utf-8") as out:
        for i in range(start, stop):
            chat = [{"role": "user", "content": f"{i}+1="}, {"role": "assistant", "content": str(i + 1)}]
            out.write(json.dumps({"messages": chat}) + "\n")


def fire(client: SyncPrefectClient, title: str) -> Any:
    return client.create_flow_run_from_deployment(client.read_deployment_by_name(title).id)


def state(client: SyncPrefectClient, flow_run: Any) -> str:
    """Its kind; the name of a final state is a result."""
    return client.read_flow_run(flow_run.id).state_type.value.capitalize()


# ---- who may talk to it ----------------------------------------------------------------------------------------------


def status(url: str, body: dict | None = None, **headers: str) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with OPENER.open(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.integration
def test_prefect_refuses_foreign_hosts_origins_and_callers_without_login(up: Up, login: str) -> None:
    api, _, log = up
    root, port = api.removesuffix("/api"), api.split(":")[2].removesuffix("/api")
    basic = {"Authorization": "Basic " + base64.b64encode(login.encode()).decode()}
    runs = f"{api}/flow_runs/filter"

    assert status(runs, {}, **basic) == 200
    assert status(runs, {}, Origin=root, **basic) == 200
    assert status(runs, {}, Host=f"localhost:{port}", **basic) == 200
    assert status(runs, {}) == 401
    assert status(runs, {}, Authorization="Basic " + base64.b64encode(b"penstock:guess").decode()) == 401
    for foreign in ("http://example.com", "null", f"http://localhost:{int(port) + 1}", f"https://127.0.0.1:{port}"):
        assert status(runs, {}, Origin=foreign, **basic) == 403, foreign
    hosts = ("example.com", f"example.com:{port}", f"127.0.0.1.example.com:{port}", "127.0.0.1@example.com", "[::1", "")
    for foreign in hosts:
        assert status(runs, {}, Host=foreign, **basic) in (400, 403), foreign
        assert status(root, Host=foreign) in (400, 403), foreign
    assert stat.S_IMODE(profile_of(log).stat().st_mode) == 0o600
    assert login not in log.read_text()
    assert not any(login in " ".join(process.cmdline()) for process in up.process.children(recursive=True))


@pytest.mark.integration
def test_events_are_refused_without_login(up: Up, login: str) -> None:
    from websockets.exceptions import InvalidStatus, WebSocketException
    from websockets.sync.client import connect

    def greeted(token: str, origin: str | None = None) -> bool:
        address = up.api.replace("http", "ws") + "/events/in"
        with connect(address, subprotocols=["prefect"], origin=origin, proxy=None) as socket:  # type: ignore[list-item, arg-type]
            socket.send(json.dumps({"type": "auth", "token": token}))
            return json.loads(socket.recv(timeout=30))["type"] == "auth_success"

    assert greeted(login)
    with pytest.raises(WebSocketException):
        greeted("penstock:guess")
    with pytest.raises(InvalidStatus):
        greeted(login, "http://example.com")


@pytest.mark.integration
def test_mlflow_refuses_foreign_hosts_and_changes_from_foreign_pages(up: Up) -> None:
    root, basic = mlflow_of(up.log)
    assert f"  export MLFLOW_TRACKING_URI={root}\n" in up.log.read_text()
    create, name = f"{root}/api/2.0/mlflow/experiments/create", {"name": "made by a test"}
    assert status(create, name, Origin="http://example.com", **basic) == 403
    assert status(create, name, Host="example.com", **basic) == 403
    assert status(root, Host="example.com", **basic) == 403
    assert status(create, name, Origin=root) == 401
    assert status(create, name, Origin=root, **basic) == 200
    made = f"{root}/api/2.0/mlflow/experiments/get-by-name?experiment_name=made%20by%20a%20test"
    with OPENER.open(urllib.request.Request(made, headers=basic), timeout=30) as answer:
        location = json.load(answer)["experiment"]["artifact_location"]
    assert location.startswith("file:///"), "runs that write to the database itself can use it"


@pytest.mark.integration
@pytest.mark.full
def test_printed_export_line_logs_the_prefect_command_in(
    up: Up, deployed: tuple[str, Path], client: SyncPrefectClient
) -> None:
    [line] = re.findall(r"^ +(export PREFECT_PROFILES_PATH=.*)$", up.log.read_text(), re.MULTILINE)
    prefect = f"{shlex.quote(sys.executable)} -m prefect"
    command = f"{prefect} deployment run train/default -p config='{{}}' --start-in '10 years'"
    assert deploy.deploy_all(up.api) == 0

    def in_shell(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = prefect_environment(deployed[1], **environment)
        command = ["bash", "-c", script]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)

    refused = in_shell(command, PREFECT_API_URL=up.api)
    assert refused.returncode != 0 and "401" in refused.stdout + refused.stderr
    accepted = in_shell(f"{line} && {command}")
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    [run] = [run for run in client.read_flow_runs() if run.name in accepted.stdout]
    assert run.state_name == "Scheduled"
    client.delete_flow_run(run.id)


@pytest.mark.integration
def test_penstock_without_the_login_is_refused(up: Up) -> None:
    wrong = {PREFECT_API_URL: up.api, PREFECT_API_AUTH_STRING: "penstock:guess"}
    with temporary_settings(wrong), pytest.raises(OptionError, match="PREFECT_PROFILES_PATH"):
        prefect_api.ensure_prefect_api.__wrapped__()


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.skipif(installed_browser() is None, reason="no chromium or google-chrome on this machine")
def test_the_prefect_page_asks_for_the_password_and_works_with_it(up: Up, login: str, tmp_path: Path) -> None:
    root = up.api.removesuffix("/api")
    with browser() as page:
        page.open(f"{root}/runs")
        page.wait_for("document.querySelector('input[type=password]') !== null")
        page.type_into("input[type=password]", login)
        page.press_enter()
        page.wait_for(
            "localStorage.getItem('prefect-password') !== null && !document.querySelector('input[type=password]')"
        )
        page.wait_for("document.body.innerText.includes('Flow Runs') || document.body.innerText.includes('Runs')")
        headers = "{Authorization: 'Basic ' + localStorage.getItem('prefect-password')}"
        answer = f"fetch('{up.api}/flow_runs/count', {{method: 'POST', headers: {headers}}})"
        assert page.evaluate(f"{answer}.then(answer => answer.status)") == 200
        # Another page of the same browser sends no header, and the body is not shown to it.
        page.open("data:text/html,<title>elsewhere</title>")
        post = f"fetch('{up.api}/flow_runs/filter', {{method: 'POST', body: '{{}}'}})"
        assert page.evaluate(f"{post}.then(answer => 'read ' + answer.status, () => 'refused')") == "refused"


@pytest.mark.integration
def test_deployment_has_pool_limit_parameters_and_schedule(
    client: SyncPrefectClient, deployed: tuple[str, Path]
) -> None:
    made = client.read_deployment_by_name(deployed[0])
    assert made.work_pool_name == "penstock" and made.enforce_parameter_schema
    assert made.global_concurrency_limit is not None and made.global_concurrency_limit.limit == 1
    assert made.parameters["config"]["run"]["store_options"] == {"key": "env:STORE_KEY_OF_A_TEST"}
    [schedule] = made.schedules
    assert (schedule.active, schedule.schedule.cron, schedule.schedule.timezone) == (True, "0 2 * * *", "Europe/Berlin")
    automations = client.read_automations_by_name(deploy.AUTOMATION)
    assert len(automations) == 1, "made twice"  # by `penstock up` and by `penstock deploy`


@pytest.mark.integration
def test_deploy_all_keeps_an_existing_scheduled_deployment(
    client: SyncPrefectClient,
    deployed: tuple[str, Path],
    up: Up,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(up.log.parent / "prefect"))
    assert deploy.deploy_all(up.api) == 0  # the login is in this process's settings, by `client`
    flows = ("train", "sft", "convert", "evaluate", "replay")
    assert all(client.read_deployment_by_name(f"{flow}/default").enforce_parameter_schema for flow in flows)
    [template] = client.read_deployment_by_name("train/nightly").schedules
    assert not template.active
    assert client.read_deployment_by_name(deployed[0]).schedules[0].active
    assert deploy.deployment_exists("train/nightly") and not deploy.deployment_exists("train/weekly")


@pytest.mark.integration
@pytest.mark.parametrize(
    "config",
    [
        {"train": {"lr": "much"}},
        {"run": {"num_rollouts": 3}},
        {"run": {"num_rollout": -1}},
    ],
)
def test_bad_parameters_are_refused_at_submission(
    client: SyncPrefectClient, deployed: tuple[str, Path], config: dict
) -> None:
    made = client.read_deployment_by_name(deployed[0])
    with pytest.raises(Exception, match=r"(?s)409|422"):
        client.create_flow_run_from_deployment(made.id, parameters={"config": config})


@pytest.mark.integration
def test_scheduled_run_resumes_after_kill_with_new_rows_and_survives_server_death(
    client: SyncPrefectClient, deployed: tuple[str, Path], up: Up
) -> None:
    title, folder = deployed
    log = up.log
    store = Store(str(folder / "store"))

    def has(prefix: str) -> bool:
        return store.exists(f"{prefix}.commit.json")

    # first firing: its process is killed after the first of two rounds; the worker marks it
    killed = fire(client, title)
    until(lambda: has(KEYS.step_prefix(0)), log)
    for process in up.child("worker").children(recursive=True):
        process.kill()
    assert until(lambda: (name := state(client, killed)) not in ("Running", "Pending") and name, log) == "Crashed"

    # second firing: the same target, and the server dies meanwhile
    second = fire(client, title)
    until(lambda: state(client, second) == "Running", log)
    up.child(str(LAUNCHER)).kill()
    until(lambda: has(KEYS.export_prefix(2)), log)
    until(lambda: "Prefect died; restarted it" in log.read_text(), log)
    until(lambda: state(client, second) == "Completed", log)
    assert [has(KEYS.step_prefix(r)) for r in range(3)] == [True, True, False]

    # third firing: two rounds more, on rows that were appended meanwhile
    add_rows(folder / "data.jsonl", 48, 64)
    third = fire(client, title)
    until(lambda: state(client, third) == "Completed", log)
    assert [has(KEYS.step_prefix(r)) for r in range(5)] == [True, True, True, True, False]
    source = store.committed(KEYS.rollout_prefix(3)).state["data_source"]  # type: ignore[union-attr]
    assert (source["issued"], source["epoch"], source["cursor"]) == (64, 0, 64)
    assert [(segment["start"], segment["rows"]) for segment in source["segments"]] == [(0, 48), (48, 16)]
    assert statuses_in_mlflow(log) == ["FINISHED"], "the run of another store is shown"
    written = [path for root in (folder, log.parent) for path in root.rglob("*") if path.is_file()]
    assert len(written) > 20
    assert not [path for path in written if STORE_KEY.encode() in path.read_bytes()], "a secret was recorded"
    assert len(store.list(f"{KEYS.prefix}/changes")) == 1, "the killed start added none"


def all_flow_runs_of(client: SyncPrefectClient, title: str) -> list[Any]:
    """The flow runs of a deployment, the oldest first."""
    deployment = DeploymentFilter(id=DeploymentFilterId(any_=[client.read_deployment_by_name(title).id]))
    return client.read_flow_runs(deployment_filter=deployment, sort=FlowRunSort.EXPECTED_START_TIME_ASC)


def flow_runs_of(client: SyncPrefectClient, title: str) -> list[Any]:
    """The flow runs of a deployment that have started, the oldest first."""
    return [run for run in all_flow_runs_of(client, title) if run.start_time is not None]


def states_of(client: SyncPrefectClient, title: str) -> list[str]:
    return [run.state_name for run in flow_runs_of(client, title)]


def kill_flow_run_at(point: str, up: Up, *, with_worker: bool = False) -> None:
    """Kill the process of the flow run, as `kill -9` does, when a failpoint is reached."""
    faults, worker = up.log.parent / "faults", up.child("worker")
    (faults / point).touch()
    until((faults / f"{point}.reached").exists, up.log)
    flow_run = max(worker.children(), key=psutil.Process.create_time)  # an earlier flow run may still be ending
    processes = [worker, flow_run] if with_worker else [flow_run]
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=60)
    (faults / f"{point}.reached").unlink()


SILENCE = timedelta(seconds=45)  # more than one heartbeat of a flow run, which Prefect sends every 30 s


def notice_silence_soon(up: Up) -> None:
    """Mark flow runs as crashed that have been silent for SILENCE, instead of three minutes."""
    deploy.ensure_zombie_automation(up.api, after=SILENCE, name="soon, for tests of pauses")


@pytest.mark.integration
@pytest.mark.full
def test_flow_run_that_is_killed_alone_and_with_its_worker_is_run_again(
    client: SyncPrefectClient, up: Up, tiny_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "label": str(i + 1)} for i in range(16)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"train --name killed --retries 3 --run k --store store --num-rollout 3 --save-interval 1 --rm-type random "
        f"--hf-checkpoint {tiny_model} --prompt-data data.jsonl --input-key prompt --label-key label "
        "--apply-chat-template --rollout-batch-size 4 --n-samples-per-prompt 2 --rollout-max-response-len 8 --lr 1e-3 "
        "--eval-prompt-data tiny data.jsonl --eval-interval 2 --skip-eval-before-train --eval-max-response-len 8"
    ).split()
    penstock_deploy(up.log, tmp_path, words)
    parameters = client.read_deployment_by_name("train/killed").parameters
    assert len([*list_leaves(parameters)]) == 18, "what was given, not all options"
    notice_silence_soon(up)
    fire(client, "train/killed")
    kill_flow_run_at("rollout-after-upload", up, with_worker=True)
    kill_flow_run_at("eval-generating", up)
    until(lambda: states_of(client, "train/killed")[2:] == ["Completed"], up.log)

    runs = flow_runs_of(client, "train/killed")
    assert [run.state_name for run in runs] == ["Crashed", "Crashed", "Completed"]
    assert re.fullmatch(r"k #3, reward [\d.]+", runs[2].name)
    tags = [[tag for tag in run.tags if tag.startswith("retry:")] for run in runs]
    assert tags == [[], ["retry:1/3"], ["retry:2/3"]]
    assert "no heartbeat" in runs[0].state.message
    assert "next start resumes after 2 rounds" in runs[1].state.message
    [page] = [a for a in client.read_artifacts() if a.key == "run-k" and str(a.flow_run_id) == str(runs[2].id)]
    assert page.description.startswith("retry 2 of 3, round 2, reward ")
    store, keys = Store(str(tmp_path / "store")), RunKeys("k")
    assert audit_run(store, keys).problems == []
    trained: Counter[str] = Counter()
    for run in runs:
        flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
        for task_run in client.read_task_runs(flow_run_filter=flow_run):
            is_new = not (task_run.state.message or "").startswith("committed before")
            if task_run.name.startswith("train-") and task_run.state_type == StateType.COMPLETED and is_new:
                trained[task_run.name] += 1
    assert trained == {f"train-{r:06d}": 1 for r in range(3)}, "no round was trained twice"


def list_leaves(values: Any) -> Iterator[Any]:
    for value in values.values():
        yield from list_leaves(value) if isinstance(value, dict) else [value]


def sft_words(model: Path, own: str) -> list[str]:
    """The words after `penstock deploy` for a small SFT run with the options `own`."""
    data = "--prompt-data data.jsonl --input-key messages --rollout-batch-size 8 --n-samples-per-prompt 1 --lr 1e-3"
    return f"sft {own} --store store --hf-checkpoint {model} {data}".split()


@pytest.mark.integration
def test_same_kill_twice_and_invalid_input_end_the_retries(
    client: SyncPrefectClient, up: Up, tiny_model: Path, tmp_path: Path
) -> None:
    add_rows(tmp_path / "data.jsonl", 0, 16)
    words = sft_words(tiny_model, "--name stuck --retries 5 --run s --num-rollout 2")
    penstock_deploy(up.log, tmp_path, words)
    fire(client, "sft/stuck")
    kill_flow_run_at("train-mid-step", up)
    kill_flow_run_at("train-mid-step", up)
    until(lambda: states_of(client, "sft/stuck")[2:] == ["Failed"], up.log)
    message = flow_runs_of(client, "sft/stuck")[2].state.message
    assert "(killed) without a new commit" in message and NO_RETRY in message

    (tmp_path / "data.jsonl").unlink()
    fire(client, "sft/stuck")
    until(lambda: states_of(client, "sft/stuck")[3:] == ["Failed"], up.log)
    message = flow_runs_of(client, "sft/stuck")[3].state.message
    assert "data.jsonl" in message and NO_RETRY in message
    time.sleep(deploy.RETRY_DELAY.total_seconds())  # a retry would be scheduled by now, although it was not started
    assert len(all_flow_runs_of(client, "sft/stuck")) == 4
    [automation] = client.read_automations_by_name("penstock: sft/stuck is run again after a crash")
    add_rows(tmp_path / "data.jsonl", 0, 16)
    penstock_deploy(up.log, tmp_path, words[:3] + words[5:])
    assert client.read_automations_by_name(automation.name) == []


@pytest.mark.integration
@pytest.mark.full
@pytest.mark.parametrize("pauses_server", [False, True])
def test_paused_flow_run_continues_and_its_retry_adds_no_rounds(
    client: SyncPrefectClient, up: Up, tiny_model: Path, tmp_path: Path, pauses_server: bool
) -> None:
    name = f"paused-{pauses_server}"
    title, faults = f"sft/{name}", up.log.parent / "faults"
    notice_silence_soon(up)
    add_rows(tmp_path / "data.jsonl", 0, 32)
    words = sft_words(tiny_model, f"--name {name} --retries 2 --run {name} --num-rollout-per-start 2")
    penstock_deploy(up.log, tmp_path, words)
    fire(client, title)
    (faults / "train-mid-step").touch()
    until((faults / "train-mid-step.reached").exists, up.log)
    worker = up.child("worker")
    paused = [up.process, up.child(str(LAUNCHER))] if pauses_server else []
    paused += [worker, *worker.children(recursive=True)]
    for process in paused:
        process.suspend()
    (faults / "train-mid-step.reached").unlink()  # it continues there
    if pauses_server:
        time.sleep(SILENCE.total_seconds() + 5)
    else:
        until(lambda: states_of(client, title)[0] == "Crashed", up.log)
    for process in paused:
        process.resume()
    # a retry is scheduled only if the page called the silent flow run crashed, which a paused server may not do
    least = 1 if pauses_server else 2
    until(lambda: states_of(client, title).count("Completed") >= least, up.log)
    store, keys = Store(str(tmp_path / "store")), RunKeys(name)
    until(lambda: read_starts(store, keys)[-1][1], up.log)
    assert states_of(client, title)[-1] == "Completed"
    assert store.committed_indices(f"{keys.prefix}/steps") == [0, 1] and audit_run(store, keys).problems == []
    [(_, end)] = read_starts(store, keys)
    assert end is not None and end.outcome == "FINISHED", "only the paused process has driven the run"
    if not pauses_server:
        _, retry = flow_runs_of(client, title)
        assert "continued after a pause" in retry.state.message


def statuses_in_mlflow(log: Path) -> list[str]:
    """The status of the scheduled run in the MLflow that `penstock up` shows."""
    root, basic = mlflow_of(log)

    def ask(path: str, body: dict | None = None) -> Any:
        data, headers = body and json.dumps(body).encode(), {"Content-Type": "application/json", **basic}
        with OPENER.open(urllib.request.Request(f"{root}/api/2.0/mlflow/{path}", data, headers), timeout=30) as answer:
            return json.load(answer)

    experiment = ask("experiments/get-by-name?experiment_name=penstock")["experiment"]["experiment_id"]
    query = {"experiment_ids": [experiment], "filter": f"attributes.run_name = '{KEYS.run}'"}
    return [run["info"]["status"] for run in ask("runs/search", query)["runs"]]
