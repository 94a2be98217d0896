"""One SGLang server: a real one, on GPUs or on CPU, as a supervised child process.

`SGLangServer` is a plain class; the pool makes it a Ray actor. The server never outlives it: it stays in the actor's session and
asks for SIGKILL when its parent dies (`launch.py`), and so do SGLang's own children. Restarting is the pool's business.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from engines.ports import free_port
from engines.scratch import own_directory
from engines.sglang import control
from engines.sglang.args import command_line
from storage.secrets import protect, redact

KEY_VARIABLE = "PENSTOCK_SERVER_KEY"  # environment of launch.py and launch_router.py alone
LAUNCHER = Path(__file__).with_name("launch.py")  # run as a script: importing it would make this process a server's
# Ports that SGLang derives from its own: gRPC (0.5.15.post1 refuses to start beyond 65535), and those of attention with data parallelism.
DERIVED_PORTS = (10_000, *range(233, 241))
HIGHEST_PORT = 65_535 - max(DERIVED_PORTS)


class ServerSpec(BaseModel):
    """What to serve and how."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_path: str
    """Hugging Face directory: the first weights, the config and the tokenizer."""
    host: str = "127.0.0.1"
    """Address to listen on. SGLang executes what it unpickles, so anything but loopback needs a closed network."""
    port: int = 0
    """Port of the first engine, counting up for the others; 0 chooses free ones."""
    weight_version: str = "default"
    """What the engine calls the weights that it loads."""
    args: dict[str, Any] = {}
    """SGLang's own flags with underscored names; `api_key` is the key of every server, each has a random one of its own without it."""
    tensor_parallel: int = 1
    """GPUs of one engine."""
    threads: int = 1
    """CPU threads of the server's arithmetic; small models are fastest with 1."""
    python: str | None = None
    """Interpreter to run SGLang with; this one by default."""
    pythonpath: str | None = None
    """PYTHONPATH of the server."""
    env: dict[str, str] = {}
    """Further environment variables of the server."""
    log_dir: str | None = None
    """Where the servers' logs go; the system's temporary directory by default."""
    start_timeout: float = 900
    """Seconds to load the model before the start counts as failed."""

    def digest(self, gpu_ids: tuple[str, ...] = ()) -> str:
        """Of the spec and the GPUs: servers with equal ones are interchangeable."""
        return hashlib.sha256(f"{self.model_dump_json()} {gpu_ids}".encode()).hexdigest()


