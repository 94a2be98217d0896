"""Every command says how it is called, and starts nothing for that."""

import pytest

from flows import cli


@pytest.mark.parametrize("command", sorted(set(cli.COMMANDS) - {"demo", "doctor", "resume", "runs"}))
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "penstock" and {"--store", "--cron"} & set(" ".join(words).replace("[", " ").split())


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n  {command} " in said for command in cli.COMMANDS)
