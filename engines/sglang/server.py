"""The SGLang implementation of `EngineServer`: command line and readiness check of a server process."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.engines.ports import HIGHEST, reserve_free_port
from penstock.engines.serving.server import EngineServer
from penstock.engines.sglang import control
from penstock.engines.sglang.args import to_command_line

LAUNCHER = Path(__file__).with_name("launch.py")  # a script; do not import it: its top-level code patches the process


class SGLangServer(EngineServer):
    """An `EngineServer` that runs SGLang through `launch.py`."""

    name = "sglang"
    # Offset 10000: gRPC (0.5.15.post1 does not start if this exceeds 65535). 233 to 240: data-parallel attention.
    derived_ports = (10_000, *range(233, 241))
    highest_port = HIGHEST - max(derived_ports)

    def command(self, port: int) -> list[str]:
        """Return the server's command line, without the API key, because `ps` shows command lines to other users."""
        spec = self.spec
        ours: dict[str, object] = {
            "model_path": spec.model_path,
            "host": self._host,
            "port": port,
            "tp_size": spec.tensor_parallel,
            "weight_version": spec.weight_version,
        }
        if spec.num_nodes > 1:
            ours |= {"nnodes": spec.num_nodes, "node_rank": self.node_rank, "dist_init_addr": self.rendezvous}
        else:
            ours["nccl_port"] = reserve_free_port()  # rendezvous of the ranks; SGLang would not reserve its choice
        configured = {name: value for name, value in spec.args.items() if name != "api_key"}
        return [spec.python or sys.executable, str(LAUNCHER), *to_command_line(ours), *to_command_line(configured)]

    def is_ready(self) -> bool:
        """Return whether the server has loaded its model and accepts requests. A process with another node rank than 0
        answers when its ranks have loaded the model."""
        return control.is_ready(self.url())
