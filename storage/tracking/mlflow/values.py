"""Names, parameters and metrics in the form that MLflow accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.storage.tracking.points import MetricPoint, flatten_config

if TYPE_CHECKING:
    from mlflow.entities import Metric

T = TypeVar("T")

MAX_METRICS, MAX_PARAMS, MAX_DATASETS = 1000, 100, 100  # MLflow's limits per request
_MAX_PARAM = 6000  # characters of a parameter's value
_FORBIDDEN = re.compile(r"[^\w\-./: ]")  # characters that MLflow rejects in names, for instance "@"
_FORBIDDEN_IN_MODELS = re.compile(r"[^\w\- ]")  # MLflow also rejects / : . % and quotes in names of logged models


def flatten_params(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the values of a nested config as MLflow parameters: dotted name, text. Secrets are left out."""
    for name, value in flatten_config(values):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield replace_forbidden_characters(name), text[:_MAX_PARAM]


def replace_forbidden_characters(name: str) -> str:
    """Replace the characters that MLflow rejects in names: `eval/aime/pass@8` becomes `eval/aime/pass_at_8`."""
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))


def model_name(name: str) -> str:
    """Return a name that MLflow accepts for a logged model: `my-run/000020` becomes `my-run-000020`."""
    return _FORBIDDEN_IN_MODELS.sub("_", name.replace("/", "-"))


def to_mlflow(points: Sequence[MetricPoint], links: dict[str, str] | None = None) -> list[Metric]:
    """Return metric points as MLflow metrics, linked to a model and a data set if `links` is given."""
    from mlflow.entities import Metric

    return [
        Metric(replace_forbidden_characters(point.name), point.value, int(point.at * 1000), point.step, **(links or {}))
        for point in points
    ]


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive parts of `items` with at most `size` items each."""
    return (items[start : start + size] for start in range(0, len(items), size))
