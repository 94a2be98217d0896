"""Start Prefect's server behind a check of Host and Origin: `python -P prefect_server.py --host HOST --port PORT`.

Prefect checks the API's secret (PREFECT_SERVER_API_AUTH_STRING) and writes CORS headers, but answers any Host. A page whose name was made
to resolve to 127.0.0.1 (DNS rebinding) is refused here, and so is every request that a page of another origin sends. A script of its own,
so that starting it imports nothing of Penstock.
"""

from __future__ import annotations

import argparse
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost")


def own_origins(port: int) -> list[str]:
    """Return the origins under which a browser opens a loopback server at `port`."""
    return [f"http://{host}:{port}" for host in LOOPBACK]


class OwnOriginOnly:
    """ASGI middleware: refuse a foreign Host, and a foreign Origin where one is sent, with 403."""

    def __init__(self, app: Any, port: int) -> None:
        self.app = app
        self.origins = own_origins(port)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on, or answer it with 403."""
        if scope["type"] not in ("http", "websocket") or self._allows(scope["headers"]):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: a 403
        else:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"foreign Host or Origin\n"})

    def _allows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        return len(hosts) == 1 and _host_name(hosts[0]) in LOOPBACK and all(origin in self.origins for origin in origins)


def _host_name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def main() -> None:
    """Serve until SIGTERM, as `prefect server start` does."""
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
