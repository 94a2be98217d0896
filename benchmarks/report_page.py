"""Measure the report of a run with many samples: seconds to write it, size, and time until it can be used in headless
Chromium. Prints JSON.

    python benchmarks/report_page.py [--samples 100000] [--repeats 5]

The run is synthetic: rounds of 128 groups of 8 samples, prompts of 8 tokens that occur in several rounds, responses of
3 to 6 tokens with random log-probs of engine and trainer, and advantages. `overview` is the time from navigation until
curves and tables are shown, `samples` until the sample browser shows the first samples, `search` the time of a text
search over all samples.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.append(str(Path(__file__).parents[1] / "tests" / "flows"))
from chromium import Page, browser, installed_browser

from penstock.flows.inspect.report import make_report
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.storage.commit import Commit, RunKeys, commit_key
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import write_shards, write_trained_tokens
from penstock.storage.store import Store

GROUPS, GROUP_SIZE, PROMPTS = 128, 8, 1700
STATUS = "document.querySelector('#samples > [role=status]').textContent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="number of samples (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="times that the page is opened (default: %(default)s)")
    options = parser.parse_args()
    if installed_browser() is None:
        sys.exit("this benchmark needs chromium or google-chrome on PATH: install one")
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        store = Store(f"{scratch}/store")
        make_run(store, options.samples)
        start = time.monotonic()
        page = make_report(store, "bench", options.samples)
        seconds = time.monotonic() - start
        path = Path(scratch, "bench.html")
        path.write_text(page, encoding="utf-8")
        measured = [open_report(path) for _ in range(options.repeats)]
        figures = {name: round(statistics.median(times[name] for times in measured), 3) for name in measured[0]}
        print(
            json.dumps(
                {
                    "samples": options.samples,
                    "bytes": path.stat().st_size,
                    "write_seconds": round(seconds, 1),
                    "repeats": options.repeats,
                    "median_seconds": figures,
                },
                indent=1,
            )
        )


def make_run(store: Store, num_samples: int) -> None:
    """Write a synthetic run with `num_samples` samples to the store."""
    num_rounds = -(-num_samples // (GROUPS * GROUP_SIZE))
    words = ["--run", "bench", "--store", str(store.root), "--hf-checkpoint", "model", "--num-rollout", str(num_rounds)]
    keys = open_run(store, resolve("train", parse_config([*words, "--prompt-data", "data.jsonl"]), store))
    rng = random.Random(0)
    for r in range(num_rounds):
        samples = [make_sample(rng, r, k) for k in range(min(GROUPS * GROUP_SIZE, num_samples))]
        num_samples -= len(samples)
        commit_round(store, keys, r, samples)


def commit_round(store: Store, keys: RunKeys, r: int, samples: list[Sample]) -> None:
    """Commit a rollout with its samples, and the training step on it."""
    attempt = store.new_attempt(keys.rollout_prefix(r))
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
    rollout = Commit(kind="rollout", run=keys.run, index=r, policy_version=r, attempt=attempt, files=out.files)
    rollout.seconds = {"generate": 2.0}
    rollout.summary = {"rollout/raw_reward": statistics.fmean(sample.reward or 0.0 for sample in samples)}
    store.commit(keys.rollout_prefix(r), rollout)
    step = Commit(kind="step", run=keys.run, index=r, policy_version=r + 1, seconds={"update": 2.0})
    step.inputs, step.summary = {"rollout": commit_key(keys.rollout_prefix(r))}, {"train/grad_norm": 1.0 / (r + 1)}
    step.attempt = store.new_attempt(keys.step_prefix(r))
    with store.writing(step.attempt) as out:
        write_tokens_of_trainer(out.path, samples)
    step.files = out.files
    store.commit(keys.step_prefix(r), step)


def write_tokens_of_trainer(directory: Path, samples: list[Sample]) -> None:
    """Write log-probs of the trainer, which differ from the engine's by 0.02 on average, and advantages of +0.5 or -0.5
    for each trained token."""
    ids = pa.chunked_array([[sample.sample_id for sample in samples]], pa.string())
    counts = np.array([sum(sample.loss_mask) for sample in samples])
    logprobs = np.concatenate([np.array(s.rollout_logprobs)[np.array(s.loss_mask) == 1] for s in samples])
    gaps = np.random.default_rng(len(samples)).laplace(0.0, 0.02, len(logprobs))
    advantages = np.repeat([(sample.reward or 0.0) - 0.5 for sample in samples], counts)
    columns = {"trainer_logprobs": logprobs + gaps, "advantages": advantages}
    write_trained_tokens(directory, ids, counts, columns)


def make_sample(rng: random.Random, r: int, k: int) -> Sample:
    """Return sample `k` of round `r`."""
    issue = r * GROUPS + k // GROUP_SIZE
    row, length = issue % PROMPTS, rng.randint(3, 6)
    response = [rng.randint(6, 15) for _ in range(length)]
    return Sample(
        sample_id=f"{issue:09d}-{k % GROUP_SIZE:02d}",
        group_id=f"{issue:09d}",
        trajectory_id=f"{issue:09d}-{k % GROUP_SIZE:02d}",
        rollout_id=r,
        prompt=f"<|user|>{row}+{row % 7}=<|end|><|assistant|>",
        response="".join(str(token - 6) for token in response),
        label=str(row + row % 7),
        token_ids=[2, 10, 11, 12, 16, 6 + row % 7, 19, 3, *response],
        loss_mask=[0] * 8 + [1] * length,
        rollout_logprobs=[0.0] * 8 + [-rng.expovariate(2.0) for _ in response],
        reward=float(rng.random() < 0.5),
        status=Status.COMPLETED,
        policy_versions=(r, r),
        metadata={"source": {"epoch": issue // PROMPTS, "file": 0, "row": row}},
    )


def open_report(path: Path) -> dict[str, float]:
    """Return the seconds until parts of the page can be used, in a fresh browser context."""
    with browser() as page:
        page.open(path.as_uri())
        page.wait_for("document.documentElement.dataset.ready === 'samples'")
        marks = page.evaluate(
            "Object.fromEntries(performance.getEntriesByType('mark').map(m => [m.name, m.startTime]))"
        )
        return {name: value / 1000 for name, value in marks.items()} | {"search": search(page, "1234")}


def search(page: Page, text: str) -> float:
    """Return the seconds of a text search over all samples, including the 0.25 s that the page waits for more keys."""
    before = page.evaluate(STATUS)
    start = time.monotonic()
    page.evaluate(
        f"{{const node = document.querySelector('#filter-text'); node.value = {json.dumps(text)};"
        "node.dispatchEvent(new Event('input'));}"
    )
    page.wait_for(f"{STATUS} !== {json.dumps(before)} && {STATUS}.includes('sample')")
    return time.monotonic() - start


if __name__ == "__main__":
    main()
