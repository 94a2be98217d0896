"""The login of this user's local web servers, and links that log a browser in.

All users of a machine can reach 127.0.0.1. So every start of a server creates a new login, which only the user who
started it can read, and LoginGate checks every request before it reaches the app. If another user's server later gets
the same port and receives the login, the login is already invalid.
"""

from __future__ import annotations

import base64
import functools
import hmac
import html
import os
import re
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from penstock.storage.secrets import register_secret, write_private

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")  # host names under which a server answers
LOOPBACK = (*_NAMES, "::1")
LINK_TIMEOUT = 2.0  # seconds to wait for the answer of a link's server
_PAGE = "/open"  # of LoginGate: logs a browser in, then opens the page that is given after `#`
_TOKEN = re.compile(r"[\w-]{32}")  # of a link: 24 bytes in base64
_MAX_BODY = 1000  # bytes of a token or login that a browser sends


def service_directory(port: int) -> Path:
    """Return the private directory of the web server that Penstock starts at `port`: its log, login and links."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "penstock" / "services" / str(port)


def ports_with_login() -> list[int]:
    """Return the ports of all web servers that this user has started, including servers that no longer run."""
    return sorted(int(path.parent.name) for path in service_directory(0).parent.glob("[0-9]*/login"))


def create_login(port: int) -> str:
    """Return a new login (`penstock:SECRET`) for a start of the server at `port`, and write it to a private file. Links
    of earlier starts expire."""
    login = f"penstock:{secrets.token_hex(32)}"
    write_private(login_path(port), login)
    shutil.rmtree(service_directory(port) / "links", ignore_errors=True)
    return register_secret(login)


def login_path(port: int) -> Path:
    """Return the path of the file with the login of the server at `port`."""
    return service_directory(port) / "login"


def read_login(url: str) -> str | None:
    """Return the login of the server at a URL if this user has started it with Penstock on this machine, else None."""
    with suppress(FileNotFoundError, ValueError):  # ValueError: not a URL, or an invalid port
        parts = urlsplit(url)
        if parts.hostname not in _NAMES or not parts.port:
            return None
        path = login_path(parts.port)
        status = path.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return register_secret(path.read_text())
    return None


def with_login(url: str) -> str:
    """Return the URL with the login of the server, if this user has started it and the URL does not contain one."""
    login = read_login(url)
    return url if login is None or "@" in urlsplit(url).netloc else url.replace("://", f"://{login}@", 1)


@functools.cache
def page_link(url: str) -> str:
    """Return a link to a page of a server. If this user has started it and standard output is a terminal, the link also
    logs in the browser that opens it first. A file or pipe may be read by other users, so its links ask for the
    login."""
    if read_login(url) is None:
        return url
    parts = urlsplit(url)
    token = ""
    if sys.stdout.isatty():
        token = secrets.token_urlsafe(24)
        write_private(service_directory(parts.port or 0) / "links" / token, "")
    page = f"/{parts.fragment.lstrip('/')}" if parts.fragment else parts.path or "/"
    return f"{parts.scheme}://{parts.netloc}{_PAGE}#{token}{page}"


def live_link(url: str, *, has_page: str = "/") -> str:
    """Return a link to a page of a server (`page_link`), or "" if the server does not answer or is not the expected one
    (`has_page`). A `url` that is not an HTTP URL is returned unchanged.

    `has_page` is a path that the expected server answers with status 200 and other servers do not; "/" accepts any
    server that this user has started.
    """
    if not url.startswith(("http://", "https://")):
        return url
    import httpx

    try:
        parts = urlsplit(url)
        is_local, has_login = parts.hostname in LOOPBACK, read_login(url) is not None
        path = "/" if not is_local else "/open" if has_login and has_page == "/" else has_page
        origin = with_login(f"{parts.scheme}://{parts.netloc}")
        answer = httpx.get(f"{origin}{path}", timeout=LINK_TIMEOUT, trust_env=not is_local)
        if path == "/open":  # the port may belong to another user's server now
            is_live = html.escape(str(login_path(parts.port or 0))) in answer.text
        else:
            is_live = answer.status_code == 200 if path != "/" else answer.status_code < 500
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return ""
    return page_link(url) if is_live else ""


def origins(port: int) -> list[str]:
    """Return the origins of the web pages of a loopback server at `port`."""
    return [f"http://{host}:{port}" for host in _NAMES]


class LoginGate:
    """ASGI middleware that refuses foreign hosts and origins, and logs browsers in.

    Args:
        login: `USER:PASSWORD`.
        script: JavaScript that runs in a browser that has logged in; `login` is defined there.
        pages: where the pages of the app begin: "" or, if the app shows the page after `#`, "/#".
        checks_login: whether requests need the login here; False if the app itself checks the header Authorization.
    """

    def __init__(
        self, app: Any, port: int, login: str, *, script: str, pages: str = "", checks_login: bool = True
    ) -> None:
        self.app = app
        self.port = port
        self.basic = f"Basic {base64.b64encode(login.encode()).decode()}"
        self.login = login
        self.checks_login = checks_login
        self._cookie = f"penstock-{port}"  # browsers do not distinguish cookies by port
        self._html = (
            _HTML.replace("SCRIPT", script).replace("PAGES", pages).replace("FILE", html.escape(str(login_path(port))))
        )

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request to the app or answer it."""
        if scope["type"] in ("http", "websocket") and (answer := await self._answer(scope, receive)):
            await answer(scope, receive, send)  # a websocket is answered before it is accepted: the client sees 403
        else:
            await self.app(scope, receive, send)

    async def _answer(self, scope: dict[str, Any], receive: Any) -> Response | None:
        """Return the answer to a request that is not for the app, else None."""
        from starlette.requests import HTTPConnection, Request
        from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse

        connection = HTTPConnection(scope)
        hosts = connection.headers.getlist("host")
        try:
            is_own = len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in _NAMES
        except ValueError:  # an invalid header
            is_own = False
        if not is_own or any(origin not in origins(self.port) for origin in connection.headers.getlist("origin")):
            return PlainTextResponse(
                "the header Host or Origin names another server: open the page at its 127.0.0.1 address\n", 403
            )
        if scope["path"] == _PAGE and scope["type"] == "http":
            if scope["method"] == "POST":
                return await self._log_in(Request(scope, receive))
            return HTMLResponse(self._html, headers=_HEADERS)
        if not self.checks_login or scope["path"] == "/health" or self._is_logged_in(connection):
            return None
        if scope["type"] == "http" and "text/html" in connection.headers.get("accept", ""):
            return RedirectResponse(_PAGE, 303)  # browsers keep what is after `#`
        return PlainTextResponse("login needed\n", 401)

    async def _log_in(self, request: Request) -> Response:
        """Log in a browser that sends the token of a link, the login, or its password, or that is already logged in."""
        from starlette.responses import PlainTextResponse

        secret = b""
        async for part in request.stream():
            secret += part
            if len(secret) > _MAX_BODY:
                return PlainTextResponse("too long\n", 413)
        password = self.login.partition(":")[2]
        known = any(hmac.compare_digest(secret.strip(), text.encode()) for text in (self.login, password))
        if not (self._is_logged_in(request) or known or self._use_link(secret.decode("latin-1"))):
            return PlainTextResponse("unknown\n", 403)
        if not self.checks_login:  # the app's own pages keep the login
            return PlainTextResponse(self.login, headers={"Cache-Control": "no-store"})
        answer = PlainTextResponse()
        answer.set_cookie(self._cookie, self.basic, httponly=True, samesite="strict")
        return answer

    def _use_link(self, token: str) -> bool:
        """Return whether `token` belongs to a link that was not used before, and delete the link."""
        if not _TOKEN.fullmatch(token):
            return False
        try:
            (service_directory(self.port) / "links" / token).unlink()
        except FileNotFoundError:
            return False
        return True

    def _is_logged_in(self, connection: Any) -> bool:
        shown = [connection.headers.get("authorization", "")]
        if self.checks_login:
            shown.append(connection.cookies.get(self._cookie, ""))
        return any(hmac.compare_digest(each.encode(), self.basic.encode()) for each in shown)


