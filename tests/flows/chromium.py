"""A headless Chromium for tests, driven by its DevTools protocol through two pipes: no port, no further package."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait  # takes any file descriptor, select only those below 1024
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0


def installed_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `send` and `receive` are pipe ends; messages end with a zero byte."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer, self._ids, self._session = b"", itertools.count(1), ""
        self.events: list[dict[str, Any]] = []  # notifications of the browser that `call` has read
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._send, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            while b"\0" not in self._buffer:
                assert wait([self._receive], max(0.0, deadline - time.monotonic())), f"{method}: no answer"
                chunk = os.read(self._receive, 1 << 16)
                assert chunk, "the browser has ended"
                self._buffer += chunk
            raw, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(raw)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            if "method" in message:
                self.events.append(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression. An exception in it is an error."""
        answer = self._answer(expression)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true. It may raise exceptions before."""
        deadline = time.monotonic() + SECONDS
        while self._answer(condition)["result"].get("value") is not True:
            assert time.monotonic() < deadline, f"{condition}: {self.evaluate('document.body.innerText')}"
            time.sleep(0.02)

    def _answer(self, expression: str) -> dict[str, Any]:
        return self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)

    def type_into(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """A fresh browser with one tab; it ends with the block."""
    to_browser, from_us = os.pipe()
    from_browser, to_us = os.pipe()
    program = installed_browser()
    assert program is not None
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server"]
    flags += ["--no-sandbox"] if os.getuid() == 0 else []
    words = [program, *flags, f"--user-data-dir={directory / 'chromium'}", "--remote-debugging-pipe", "about:blank"]
    # The browser reads messages from descriptor 3 and writes to 4.
    command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{to_us}', "chromium", *words]
    with (directory / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(to_browser, to_us)
        )
    os.close(to_browser)
    os.close(to_us)
    try:
        yield Page(from_us, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(from_us)
        os.close(from_browser)
