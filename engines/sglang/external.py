"""An engine that somebody else has started: found, checked, waited for, never started or ended. Stands where an `Engine` may stand.

What it serves is made right by the supervisor like any other's: weights are published to it, and it is watched. If it goes away,
only its owner can bring it back.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engines.sglang import control
from engines.sglang.engine import LOOK_EVERY, GivenUp
from engines.sglang.server import ServerSpec
from storage.errors import EngineError
from storage.secrets import has_credentials

OLDEST = (0, 5, 15)  # SGLang release with /model_info
# What two models must have in common for the weights of one to fit into the other.
SIZES = (
    *(
        "architectures",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ),
    *("intermediate_size", "moe_intermediate_size", "num_experts", "n_routed_experts", "kv_lora_rank", "q_lora_rank"),
    "tie_word_embeddings",
)


class ExternalEngine:
    """See `Engine` for what its methods promise.

    Args:
        address: host:port.
        spec: the model that it must serve, and how long it is waited for.
        index: its number in the pool.
    """

    adopted = False

    def __init__(self, address: str, spec: ServerSpec, index: int) -> None:
        self.address = address
        self.spec = spec
        self.index = index
        self._url = url_of(address)
        if key := spec.args.get("api_key"):
            control.use_key(self._url, key)
        self._found = False
        self.begin()

    def begin(self) -> None:
        """From now on it is waited for."""
        self._deadline = time.monotonic() + self.spec.start_timeout

    def settle(self) -> None:
        """Nothing is to be done before it is used."""

    def url(self, given_up: Callable[[], bool] = lambda: False) -> str:
        """Its address, once tokens come out there.

        Raises:
            ConnectionError: none within `spec.start_timeout` seconds.
            EngineError: it serves another model.
            GivenUp: `given_up` said so meanwhile.
        """
        while not self._found:
            if control.generates(self._url):
                self._check()
                self._found = True
            elif given_up():
                raise GivenUp
            elif time.monotonic() > self._deadline:
                raise ConnectionError(
                    f"{self.last_words()} for {self.spec.start_timeout:.0f} s: start it again, or take it out of "
                    "--rollout-external-engine-addrs"
                )
            else:
                time.sleep(LOOK_EVERY)
        return self._url

    def alive(self) -> bool:
        """Whether anybody listens there; a busy server's system does so on its behalf."""
        parts = urlsplit(self._url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=5).close()
        except OSError:
            return False
        return True

    def answers(self) -> bool:
        """Whether its HTTP side speaks."""
        try:
            control.weight_version(self._url)
        except (control.ServerGone, RuntimeError):
            return False
        return True

    def generates(self, timeout: float) -> bool:
        """Whether it makes tokens."""
        return self.alive() and control.generates(self._url, timeout)

    def pid(self) -> int:
        """Unknown."""
        return 0

    def log_tail(self, num_lines: int = 25) -> str:
        """Unknown."""
        return f"the log of the engine at {self.address} is where it was started"

    def last_words(self) -> str:
        """That it is away."""
        return f"the engine at {self.address}, which was started elsewhere, does not generate"

    def kill(self) -> None:
        """It is no longer counted on; its owner's process is left alone."""
        self._found = False

    def release(self) -> None:
        """It is left as it is, with the last weights."""

    def _check(self) -> None:
        """Raises EngineError if the run's weights would not fit, RuntimeError if its SGLang is too old."""
        release, _ = control.server_facts(self._url)
        if release < OLDEST:
            raise RuntimeError(
                f"the engine at {self.address} runs SGLang {'.'.join(map(str, release))}: Penstock needs 0.5.15.post1 or later"
            )
        theirs = _model_of(self._url)
        ours = json.loads((Path(self.spec.model_path) / "config.json").read_text(encoding="utf-8"))
        for name in SIZES:
            if name in theirs and theirs[name] != ours.get(name):
                raise EngineError(
                    f"the engine at {self.address} serves a model with {name} {theirs[name]!r}, but --hf-checkpoint "
                    f"{self.spec.model_path} has {ours.get(name)!r}: start it with that model, or name another engine"
                )


def _model_of(url: str) -> dict[str, Any]:
    """What can be known of the model that an engine serves: its config.json where that can be read here, else its architecture."""
    info = control.call(url, "/model_info")
    config = Path(str(info["model_path"])) / "config.json"  # of the last weights that came over disk, which may be gone
    if config.is_file():
        return dict(json.loads(config.read_text(encoding="utf-8")))
    return {"architectures": info["architectures"]} if info.get("architectures") else {}


def url_of(address: str) -> str:
    """The URL of an engine that is named by host:port, or by a URL.

    Raises:
        EngineError: it is neither, or holds credentials.
    """
    if has_credentials(address if "://" in address else f"http://{address}"):
        raise EngineError(
            "--rollout-external-engine-addrs holds credentials: give host:port, and the engines' key with --sglang-api-key"
        )
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        if parts.scheme in ("http", "https") and parts.hostname and parts.port and not parts.path.strip("/"):
            return f"{parts.scheme}://{parts.netloc}"
    except ValueError:  # a port that is no number
        pass
    raise EngineError(f"--rollout-external-engine-addrs {address}: an engine's address is host:port, for instance 10.0.0.7:30000")


def is_on_this_machine(address: str) -> bool:
    """Whether an address is the loopback's."""
    return urlsplit(url_of(address)).hostname in ("127.0.0.1", "localhost", "::1")
