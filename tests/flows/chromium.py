"""A headless Chromium for tests, driven by its DevTools protocol through two pipes: no port, no further package. The
tests of a process share it; each gets a browser context of its own, without cookies and storage."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import wait  # takes any file descriptor, select only those below 1024
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60.0


def installed_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A process of the browser."""

    def __init__(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="penstock-tests-chromium-"))
        to_browser, self._send = os.pipe()
        self._receive, to_us = os.pipe()
        self._buffer, self._ids = b"", itertools.count(1)
        self.events: list[dict[str, Any]] = []  # notifications that `call` has read
        program = installed_browser()
        assert program is not None
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server"]
        flags += ["--no-sandbox"] if os.getuid() == 0 else []
        words = [program, *flags, f"--user-data-dir={directory}", "--remote-debugging-pipe", "about:blank"]
        # The browser reads messages from descriptor 3 and writes to 4. It ends when they are closed.
        command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{to_us}', "chromium", *words]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_browser, to_us),
        )
        os.close(to_browser)
        os.close(to_us)

        def end() -> None:
            process.kill()
            process.wait()
            shutil.rmtree(directory, ignore_errors=True)

        atexit.register(end)

    def call(self, session: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._send, json.dumps(message).encode() + b"\0")
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


shared_browser = cache(Browser)


class Page:
    """One tab."""

    def __init__(self, process: Browser, context: str) -> None:
        self._process, self._session = process, ""
        self.events = process.events = []
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._process.call(self._session, method, params)

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
def browser() -> Iterator[Page]:
    """A tab of a fresh browser context, which ends with the block."""
    process = shared_browser()
    context = process.call("", "Target.createBrowserContext", {})["browserContextId"]
    try:
        yield Page(process, context)
    finally:
        process.call("", "Target.disposeBrowserContext", {"browserContextId": context})
