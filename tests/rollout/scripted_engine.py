"""A scripted engine behind the interface of all engines, and a run with it, for tests of what uses engines."""

import asyncio
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any

from torch import Tensor, rand_like

from penstock.engines.generation import (
    OVER_MEMORY,
    EngineClient,
    EngineGone,
    EngineUrls,
    Generation,
    PromptImage,
    TokenCounts,
    WeightTransport,
)
from penstock.stages.eval.scores import compute_eval_metrics
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.prompts.data_source import RolloutRound
from penstock.stages.rollout.prompts.source import PromptSource
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import BUFFER, Commit, RunKeys
from penstock.storage.preemption import StopRequest
from penstock.storage.samples.sample import Sample
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

KEYS = RunKeys("run")


class ScriptedClient(EngineClient):
    """An engine without a model, the second implementation of the interface: it answers every prompt with digits and an
    end token, after a random pause."""

    def __init__(self, urls: EngineUrls, timeout: float = 600, *, weight_version: str = "run/0") -> None:
        self._urls = urls
        self.timeout = timeout
        self.served_version = weight_version
        self.weights: dict[str, Tensor] = {}
        self.finish_reason: Any = "stop"
        self.pause_seconds = 0.001
        self.in_flight = self.most_in_flight = 0
        self.requests: list[tuple[list[int], dict[str, Any], int]] = []
        self._aborted = False
        self._paused = False

    @property
    def urls(self) -> list[str]:
        return list(self._urls() if callable(self._urls) else self._urls)

    async def generate_each(
        self,
        prompts: list[list[int]],
        samplings: list[dict[str, Any]],
        *,
        images: Sequence[Sequence[PromptImage]] = (),
        session: str | None = None,
    ) -> list[Generation]:
        n = len(prompts)
        self.requests.append((list(prompts[0]), samplings[0], n))
        self.in_flight += n
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.pause_seconds * random.random())
        self.in_flight -= n
        return [self.answer(input_ids, index) for index, input_ids in enumerate(prompts)]

    def answer(self, input_ids: list[int], index: int) -> Generation:
        return Generation(
            token_ids=[6 + (len(input_ids) + index) % 10, 1],
            logprobs=[-0.5, -0.25],
            finish_reason=self.finish_reason,
            weight_versions=[(self.served_version, 2)],
            counts=TokenCounts(prompt=len(input_ids), cached=2),
        )

    async def abort(self) -> None:
        self._aborted = True
        while self.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def update_weights(
        self, named: Iterable[tuple[str, Tensor]], version: str, transport: WeightTransport = OVER_MEMORY
    ) -> None:
        released = self.served_version.startswith(("released", "loading:", "loaded:"))
        self.served_version = f"loading:{version}" if released else f"updating:{version}"
        self.weights |= dict(named)
        self.served_version = f"loaded:{version}" if released else version

    def use_adapter(self, name: str) -> None:
        self.adapter: str | None = name

    def unload_adapters(self) -> None:
        self.adapter = None

    def weight_checksums(self) -> dict[str, list[dict[str, str]]]:
        checksums = {name: hashlib.sha256(bytes(tensor.numpy())).hexdigest() for name, tensor in self.weights.items()}
        return {url: [checksums] for url in self.urls}

    def overwrite_weights(self) -> None:
        released = self.served_version.startswith(("released", "loading:", "loaded:"))
        self.served_version = "loading:overwritten" if released else "overwritten"
        self.weights = {name: rand_like(tensor) for name, tensor in self.weights.items()}

    def release_memory(self) -> None:
        self.served_version = "released"
        self._paused = True

    def resume_kv_cache(self) -> None:
        if self.served_version.startswith("loaded:"):
            self.served_version = self.served_version.removeprefix("loaded:")
            self._paused = False

    def generates_tokens(self, url: str, timeout: float = 30) -> bool:
        return url in self.urls

    def weight_version(self, url: str, timeout: float = 30) -> str:
        if url not in self.urls:
            raise EngineGone(f"{url} did not answer")
        return self.served_version

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False


