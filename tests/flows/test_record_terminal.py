"""benchmarks/record_terminal.py: what a command shows, as an asciicast and as an SVG picture."""

from __future__ import annotations

import importlib.util
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = r"printf 'first\nsecond\n'; sleep 0.05; printf '\033[1F\033[J\033[1;31mred & bold\033[0m\n'; exit 3"


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "record_terminal.py"
    spec = importlib.util.spec_from_file_location("record_terminal", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["record_terminal"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recording_shows_what_the_terminal_showed_at_each_time(recorder: ModuleType, tmp_path: Path) -> None:
    cast = tmp_path / "a.cast"
    assert recorder.record(["/bin/sh", "-c", PROGRAM], cast, 40, 5) == 3
    header, *events = map(json.loads, cast.read_text().splitlines())
    assert (header["version"], header["width"], header["height"]) == (2, 40, 5)
    assert "".join(text for _, _, text in events).startswith("first\r\nsecond\r\n")
    width, height, frames = recorder.read_frames(cast, 2)
    last = ["".join(char for char, _ in row) for row in frames[-1]]
    assert (width, height, len(frames)) == (40, 5, 2) and last[:2] == ["first", "red & bold"]
    svg = ElementTree.fromstring(recorder.render_svg(width, height, frames, 3.0))
    texts = [span for span in svg.iter("{http://www.w3.org/2000/svg}tspan") if span.text == "red & bold"]
    assert texts and texts[-1].attrib["style"] == "fill:#e06c75;font-weight:bold"
