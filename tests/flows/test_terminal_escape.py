"""Nothing that a model or a data set wrote reaches a terminal as a control sequence, whichever command prints it."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.table import Table
from rich.text import Text

from penstock.flows import cli
from penstock.flows.runtime.display import Display
from penstock.flows.terminal.console import LiveRegion, TerminalConsole, print_table
from penstock.flows.terminal.escape import escape_controls, escaped_output
from penstock.flows.terminal.panel import Panel
from penstock.storage.commit import Commit
from penstock.storage.errors import OptionError
from penstock.storage.store import Store
from tests.storage import made_run

SEQUENCES = {
    "title": "\x1b]0;owned\x07",
    "clear screen": "\x1b[2J\x1b[H",
    "hidden text": "\x1b[8mhidden\x1b[0m",
    "colour": "\x1b[31mred",
    "link": "\x1b]8;;http://evil.example\x1b\\safe\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "reset": "\x1bc",
    "DCS": "\x1bP$q\x1b\\",
    "C1 CSI": "\x9b2J",
    "C1 OSC": "\x9d0;owned\x9c",
    "carriage return": "true\rfalse",
    "backspace": "abc\b\b\bxyz",
    "NUL and DEL": "\x00\x7f",
    "right-to-left override": "\u202egnp.exe",
    "invisible": "\u200b\u2060\ufeff\xad",
    "tags": "\U000e0041\U000e0042",
    "line separators": "\u2028\u2029\x85",
    "lone surrogate": "\ud83d",
}
EVIL = "".join(SEQUENCES.values())
SEEN = "owned"  # a part of EVIL that may be printed
JOINERS = "\u200c\u200d"


def controls(text: str) -> set[str]:
    """The characters of a text that a terminal obeys or hides."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t" + JOINERS}


