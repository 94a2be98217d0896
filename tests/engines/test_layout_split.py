"""Layers are split over pipeline stages as Megatron does, and errors suggest flags that work."""

import re
from itertools import product
from typing import Any

import pytest

from penstock.engines.megatron.parallel import ParallelLayout
from penstock.engines.parallel_layout import check_pipeline
from penstock.flows.options import flags
from penstock.storage.errors import LayoutError
from tests.engines.megatron_reference import SHAPE


def options_of(text: str) -> dict[str, Any]:
    """Return the Megatron options of a part of a command line."""
    return flags.parse_config(["--hf-checkpoint", "x", *text.split()]).train.megatron.model_dump()


def test_error_suggests_flags_that_work() -> None:
    for case in product([3, 24, 47, 61, 62, 92], [2, 3, 4, 8, 16, 32], [None, 1, 2, 3]):
        check_suggestion(*case)


def check_suggestion(num_layers: int, pipeline: int, virtual: int | None) -> None:
    shape = SHAPE.model_copy(update={"num_layers": num_layers})
    try:
        check_pipeline(shape, pipeline, virtual)
    except LayoutError as error:
        text = str(error)
    else:
        assert num_layers % (pipeline * (virtual or 1)) == 0
        return
    assert len(text) <= 300 and f"--pipeline-model-parallel-size {pipeline}" in text and str(num_layers) in text
    suggested = re.findall(r"use ((?:--decoder-\w+-pipeline-num-layers \d+ ?)+)", text)
    if suggested:
        check_pipeline(shape, pipeline, virtual, options_of(suggested[0]))
    elif sizes := re.search(r"set --pipeline-model-parallel-size to one of ([\d, ]+)", text):
        for size in sizes[1].split(", "):
            check_pipeline(shape, int(size), virtual)
    else:
        assert text.endswith("omit --virtual-pipeline-model-parallel-size") and num_layers % (virtual or 1)


def test_error_for_61_layers_on_two_stages_suggests_a_smaller_last_stage() -> None:
    with pytest.raises(LayoutError, match=r"--decoder-last-pipeline-num-layers 30\b.*31, 30"):
        check_pipeline(SHAPE.model_copy(update={"num_layers": 61}), 2)


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        (1, {"num_layers_in_first_pipeline_stage": 2}),
        (2, {"num_layers_in_first_pipeline_stage": 0}),
        (2, {"num_layers_in_last_pipeline_stage": 60}),
        (2, {"num_layers_in_last_pipeline_stage": 59, "num_layers_in_first_pipeline_stage": 2}),
        (2, {"num_layers_in_last_pipeline_stage": 1, "account_for_loss_in_pipeline_split": True}),
        (8, {"num_layers_in_last_pipeline_stage": 6}),
    ],
)
def test_impossible_split_is_an_error(pipeline: int, options: dict[str, Any]) -> None:
    from penstock.engines.megatron.model.transformer_config import transformer_config

    shape = SHAPE.model_copy(update={"num_layers": 60})
    with pytest.raises(LayoutError, match="--decoder-"):
        check_pipeline(shape, pipeline, None, options)
    with pytest.raises(LayoutError):
        transformer_config(shape, ParallelLayout(pipeline=pipeline), overrides=options)
