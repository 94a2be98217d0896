"""The help of `penstock eval --rescore` and `--compare`."""

import pytest

from penstock.flows import cli


@pytest.mark.parametrize("form", ["--rescore", "--compare"])
def test_help_of_rescore_and_compare(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", form, "--help"]) == 0
    assert f"penstock eval {form} " in capsys.readouterr().out
    assert cli.main(["eval", "--help"]) == 0
    assert f"penstock eval {form} --help" in capsys.readouterr().out
