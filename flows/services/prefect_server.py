"""Start Prefect's server behind a check of Host and Origin: `python -P prefect_server.py --host HOST --port PORT`.

Prefect checks the API's secret (PREFECT_SERVER_API_AUTH_STRING) and writes CORS headers, but answers any Host. This
script rejects requests to a foreign host name that resolves to 127.0.0.1 (DNS rebinding), and requests from web pages
of other origins. It is a separate script so that it starts without importing Penstock.
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost")


def loopback_origins(port: int) -> list[str]:
    """Return the origins of the web pages of a loopback server at `port`."""
    return [f"http://{host}:{port}" for host in LOOPBACK]


class OwnOriginOnly:
    """ASGI middleware that answers 403 if Host is not a loopback name or Origin is not the server's own page."""

    def __init__(self, app: Any, port: int) -> None:
        self.app = app
        self.origins = loopback_origins(port)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request to the wrapped app, or answer it with 403."""
        if scope["type"] not in ("http", "websocket") or self._allows_request(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before accepting: the client sees 403
        else:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"foreign Host or Origin\n"})

    def _allows_request(self, headers: list[tuple[bytes, bytes]]) -> bool:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        return len(hosts) == 1 and host_name(hosts[0]) in LOOPBACK and all(origin in self.origins for origin in origins)


def host_name(host: str) -> str | None:
    """Return the name in a Host header, without the port; None if the header is invalid."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def main() -> None:
    """Run the server until SIGTERM, with the same settings as `prefect server start`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()

    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import get_current_settings

    server = get_current_settings().server
    uvicorn.run(
        OwnOriginOnly(create_app(final=True), options.port),
        host=options.host,
        port=options.port,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level=server.logging_level.lower(),
    )


if __name__ == "__main__":
    main()