_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}
_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Log in</title>
<style>body { font: 16px sans-serif; max-width: 40em; margin: 4em auto } input { width: 30em }</style>
</head>
<body hidden>
<p>This page needs a login. A link in a terminal logs in once, in the browser that opens it first;
<code>penstock up</code> and runs print new ones.</p>
<form><label>Login: <input type="password" autofocus></label> <button>Log in</button></form>
<p id="wrong"></p>
<p>The login is in the file <code>FILE</code>.</p>
<script>
const hash = location.hash.slice(1), end = hash.indexOf("/") < 0 ? hash.length : hash.indexOf("/")
const page = hash.slice(end) || "/"
history.replaceState(null, "", "#" + page)
async function enter(secret) {
  const stored = localStorage.getItem("prefect-password")
  const headers = stored ? {Authorization: "Basic " + stored} : {}
  const answer = await fetch("/open", {method: "POST", body: secret, headers})
  if (!answer.ok) {
    document.body.hidden = false
    return secret
  }
  const login = await answer.text()
  SCRIPT
  location.replace(location.origin + "PAGES" + page)
}
document.querySelector("form").onsubmit = async event => {
  event.preventDefault()
  if (await enter(document.querySelector("input").value)) document.querySelector("#wrong").textContent = "Wrong login."
}
enter(hash.slice(0, end))
</script>
</body>
</html>
"""
