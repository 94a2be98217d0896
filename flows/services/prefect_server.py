"""Start Prefect's server behind LoginGate: `python -P prefect_server.py --host HOST --port PORT`.

Prefect checks the API's secret (PREFECT_SERVER_API_AUTH_STRING) and writes CORS headers, but answers any Host. The gate
rejects requests to a foreign host name that resolves to 127.0.0.1 (DNS rebinding), and requests from web pages of other
origins. Prefect's pages keep the login in the browser's storage of their origin, so this server also serves the login
page.
"""

from __future__ import annotations

import argparse

from penstock.storage.web.login import LoginGate

_KEEP_LOGIN = 'localStorage.setItem("prefect-password", btoa(login))'


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
    assert server.api.auth_string is not None
    login = server.api.auth_string.get_secret_value()
    uvicorn.run(
        LoginGate(create_app(final=True), options.port, login, script=_KEEP_LOGIN, checks_login=False),
        host=options.host,
        port=options.port,
        timeout_keep_alive=server.api.keepalive_timeout,
        ws_ping_interval=server.api.websocket_ping_interval,
        ws_ping_timeout=server.api.websocket_ping_timeout,
        log_level=server.logging_level.lower(),
    )


if __name__ == "__main__":
    main()