class SlowClient(ScriptedClient):
    """Writes token by token and stops in the middle when aborted. The length of a response and the time of its tokens
    are random; some prompts are refused, and some requests fail."""

    chance = random.Random(0)
    longest = 8
    refused = broken = 0.0  # shares of requests

    async def generate_each(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], **options: Any
    ) -> list[Generation]:
        self.requests.append((list(prompts[0]), samplings[0], len(prompts)))
        fate = self.chance.random()
        self.in_flight += 1
        try:
            answers = await asyncio.gather(*(self._write(sampling["max_new_tokens"]) for sampling in samplings))
        finally:
            self.in_flight -= 1
        if fate < self.refused:
            raise ValueError("the input is too long")
        if fate > 1 - self.broken:
            raise ConnectionError("no engine answered")
        return answers

    async def _write(self, most: int) -> Generation:
        wanted, versions, token_ids = self.chance.randint(1, self.longest), [], []
        pause = self.chance.random() * 2 * self.pause_seconds  # for a token
        while len(token_ids) < min(wanted, most) and not self._aborted:
            await asyncio.sleep(pause)
            version = self.served_version
            if not self._paused and not version.startswith("updating:"):  # engines pause during an update
                token_ids.append(6 + len(token_ids) % 10)
                versions.append(version)
        ended = "stop" if len(token_ids) == wanted else "length" if len(token_ids) == most else "abort"
        spans = [(version, len(list(tokens))) for version, tokens in groupby(versions)]
        return Generation(token_ids, [-0.5] * len(token_ids), ended, spans)  # type: ignore[arg-type]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@contextmanager
def json_server(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[str]:
    """Serve `answer(path, body)`, which returns a status and an object, on this machine, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, result = answer(self.path, body)
            content = json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps([self.headers["Authorization"]]).encode())

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Bench:
    """One run in a temporary store: `round(r)` does round r as a flow would."""

    def __init__(self, directory: Path, tokenizer: PromptTokenizer, num_rows: int = 10, **options: Any) -> None:
        rows = [{"input": f"{i}+1=", "label": str(i + 1), "metadata": {"i": i}} for i in range(num_rows)]
        options = {
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rm_type": "exact_number",
            "rollout_shuffle": True,
        } | options
        self.config = RolloutConfig(
            prompt_data=write_jsonl(directory / "rows.jsonl", rows), label_key="label", **options
        )
        self.store = Store(str(directory / "store"))
        self.tokenizer = tokenizer
        self.clients: list[ScriptedClient] = []

    def connect(
        self,
        urls: list[str],
        timeout: float,
        version: int = 0,
        client: type[ScriptedClient] = ScriptedClient,
        **changes: Any,
    ) -> ScriptedClient:
        made = client(urls, timeout, weight_version=f"run/{version}")
        for name, value in changes.items():
            setattr(made, name, value)
        self.clients.append(made)
        return made

    def source(self) -> PromptSource:
        return PromptSource.open(self.config)

    def trained(self, commit: Commit) -> list[Sample]:
        return read_samples(self.store, commit)

    def buffered(self, commit: Commit) -> list[Sample]:
        return read_samples(self.store, commit, BUFFER) if commit.num_samples(BUFFER) else []

    def journal(self, r: int) -> list[Commit]:
        """The entries of a round's journal."""
        prefix = f"{KEYS.rollout_prefix(r)}.journal"
        entries = [self.store.committed(f"{prefix}/{number:06d}") for number in self.store.committed_indices(prefix)]
        return [entry for entry in entries if entry is not None]

    def round(
        self, r: int, stop: StopRequest | None = None, policy_version: int | None = None, **changes: Any
    ) -> Commit:
        return rollout_stage(
            RolloutContext(
                self.store,
                self.config,
                self.source(),
                self.tokenizer,
                ["http://engine"],
                stop=stop,
                connect=partial(self.connect, version=r, **changes),
            ),
            KEYS.rollout_prefix(r),
            RolloutRound("run", rollout_id=r, policy_version=r if policy_version is None else policy_version),
            read_resume_point(self.store, KEYS, r),
        )

    def evaluate(self, version: int, name: str, **changes: Any) -> Commit:
        """Evaluate a policy version on the prompts of the run, as the data set `name`."""
        source = self.source()
        connect = partial(self.connect, version=version, **changes)
        return rollout_stage(
            RolloutContext(self.store, self.config, source, self.tokenizer, ["http://engine"], connect=connect),
            KEYS.eval_prefix(version, name),
            RolloutRound("run", version, version, kind="eval", id_prefix=f"eval-{version:06d}-{name}-"),
            num_prompts=len(source),
            summarize=partial(compute_eval_metrics, name=name),
        )
