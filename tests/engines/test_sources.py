"""Sources are parsed reliably, whatever other threads do."""

import ast
import threading
from pathlib import Path

import pytest

from penstock.engines import sources
from penstock.engines.sources import parse_source


def test_threads_that_parse_at_the_same_time_do_not_fail() -> None:
    text = Path(sources.__file__).read_text()
    deep = "x = " + "(" * 60 + "1" + " + 1)" * 60 + "\n"
    found: list[str] = []

    def parse() -> None:
        found.extend(ast.dump(parse_source(source)) for _ in range(150) for source in (text, deep))

    threads = [threading.Thread(target=parse) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 150 * 2 and len(set(found)) == 2


def test_a_transient_system_error_is_retried_and_a_lasting_one_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "RETRY_SECONDS", 0.0)
    failures = [SystemError("AST constructor recursion depth mismatch")] * 3
    original = ast.parse

    def parse(*args: object) -> ast.Module:
        if failures:
            raise failures.pop()
        return original(*args)

    monkeypatch.setattr(ast, "parse", parse)
    assert isinstance(parse_source("x = 1"), ast.Module)
    failures += [SystemError("always")] * sources.NUM_TRIES
    with pytest.raises(SystemError, match="always"):
        parse_source("x = 1")
    with pytest.raises(SyntaxError):
        parse_source("x =")
