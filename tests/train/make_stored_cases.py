"""Store what the code returns for the stored cases, and for new ones: `python -m tests.train.make_stored_cases`.

Run it to add cases, or when a change of numbers is intended, and say so in the commit: a rewrite has to reproduce the
stored numbers.

tests/fixtures/loss_cases.json holds one case per line: `name`, `family` (the estimator, or what else it is about),
`seed`, `options` (flags of the trainer), `rollout` (`stored_cases.Rollout`) or the sizes of `logits`, `ranks` if two
ranks compute it, and `outputs` (name -> length). tests/fixtures/loss_cases.npz holds the outputs of all cases, one
after the other. The cases are every estimator with each entry of an axis of options or rollouts, mixtures that cover
the pairs of entries of all axes, and ratios, drifts and changes of a value exactly at their bounds.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from tests.train.stored_cases import Case, Outputs, compute, compute_on_two_ranks

FIXTURE = Path(__file__).parents[1] / "fixtures" / "loss_cases.json"
# Cases to add: family, options and rollout, as in the file. They get the next seeds, and names from them. Remove a case
# from this list when it is stored.
NEW_CASES: list[Case] = []


def main() -> None:
    """Compute all cases and write them."""
    cases = number([case for case, _ in load()] + NEW_CASES)
    with tempfile.TemporaryDirectory() as directory:
        results = compute_all(cases, Path(directory))
    lengths = [{name: len(values) for name, values in result.items()} for result in results]
    lines = [json.dumps(case | {"outputs": outputs}) for case, outputs in zip(cases, lengths, strict=True)]
    FIXTURE.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    values = np.concatenate([values for result in results for values in result.values()])
    np.savez_compressed(FIXTURE.with_suffix(".npz"), values=values)
    print(f"{len(cases)} cases, {len(values)} numbers in {FIXTURE}")


def load() -> list[tuple[Case, Outputs]]:
    """Return the stored cases with their outputs."""
    values, start, stored = np.load(FIXTURE.with_suffix(".npz"))["values"], 0, []
    for case in json.loads(FIXTURE.read_text()):
        outputs = {}
        for name, length in case.pop("outputs").items():
            outputs[name] = values[start : start + length]
            start += length
        stored.append((case, outputs))
    assert start == len(values), f"{FIXTURE} describes {start} numbers, but {len(values)} are stored"
    return stored


def compute_all(cases: list[Case], directory: Path) -> list[Outputs]:
    """Return the outputs of each case."""
    shared = iter(compute_on_two_ranks([case for case in cases if "ranks" in case], directory))
    return [next(shared) if "ranks" in case else compute(case) for case in cases]


def number(cases: list[Case]) -> list[Case]:
    """Return the cases with a name and a seed each, which are their positions."""
    return [{"name": f"{case['family']}-{seed}", **case, "seed": seed} for seed, case in enumerate(cases)]


if __name__ == "__main__":
    main()
