"""An external inference engine: started outside of Penstock, which only waits for it and checks it.

The supervisor sends weights to an external engine and checks its health like any other engine's. If it dies, the user
must restart it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from penstock.engines.backends import EngineBackend
from penstock.engines.serving import keys
from penstock.engines.serving.addresses import engine_url
from penstock.engines.serving.replica import POLL_SECONDS, Replica, StartCancelled
from penstock.engines.serving.server import ServerSpec
from penstock.engines.weights.routes import ProcessPlace


class ExternalReplica(Replica):
    """A `Replica` for an engine that Penstock does not start or stop.

    Args:
        address: host:port of the engine.
        spec: the model that the engine must serve, its API key, and the time to wait for it (`start_timeout`).
        index: position in the pool.
        backend: the engine implementation.
    """

    def __init__(self, address: str, spec: ServerSpec, index: int, backend: EngineBackend) -> None:
        self.address = address
        self.spec = spec
        self.index = index
        self.backend = backend
        self.client = backend.connect(
            lambda: []
        )  # only its `generates_tokens` and `weight_version` are used, which take an address
        self.known_url = self._url = engine_url(address)
        if key := spec.args.get("api_key"):
            keys.set_api_key(self._url, key)
        self._checked = False
        self.launch_server()

    def launch_server(self) -> None:
        """Reset the deadline until which `wait_for_url` waits; the user must start the engine."""
        self._deadline = time.monotonic() + self.spec.start_timeout

    def wait_for_url(self, cancelled: Callable[[], bool] = lambda: False) -> str:
        """Wait until the engine generates tokens, check its model, and return its address.

        Raises:
            ConnectionError: the engine did not generate within `spec.start_timeout` seconds.
            EngineError: the engine serves a different model.
            StartCancelled: `cancelled` returned True while waiting.
        """
        while not self._checked:
            if self.client.generates_tokens(self._url):
                self.backend.check_external_server(self._url, self.spec.model_path, self.spec.args)
                self._checked = True
            elif cancelled():
                raise StartCancelled
            elif time.monotonic() > self._deadline:
                raise ConnectionError(
                    f"{self.exit_report()} (waited {self.spec.start_timeout:.0f} s): restart it, or remove it from "
                    "--rollout-external-engine-addrs"
                )
            else:
                time.sleep(POLL_SECONDS)
        return self._url

    def alive(self) -> bool:
        """Return whether the engine's port accepts connections. A busy server counts as alive, because the kernel
        accepts connections for it."""
        parts = urlsplit(self._url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=5).close()
        except OSError:
            return False
        return True

    def _address(self) -> str:
        return self._url  # unlike `wait_for_url`, does not wait for the engine

    def place(self) -> ProcessPlace:
        """Return a place with an empty node and without GPUs, because those of an external engine are unknown."""
        return ProcessPlace("")

    def pid(self) -> int:
        """Return 0: the process id of an external engine is unknown."""
        return 0

    def log_tail(self, num_lines: int = 25) -> str:
        """Return a note that the log is not available here."""
        return f"the external engine at {self.address} was not started by Penstock: see the log where it was started"

    def exit_report(self) -> str:
        """Return a message that the engine does not generate tokens; its exit code and log are unknown."""
        return f"the external engine at {self.address} does not generate tokens"

    def kill(self) -> None:
        """Make the next `wait_for_url` call check the engine again; its process is not killed."""
        self._checked = False

    def release(self) -> None:
        """Do nothing: the engine keeps running, with the weights that were sent last."""
