"""`penstock eval` has two further forms, which say so themselves."""

import pytest

from flows import cli


@pytest.mark.parametrize("form", ["--rescore", "--compare"])
def test_help_of_the_further_forms(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", form, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"penstock eval {form} ")
    assert cli.main(["eval", "--help"]) == 0
    assert f"penstock eval {form} --help" in capsys.readouterr().out
