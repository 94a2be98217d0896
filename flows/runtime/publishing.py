"""Load policy versions into the engines that use them, and send the trainer's weights to engines.

`PolicyEngines` enters the blocks of flows/policy_schedule.py, in which a rollout, a stream or an evaluation uses the
engines. `PolicyPublisher` sends weights, and moves the state of trainer and engines between devices and host memory.
`evaluate_policy` scores a policy version with these engines.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

from penstock.engines.generation import EngineRoute, WeightTransport, WeightUpload
from penstock.engines.serving.endpoints import adapter_suffix
from penstock.engines.serving.pool import EnginePool
from penstock.engines.training import MemorySwitch
from penstock.engines.weights.fp8_blocks import fp8_weights, keeps_scales
from penstock.engines.weights.transfer import add_upload, update_and_check
from penstock.flows.options.adapters import adapter_of_version
from penstock.flows.policy_schedule import EngineUse, PolicyLimits, PolicySchedule, PolicyTurns
from penstock.flows.runtime.display import ProgressCallback
from penstock.flows.runtime.processes import Processes
from penstock.stages.eval.scores import compute_eval_metrics
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import Commit
from penstock.storage.failpoints import failpoint
from penstock.storage.preemption import StopRequest

Urls = Callable[[], list[str]]  # returns the addresses of the live engines
OnPublished = Callable[[int, list[str], dict[str, float], list[MemorySwitch]], None]


class PolicyEngines:
    """The engines of a run, at the policy versions that rollouts and evaluations need.

    Args:
        processes: trainer and engines.
        on_published: called after each weight update with (policy version, addresses of the engines, metrics, moves of
            state between devices and host memory since the previous weight update).
    """

    def __init__(self, processes: Processes, on_published: OnPublished) -> None:
        run = processes.run.config.run
        lead = run.max_staleness if run.streams else run.async_buffer_size
        limits = PolicyLimits(
            lead=run.num_rollout if run.debug_rollout_only else lead,
            bound=run.staleness_limit,
            interval=run.update_weights_interval,
            streams=run.streams,
            evaluates_apart=processes.evaluates_apart,
        )
        self.turns = PolicyTurns(PolicySchedule(limits))
        self.processes = processes
        self.publisher = PolicyPublisher(processes, on_published)
        self._urls: dict[EngineUse, Urls] = {}  # of the pools that are used

    @contextmanager
    def at(self, version: int | None, use: EngineUse | None = None, *, rewind: bool = True) -> Iterator[Urls]:
        """Load policy `version` into engines, including engines that restart during the block.

        Args:
            version: the policy version; None: the newest one, which other threads may replace by newer ones during the
                block.
            use: which engines; default: the engines that generate rollouts.
            rewind: whether a trainer that has a newer version is restored to `version`; otherwise RuntimeError is
                raised.
        """
        rollouts = self.turns.schedule.rollouts
        use = rollouts if use is None else use
        with self.turns.using(use, version) as opened:
            if opened is None:
                yield self._urls[use]
                return
            pool = self._pool(use)
            send = partial(self._send, None if version is None else opened, rewind=rewind)
            if use is rollouts:
                self.publisher.offload_trainer(keep_weights=True)
            with pool.serving(self.processes.run.weight_version(opened), send) as urls:
                self._urls[use] = urls
                with self.turns.change() as schedule:
                    schedule.weights_sent(use, opened)
                if use is rollouts:
                    self.publisher.offload_trainer()
                yield urls

    def for_evaluation(self, version: int) -> AbstractContextManager[Urls]:
        """Load policy `version` into the engines that evaluate, for a block. Evaluations of one version share them. A
        trainer that is already training later rounds is not restored."""
        schedule = self.turns.schedule
        pool = schedule.evaluations if schedule.limits.evaluates_apart else schedule.rollouts
        return self.at(version, pool, rewind=schedule.evaluated is None)

    @contextmanager
    def for_stream(self) -> Iterator[Urls]:
        """Load the newest policy into all engines. Other threads may publish newer policies during the block."""
        with self.at(None, rewind=False) as urls:
            yield urls
            self.turns.wait_until(lambda schedule: schedule.evaluated is None)

    def publish(self, version: int) -> None:
        """Load policy `version` into every engine that generates rollouts, between two rollouts."""
        rollouts = self.turns.schedule.rollouts
        self.publisher.offload_trainer(keep_weights=True)
        self._update(rollouts, version)
        with self.turns.change() as schedule:
            schedule.weights_sent(rollouts, version)

    def publish_for_evaluation(self, version: int) -> None:
        """Load policy `version`, the trainer's current one, into the engines that evaluate it, after the previous
        evaluation."""
        schedule = self.turns.schedule
        if schedule.limits.evaluates_apart:
            self.turns.wait_until(lambda schedule: schedule.evaluated is None)
            self._update(schedule.evaluations, version)
        else:
            self.publish_in_flight(version, may_skip=False)

    def publish_in_flight(self, version: int, *, may_skip: bool = True) -> None:
        """Load policy `version` into every engine while it generates, unless `PolicySchedule.may_update_in_flight`
        leaves it to a later call or to the start of the engines."""
        schedule = self.turns.schedule
        self.turns.wait_until(lambda schedule: schedule.may_update_in_flight(may_skip=may_skip) != "wait")
        if schedule.may_update_in_flight(may_skip=may_skip) == "skip":
            return
        self._pool(schedule.rollouts).update_while_serving(
            self.processes.run.weight_version(version), partial(self._send, None, rewind=False)
        )
        with self.turns.change():
            schedule.weights_sent(schedule.rollouts, version)

    def _update(self, use: EngineUse, version: int) -> None:
        self._pool(use).update_to_version(
            self.processes.run.weight_version(version), partial(self._send, version, rewind=True)
        )

    def _pool(self, use: EngineUse) -> EnginePool:
        return self.processes.start_engines("rollout" if use is self.turns.schedule.rollouts else "evaluation")

    def _send(self, version: int | None, urls: list[str], *, rewind: bool) -> None:
        """Send policy `version`, or None: the newest, to the engines at `urls`."""
        with self.turns.sending():
            self.publisher.send(self.turns.schedule.trained if version is None else version, urls, rewind=rewind)


class PolicyPublisher:
    """Sends the weights of policy versions from the trainer to engines."""

    def __init__(self, processes: Processes, on_published: OnPublished) -> None:
        self.processes = processes
        self.config = processes.run.config
        self.on_published = on_published
        self._have_vision: set[tuple[str, EngineRoute]] = set()  # engines that have got the frozen vision tower
        record = processes.run.record
        self._adapter_suffix = adapter_suffix(
            f"{processes.run.store.uri} {processes.run.keys.run} {record.created_at if record else None}"
        )

    def send(self, version: int, urls: list[str], *, rewind: bool) -> None:
        """Send policy `version` to the engines at `urls`. If the trainer has another version, it is restored to
        `version` first. Raises RuntimeError if the trainer has a newer version and `rewind` is false."""
        processes, run = self.processes, self.config.run
        if not rewind and (state := processes.trainer.policy_state()) is not None and state.version > version:
            raise RuntimeError(  # not a ValueError, which is not retried
                f"an engine needs the weights of version {version}, but the trainer has version {state.version}: a "
                "rollout restarts with the trainer's version and keeps its finished groups; an evaluation runs later"
            )
        trainer = processes.restore_trainer_at(version)
        start = time.perf_counter()
        transport = self.transport(trainer, urls, version)
        metrics: dict[str, float] = {}
        if (adapter := transport.adapter) is not None:
            trainer.publish(urls, processes.run.weight_version(version), transport)
            failpoint("adapter-loaded")
            processes.connect(urls).use_adapter(adapter.name)
            metrics = {"perf/checked_weight_tensors": adapter.num_tensors} if adapter.compare else {}
        elif run.check_weight_update_equal:
            metrics = self._send_and_check(trainer, urls, version, transport)
        else:
            trainer.publish(urls, processes.run.weight_version(version), transport)
            self._have_vision |= transport.routes.items()
        if run.offloads_engines:
            self.offload_trainer()  # the KV cache needs the memory of the weights
            failpoint("engines-without-cache")
            with processes.record_memory_switch("engines: resume KV cache"):
                processes.connect(urls).resume_kv_cache()
        metrics["perf/update_weights_time"] = time.perf_counter() - start - metrics.get("perf/check_weights_time", 0.0)
        switches, processes.memory_switches = processes.memory_switches, []
        if run.alternates_trainer_and_engines:
            switches += trainer.take_memory_switches()
        self.on_published(version, urls, metrics, switches)

    def transport(self, trainer: TrainerGroup, urls: list[str], version: int) -> WeightTransport:
        """Return the transport of policy `version` to the engines at `urls`. For transport over disk, the files are
        written to --update-weight-disk-dir if given, else to the store if it is local, else to a temporary directory of
        the trainer's machine, from which they are uploaded to the store if engines run on other machines."""
        processes, config = self.processes, self.config
        store, prefix = processes.run.store, f"{processes.run.keys.prefix}/published"
        engines = processes.start_engines()
        places, ranks = engines.places(urls), trainer.places()
        directory = config.run.update_weight_disk_dir or (store.path(prefix) if store.is_local else None)
        transport = processes.engine_options.weight_transport(places, ranks, directory or tempfile.gettempdir())
        if processes.engine_options.adapters is not None:
            adapter = adapter_of_version(
                processes.run.weight_version(version),
                self._adapter_suffix,
                config.train,
                processes.shape,
                config.convert.hf_checkpoint,
                compare=config.run.check_weight_update_equal,
            )
            transport = replace(transport, adapter=adapter)
        routes = transport.routes.items()
        if processes.engine_options.sends_vision_once and all(route.incarnation for _, route in routes):
            transport = replace(transport, without_vision=routes <= self._have_vision)
        if directory is not None:
            return transport
        upload = WeightUpload(store.uri, store.options, prefix, engines.actors(urls))
        return add_upload(transport, places, ranks[0].node, upload)

    def _send_and_check(
        self, trainer: TrainerGroup, urls: list[str], version: int, transport: WeightTransport
    ) -> dict[str, float]:
        """Send the weights of policy `version` to the engines at `urls`, check every tensor, and return metrics."""
        processes = self.processes
        skipped = self.reason_against_initial_comparison() if version == 0 else None
        if skipped:
            processes.note(
                f"the weights that engines load from --hf-checkpoint are not compared with version 0: {skipped}"
            )
        start = time.perf_counter()
        num_tensors, update_time = update_and_check(
            processes.connect(urls),
            partial(trainer.publish, urls),
            processes.run.weight_version(version),
            transport,
            is_initial=version == 0 and not skipped,
        )
        processes.note(f"weights of version {version} are equal in trainer and engines: {num_tensors} tensors compared")
        check_time = time.perf_counter() - start - update_time
        return {"perf/checked_weight_tensors": num_tensors, "perf/check_weights_time": check_time}

    def reason_against_initial_comparison(self) -> str | None:
        """Return why the weights of --hf-checkpoint may differ from those that the trainer sends as version 0; None if
        they must be equal."""
        path, start = self.config.convert.hf_checkpoint, self.config.start_weights
        if start != path:
            return f"version 0 has the weights of {start}"
        if fp8_weights(path) and not keeps_scales(path):
            return "its fp8 scales are not amax / 448 of bf16 weights, so they change when they are computed again"
        return None

    def offload_trainer(self, keep_weights: bool = False) -> None:
        """With --offload-train, move the trainer's state to host memory; the trainer moves it back on next use."""
        trainer = self.processes.started_trainer
        if trainer is not None and self.config.run.offloads_trainer:
            trainer.offload(keep=("weights",) if keep_weights else ())
            failpoint("trainer-offloaded")


