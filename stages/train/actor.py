"""One rank of the trainer: its models on a GPU (or CPU threads), and the policy version that they hold.

`PolicyState.clean` is False while the weights are being changed, so an interrupted step is detected. The driver calls
every method through `call`, which accepts only the driver that took over the rank last. A replaced driver that is still
running therefore cannot change the weights. The driver imports this module to create the actors; torch is imported
inside the methods, so that only the ranks load them.
"""

from __future__ import annotations

import gc
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.backends import engine_backend
from penstock.engines.scratch import end_with_parent, own_temp_directory, print_stacks_on_signal
from penstock.engines.training import MemorySwitch, StateKind, TrainEngine, train_backend
from penstock.stages.images import SampleImages, fingerprint_of_images, read_image_processor
from penstock.stages.train.diagnostics.rank import RankDiagnostics
from penstock.stages.train.spec import (
    NEEDED_ON_DEVICE,
    POLICY_METHODS,
    AuxiliaryModel,
    Build,
    FencedError,
    PolicyState,
    RankInfo,
    SaveResult,
    TrainResult,
)
from penstock.storage.commit import Commit, FileRecord
from penstock.storage.store import Store

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor

    from penstock.engines.families.shape import ModelShape
    from penstock.engines.generation import EngineClient, EngineGone, EngineRefused, WeightTransport
    from penstock.stages.train.batching import Batch
    from penstock.stages.train.step import Models