def controls_without_colours(text: str) -> set[str]:
    """The same of what a console wrote: its own colours and links begin with ESC."""
    return controls(re.sub(r"\x1b\[[\d;]*m", "", text))


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_a_control_sequence_is_escaped_and_json_stays_equal(
    sequence: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with escaped_output():
        print("printed", sequence)
        print(sequence, file=sys.stderr)
        sys.stdout.writelines([sequence, "\n"])
        logging.StreamHandler(sys.stderr).emit(logging.makeLogRecord({"msg": sequence}))
    assert not controls(terminal.getvalue()) and terminal.getvalue().count("\\") >= 4
    assert json.loads(escape_controls(json.dumps([sequence], ensure_ascii=False))) == [sequence]


def test_every_control_character_is_escaped_and_other_text_is_not_changed() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    scripts = {unicodedata.name(c).split()[0] for c in controls(escape_controls(everything))}
    assert scripts == {"ARABIC", "SYRIAC", "KAITHI", "EGYPTIAN"}, "which show their format characters"
    for text in ("a\tb\nc", "na\u00efve", "\u4e2d\u6587", "\u0627\u0644", "\U0001f469\u200d\U0001f52c", "\u2764\ufe0f",
                 "\u0645\u06cc\u200c\u062f", "C:\\u001b\\x"):  # fmt: skip
        assert escape_controls(text) == text


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
def test_a_console_colours_its_output_and_escapes_what_is_printed(sequence: str, terminal: Terminal) -> None:
    console = TerminalConsole(file=terminal, highlight=False)
    console.print("a string", sequence, style="bold")
    console.print(Text(f"a text {sequence}", style="red"))
    console.print(sequence, markup=False)
    console.rule(f"a title {sequence}")
    console.out(sequence)
    table = Table("a column", sequence)
    table.add_row(sequence, Text(sequence))
    console.print(table)
    assert "\x1b[1m" in terminal.getvalue() and not controls_without_colours(terminal.getvalue())


def test_output_beside_the_panel_is_escaped(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    with escaped_output():
        region = LiveRegion(TerminalConsole(file=sys.stdout), Panel("r", "train", 3).render)
        region.start()
        terminal.truncate(0)
        print(f"a library {EVIL}")
        print(f"an error {EVIL}", file=sys.stderr)
        region.print(Text(f"a line {EVIL}"))
        region.stop()
    ours = re.compile(r"\x1b\[[\d;]*[mAK]|\r")
    written = ours.sub("", terminal.getvalue()).replace("\x00", "")  # of the truncated part
    assert SEEN in written and not controls(written)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_of_a_run_are_escaped(log_format: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    config = SimpleNamespace(
        run=SimpleNamespace(num_rollout=3, debug_rollout_only=False, log_format=log_format),
        convert=SimpleNamespace(hf_checkpoint=f"/models/{EVIL}"),
        rollout=SimpleNamespace(prompt_data=[f"/data/{EVIL}"]),
        eval=SimpleNamespace(data_sets=[(EVIL, EVIL)]),
    )
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    with escaped_output():
        display = Display("r", "train", config, "/store", pages={"prefect": EVIL})
        display.note(f"filter dropped a group: {EVIL}")
        display.warn(f"reward failed: {EVIL}")
        row = {"reward": 1.0, "prompt": EVIL, "response": EVIL}
        display.print_commit(Commit(kind="rollout", index=0, state={"shown": [row]}))
        display.close()
        print_table([EVIL], [[EVIL]])
    assert SEEN in terminal.getvalue() and not controls(terminal.getvalue())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A run whose prompts, responses, labels and metadata contain every sequence."""
    place = tmp_path_factory.mktemp("evil")
    evil = EVIL.replace("\ud83d", "")  # Parquet has no lone surrogates
    make = made_run._samples

    def samples(*arguments: object, **options: object) -> list:  # type: ignore[type-arg]
        fields = {"prompt": evil, "response": evil, "label": evil}
        return [dataclasses.replace(each, **fields) for each in make(*arguments, **options)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_run, "_samples", samples)
        made = Store(str(place / "store"))
        data = made_run.write_data(place / "data.jsonl", word=evil)
        made_run.make_run(made, made_run.config_of(made, data), rounds=2, save=(2,), score=(2,))
    yield made


@pytest.mark.parametrize(
    "words, shows",
    [
        (["samples", "r"], True),
        (["samples", "r", "--prompt", "0"], True),
        (["samples", "r", "--json"], True),
        (["query", "select response, prompt from samples"], True),
        (["query", "select response from samples", "--format", "json"], True),
        (["query", f"select {EVIL[:-1]}"], False),
        (["show", "r"], False),
        (["show", EVIL], False),
        (["samples", "r", "--grep", f"({EVIL[:-1]}"], False),
        (["lineage", "r"], False),
        ([EVIL], False),
    ],
    ids=lambda value: escape_controls(" ".join(value))[:60] if isinstance(value, list) else "",
)
def test_no_command_prints_a_control_character(
    words: list[str], shows: bool, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*words, *(["--store", store.root] if words != [EVIL] else [])])
    captured = capsys.readouterr()
    assert not controls(captured.out + captured.err)
    assert captured.out + captured.err and (not shows or SEEN in captured.out)


def test_json_and_csv_in_a_file_have_the_exact_text_and_csv_on_a_terminal_is_escaped(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["samples", "r", "--limit", "1", "--json", "--store", store.root]) == 0
    assert json.loads(capsys.readouterr().out)["response"] == EVIL.replace("\ud83d", "")
    words = ["query", "select response from samples limit 1", "--format", "csv", "--store", store.root]
    assert cli.main(words) == 0
    assert SEQUENCES["title"] in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(words) == 0
    assert not controls(capsys.readouterr().out)


def test_an_error_and_its_traceback_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (sys.stdout, sys.stderr)
    for error in (OptionError(EVIL), RuntimeError(EVIL), OSError(2, EVIL, EVIL)):

        def fail(argv: list[str], error: Exception = error) -> int:
            raise error

        monkeypatch.setitem(cli.COMMANDS, "runs", fail)
        assert cli.main(["runs", "--verbose"]) in (1, 2)
        captured = capsys.readouterr()
        assert SEEN in captured.err and not controls(captured.out + captured.err)
    assert (sys.stdout, sys.stderr) == before, "the streams are restored"


def test_only_the_escaping_console_is_constructed_in_the_product() -> None:
    root = Path(__file__).parents[2]
    found = [
        str(path)
        for folder in ("flows", "stages", "engines", "storage")
        for path in sorted((root / folder).rglob("*.py"))
        if path.name != "escape.py" and re.search(r"(?<!Terminal)\bConsole\(", path.read_text())
    ]
    assert not found
