"""The server process of one inference engine, on GPUs or on CPU.

`EngineServer` is a plain class that the pool runs as a Ray actor. The server process never outlives the actor: the
server's launch script requests SIGKILL at the death of its parent (PR_SET_PDEATHSIG), and the server's child processes
do the same. `supervisor.py` decides when a server is restarted.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import psutil
from pydantic import BaseModel, ConfigDict

from penstock.engines.network import (
    HIGHEST,
    LOOPBACK,
    interface_of,
    is_free,
    join_address,
    node_address,
    reserve_free_port,
    socket_environment,
)
from penstock.engines.scratch import end_with_parent, own_temp_directory
from penstock.engines.serving import endpoints
from penstock.storage.commit import Commit
from penstock.storage.errors import EngineError
from penstock.storage.secrets import redact, register_secret
from penstock.storage.store import Store

PORT_TIMEOUT = 10.0  # seconds until a port of a killed server must be free
KEY_VARIABLE = "PENSTOCK_SERVER_KEY"  # passes the API key to server and router processes; set only for them


class ServerSpec(BaseModel):
    """Model and settings of the inference servers of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_path: str
    """Hugging Face directory with the initial weights, the config and the tokenizer."""
    role: str = "engine"
    """Name of the servers in Ray and in messages: "engine", or "teacher"."""
    several_nodes: bool = False
    """Listen on the address of the server's node, which processes on other nodes can reach, instead of loopback. Use it
    only in a private network: engines may unpickle request data, which can execute code. The server always has an API
    key."""
    network_interface: str | None = None
    """With `several_nodes`: network interface whose address the servers use; None: the node's address in Ray."""
    num_nodes: int = 1
    """Number of nodes of one engine; one server process runs on each."""
    port: int = 0
    """Port of engine 0; engine i uses `port` + i. 0 chooses free ports."""
    weight_version: str = "default"
    """Weight version that the engine reports for the weights in `model_path`."""
    args: dict[str, Any] = {}
    """The engine's own flags with underscored names. `api_key` is the API key of every server; without it each server
    gets a random key."""
    tensor_parallel: int = 1
    """Tensor-parallel size: the number of GPUs of one engine."""
    threads: int = 1
    """CPU threads of the server (OMP_NUM_THREADS); small models are fastest with 1."""
    python: str | None = None
    """Python interpreter that runs the server; by default the interpreter of this process."""
    pythonpath: str | None = None
    """Directories that are prepended to the server's PYTHONPATH."""
    env: dict[str, str] = {}
    """Additional environment variables of the server."""
    log_dir: str | None = None
    """Directory of the servers' logs; the system's temporary directory by default."""
    start_timeout: float = 900
    """Seconds within which a server must have loaded its model; otherwise the start fails."""

    def digest(self, gpu_ids: tuple[str, ...] = ()) -> str:
        """Return a hash of the spec and the GPU ids. A driver adopts (reuses) the server of an earlier driver only if
        the server was started with an equal hash."""
        return hashlib.sha256(f"{self.model_dump_json()} {gpu_ids}".encode()).hexdigest()


class ServerInfo(NamedTuple):
    """A server process and the information that its pool needs to use it."""

    node: str  # Ray's id of the machine
    pid: int  # id of the main process; 0 if it is not started
    key: str  # API key that every request must carry
    log: str  # path of the log on the machine


