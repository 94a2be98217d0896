"""A small web server on 127.0.0.1 for pages that only the user who started it may read.

All users of a machine reach 127.0.0.1, and so do all web pages in this user's browser. So the link that is printed has
a token, which sets a cookie in the browser that opens it; requests without the cookie, with a foreign Host or Origin,
or with another method than GET and HEAD are refused. All pages are below a random path, to which alone the cookie
belongs: browsers send cookies of 127.0.0.1 to all ports, and so to the servers of other users.
"""

from __future__ import annotations

import hmac
import html
import json
import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from penstock.storage.secrets import redact, register_secret
from penstock.storage.web.login import HOST, LOOPBACK

MAX_CONNECTIONS = 64  # at the same time
REQUEST_SECONDS = 30.0  # after which a client that sends nothing is disconnected
POLL_SECONDS = 0.1  # within which the end of the server is noticed
_COOKIE = "penstock"
_HEADERS = {
    "Content-Security-Policy": (  # no inline script or style, no request to another server
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_OPEN_PAGE = '<!doctype html><title>Penstock</title><meta http-equiv="refresh" content="0;url={}">'

logger = logging.getLogger(__name__)

Content = tuple[str, bytes]  # MIME type, body
Respond = Callable[[str, dict[str, str]], Content | None]  # path without "/", query -> content; None: not found


def json_content(value: Any) -> Content:
    """Return a value as JSON in ASCII: it may contain lone surrogates, which UTF-8 cannot encode."""
    return "application/json", json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class PageServer(ThreadingHTTPServer):
    """Serves the pages of `respond` at a free port, or at `port`, from threads, between entering and leaving it."""

    daemon_threads = True

    def __init__(self, respond: Respond, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.respond = respond
        self.token = register_secret(secrets.token_urlsafe(24))
        self.login = register_secret(secrets.token_urlsafe(24))
        self.directory = f"/{secrets.token_urlsafe(12)}/"
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_SECONDS,), name="page-server", daemon=True
        )

    def link(self, query: str = "") -> str:
        """Return the link that logs a browser in and opens the first page, with a query (`run=NAME`)."""
        return f"http://{HOST}:{self.server_port}/open/{self.token}{query and '?'}{query}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return False for connections above MAX_CONNECTIONS, which are then closed: any local user can open them, and
        the process may be the driver of a run."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the exception of a request, which a browser that has gone may have caused."""
        logger.debug("request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "penstock", ""
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_SECONDS
    disable_nagle_algorithm = True  # the body would wait 40 ms for the acknowledgement of the headers

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is that of a run."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        # A request must be for this machine (perhaps at the port of an SSH forward), and, if a page sends it, for the
        # server of that page.
        is_own = False
        with suppress(ValueError):  # an invalid header
            is_loopback = len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in LOOPBACK
            is_own = is_loopback and all(origin == f"http://{hosts[0]}" for origin in origins)
        if not is_own:
            self._send(HTTPStatus.FORBIDDEN, ("text/plain", b"foreign Host or Origin\n"))
        elif parts.path.startswith("/open/"):
            self._open(parts.path.removeprefix("/open/"), parts.query)
        elif not (parts.path.startswith(self.server.directory) and self._is_logged_in()):
            text = b"This page needs a login: open the link that the command has printed, or run `penstock watch`.\n"
            self._send(HTTPStatus.UNAUTHORIZED, ("text/plain", text))
        else:
            path = parts.path.removeprefix(self.server.directory)
            try:
                content = self.server.respond(path, dict(parse_qsl(parts.query)))
            except Exception as error:  # the page shows it; the server continues
                logger.debug("no answer to %s", path, exc_info=True)
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, json_content({"error": redact(str(error))[:300]}))
                return
            if content is None:
                self._send(HTTPStatus.NOT_FOUND, ("text/plain", b"not found\n"))
            else:
                self._send(HTTPStatus.OK, content)

    do_HEAD = do_GET

    def _is_logged_in(self) -> bool:
        cookie: SimpleCookie = SimpleCookie()
        with suppress(CookieError):
            cookie.load(self.headers.get("Cookie", ""))
        login = cookie[_COOKIE].value if _COOKIE in cookie else ""
        return hmac.compare_digest(login.encode(), self.server.login.encode())

    def _open(self, token: str, query: str) -> None:
        """Log the browser in that has the token. The page that it gets opens the first page by itself: a redirect would
        not send the cookie if the link was on a page of another server."""
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, ("text/plain", b"This link has expired: open the newest link.\n"))
            return
        directory = self.server.directory
        cookie = f"{_COOKIE}={self.server.login}; Path={directory}; HttpOnly; SameSite=Strict"
        page = _OPEN_PAGE.format(html.escape(f"{directory}{query and '?'}{query}"))
        self._send(HTTPStatus.OK, ("text/html; charset=utf-8", page.encode()), {"Set-Cookie": cookie})

    def _send(self, status: HTTPStatus, content: Content, headers: dict[str, str] | None = None) -> None:
        kind, body = content
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {}), "Content-Type": kind}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