class SGLangServer:
    """One server process on this machine.

    Args:
        spec: what it serves.
        index: its number in the pool.
        gpu_ids: the node's numbers of its GPUs.
        owner: of the pool that supervises it. On a standing Ray a server outlives its pool, and the next one takes it over.
    """

    def __init__(self, spec: ServerSpec, index: int = 0, gpu_ids: tuple[str, ...] = (), owner: str = "") -> None:
        self.spec = spec
        self._key = protect(str(spec.args.get("api_key") or secrets.token_hex(32)))
        self.index = index
        self.gpu_ids = gpu_ids
        self.owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._log: Path | None = None

    def start(self) -> str:
        """Start the server and wait until it answers. Returns its URL.

        Raises:
            RuntimeError: it died, with its last log lines, or took longer than `start_timeout`.
        """
        assert self._process is None, "already started"
        deadline = time.monotonic() + self.spec.start_timeout
        for last_try in (False, False, True):
            self._launch()
            control.use_key(self.url(), self._key)
            if self._wait_until_ready(deadline):
                return self.url()
            # Another process may take a free port before the server, which binds it only after loading.
            if last_try or self.spec.port or "address already in use" not in self.log_tail(200).lower():
                break
            self.stop()
        words = self.last_words("while starting", f"did not answer within {self.spec.start_timeout:.0f} s")
        self.stop()
        raise RuntimeError(f"the SGLang server for {self.spec.model_path} {words}")

    def adopt(self, owner: str, digest: str) -> str | None:
        """Belong to `owner` from now on. Returns the server's URL, or None if it is dead or another one is wanted (`ServerSpec.digest`)."""
        self.owner = owner
        return self.url() if self.alive() and digest == self.spec.digest(self.gpu_ids) else None

    def url(self) -> str:
        """Where it listens."""
        assert self._process is not None, "not started"
        return f"http://{self.spec.host}:{self._port}"

    def key(self) -> str:
        """What every request to the server must carry (control.use_key)."""
        return self._key

    def alive(self, owner: str | None = None) -> bool:
        """Whether the process runs (it ends by itself when one of SGLang's own processes dies).

        Raises:
            RuntimeError: `owner` asks, and it is not the owner any more.
        """
        if owner is not None and owner != self.owner:
            raise RuntimeError("another driver has taken over the engines of this run: let only one driver work on a run")
        return self._process is not None and self._process.poll() is None

    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None, "not started"
        return self._process.pid

    def log_path(self) -> str:
        """Of the server's log, on this machine."""
        return str(self._log or "")

    def log_tail(self, num_lines: int = 25) -> str:
        """The last lines of the server's log."""
        return last_lines(self._log, num_lines)

    def last_words(self, when: str = "", still_running: str = "is stuck") -> str:
        """How the server ended, with the end of its log; `still_running` if it did not."""
        code = self._process.poll() if self._process else None
        how = still_running if code is None else f"ended with code {code}"
        return f"{how} {when}".rstrip() + f". The end of its log, {self._log}:\n{self.log_tail()}"

    def stop(self) -> None:
        """End the server and its children. Nothing in them is worth a graceful end: SGLang's takes over 5 s."""
        if self._process is None:
            return
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self._process.kill()
        self._process.wait(timeout=30)
        for child in family:
            if child.is_running():
                child.kill()
        psutil.wait_procs(family, timeout=30)
        self._process = None

    def _launch(self) -> None:
        spec = self.spec
        self._port = spec.port + self.index if spec.port else free_port(HIGHEST_PORT, DERIVED_PORTS)
        ours = {
            "model_path": spec.model_path,
            "host": spec.host,
            "port": self._port,
            "nccl_port": free_port(),  # where its ranks meet; SGLang would choose one and bind it seconds later
            "tp_size": spec.tensor_parallel,
            "weight_version": spec.weight_version,
        }
        given = {name: value for name, value in spec.args.items() if name != "api_key"}  # a command line is shown by `ps`
        command = [spec.python or sys.executable, str(LAUNCHER), *command_line(ours), *command_line(given)]
        directory = Path(spec.log_dir or tempfile.gettempdir())
        directory.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"sglang-{self.index}-", suffix=".log", dir=directory)
        self._log = Path(path)
        with open(handle, "wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self._environment()
            )

    def _environment(self) -> dict[str, str]:
        spec = self.spec
        env = {
            **os.environ,
            "OMP_NUM_THREADS": str(spec.threads),
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_SERVER_PARENT": str(os.getpid()),
            "TMPDIR": str(own_directory()),  # its sockets and empty files go with this process
            KEY_VARIABLE: self._key,
        }
        env.setdefault("HF_HUB_OFFLINE", "1")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpu_ids)  # none: a CPU engine, also on a machine with GPUs
        if spec.python:
            env.pop("PYTHONPATH", None)  # the trainer's packages are none of the other interpreter's business
        if spec.pythonpath:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.pythonpath, env.get("PYTHONPATH")]))
        return env | spec.env

    def _wait_until_ready(self, deadline: float) -> bool:
        while self.alive() and time.monotonic() < deadline:
            if control.is_ready(self.url()):
                return True
            time.sleep(0.2)
        return False


def last_lines(log: Path | None, num_lines: int) -> str:
    """The end of a log file; nothing if there is none here."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * num_lines))
        return redact("\n".join(file.read().decode(errors="replace").splitlines()[-num_lines:]))  # SGLang logs its arguments
