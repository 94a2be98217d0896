"""Links to the pages of our servers: one click logs the browser in, once; no link leads to a server that ends."""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, browser, installed_browser
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from penstock.flows.runtime import prefect_api
from penstock.flows.runtime.child_process import Service, choose_port
from penstock.storage.web.login import LoginGate, create_login, login_path, page_link, read_login, with_login

PORT = 4321
URL = f"http://127.0.0.1:{PORT}"
PAGE = "/runs/flow-run/0d8c"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    page_link.cache_clear()
    return tmp_path / "state"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def token_of(link: str) -> str:
    return link.partition("#")[2].partition("/")[0]


@pytest.mark.parametrize(
    "url, page",
    [
        (f"{URL}{PAGE}", PAGE),
        (f"{URL}/#/experiments/1/runs/2?workflowType=x", "/experiments/1/runs/2?workflowType=x"),
        (URL, "/"),
        (f"http://localhost:{PORT}/", "/"),
    ],
)
def test_a_link_in_a_terminal_has_a_token_and_the_page_but_not_the_login(url: str, page: str, terminal: None) -> None:
    login = create_login(PORT)
    link = page_link(url)
    assert link == f"{url.split('/', 3)[0]}//{url.split('/')[2]}/open#{token_of(link)}{page}"
    assert len(token_of(link)) == 32 and login.partition(":")[2] not in link
    [path] = (login_path(PORT).parent / "links").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert page_link(url) == link, "a panel that is drawn again does not make new tokens"


def test_a_link_in_a_file_or_pipe_has_no_token() -> None:
    create_login(PORT)
    assert page_link(f"{URL}{PAGE}") == f"{URL}/open#{PAGE}"


@pytest.mark.parametrize(
    "url",
    [f"http://127.0.0.1:{PORT + 1}/x", f"http://prefect.example:{PORT}/x", "", "sqlite:////store/mlflow.db",
     "http://127.0.0.1:bad/x", "http://127.0.0.1/x", "http://[::1"],
)  # fmt: skip
def test_links_to_other_servers_are_not_changed_and_get_no_login(url: str, terminal: None) -> None:
    create_login(PORT)
    assert page_link(url) == url and with_login(url) == url


def test_a_login_that_others_can_read_or_write_is_not_used(terminal: None) -> None:
    create_login(PORT)
    login_path(PORT).chmod(0o644)
    assert read_login(URL) is None and page_link(URL) == URL and with_login(URL) == URL


def test_every_start_of_a_server_has_a_new_login_and_ends_the_links_of_the_last(terminal: None) -> None:
    first, link = create_login(PORT), page_link(f"{URL}{PAGE}")
    second = create_login(PORT)
    assert first != second == read_login(URL)
    assert client(second).post("/open", content=token_of(link)).status_code == 403
    assert prefect_api.prefect_server(PORT).environment["PREFECT_API_AUTH_STRING"] not in (first, second)


def client(login: str, *, checks_login: bool = True) -> TestClient:
    """A client of an app behind the gate, which shows its pages at every path."""
    route = Route("/{path:path}", lambda request: PlainTextResponse("the app"), methods=["GET", "POST"])
    app = Starlette(routes=[route])
    gate = LoginGate(app, PORT, login, script="keep(login)", checks_login=checks_login)
    return TestClient(gate, URL, follow_redirects=False)


def test_a_token_logs_in_once(terminal: None) -> None:
    login = create_login(PORT)
    token = token_of(page_link(f"{URL}{PAGE}"))
    mine, other = client(login), client(login)
    assert mine.get("/x").status_code == 401
    assert mine.get("/open").status_code == 200, "the page itself, also for a preview, does not use the token up"
    assert mine.post("/open", content=token).status_code == 200
    assert mine.get("/x").text == "the app"
    assert mine.post("/open", content=token).status_code == 200, "the same link again, in a browser that is logged in"
    assert other.post("/open", content=token).status_code == 403
    assert other.get("/x").status_code == 401


@pytest.mark.parametrize(
    "secret",
    ["", "guess", "penstock:", "..", "../login", "x" * 32, "links", "\u00e4" * 16, "%2e%2e", "x" * 100_000],
)  # fmt: skip
def test_other_secrets_do_not_log_in(secret: str, terminal: None) -> None:
    login = create_login(PORT)
    page_link(URL)
    mine = client(login)
    assert mine.post("/open", content=secret.encode()).status_code in (403, 413)
    assert mine.get("/x").status_code == 401 and read_login(URL) == login


def test_the_login_or_its_password_can_be_typed_and_gives_a_cookie_out_of_reach_of_scripts_and_other_sites() -> None:
    login = create_login(PORT)
    for secret in (login, login.partition(":")[2], f" {login}\n"):
        mine = client(login)
        answer = mine.post("/open", content=secret)
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and str(PORT) in cookie and not answer.text
        assert answer.status_code == 200 and mine.get("/x").text == "the app"


