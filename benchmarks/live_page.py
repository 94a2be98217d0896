"""Measure the live page of a long run: milliseconds of an answer of the server, and of a refresh in headless Chromium.
Prints JSON.

    python benchmarks/live_page.py [--rounds 10000] [--samples 100] [--repeats 50]

The run is synthetic: every round has a commit of a rollout with `samples` samples and one of a step, with 60 metrics
each; an evaluation and a checkpoint every 20 rounds. `opening` is the first reading of all commits, which takes several
answers; `opening_max_ms` is the slowest one. `unchanged` is an answer when nothing is new, `new_round` an answer after
a new round, `samples` the answer with the newest samples. `browser` is a refresh in the browser, from its request to
the end of the drawing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests" / "flows"))
from chromium import browser, installed_browser
from report_page import make_sample

from penstock.flows.inspect.watch import WatchedRuns
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.history import run_status
from penstock.storage.history.run_record import Start, record_start
from penstock.storage.history.run_status import RunStatus
from penstock.storage.leases import Lease, new_driver_lease_key
from penstock.storage.report.live import METRICS
from penstock.storage.samples.shards import write_shards
from penstock.storage.store import Store
from penstock.storage.web.page_server import PageServer

NUM_METRICS, EVERY = 60, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=100, help="of a round (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=50, help="of each measurement (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        store = Store(f"{scratch}/store")
        keys = make_run(store, options.rounds, options.samples)
        lease = Lease(store, new_driver_lease_key(keys)).take()
        with PageServer(WatchedRuns([store]).respond) as server:
            figures = measure_server(server, store, keys, options)
            if installed_browser() is not None:
                figures["browser"] = measure_browser(server)
        lease.release()
    print(json.dumps({"rounds": options.rounds, "num_samples": options.rounds * options.samples, **figures}, indent=1))


def make_run(store: Store, num_rounds: int, num_samples: int) -> RunKeys:
    """Write a synthetic run to the store. It has a start without an end, as a running run has."""
    words = ["--run", "bench", "--store", str(store.root), "--hf-checkpoint", "model", "--num-rollout", "99999"]
    keys = open_run(store, resolve("train", parse_config([*words, "--prompt-data", "data.jsonl"]), store))
    record_start(store, keys, Start())
    random = Random(0)
    for r in range(num_rounds):
        commit_round(store, keys, r, num_samples, random)
        if r % EVERY == 0:
            prefix = keys.eval_prefix(r, "sums")
            summary = {f"eval/sums{end}": random.random() for end in ("", "-ci_low", "-ci_high")}
            store.commit(prefix, Commit(kind="eval", index=r, attempt=f"{prefix}/a", summary=summary))
            store.commit(keys.checkpoint_prefix(r), Commit(kind="checkpoint", index=r, policy_version=r))
    return keys


def commit_round(store: Store, keys: RunKeys, r: int, num_samples: int, random: Random) -> None:
    """Commit a rollout with its samples, and a step."""
    names = [*METRICS, *(f"rollout/more/{number}" for number in range(NUM_METRICS - len(METRICS)))]
    attempt = store.new_attempt(keys.rollout_prefix(r))
    with store.writing(attempt) as out:
        write_shards(out.path, [make_sample(random, r, k) for k in range(num_samples)])
    for kind, prefix in (("rollout", keys.rollout_prefix(r)), ("step", keys.step_prefix(r))):
        of_kind = [name for name in names if name.startswith("train/") == (kind == "step")]
        commit = Commit(kind=kind, run=keys.run, index=r, policy_version=r, seconds={"generate": 2.0})
        commit.summary = {name: random.random() for name in of_kind}
        if kind == "rollout":
            commit.attempt, commit.files = attempt, out.files
        else:
            commit.inputs = {"rollout": commit_key(keys.rollout_prefix(r))}
        store.commit(prefix, commit)


def write_status(store: Store, keys: RunKeys) -> None:
    status = RunStatus(at=time.time(), start=0, host="node", pid=1)
    store.replace(keys.status, status.model_dump_json().encode())


def measure_server(server: PageServer, store: Store, keys: RunKeys, options: argparse.Namespace) -> dict[str, Any]:
    """Return the milliseconds and sizes of the server's answers, by the names in the module's docstring."""
    connection = HTTPConnection("127.0.0.1", server.server_port)

    def ask(path: str) -> tuple[float, bytes]:
        start = time.perf_counter()
        connection.request("GET", server.directory + path, headers={"Cookie": f"penstock={server.login}"})
        body = connection.getresponse().read()
        return 1000 * (time.perf_counter() - start), body

    def refresh(since: str) -> tuple[float, dict[str, Any], int]:
        write_status(store, keys)
        milliseconds, body = ask(f"api/run?run=bench&since={since}")
        return milliseconds, json.loads(body), len(body)

    def repeat(prepare: Callable[[], None], since: str) -> dict[str, float]:
        times, size = [], 0
        for _ in range(options.repeats):
            prepare()
            milliseconds, answer, size = refresh(since)
            times.append(milliseconds)
            since = answer["cursor"]
        return {"median_ms": median(times), "max_ms": round(max(times), 1), "bytes": size}

    times, start = [], time.perf_counter()
    while True:
        milliseconds, answer, size = refresh("")
        times.append(milliseconds)
        if not answer["num_loading"]:
            break
    figures: dict[str, Any] = {
        "opening_s": round(time.perf_counter() - start, 1),
        "opening_answers": len(times),
        "opening_max_ms": round(max(times), 1),
        "complete_answer_bytes": size,
    }
    figures["unchanged"] = repeat(lambda: None, answer["cursor"])
    run_status.LISTING_SECONDS = 0.0
    figures["unchanged_with_listing"] = repeat(lambda: None, answer["cursor"])
    rounds = iter(range(options.rounds, options.rounds + options.repeats))
    figures["new_round"] = repeat(
        lambda: commit_round(store, keys, next(rounds), options.samples, Random(1)), answer["cursor"]
    )
    first, body = ask("api/samples?run=bench")
    figures["samples"] = {"first_ms": round(first, 1), "cached_ms": round(ask("api/samples?run=bench")[0], 1)}
    return figures | {"samples_bytes": len(body)}


def measure_browser(server: PageServer) -> dict[str, float]:
    """Return the milliseconds of refreshes in a browser: the first one, and the median of the following ones."""
    with browser() as page:
        page.open(server.link("run=bench"))
        page.wait_for("performance.getEntriesByName('refresh').length > 3")
        times = page.evaluate("performance.getEntriesByName('refresh').map(entry => entry.duration)")
    return {"first_ms": round(times[0], 1), "next_median_ms": median(times[1:])}


def median(times: list[float]) -> float:
    return round(statistics.median(times), 1)


if __name__ == "__main__":
    main()