def evaluate_policy(
    engines: PolicyEngines,
    tokenizer: PromptTokenizer,
    stop: StopRequest,
    version: int,
    name: str,
    on_progress: ProgressCallback = lambda done, total: None,
) -> Commit:
    """Score policy `version` on the data set `name`: generate responses to its prompts, grade them, and commit the
    metrics. Return the commit, or the existing one. Engines that do not serve `version` get it from the trainer, which
    is restored to it."""
    processes, run = engines.processes, engines.processes.run
    prefix, evals = run.keys.eval_prefix(version, name), run.config.eval
    if existing := run.store.committed(prefix):
        return existing
    rollout = run.config.rollout_with_args.model_copy(update=evals.rollout_overrides(dict(evals.data_sets)[name], name))
    source = PromptSource.open(rollout)
    with engines.for_evaluation(version) as urls:
        context = RolloutContext(
            run.store,
            rollout,
            source,
            tokenizer,
            urls,
            provenance=run.provenance,
            stop=stop,
            on_progress=on_progress,
            connect=processes.connect_for_evaluation,
            read_counters=partial(processes.counters, "evaluation" if processes.evaluates_apart else "rollout"),
        )
        return rollout_stage(
            context,
            prefix,
            RolloutRound(run.keys.run, version, version, kind="eval", id_prefix=f"eval-{version:06d}-{name}-"),
            num_prompts=len(source),
            summarize=lambda samples: compute_eval_metrics(
                samples,
                name,
                pass_threshold=evals.data_set_settings(name).get("pass_threshold"),
                require_pass_rate=evals.log_passrate,
            ),
        )
