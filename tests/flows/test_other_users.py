"""MLflow of `penstock up` refuses other users of the machine, who do not have the login. Even with a stolen login, it
neither reads nor writes the owner's other files."""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from penstock.flows.runtime.child_process import choose_port
from penstock.flows.services.stack import mlflow_server
from penstock.storage.web.login import login_path, read_login

pytestmark = pytest.mark.integration
API = "/api/2.0/mlflow"
SECRET = "the owner's Prefect login"
OPENER = build_opener(ProxyHandler({}))


class Served(NamedTuple):
    """A running MLflow server of this user."""

    url: str
    port: int
    artifacts: Path
    owner: Path  # a private directory of this user, with the file `login`


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("owner")
    owner = home / "private"
    owner.mkdir(mode=0o700)
    (owner / "login").write_text(SECRET)
    (owner / "login").chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home / "state"))
        port = choose_port("mlflow", 0, 0)
        (home / "store" / "mlflow").mkdir(parents=True)
        server = mlflow_server(port, f"sqlite:///{home}/store/mlflow/mlflow.db", home / "logs")
        server.start()
        try:
            server.wait_ready()
            yield Served(f"http://127.0.0.1:{port}", port, home / "store" / "mlflow" / "artifacts", owner)
        finally:
            server.stop()


