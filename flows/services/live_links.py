"""Links to pages whose server answers: an address that was recorded or configured may be that of a dead server, or of
another server that got its port."""

from __future__ import annotations

import html
from urllib.parse import urlsplit

import httpx

from penstock.storage.web.login import LOOPBACK, login_path, page_link, read_login, with_login

_TIMEOUT = 2.0  # seconds


def live_link(url: str, *, has_page: str = "/") -> str:
    """Return a link to a page of a server (`page_link`), or "" if the server does not answer or is not the one that the
    URL is meant for. What is not an HTTP URL is returned as it is.

    Args:
        url: of the page.
        has_page: path that only a server of this machine with the page answers with status 200; "/": any of the
            user's own servers has it.
    """
    if not url.startswith(("http://", "https://")):
        return url
    try:
        parts = urlsplit(url)
        is_local, has_login = parts.hostname in LOOPBACK, read_login(url) is not None
        path = "/" if not is_local else "/open" if has_login and has_page == "/" else has_page
        origin = with_login(f"{parts.scheme}://{parts.netloc}")
        answer = httpx.get(f"{origin}{path}", timeout=_TIMEOUT, trust_env=not is_local)
        if path == "/open":  # another user's server may have the port now
            is_live = html.escape(str(login_path(parts.port or 0))) in answer.text
        else:
            is_live = answer.status_code == 200 if path != "/" else answer.status_code < 500
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return ""
    return page_link(url) if is_live else ""
