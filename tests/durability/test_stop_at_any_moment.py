"""A stop signal at any moment of the first minute of a run ends it within its grace period, with all its processes.

PENSTOCK_TEST_MOMENTS is the number of moments (30 take about 20 minutes); the signals take turns."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import cycle

import psutil
import pytest
from harness import Pipeline, World, family, tiny_flags

from penstock.flows.runtime.signals import TICK

pytestmark = [pytest.mark.full, pytest.mark.integration, pytest.mark.timeout(600)]

GRACE = 30
LIMIT = GRACE + 4 * TICK + 4  # the watchdog's own start and kills take time on a busy machine
_RANDOM = random.Random(37)
MOMENTS = [round(_RANDOM.uniform(0.0, 60.0), 1) for _ in range(int(os.environ.get("PENSTOCK_TEST_MOMENTS", "4")))]
CASES = zip(sorted(MOMENTS), cycle((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)))


@pytest.mark.parametrize(("moment", "number"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_run_ends_within_its_grace_period(world: World, moment: float, number: signal.Signals) -> None:
    flags = [*tiny_flags(world, rounds=60), "--grace-period", str(GRACE)]
    pipeline = Pipeline(world, "stopped", str(world.root / "store"), flags)
    pipeline.start()
    time.sleep(moment)
    processes = family(pipeline.pid)[1:]
    assert pipeline.returncode() is None, pipeline.tail()
    start = time.monotonic()
    os.kill(pipeline.pid, number)
    code = pipeline.wait(LIMIT)
    seconds = time.monotonic() - start
    _, alive = psutil.wait_procs(processes, timeout=10)
    print(f"{number.name} after {moment} s: ended after {seconds:.1f} s with exit code {code}")
    # before the handlers are installed, the signal ends Python itself
    assert code in (128 + number, -number, -signal.SIGKILL), pipeline.tail()
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