class EngineServer(ABC):
    """One inference server process on this machine, of the engine at position `index` in the pool. Subclasses define
    its command line and readiness check.

    Args:
        gpu_ids: for CUDA_VISIBLE_DEVICES; empty for a CPU engine.
        owner: id of the pool that supervises the server, until another pool adopts it.
        node_rank: position of this process among the `spec.num_nodes` processes of the engine. Requests go to the
            process with node rank 0; the other processes only compute.
    """

    name: ClassVar[str]  # name of the engine in messages; prefix of the log's file name
    highest_port: ClassVar[int] = HIGHEST
    derived_ports: ClassVar[Sequence[int]] = ()  # offsets (port + offset) of further ports that the server binds
    # Names of environment variables that get the address of the server's node if the run uses several nodes.
    address_variables: ClassVar[Sequence[str]] = ()
    not_inherited: ClassVar[re.Pattern[str]] = re.compile("")  # names of environment variables the server must not get
    bind_error: ClassVar[str] = ""  # regular expression of the log line that says that `{port}` could not be bound

    def __init__(
        self, spec: ServerSpec, index: int = 0, gpu_ids: tuple[str, ...] = (), owner: str = "", node_rank: int = 0
    ) -> None:
        self.spec = spec
        self.node_rank = node_rank
        self.rendezvous = ""  # host:port at which the processes of the engine meet; "" for an engine of one process
        self._host = LOOPBACK
        self.index = index
        self.gpu_ids = gpu_ids
        self.owner = owner
        self.key = register_secret(str(spec.args.get("api_key") or secrets.token_hex(32)))
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._log: Path | None = None
        self._download = ExitStack()  # removes the files of the last `download`

    @abstractmethod
    def command(self, port: int) -> list[str]:
        """Return the command line of the server, without the API key, because `ps` shows it to other users. The process
        must end when its parent dies, and read its API key from the environment variable PENSTOCK_SERVER_KEY."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether the server has loaded its model and accepts requests."""

    def choose_rendezvous(self) -> str:
        """Reserve the port on this node at which the processes of an engine meet. Return host:port."""
        host = node_address(self.spec.network_interface) if self.spec.several_nodes else LOOPBACK
        return join_address(host, reserve_free_port(HIGHEST - 8, range(1, 8), host))

    def start(self, rendezvous: str = "") -> str:
        """Start the server, wait until it is ready, and return its URL. `rendezvous`: the result of `choose_rendezvous`
        of node rank 0, for an engine over several nodes."""
        assert self._process is None, "the server has already been started"
        end_with_parent()
        deadline = time.monotonic() + self.spec.start_timeout
        self.rendezvous = rendezvous
        if self.spec.several_nodes and self.node_rank == 0:
            self._host = node_address(self.spec.network_interface)
        for last_try in (False, False, True):
            self._launch()
            endpoints.set_api_key(self.url(), self.key)
            while self.alive() and not self._port_was_taken() and time.monotonic() < deadline:
                if self.is_ready():
                    return self.url()
                time.sleep(0.2)
            # The server binds its port only after loading the model; another process may have taken the port by then.
            # The processes of an engine over several nodes can only be restarted together, by the pool.
            fixed = self.spec.port or self.spec.num_nodes > 1
            if last_try or fixed or "address already in use" not in read_log_tail(self._log, 200).lower():
                break
            self.stop()
        if self.spec.port and self._port_was_taken():
            self.stop()
            raise self._port_error()
        report = self.exit_report(f"was not ready within {self.spec.start_timeout:.0f} s")
        self.stop()
        raise RuntimeError(f"the {self.name} server of {self.spec.model_path} failed to start: the server {report}")

    def adopt(self, owner: str, digest: str) -> str | None:
        """Make the pool with the id `owner` the owner of the running server; its earlier pool can no longer use it.
        Return the URL, or None if the server is dead or its `ServerSpec.digest` differs from `digest`."""
        self.owner = owner
        return self.url() if self.alive() and digest == self.spec.digest(self.gpu_ids) else None

    def url(self) -> str:
        """Return the server's URL (http://host:port)."""
        assert self._process is not None, "the server is not started"
        return f"http://{join_address(self._host, self._port)}"

    def info(self) -> ServerInfo:
        """Return the machine, process, API key and log of the server."""
        import ray

        pid = self._process.pid if self._process else 0
        return ServerInfo(ray.get_runtime_context().get_node_id(), pid, self.key, str(self._log or ""))

    def alive(self, owner: str | None = None) -> bool:
        """Return whether the server's main process is running; an engine must make it exit when a child process dies.
        Raises RuntimeError if `owner` is given, but another driver of the run has taken over the server."""
        if owner is not None and owner != self.owner:
            raise RuntimeError("another driver now uses the engines of this run: start only one driver per run")
        return self._process is not None and self._process.poll() is None

    def download(self, store: str, store_options: dict[str, Any], commit: Commit) -> str:
        """Download the files that `commit` lists from a store to this machine, and return their directory, which
        `remove_download` deletes. The commit record itself need not be in the store."""
        self.remove_download()  # files of an update whose trainer died
        return str(self._download.enter_context(Store(store, store_options, probe=False).reading(commit)))

    def remove_download(self) -> None:
        """Remove the directory of the last `download`, if there is one."""
        self._download.close()

    def exit_report(self, still_running: str = "is stuck") -> str:
        """Return "died (exit code X)", or the text `still_running` if the process is alive, and the tail of the log."""
        code = self._process.poll() if self._process else None
        outcome = still_running if code is None else f"died (exit code {code})"
        return f"{outcome}; tail of {self._log}:\n{read_log_tail(self._log, 25)}"

    def stop(self) -> None:
        """Kill the server and its child processes with SIGKILL; a graceful shutdown would take seconds."""
        if self._process is None:
            return
        try:
            children = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self._process.kill()
        self._process.wait(timeout=30)
        for child in children:
            if child.is_running():
                child.kill()
        psutil.wait_procs(children, timeout=30)
        self._process = None

    def _launch(self) -> None:
        """Start the server process, with its output in a new log file."""
        spec = self.spec
        if spec.port and self.node_rank == 0:
            self._port = spec.port + self.index
            deadline = time.monotonic() + PORT_TIMEOUT
            while not is_free(self._port, self._host):  # an earlier server of this engine may not have ended yet
                if time.monotonic() > deadline:
                    raise self._port_error()
                time.sleep(0.1)
        else:
            self._port = reserve_free_port(self.highest_port, self.derived_ports, self._host)
        env = {
            **{name: value for name, value in os.environ.items() if not self.not_inherited.fullmatch(name)},
            "OMP_NUM_THREADS": str(spec.threads),
            "PYTHONUNBUFFERED": "1",
            "PENSTOCK_SERVER_PARENT": str(os.getpid()),
            "TMPDIR": str(own_temp_directory()),  # removed when this process ends, with the server's sockets and files
            KEY_VARIABLE: self.key,
        }
        env.setdefault("HF_HUB_OFFLINE", "1")
        if self.rendezvous or spec.several_nodes:
            host = node_address(spec.network_interface) if spec.several_nodes else LOOPBACK
            if interface := interface_of(host):
                env["GLOO_SOCKET_IFNAME"] = interface  # by default the interface to which the host's name resolves
            env |= dict.fromkeys(self.address_variables, host) | socket_environment(spec.network_interface)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpu_ids)  # empty for a CPU engine, even on a machine with GPUs
        if spec.python:
            env.pop("PYTHONPATH", None)  # another interpreter must not import the trainer's packages
        if spec.pythonpath:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [spec.pythonpath, env.get("PYTHONPATH")]))
        command = self.command(self._port)
        directory = Path(spec.log_dir or tempfile.gettempdir())
        directory.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix=f"{self.name}-{self.index}-", suffix=".log", dir=directory)
        self._log = Path(path)
        with open(handle, "wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env | spec.env
            )

    def _port_was_taken(self) -> bool:
        """Return whether the log reports that the server could not bind its port; its process may keep running."""
        pattern = self.bind_error.format(port=self._port)
        return bool(pattern) and re.search(pattern, read_log_tail(self._log, 50)) is not None

    def _port_error(self) -> EngineError:
        return EngineError(
            f"engine {self.index} cannot listen on port {self._port} of {self._host} (--engine-port {self.spec.port} "
            f"+ {self.index}), because another process uses it: end that process, give another port, or omit the "
            "option to use free ports"
        )


def read_log_tail(log: Path | None, num_lines: int) -> str:
    """Return the last `num_lines` lines of a log file, secrets redacted; "" if the file is not on this machine."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400 * num_lines))
        lines = file.read().decode(errors="replace").splitlines()[-num_lines:]
    return redact("\n".join(lines))  # servers may log their API key
