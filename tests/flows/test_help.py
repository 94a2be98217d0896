"""--help of every command prints its usage and starts nothing."""

import re
from pathlib import Path

import pytest

from penstock.flows import cli


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_help_of_every_command_is_printed(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([command, "--help"], [command, "ghost", "--store", "/dev/null/x", "-h"]):  # nothing of it is read
        assert cli.main(words) == 0
        out = capsys.readouterr().out
        assert f"penstock {command}" in out.partition("\n")[0] and {
            "--store",
            "--cron",
            "--directory",
            "--output",
        } & set(re.findall(r"--\w+", out))
    assert list(tmp_path.iterdir()) == []


def test_usage_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {command} " in said for command in cli.COMMANDS)
