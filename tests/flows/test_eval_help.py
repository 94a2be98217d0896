"""The help of `penstock eval --compare` and `penstock regrade`, to which that of `penstock eval` refers."""

import pytest

from penstock.flows import cli


@pytest.mark.parametrize("form", ["eval --compare", "regrade"])
def test_help_of_compare_and_regrade(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*form.split(), "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"penstock {form} ")
    assert cli.main(["eval", "--help"]) == 0
    assert f"penstock {form} --help" in capsys.readouterr().out
