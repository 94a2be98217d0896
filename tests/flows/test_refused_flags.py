"""Flags of slime and Megatron-LM that are refused with a reason, or accepted because they change nothing."""

import logging

import pytest

from penstock.flows.config import validate_config
from penstock.flows.options import refused
from penstock.flows.options.argv import MAX_LINE
from penstock.flows.options.flags import parse_config, penstock_flags
from penstock.storage.errors import OptionError

MODEL = ["--hf-checkpoint", "model"]


@pytest.mark.parametrize("key", refused.REFUSED)
def test_refused_flag_raises_its_reason_in_one_line(key: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_config([*MODEL, *key.split(" ")])
    assert str(raised.value) == f"{key} is not supported: {refused.REFUSED[key]}"
    assert len(str(raised.value)) <= MAX_LINE


@pytest.mark.parametrize("key", refused.ACCEPTED)
def test_accepted_flag_changes_nothing_and_is_logged_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    refused.log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        configs = [parse_config([*MODEL, *key.split(" ")]) for _ in range(2)]
    assert configs[0] == configs[1] == parse_config(MODEL)
    assert [record.getMessage() for record in caplog.records] == [f"{key}: {refused.ACCEPTED[key]}"]


def test_value_decides_between_accepted_and_refused() -> None:
    with pytest.raises(OptionError, match="--update-weight-mode is not supported"):
        parse_config([*MODEL, "--update-weight-mode", "delta"])
    with pytest.raises(OptionError, match="--ckpt-format torch is not supported: give torch_dist"):
        parse_config([*MODEL, "--ckpt-format", "torch"])


def test_refused_name_in_toml_raises_the_same_reason() -> None:
    with pytest.raises(OptionError, match=r"\[train\] release_train is not supported: the trainer's processes"):
        validate_config({"train": {"release_train": True}})


def test_tables_name_no_option_and_do_not_overlap() -> None:
    listed = {key.partition(" ")[0] for key in (*refused.REFUSED, *refused.ACCEPTED)}
    assert not listed & penstock_flags().keys()
    assert not refused.REFUSED.keys() & refused.ACCEPTED.keys()
