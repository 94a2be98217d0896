"""The server of the live page: who gets an answer, and what the browser may do with it."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.storage.web.page_server import MAX_CONNECTIONS, Content, PageServer, json_content

SECRET = "what a page shows"


def respond(path: str, query: dict[str, str]) -> Content | None:
    if path == "fails":
        raise RuntimeError("the disk is gone")
    return json_content({"text": SECRET, "query": query}) if path in ("", "api/run") else None


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(respond) as server:
        yield server


def request(
    server: PageServer, path: str, *, method: str = "GET", logged_in: bool = True, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of an answer. Names of headers have _ for -."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    cookie = {"Cookie": f"other=1; penstock={server.login}"} if logged_in else {}
    connection.request(method, path, headers={**cookie, **{n.replace("_", "-"): v for n, v in headers.items()}})
    answer = connection.getresponse()
    out = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return out


def page(server: PageServer, path: str = "") -> str:
    return server.directory + path


def test_link_logs_in_and_opens_the_page(server: PageServer) -> None:
    path = server.link("run=my-run&x=%22%3E").removeprefix(f"http://127.0.0.1:{server.server_port}")
    status, headers, body = request(server, path, logged_in=False)
    assert status == 200 and f"0;url={server.directory}?run=my-run&amp;x=%22%3E" in body
    cookie = headers["Set-Cookie"]
    assert cookie == f"penstock={server.login}; Path={server.directory}; HttpOnly; SameSite=Strict"
    assert server.token not in cookie
    assert SECRET in request(server, page(server), logged_in=False, Cookie=cookie.partition(";")[0])[2]


@pytest.mark.parametrize(
    "path, headers, status",
    [
        ("{page}", {}, 401),
        ("{page}api/run", {"Cookie": "penstock=wrong"}, 401),
        ("{page}api/run", {"Cookie": "penstock=\u00e4"}, 401),
        ("/open/wrong", {}, 403),
        ("/api/run", {}, 401),
        ("/api/run", {"Cookie": "penstock={login}"}, 401),  # outside the random path
    ],
)
def test_request_without_the_login_gets_nothing(
    server: PageServer, path: str, headers: dict[str, str], status: int
) -> None:
    headers = {name: value.format(login=server.login) for name, value in headers.items()}
    found, headers, body = request(server, path.format(page=server.directory), logged_in=False, **headers)
    assert found == status and SECRET not in body and "Set-Cookie" not in headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "attacker.example"}, 403),
        ({"Host": "127.0.0.1.attacker.example"}, 403),
        ({"Host": "[::"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost:8000", "Origin": "http://attacker.example"}, 403),
        ({"Host": "localhost:8000", "Origin": "null"}, 403),
        ({"Host": "localhost:8000", "Origin": "https://localhost:8000"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),  # a forwarded port
    ],
)
def test_foreign_host_or_origin_is_refused(server: PageServer, headers: dict[str, str], status: int) -> None:
    found, _, body = request(server, page(server), **headers)
    assert found == status and (SECRET in body) == (status == 200)
    found, answer, _ = request(server, f"/open/{server.token}", **headers)
    assert found == status and ("Set-Cookie" in answer) == (status == 200)


@pytest.mark.parametrize("method", ["POST", "OPTIONS", "CONNECT"])
def test_other_methods_are_refused(server: PageServer, method: str) -> None:
    status, _, body = request(server, page(server), method=method)
    assert status == 501 and SECRET not in body


def test_head_has_no_body(server: PageServer) -> None:
    status, headers, body = request(server, page(server), method="HEAD")
    assert status == 200 and body == "" and int(headers["Content-Length"]) > 0


def test_answers_forbid_inline_scripts_and_other_servers(server: PageServer) -> None:
    for path in (page(server), page(server, "fails"), page(server, "missing"), "/", f"/open/{server.token}"):
        _, headers, _ = request(server, path)
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"


def test_failure_is_shown_and_the_server_continues(server: PageServer) -> None:
    status, _, body = request(server, page(server, "fails"))
    assert status == 500 and "the disk is gone" in body
    assert request(server, page(server))[0] == 200 and request(server, page(server, "missing"))[0] == 404


def test_servers_have_their_own_secrets_listen_on_loopback_only_and_end_with_their_blocks() -> None:
    with PageServer(respond) as one, PageServer(respond) as two:
        assert one.server_address[0] == "127.0.0.1"
        assert len({one.token, two.token, one.login, two.login, one.directory, two.directory}) == 6
        assert request(two, two.directory, logged_in=False, Cookie=f"penstock={one.login}")[0] == 401
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one.server_port), timeout=5)


@pytest.mark.integration
def test_connections_above_the_limit_are_closed_and_the_server_continues() -> None:
    with PageServer(respond) as server:
        held = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(MAX_CONNECTIONS)]
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as refused:
            assert refused.recv(1) == b""
        for connection in held:
            connection.close()
        status = 0
        while status != 200:  # as soon as the threads have seen the ends; hangs if they never do
            with suppress(http.client.HTTPException, ConnectionError):
                status = request(server, page(server))[0]
