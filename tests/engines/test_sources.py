"""Sources are parsed whatever other threads do."""

import ast
import threading
from pathlib import Path

import pytest

from engines import sources
from engines.sources import parsed


def test_threads_that_parse_at_the_same_time_do_not_fail() -> None:
    text = Path(sources.__file__).read_text()
    deep = "x = " + "(" * 60 + "1" + " + 1)" * 60 + "\n"
    found: list[str] = []

    def parse() -> None:
        found.extend(ast.dump(parsed(source)) for _ in range(150) for source in (text, deep))

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 150 * 2 and len(set(found)) == 2


def test_a_failure_of_the_moment_is_tried_again_and_a_lasting_one_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PAUSE", 0.0)
    failures = [SystemError("AST constructor recursion depth mismatch")] * 3
    original = ast.parse

    def parse(*args: object) -> ast.Module:
        if failures:
            raise failures.pop()
        return original(*args)

    monkeypatch.setattr(ast, "parse", parse)
    assert isinstance(parsed("x = 1"), ast.Module)
    failures += [SystemError("always")] * sources.NUM_TRIES
    with pytest.raises(SystemError, match="always"):
        parsed("x = 1")
    with pytest.raises(SyntaxError):
        parsed("x =")
