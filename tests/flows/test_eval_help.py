"""The help of `penstock eval --rescore` and `--compare`."""

import pytest

from penstock.flows import cli


@pytest.mark.parametrize(("form", "other"), [("--rescore", "--compare"), ("--compare", "--rescore")])
def test_help_of_rescore_and_compare(form: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", form, "--help"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"penstock eval {form} ")
    assert other not in printed
    assert cli.main(["eval", "--help"]) == 0
    assert f"penstock eval {form} --help" in capsys.readouterr().out