def call(
    served: Served, path: str, body: Any = None, method: str | None = None, login: bool = False, **headers: str
) -> tuple[int, str]:
    """The status and the body of the answer. A redirect is not followed."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    kind = {"Content-Type": "text/plain" if isinstance(body, bytes) else "application/json", **headers}
    if login:
        name = read_login(served.url)
        assert name is not None
        kind["Authorization"] = "Basic " + base64.b64encode(name.encode()).decode()
    try:
        with OPENER.open(Request(served.url + path, data, kind, method=method), timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except HTTPError as error:
        return error.code, error.read().decode(errors="replace")


PATHS = (
    ("GET", "/get-artifact?run_id=1&path=login", None),
    ("POST", "/ajax-api/2.0/mlflow/upload-artifact?run_uuid=1&path=a", b"x"),
    ("GET", "/ajax-api/3.0/mlflow/get-trace-artifact?request_id=tr-1", None),
    ("PUT", "/api/2.0/mlflow-artifacts/artifacts/a/b", b"x"),
    ("DELETE", "/api/2.0/mlflow-artifacts/artifacts/penstock", None),
    ("POST", f"{API}/experiments/create", {"name": "a", "artifact_location": "/etc"}),
    ("POST", "/graphql", {"query": "{ mlflowSearchRuns(input: {}) { runs { info { runId } } } }"}),
    ("POST", "/v1/traces", b"x"),
    ("POST", "/api/3.0/mlflow/gateway/secrets/create", {}),
    ("POST", "/ajax-api/3.0/mlflow/assistant/message", {"message": "run `id`"}),
    ("GET", "//get-artifact?run_id=1&path=login", None),
    ("GET", "/health/../get-artifact?run_id=1&path=login", None),
    ("GET", "/%68ealth/x", None),
    ("GET", "/static-files/index.html", None),
)


def test_another_user_cannot_read_the_login(served: Served) -> None:
    assert stat.S_IMODE(login_path(served.port).stat().st_mode) == 0o600


@pytest.mark.parametrize("method, path, body", PATHS, ids=[f"{method} {path}" for method, path, _ in PATHS])
def test_no_route_answers_without_the_login(served: Served, method: str, path: str, body: Any) -> None:
    assert call(served, path, body, method) == (401, "login needed\n")
    for wrong in ("Basic cGVuc3RvY2s6Z3Vlc3M=", "Basic", "Bearer x", "Basic \u00e4"):
        assert call(served, path, body, method, Authorization=wrong)[0] == 401
    assert call(served, path, body, method, Cookie=f"penstock-{served.port}=guess")[0] == 401
    assert call(served, path, body, method, Host="example.com")[0] == 403
    assert call(served, path, body, method, login=True, Origin="http://127.0.0.1:1")[0] == 403


def create_experiment(served: Served, location: str) -> str:
    """A new run in an experiment of that location; "" if one of both is refused."""
    body = {"name": f"at {location}", "artifact_location": location}
    status, text = call(served, f"{API}/experiments/create", body, login=True)
    if status != 200:
        return ""
    experiment = json.loads(text)["experiment_id"]
    status, text = call(served, f"{API}/runs/create", {"experiment_id": experiment}, login=True)
    return json.loads(text)["run"]["info"]["run_id"] if status == 200 else ""


LOCATIONS = (
    "{owner}", "file://localhost{owner}", "file:{owner}", "{artifacts}/../../../private",
    "file://{artifacts}/x/%2e%2e/%2e%2e/%2e%2e/%2e%2e/private", "{artifacts}-beside", "{artifacts}/link",
    "http://127.0.0.1:9/x", "mlflow-artifacts://127.0.0.1:9/x", "s3://bucket/x", "dbfs:/x",
)  # fmt: skip


@pytest.fixture
def link(served: Served) -> None:
    """A symbolic link `link` among the artifacts, which leads to the private directory."""
    served.artifacts.mkdir(exist_ok=True)
    if not (served.artifacts / "link").is_symlink():
        (served.artifacts / "link").symlink_to(served.owner)


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("location", LOCATIONS)
def test_with_the_login_artifacts_outside_of_the_store_are_neither_read_nor_written(
    served: Served, location: str
) -> None:
    place = location.format(owner=served.owner, artifacts=served.artifacts)
    before = sorted(served.owner.rglob("*"))
    if run := create_experiment(served, place):
        named = urlencode({"run_uuid": run, "run_id": run, "path": "planted"})
        status, _ = call(served, f"/ajax-api/2.0/mlflow/upload-artifact?{named}", b"planted", login=True)
        assert status >= 400
        status, text = call(served, f"/get-artifact?{named}", login=True)
        assert status >= 400 and "planted" not in text
        status, text = call(served, f"{API}/artifacts/list?run_id={run}", login=True)
        assert status >= 400
    assert sorted(served.owner.rglob("*")) == before
    assert not list(served.artifacts.parent.glob("artifacts-beside"))


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize(
    "path",
    [
        "link/login", "../../../private/login", "..%2f..%2f..%2fprivate%2flogin", "{owner}/login", "%2f{owner}/login",
        "file:{owner}/login", "..%252f..%252fprivate/login",
    ],
)  # fmt: skip
def test_with_the_login_a_path_of_an_artifact_does_not_leave_the_store(served: Served, path: str) -> None:
    path = path.format(owner=served.owner)
    for prefix in ("/api/2.0", "/ajax-api/2.0"):
        place = f"{prefix}/mlflow-artifacts/artifacts/{path}"
        assert SECRET not in call(served, place, login=True)[1]
        call(served, place, b"overwritten", "PUT", login=True)
        call(served, place, None, "DELETE", login=True)
    run = create_experiment(served, (served.artifacts / quote(path, safe="")).as_uri())
    for named in (urlencode({"run_id": run, "path": path}), f"run_id={run}&path={path}"):
        assert SECRET not in call(served, f"/get-artifact?{named}", login=True)[1]
    assert (served.owner / "login").read_text() == SECRET


def test_with_the_login_an_artifact_of_the_store_is_written_and_read(served: Served) -> None:
    run = create_experiment(served, (served.artifacts / "penstock").as_uri())
    named = urlencode({"run_uuid": run, "run_id": run, "path": "sub/note.txt"})
    assert call(served, f"/ajax-api/2.0/mlflow/upload-artifact?{named}", b"mine", login=True)[0] == 200
    assert call(served, f"/get-artifact?{named}", login=True) == (200, "mine")
    assert (served.artifacts / "penstock" / run / "artifacts" / "sub" / "note.txt").read_text() == "mine"


def test_mlflows_assistant_which_runs_commands_is_not_served(served: Served) -> None:
    for path in ("message", "config", "sessions/1/stream", "providers"):
        assert call(served, f"/ajax-api/3.0/mlflow/assistant/{path}", login=True)[0] == 404


def test_a_client_of_the_same_user_logs_in_by_itself(served: Served, tmp_path: Path) -> None:
    from penstock.storage.tracking.mlflow.mlflow_options import MlflowOptions
    from penstock.storage.tracking.tracker import RunStarted, TrackedRun

    tracker = MlflowOptions.connect(served.url, TrackedRun("r", "1"))
    tracker.deliver([RunStarted("start", 1.0, {"run": {"seed": 1}})], [])  # type: ignore[arg-type]
    assert tracker.page is not None and "@" not in tracker.page
    assert call(served, f"{API}/runs/get?run_id={tracker.runs.main_run_id}", login=True)[0] == 200
