"""Measure what the live page costs a run: rounds of the tiny recipe with the page (status.json is written, and a page
is open in headless Chromium) and without it (neither), in alternating blocks of one run. Prints JSON.

    python benchmarks/live_overhead.py [--pairs 12] [--rounds 8] [--output FILE]

Each pair of neighbouring blocks of `rounds` rounds gives a ratio, with the page to without it: of wall time (from the
commit of a step to that of a later one), of the processor time of the driver, which writes the status and serves the
page, and of that of all processes of the run. The order of the blocks changes from pair to pair. Processor time of the
browser is not counted, but it runs on the same cores. `percent`: 100 (ratio - 1).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests" / "flows"))
sys.path.insert(0, str(Path(__file__).parent))

from chromium import Page, browser
from report import make_parser, parse_options, write_report
from run import WARM_UP_ROUNDS, tiny_config

from penstock.flows.commands.demo_model import make_tiny_data, make_tiny_model
from penstock.flows.inspect.watch import WatchedRuns
from penstock.flows.reporting.status import StatusWriter
from penstock.flows.runtime import environment
from penstock.flows.runtime.runs import open_store
from penstock.storage.commit import RunKeys, commit_key
from penstock.storage.store import Store
from penstock.storage.web.page_server import PageServer

KEYS = RunKeys("bench")
WALL, DRIVER, ALL = "wall_seconds", "driver_cpu_seconds", "run_cpu_seconds"
HIDE = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"


class Switch:
    """Turns the page on and off: the writes of the status, and the open page, which requests nothing while hidden."""

    def __init__(self, page: Page) -> None:
        self.page, self.is_on, self.num_writes = page, True, 0
        write = StatusWriter._write

        def write_if_on(writer: StatusWriter) -> None:
            if self.is_on:
                self.num_writes += 1
                write(writer)

        StatusWriter._write = write_if_on  # type: ignore[method-assign]

    def turn(self, on: bool) -> None:
        self.is_on = on
        self.page.evaluate(HIDE % str(not on).lower() + "document.dispatchEvent(new Event('visibilitychange'))")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="of blocks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="of a block (default: %(default)s)")
    options = parse_options(parser)
    environment.set_default_variables()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        root = Path(scratch)
        make_tiny_model(root / "model", max_length=1024)
        make_tiny_data(root / "data")
        num_rounds = WARM_UP_ROUNDS + 2 * options.pairs * options.rounds + 1
        config = tiny_config(root, run={"run": KEYS.run, "store": str(root / "store"), "num_rollout": num_rounds})
        figures: dict[str, Any] = {}
        with PageServer(WatchedRuns([store := open_store(config.run)]).respond) as server, browser() as page:
            switch = Switch(page)
            arguments = (store, server.link(f"run={KEYS.run}"), switch, options.pairs, options.rounds, figures)
            thread = threading.Thread(target=measure, args=arguments, daemon=True)
            thread.start()
            from penstock.flows.runtime.runner import run_flow

            assert run_flow("train", config) == 0
            thread.join()
    write_report(options, figures)
    return 0


def measure(store: Store, link: str, switch: Switch, pairs: int, rounds: int, figures: dict[str, Any]) -> None:
    """Switch the page on and off at the ends of blocks, and add the times of the blocks and their ratios to
    `figures`."""
    wait_for_step(store, 0)
    switch.page.open(link)
    switch.page.wait_for("document.documentElement.dataset.ready === 'run'")
    last = WARM_UP_ROUNDS
    blocks: list[dict[bool, dict[str, float]]] = []
    for pair in range(pairs):
        blocks.append({})
        for on in (True, False) if pair % 2 else (False, True):
            wait_for_step(store, last)
            switch.turn(on)
            before = read_times(store, last)
            last += rounds
            wait_for_step(store, last)
            after = read_times(store, last)
            blocks[-1][on] = {name: (after[name] - before[name]) / rounds for name in before}
    figures |= {
        name: summarize([(pair[True][name], pair[False][name]) for pair in blocks]) for name in (WALL, DRIVER, ALL)
    }
    figures["status_writes"] = switch.num_writes
    figures["refreshes"] = switch.page.evaluate("performance.getEntriesByName('refresh').length")


def wait_for_step(store: Store, number: int) -> None:
    """Wait until a round is trained."""
    while not store.exists(commit_key(KEYS.step_prefix(number))):
        time.sleep(0.02)


def read_times(store: Store, number: int) -> dict[str, float]:
    """Return the time of a step's commit, and the processor time that driver and run have used by now."""
    step, cpu, driver = store.committed(KEYS.step_prefix(number)), 0.0, psutil.Process()
    assert step is not None
    for process in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "chrom" not in process.name():
                cpu += sum(process.cpu_times()[:2])
    own = time.process_time()  # finer than ticks of 10 ms
    return {WALL: step.created_at, DRIVER: own, ALL: own + cpu}


def summarize(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the medians of (with, without) pairs, and quartiles and range of how much more "with" is, in percent."""
    percent = sorted(100 * (with_page / without - 1) for with_page, without in pairs)
    return {
        "with": round(statistics.median(pair[0] for pair in pairs), 4),
        "without": round(statistics.median(pair[1] for pair in pairs), 4),
        "percent_quartiles": [round(value, 1) for value in statistics.quantiles(percent, n=4, method="inclusive")],
        "percent_range": [round(percent[0], 1), round(percent[-1], 1)],
    }


if __name__ == "__main__":
    sys.exit(main())