def test_a_page_without_a_login_leads_to_the_login_and_an_api_call_does_not() -> None:
    mine = client(create_login(PORT))
    answer = mine.get("/x", headers={"Accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/open")
    assert mine.get("/x", headers={"Accept": "application/json"}).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [{"Host": "example.com"}, {"Host": f"127.0.0.1.example.com:{PORT}"}, {"Host": "[::1"}, {"Host": ""},
     {"Origin": "http://example.com"}, {"Origin": "null"}, {"Origin": f"http://127.0.0.1:{PORT + 1}"}],
)  # fmt: skip
@pytest.mark.parametrize("checks_login", [True, False])
def test_foreign_hosts_and_origins_are_refused_also_with_the_login(checks_login: bool, headers: dict[str, str]) -> None:
    login = create_login(PORT)
    headers = {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}", **headers}
    for path in ("/open", "/x", "/health"):
        assert client(login, checks_login=checks_login).get(path, headers=headers).status_code == 403, path


def test_an_app_that_checks_the_login_itself_gets_every_request_of_its_own_origin() -> None:
    login = create_login(PORT)
    mine = client(login, checks_login=False)
    assert mine.get("/x").text == "the app"
    assert mine.post("/open", content=login).text == login, "its pages keep the login"
    assert mine.post("/open", content="guess").status_code == 403


def test_the_page_that_logs_in_loads_nothing_and_cannot_be_framed() -> None:
    answer = client(create_login(PORT)).get("/open")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["cache-control"] == "no-store"


# ---- in a browser ----------------------------------------------------------------------------------------------------


needs_browser = pytest.mark.skipif(installed_browser() is None, reason="no chromium or google-chrome on this machine")


@pytest.fixture(scope="module")
def prefect(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("prefect")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        server = prefect_api.prefect_server(choose_port("prefect", 0, 0))
        server.environment["PREFECT_HOME"] = str(shutil.copytree(prefect_home, folder / "home"))
        server.start()
    server.wait_ready()
    yield server
    server.stop()


@pytest.fixture
def prefect_root(prefect: Service, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of Prefect's server, with the state directory that has its login."""
    monkeypatch.setenv("XDG_STATE_HOME", str(Path(prefect.environment["PREFECT_HOME"]).with_name("state")))
    return prefect.environment["PREFECT_API_URL"].removesuffix("/api")


def save(page: Page, name: str) -> None:
    if directory := os.environ.get("PENSTOCK_SCREENSHOTS"):
        data = page.call("Page.captureScreenshot", format="png")["data"]
        Path(directory, f"{name}.png").write_bytes(base64.b64decode(data))


def expect(page: Page, text: str) -> None:
    page.wait_for(f"document.body.innerText.includes({json.dumps(text)})")


@pytest.mark.integration
@needs_browser
def test_one_click_opens_the_page_of_a_flow_run(prefect: Service, prefect_root: str, terminal: None) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    settings = {PREFECT_API_URL: prefect.environment["PREFECT_API_URL"]}
    settings |= {PREFECT_API_AUTH_STRING: prefect.environment["PREFECT_API_AUTH_STRING"]}
    with temporary_settings(settings), get_client(sync_client=True) as api:
        run = api.create_flow_run(flow(lambda: None, name="a-flow"), name="brave-llama")
    link = page_link(f"{prefect_root}/flow-runs/flow-run/{run.id}")
    with browser() as page:
        page.open(link)
        expect(page, "brave-llama")
        assert token_of(link) not in page.evaluate("location.href")
        save(page, "prefect-flow-run")
        page.open("about:blank")
        page.open(link)  # the same browser: still logged in
        expect(page, "brave-llama")
    with browser() as page:
        page.open(link)  # another browser: the token is used up
        expect(page, "needs a login")
        save(page, "login")
        page.type_into("input", "guess")
        page.press_enter()
        expect(page, "Wrong login")
        page.evaluate("document.querySelector('input').value = ''")
        page.type_into("input", prefect.environment["PREFECT_API_AUTH_STRING"])
        page.press_enter()
        expect(page, "brave-llama")


@pytest.mark.integration
@needs_browser
def test_a_link_does_not_lead_to_another_server(prefect_root: str, terminal: None) -> None:
    token = token_of(page_link(f"{prefect_root}/runs"))
    with browser() as page:  # which stays logged in after the first link
        for page_in_link in ("//example.com/x", "/\\\\example.com/x", "@example.com/", "javascript:alert(1)"):
            page.open("about:blank")
            page.open(f"{prefect_root}/open#{token}{page_in_link}")
            page.wait_for("document.readyState === 'complete' && location.origin !== 'null'")
            page.wait_for("document.body.innerText !== ''")
            assert page.evaluate("location.origin") == prefect_root, page_in_link