class TrainActor:
    """One rank of the trainer, as a plain class; `trainer_group.py` turns it into a Ray actor.

    Args:
        build: models, options and number of ranks.
        rank: rank of this process among all trainer ranks.
        incarnation: random id of this group of processes, new at every start.
        owner: token of the driver whose calls this rank accepts.
    """

    def __init__(self, build: Build, rank: int, incarnation: str, owner: str) -> None:
        self.build, self.spec, self.rank = build, build.spec, rank
        self.store = Store(self.spec.store, self.spec.store_options, probe=False)
        self._owner = owner
        self._joined = False
        self._listener: socket.socket | None = None  # rendezvous socket, to which the other ranks connect
        self._urls: list[str] = []  # addresses of the engines that get the weights
        # One client for all publications, because it holds the process groups that connect the rank with the engines.
        self._engines: EngineClient = engine_backend(self.spec.engine).connect(lambda: self._urls)
        self._state = PolicyState(run=self.spec.run, incarnation=incarnation, version=0, clean=False)
        self._memory_switches: list[MemorySwitch] = []  # since the last call of `take_memory_switches`
        self.diagnostics = RankDiagnostics(self.spec.diagnostics, self.spec.run, rank)
        print_stacks_on_signal()
        end_with_parent()

    # ---- ownership ---------------------------------------------------------------------------------------------------

    def call(self, owner: str, method: str, *args: Any) -> Any:
        """Call a method of this rank for the driver with the token `owner`; before that, move the offloaded state
        (weights, gradients, optimizer) that the method needs back to the device. Raises FencedError if another driver
        has taken over this rank."""
        if owner != self._owner:
            raise FencedError(
                f"another driver has taken over the trainer of run {self.spec.run!r}, so this driver stops; its "
                "commits are kept. If you did not start the other driver, find and stop it"
            )
        if needed := NEEDED_ON_DEVICE.get(method):
            self._memory_switches += self.models.onload(needed, critic=method not in POLICY_METHODS)
        return getattr(self, method)(*args)

    def adopt(self, owner: str) -> RankInfo:
        """Accept only calls of the driver with the token `owner` from now on. Return this rank's number, Ray node,
        process id, log path, and the hash of its options and code (`Build`)."""
        import ray

        self._owner = owner
        return RankInfo(
            rank=self.rank,
            build=self.build.hash,
            incarnation=self._state.incarnation,
            joined=self._joined,
            node=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            gpu_ids=tuple(map(str, ray.get_runtime_context().get_accelerator_ids()["GPU"])),
            log=os.path.realpath("/proc/self/fd/2"),  # Ray redirects stderr to a file
        )

    def import_libraries(self) -> None:
        """Import torch, the training engine, the training code and the engines' client, and create the CUDA context, so
        that `connect_and_build`, `train` and the first `publish` start without delay."""
        import torch

        import penstock.stages.train.build
        import penstock.stages.train.step  # noqa: F401

        train_backend().import_libraries()
        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
        if self.spec.config.loss_type != "sft_loss":
            self._engines.prepare_weight_updates()

    def connect_and_build(self, init_method: str, offloads: bool = False) -> None:
        """Connect to the other ranks at the rendezvous URL `init_method`, and build the models with random weights.
        `offloads`: whether calls of `offload` will follow, for which host memory is then allocated in the
        background."""
        from penstock.engines.network import interface_of, node_address
        from penstock.stages.train.build import build_models

        if init_method.startswith("tcp:") and (
            interface := interface_of(node_address(self.spec.network_interface))
        ):  # gloo would use the interface of the host's name, which is often loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        config = self.spec.config
        timeout = timedelta(seconds=config.train_timeout)  # one rank may download gigabytes while others wait
        ranks = (self.rank, self.build.num_ranks)
        listener, self._listener = self._listener, None
        layout = config.parallel_layout
        train_backend().init_ranks(*ranks, listener or init_method, layout, self.build.threads, timeout)
        self.diagnostics.start_recording_memory()
        self.models: Models = build_models(self.spec.shape, config, offloads=offloads)
        gc.freeze()  # excludes modules and models from the garbage collections that engines run at every save and load
        self._joined = True

    # ---- queries -----------------------------------------------------------------------------------------------------

    def state(self) -> PolicyState:
        """Return the policy version that this rank holds, and whether its weights are complete."""
        return self._state

    def path_exists(self, path: str) -> bool:
        """Return whether a path exists on this rank's machine."""
        return Path(path).exists()

    def open_rendezvous(self, one_node: bool) -> str:
        """Return a new URL for torch.distributed's rendezvous. If all ranks are on one node, it is the URL of a file in
        this process's temporary directory: this opens no port, and after a kill the next process of Penstock on this
        node removes the file. Otherwise it is the URL of a socket on this node's address only (tcp://host:port)."""
        from penstock.engines.network import join_address, listen_at, node_address

        if one_node:
            return f"file://{own_temp_directory()}/rendezvous-{uuid.uuid4().hex}"
        self._listener = listen_at(node_address(self.spec.network_interface))
        return f"tcp://{join_address(*self._listener.getsockname()[:2])}"

    def digest(self) -> dict[str, str]:
        """Return the hash of every parameter shard of policy and critic on this rank: shard name -> hash."""
        return self.models.digest()

    def optimizer_digest(self) -> dict[str, str]:
        """Return the hashes of everything in a checkpoint except the trained weights: optimizer, learning-rate
        scheduler and RNG states, and a reference that --ref-update-interval replaced."""
        return self.models.optimizer_state_digest()

    def fingerprint(self) -> dict[str, Any]:
        """Return everything, except weights and data, that determines the result of a training step bit for bit:
        hardware, libraries, parallel layout, packing options. The entry `bit_exact` tells whether training on the same
        data again gives the same bits."""
        config = self.spec.config
        packing = {
            name: getattr(config, name)
            for name in ("max_tokens_per_gpu", "micro_batch_size", "balance_data", "log_probs_chunk_size")
        }
        bit_exact = config.deterministic_mode or self.models.policy.device.type == "cpu"
        return {
            **self.models.policy.fingerprint(),
            **packing,
            "by_tokens": config.fills_microbatches_by_tokens,
            "bit_exact": bit_exact,
        }

    # ---- commands ----------------------------------------------------------------------------------------------------

    def load(
        self, version: int, base: Commit | None, checkpoint: Commit | None, auxiliary: dict[AuxiliaryModel, Commit]
    ) -> None:
        """Load policy `version`: the starting weights with new optimizers, or a checkpoint with all its states.

        Args:
            version: policy version that is loaded.
            base: commit with the starting weights of policy and critic. None if `checkpoint` has all weights, not only
                adapters.
            checkpoint: commit of the checkpoint; None = load `base`.
            auxiliary: commits of the reference and teacher models, and of the adapters that a run starts with. A
                reference that --ref-update-interval replaced is read from `checkpoint` instead. Without a reference in
                `auxiliary`, a policy with adapters uses `base` as its reference.
        """
        import ray

        from penstock.engines.lora import open_peft
        from penstock.stages.train.build import (
            load_auxiliary_model,
            load_initial,
            open_commit_files,
            resume_models,
        )

        machine = ray.get_runtime_context().get_node_id()
        with self._changing_weights_to(version):
            self.models.average = None
            for name, model in auxiliary.items():
                if name != "adapter":
                    with open_commit_files(self.store, model, machine) as directory:
                        load_auxiliary_model(self.models, name, directory)
            config = self.spec.config
            self.models.reference_is_base = bool(config.lora and config.uses_reference and "reference" not in auxiliary)
            assert base is not None or checkpoint is not None, "neither `checkpoint` nor `base` is given"
            if base is not None:
                with open_commit_files(self.store, base, machine) as directory:
                    load_initial(self.models, directory)
            if (adapter := auxiliary.get("adapter")) is not None:
                with open_commit_files(self.store, adapter, machine) as directory:
                    with open_peft(directory, self.models.policy.shape) as matrices_of:
                        self.models.policy.load_adapters(matrices_of)
            if checkpoint is not None:
                with open_commit_files(self.store, checkpoint, machine) as directory:
                    saved = resume_models(self.models, directory)
                assert saved["version"] == version, f"{checkpoint.attempt} contains {saved}, not policy {version}"
            if not (config.hinted and config.hinted.opd_self_ema):
                self.models.average = None  # of a parent that this run was forked from
            elif self.models.average is None:
                self.models.average = self.models.policy.average_weights(None, config.hinted.opd_self_ema)

    def train(self, rollout: Commit, version: int, attempt: str | None = None) -> TrainResult:
        """Train policy `version` on the samples of one rollout, which gives policy `version + 1`. Rank 0 writes
        what is stored of every trained token (`token_columns`) under the store's key `attempt`, if it is given."""
        from penstock.stages.train.batching import spread
        from penstock.stages.train.step import train_rollout
        from penstock.storage.samples.shards import encode_runs, read_table, write_trained_tokens

        assert self._state.clean and self._state.version == version, (
            f"asked to train policy {version}, but this rank holds {self._state}"
        )
        config, seconds = self.spec.config, {}
        start = time.perf_counter()
        table = read_table(self.store, rollout)
        batch = self._batch_of(table, [rollout])
        seconds["read"] = time.perf_counter() - start
        critic_only = version < config.num_critic_only_steps
        trace = partial(self.diagnostics.traced, rollout_id=version)
        with self._changing_weights_to(version + 1), trace("train_overall"):
            trained = train_rollout(
                self.models,
                batch,
                config,
                temperature=self.spec.temperature,
                critic_only=critic_only,
                trace=trace,
                keep_tokens=attempt is not None or self.spec.diagnostics.save_debug_train_data is not None,
            )
            if config.ref_update_interval and (version + 1) % config.ref_update_interval == 0:
                self.models.refresh_reference()
            if config.hinted and config.hinted.opd_self_ema:
                self.models.average = self.models.policy.average_weights(
                    self.models.average, config.hinted.opd_self_ema
                )
        start = time.perf_counter()
        digest = self.digest()
        seconds |= trained.seconds | {"digest": time.perf_counter() - start}
        self.diagnostics.end_round(version, table, trained.batch, trained)
        files: list[FileRecord] = []
        if attempt is not None and "trainer_logprobs" in trained.tokens and self.rank == 0:
            start = time.perf_counter()
            columns = {name: spread(values, trained.batch, batch).numpy() for name, values in trained.tokens.items()}
            with self.store.writing(attempt) as out:
                write_trained_tokens(out.path, table["sample_id"], batch.num_trained_tokens, columns)
            files, seconds["write"] = out.files, time.perf_counter() - start
        return TrainResult(
            metrics=trained.metrics,
            steps=trained.steps,
            seconds=seconds,
            digest=digest,
            fingerprint=self.fingerprint() | fingerprint_of_images(rollout),
            sample_uses=encode_runs(trained.sample_uses),
            files=files,
            notes=self.diagnostics.take_notes(),
        )

    def objective_of_samples(
        self, rollout: Commit, evaluations: Sequence[Commit], contrast: Sequence[float], sign: int
    ) -> list[float]:
        """Return the objective of every sample of `rollout` after optimizer steps on the samples of `evaluations`
        (see influence.py). Afterwards its weights are not those of a policy version: load one before the next use.
        """
        import numpy as np
        import pyarrow as pa

        from penstock.stages.train.batching import Batch
        from penstock.stages.train.influence import objective_of_samples
        from penstock.storage.samples.shards import read_table

        batch = self._batch_of(read_table(self.store, rollout), [rollout])
        samples = pa.concat_tables([read_table(self.store, evaluation) for evaluation in evaluations])
        evaluated = self._with_images(Batch.from_table(samples, needs_rewards=False), samples, evaluations)
        self._state = self._state.model_copy(update={"clean": False})
        config, temperature = self.spec.config, self.spec.temperature
        direction = np.array(contrast, np.float64)
        objective = objective_of_samples(
            self.models, batch, evaluated, direction, config, temperature=temperature, sign=sign
        )
        return list(map(float, objective))

    def save(self, attempt: str) -> SaveResult:
        """Write this rank's part of a checkpoint (weights, optimizer, scheduler and RNG states) under the key
        `attempt`; the files are durable on return."""
        from penstock.stages.train.build import save_models

        assert self._state.clean, f"asked to save, but the weights of this rank are incomplete: {self._state}"
        with self.store.writing(attempt, owns=partial(train_backend().is_written_by_rank, self.rank)) as out:
            out.hashes = save_models(self.models, out.path, {"run": self.spec.run, "version": self._state.version})
        return SaveResult(files=out.files, digest=self.digest(), optimizer_digest=self.optimizer_digest())

    def export(self, write: Callable[..., Commit]) -> Commit | None:
        """Call `write(weights=...)` on rank 0 with the gathered weights of the policy, and return its result. The other
        ranks take part in gathering and return None."""
        assert self._state.clean, f"asked to export, but the weights of this rank are incomplete: {self._state}"
        weights = self.models.policy.gather_weights()
        commit = write(weights=weights) if self.rank == 0 else None
        for _ in weights.tensors:  # consume the tensors that `write` has not consumed: gathering needs all ranks
            continue
        return commit

    def publish(
        self, urls: list[str], version: str, transport: WeightTransport, keys: dict[str, str]
    ) -> EngineGone | EngineRefused | None:
        """Send the policy's weights under their Hugging Face names, or its adapters under PEFT's, to the engines at
        `urls`; all ranks take part.

        Args:
            urls: addresses of the engines.
            version: the version that the engines report afterwards: `<run>/<policy version>`, with the prefix
                `reference:` for weights that are loaded only for a comparison.
            transport: how the weights are transferred.
            keys: URL -> API key.

        Returns:
            The error of an engine to which this rank sends requests, or None. The error is returned, not raised,
            because this rank's models are still intact.
        """
        from penstock.engines.generation import REFERENCE, EngineGone, EngineRefused
        from penstock.engines.network import node_address
        from penstock.engines.serving.endpoints import set_api_key

        own_version = f"{self.spec.run}/{self._state.version}"
        assert self._state.clean and version.removeprefix(REFERENCE) == own_version, (
            f"asked to publish {version}, but this rank holds {self._state}"
        )
        for url, key in keys.items():
            set_api_key(url, key)
        self._urls = urls
        if transport.host is None:
            transport = replace(transport, host=node_address(self.spec.network_interface))
        try:
            named = published_tensors(self.models.policy, self.spec.shape, transport)
            self._engines.update_weights(named, version, transport)
        except (EngineGone, EngineRefused) as error:
            return error
        return None

    def offload(self, keep: tuple[StateKind, ...]) -> None:
        """Move weights and optimizer state of policy and critic to host memory, and discard their gradients. `keep`:
        kinds of the policy's state that stay where they are. Later calls move the state that they need back."""
        self._memory_switches += self.models.offload(keep)

    def memory_use(self) -> tuple[int, int]:
        """Return the bytes used on this rank's device, by all processes, and by this process in host memory."""
        return train_backend().bytes_used()

    def take_memory_switches(self) -> list[MemorySwitch]:
        """Return time and memory use of each offload and onload since the last call of this method."""
        switches, self._memory_switches = self._memory_switches, []
        return switches

    def _batch_of(self, table: pa.Table, commits: Sequence[Commit]) -> Batch:
        """Return the samples of committed rounds as arrays, with what the options need of them."""
        from penstock.stages.train.batching import Batch, EngineChoices, add_teacher_data

        config = self.spec.config
        batch = Batch.from_table(
            table, needs_rewards=config.loss_type != "sft_loss", components=config.gdpo_reward_weights
        )
        if config.use_rollout_routing_replay:
            batch = replace(batch, engine_choices=EngineChoices.from_table(table, self.spec.shape))
        return add_teacher_data(self._with_images(batch, table, commits), table, config)

    def _with_images(self, batch: Batch, table: pa.Table, commits: Sequence[Commit]) -> Batch:
        """Return the samples of commits with their images, for a vision-language model."""
        from penstock.stages.train.batching import with_images

        if (vision := self.spec.shape.vision) is None:
            return batch
        processor = next(filter(None, map(read_image_processor, commits)), None)
        return with_images(batch, table, vision, SampleImages(self.store, processor) if processor else None)

    @contextmanager
    def _changing_weights_to(self, version: int) -> Iterator[None]:
        """Set `clean` of this rank's state to False while the `with` block changes the weights. When the block
        succeeds, set `version` and `clean`; if it raises, `clean` stays False."""
        self._state = self._state.model_copy(update={"clean": False})
        yield
        self._state = self._state.model_copy(update={"version": version, "clean": True})


def published_tensors(
    policy: TrainEngine, shape: ModelShape, transport: WeightTransport
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the policy that `transport` sends under their Hugging Face names, or its adapters under
    PEFT's. A collective."""
    from penstock.engines.families import tensor_layout
    from penstock.engines.families.tensor_rows import VISION
    from penstock.engines.lora import to_peft

    layout = tensor_layout(shape)
    if transport.adapter is None:
        for name, tensor in policy.gather_weights().tensors:
            if not (transport.without_vision and name.startswith(VISION)):
                yield from layout.to_hf(name, tensor)
    else:
        for layer, first, second in policy.named_adapters():
            yield from to_peft(layout, layer, first, second)
