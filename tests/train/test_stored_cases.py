"""Compare losses, gradients, advantages and metrics of the stored cases with their stored numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.train.make_stored_cases import load, number
from tests.train.stored_cases import Outputs, compute, compute_on_two_ranks

STORED = load()
FAMILIES = sorted({case["family"] for case, _ in STORED})
TOLERANCE = 1e-12  # of max(1, |x|)


def differences(result: Outputs, expected: Outputs) -> list[str]:
    """Return a line for each output that differs."""
    if result.keys() != expected.keys():
        return [f"outputs {sorted(result.keys() ^ expected.keys())} are missing or new"]
    lines = []
    for name, values in expected.items():
        scale = np.maximum(1, np.abs(values))
        if result[name].shape != values.shape:
            lines.append(f"{name} has {len(result[name])} numbers, stored are {len(values)}")
        elif not np.allclose(result[name] / scale, values / scale, rtol=0, atol=TOLERANCE, equal_nan=True):
            lines.append(f"{name} is {result[name].tolist()}, stored is {values.tolist()}")
    return lines


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_case_gives_the_stored_numbers(family: str, tmp_path: Path) -> None:
    cases, expected = zip(*((case, outputs) for case, outputs in STORED if case["family"] == family), strict=True)
    results = compute_on_two_ranks(list(cases), tmp_path) if family == "two_ranks" else map(compute, cases)
    wrong = {
        case["name"]: lines
        for case, result, outputs in zip(cases, results, expected, strict=True)
        if (lines := differences(result, outputs))
    }
    first = "\n".join(f"{name}: {line}" for name, lines in itertools.islice(wrong.items(), 3) for line in lines)
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ ({', '.join(wrong)}), the first:\n{first}"


def test_names_and_seeds_of_stored_cases_are_their_positions() -> None:
    cases = [case for case, _ in STORED]
    assert number(cases) == cases and len(cases) >= 873
