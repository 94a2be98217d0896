"""The options of a run as a whole: name, store, rounds, weight updates, Ray, trackers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from penstock.storage.commit import MAX_RUN_NAME, RUN_NAME
from penstock.storage.config import StageConfig, option
from penstock.storage.errors import check_rules
from penstock.storage.tracking.trackers import TrackerOptions


class RunOptions(StageConfig):
    """Options of the run as a whole: name, store, number of rounds, checkpoints, Ray, trackers."""

    run: str = option("", aliases=("run-name",), pattern=rf"^({RUN_NAME})?$", max_length=MAX_RUN_NAME)
    """Name of the run; the same name resumes it. Letters, digits, dot, dash, underscore, at most 200 characters."""

    store: str = option("penstock-store", mutability="placement", secret=True)
    """Where runs are stored: a directory or any fsspec URI such as s3://bucket/prefix."""

    save: str | None = option(None, mutability="placement")
    """STORE/RUN in one option, instead of --store and --run: /models/my-run is the run my-run in the store /models. A
    second start with the same value resumes the run."""

    store_options: dict[str, Any] = option({}, mutability="placement", secret=True)
    """Passed to the fsspec file system (endpoint, credentials, ...); give a secret as env:NAME or secret-file:PATH."""

    store_single_writer: bool = option(False, mutability="placement")
    """Declare that only one process writes to the store; required for stores without conditional create."""

    num_rollout: int = option(0, mutability="schedule", ge=0)
    """Number of rounds to train. With 0, `penstock train` only evaluates."""

    num_epoch: int | None = option(None, mutability="schedule", ge=1)
    """Number of passes over the rows of --prompt-data, instead of --num-rollout: the number of rounds is N x rows //
    --rollout-batch-size."""

    save_interval: int | None = option(None, mutability="schedule", ge=1)
    """Save a checkpoint every N rounds; the last round is always saved."""

    num_rollout_per_start: int | None = option(None, mutability="schedule", ge=1)
    """Instead of --num-rollout, for scheduled runs: each start of the flow trains N more rounds, or, if the previous
    start was interrupted, the rest of its N rounds."""

    save_hf: str | None = option(None, mutability="placement")
    """At every saved checkpoint also write Hugging Face files to this path; {rollout_id} is the number of the last
    trained rollout, from 0."""

    keep_checkpoints: int | None = option(None, mutability="placement", ge=1)
    """Keep only the newest N checkpoints; default all. Rounds are kept, so older policies can be restored by replay."""

    keep_best: str | None = option(None, mutability="placement")
    """Also keep the checkpoint with the best value of this evaluation metric (e.g. eval/gsm8k; higher is better)."""

    grace_period: float = option(30.0, mutability="placement", ge=0)
    """Seconds from SIGTERM to the end of the process; less than 10 counts as 10. The last 10 seconds are reserved for
    cleanup: a stage that is still running then is cancelled, and reruns on resume."""

    ray_address: str | None = option(None, mutability="placement")
    """Address of an existing Ray cluster (`auto` finds a local one); by default the run starts and stops its own."""

    num_gpus_per_node: int | None = option(None, mutability="placement", ge=1)
    """GPUs that the run uses on each node. Default: --actor-num-gpus-per-node with several --actor-num-nodes, otherwise
    all GPUs of a node."""

    network_interface: str | None = option(None, mutability="placement")
    """Network interface (such as eth0) over which the nodes of --ray-address communicate; default: the interface that
    has the address of Ray's node."""

    node_timeout: float = option(600.0, mutability="placement", ge=0)
    """Seconds to wait for the return of a Ray node that died during the run; if it does not return, the stage fails."""

    price_per_device_hour: float | None = option(None, mutability="placement", ge=0)
    """Price of one GPU (without GPUs: of one process) for one hour, in any currency. MLflow then shows the cost of the
    run."""

    report: bool = option(True, mutability="placement")
    """At the end write the HTML report of the run (`penstock report`) into the store, and send it to the trackers."""

    update_weight_transport: Literal["tensor", "nccl", "disk"] | None = option(None, mutability="placement")
    """How weights reach the engines: tensor (shared memory or GPU), nccl (network) or disk. Default: tensor if trainer
    and engines share GPUs or run without GPUs, else nccl, or disk for external engines."""

    update_weight_disk_dir: str | None = option(None, mutability="placement")
    """Directory shared by trainer and engines, for weight updates over disk; default: in the store if it is local."""

    update_weights_interval: int = option(1, mutability="schedule", ge=1)
    """Send the weights to the engines after every N rounds."""

    async_buffer_size: int = option(0, mutability="schedule", ge=0)
    """Rollouts that may be generated ahead of the trainer; 0: generate and train in turn."""

    async_mode: Literal["ahead", "streaming"] = option("ahead", mutability="schedule")
    """ahead: --async-buffer-size rollouts ahead of the trainer, each by one policy version; streaming: engines generate
    without a pause, and get new weights while they do."""

    max_staleness: int = option(2, mutability="schedule", ge=1)
    """With --async-mode streaming: tokens that are more than N policy versions older than the policy trained on them
    are masked."""

    pause_generation_mode: Literal["retract", "in_place"] = option("retract", mutability="schedule")
    """With --async-mode streaming, during a weight update: retract computes the KV cache of running requests again with
    the new weights, in_place keeps it."""

    update_weight_buffer_size: int = option(512 << 20, mutability="placement", ge=1)
    """Maximum size in bytes of the tensors that a weight update sends at a time; a single tensor may be larger."""

    check_weight_update_equal: bool = option(False, mutability="placement")
    """After every weight update check that the engines' weights equal the trainer's, tensor by tensor; slow."""

    debug_rollout_only: bool = option(False, mutability="placement")
    """Only generate and commit the rollouts, all with the initial weights, without a trainer."""

    debug_train_only: bool = option(False, mutability="placement")
    """Only train, on the rollouts that the run has committed, without engines and evaluations."""

    min_effective_sample_size: float = option(0.5, mutability="schedule", ge=0, le=1)
    """In a fork with --reuse-rollouts: stop before a round whose stored tokens have a smaller effective sample size, as
    a share of their number, for the policy that would be trained on them."""

    colocate: bool = option(False, mutability="placement")
    """Trainer and engines take turns on the same GPUs; turns on --offload-train and --offload-rollout."""

    offload_train: bool | None = option(None, mutability="placement")
    """Move the trainer's weights, gradients and optimizer state to host memory while the engines generate."""

    offload_rollout: bool | None = option(None, mutability="placement")
    """Release the engines' weights and KV cache on the GPU while the trainer works."""

    stage_retries: int = option(2, mutability="placement", ge=0)
    """How often a failed stage is retried before the run fails."""

    prometheus_port: int | None = option(None, mutability="placement", ge=0, le=65535)
    """Serve the newest metrics to Prometheus at http://127.0.0.1:N/metrics during the run; 0 chooses a free port."""

    log_format: Literal["text", "json"] = option("text", mutability="placement")
    """Format of the terminal's lines: json prints one object a line with time, level, run, round, stage and message."""

    hang_timeout: float = option(1800.0, mutability="placement", ge=0)
    """Print the Python stacks of the run's processes if no stage has made progress for N seconds; the run continues. 0:
    never."""

    @model_validator(mode="before")
    @classmethod
    def _split_save(cls, values: Any) -> Any:
        """Replace --save STORE/RUN by --store and --run."""
        if not isinstance(values, dict) or not isinstance(values.get("save"), str):
            return values
        save = values["save"].rstrip("/")
        if "://" not in save:
            save = os.path.abspath(save)
        store, _, run = save.rpartition("/")
        given_store = values.get("store")
        if isinstance(given_store, str) and "://" not in given_store:
            given_store = os.path.abspath(given_store)
        check_rules(
            (
                given not in (None, "", part),
                f"--save {values['save']} means --{name} {part}, but --{name} {given} was given: omit one of them",
            )
            for name, given, part in (("store", given_store, store or "/"), ("run", values.get("run"), run))
        )
        return {**values, "save": None, "store": store or "/", "run": run}

    def rules(self) -> Iterator[tuple[object, str]]:
        yield from super().rules()
        path = self.save_hf
        yield (
            path is not None and ("{rollout_id}" not in path or set("{}") & set(path.replace("{rollout_id}", ""))),
            f"--save-hf {path} gives several checkpoints one path, or has other braces: write {{rollout_id}} where "
            "the number of the rollout belongs, as in /models/hf_{rollout_id}",
        )
        yield (
            self.network_interface is not None and self.ray_address is None,
            "--network-interface has no effect without --ray-address, because all processes are on this machine: "
            "omit it, or join a Ray cluster of several nodes",
        )

    def hf_path(self, version: int) -> str:
        """Return the path of --save-hf for policy `version`, which the round `version` - 1 trained."""
        return (self.save_hf or "").replace("{rollout_id}", str(version - 1))

    @property
    def offloads_trainer(self) -> bool:
        """Return whether the trainer's state is in host memory while the engines generate."""
        return self.colocate if self.offload_train is None else self.offload_train

    @property
    def offloads_engines(self) -> bool:
        """Return whether the engines release their GPU memory while the trainer works."""
        return self.colocate if self.offload_rollout is None else self.offload_rollout

    @property
    def alternates_trainer_and_engines(self) -> bool:
        """Return whether the trainer or the engines free device memory while the other side works."""
        return self.offloads_trainer or self.offloads_engines

    @property
    def generates_ahead(self) -> bool:
        """Return whether rollouts are generated while earlier ones are trained."""
        return self.async_buffer_size > 0 or self.streams

    @property
    def streams(self) -> bool:
        """Return whether engines get new weights while they generate."""
        return self.async_mode == "streaming"

    @property
    def staleness_limit(self) -> int:
        """Return the largest staleness of a token: how many versions older than the policy that is trained on the token
        the policy may be that generated it."""
        return self.max_staleness if self.streams else self.async_buffer_size + self.update_weights_interval - 1


class RunConfig(TrackerOptions, RunOptions):
    """The section `run`: the options of the run as a whole, then those of its trackers."""
