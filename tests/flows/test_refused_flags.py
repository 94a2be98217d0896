"""Flags of slime and Megatron-LM that are refused with a reason, or accepted because they change nothing."""

import logging
from pathlib import Path

import pytest

from penstock.engines.families import read_shape
from penstock.engines.generation import BUCKET_BYTES
from penstock.engines.weights.transfer import ProcessPlace
from penstock.flows.config import validate_config
from penstock.flows.gpu_plan import check_layout
from penstock.flows.options import refused
from penstock.flows.options.argv import MAX_LINE
from penstock.flows.options.flags import parse_config, parse_values, penstock_flags
from penstock.flows.runtime.engine_options import engine_options
from penstock.stages.rollout.plugins.rollout_function import find_evaluation_function
from penstock.storage.errors import OptionError

MODEL = ["--hf-checkpoint", "model"]


def test_refused_flag_raises_its_reason_in_one_line() -> None:
    for key, reason in refused.REFUSED.items():
        with pytest.raises(OptionError) as raised:
            parse_config([*MODEL, *key.split(" ")])
        assert str(raised.value) == f"{key} is not supported: {reason}" and len(str(raised.value)) <= MAX_LINE


def test_accepted_flag_changes_nothing_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    refused.log_once.cache_clear()
    plain = parse_config(MODEL)
    with caplog.at_level(logging.WARNING):
        for key in refused.ACCEPTED:
            assert [parse_config([*MODEL, *key.split(" ")]) for _ in range(2)] == [plain, plain], key
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"{key}: {reason}" for key, reason in refused.ACCEPTED.items()]


def test_value_decides_between_accepted_and_refused() -> None:
    with pytest.raises(OptionError, match="--update-weight-mode is not supported"):
        parse_config([*MODEL, "--update-weight-mode", "delta"])
    with pytest.raises(OptionError, match="--ckpt-format torch is not supported: give torch_dist"):
        parse_config([*MODEL, "--ckpt-format", "torch"])
    with pytest.raises(OptionError, match="--spec is not supported: another layer specification would"):
        parse_config([*MODEL, "--spec", "slime_plugins.models.qwen3_next", "get_qwen3_next_spec"])


@pytest.mark.parametrize("name", ["generate_rollout", "eval_rollout"])
def test_slimes_evaluation_is_the_built_in_one_even_with_a_rollout_function(name: str) -> None:
    functions = ["--rollout-function-path", "own.py:f", "--eval-function-path", f"slime.rollout.sglang_rollout.{name}"]
    rollout = parse_config([*MODEL, *functions]).rollout
    assert rollout.rollout_function_path == "own.py:f" and find_evaluation_function(rollout) is None


def test_flag_of_slimes_sft_scripts_needs_the_sft_loss() -> None:
    flag = "--disable-compute-advantages-and-returns"
    assert parse_config([*MODEL, flag, "--loss-type", "sft_loss"]).train.loss_type == "sft_loss"
    with pytest.raises(OptionError, match=f"{flag} leaves --loss-type policy_loss without advantages"):
        parse_config([*MODEL, flag])


def test_number_of_mtp_layers_is_checked_against_the_checkpoint(tiny_model: Path) -> None:
    shape = read_shape(tiny_model)
    check_layout(shape, parse_config([*MODEL, "--mtp-num-layers", "0"]).train)
    check_layout(shape.model_copy(update={"num_mtp_layers": 1}), parse_config([*MODEL, "--mtp-num-layers", "1"]).train)
    with pytest.raises(OptionError, match="--mtp-num-layers 1 contradicts --hf-checkpoint, which has 0"):
        check_layout(shape, parse_config([*MODEL, "--mtp-num-layers", "1"]).train)


def test_buffer_size_of_weight_updates_is_that_of_the_buckets() -> None:
    options = engine_options(parse_config([*MODEL, "--update-weight-buffer-size", "1000"]))
    assert options.weight_transport({}, [ProcessPlace("node", (), 1)], "dir").bucket_bytes == 1000
    assert engine_options(parse_config(MODEL)).bucket_bytes == BUCKET_BYTES


def test_refused_name_in_toml_raises_the_same_reason() -> None:
    with pytest.raises(OptionError, match=r"\[train\] release_train is not supported: the trainer's processes"):
        validate_config({"train": {"release_train": True}})


def test_tables_name_no_option_and_do_not_overlap() -> None:
    keys = [*refused.REFUSED, *refused.ACCEPTED, *refused.SYNONYMS]
    assert not set(keys) & penstock_flags().keys() and len(keys) == len(set(keys))


@pytest.mark.parametrize("key", refused.SYNONYMS)
def test_synonym_is_the_same_as_its_flags_and_is_logged_once(key: str, caplog: pytest.LogCaptureFixture) -> None:
    refused.log_once.cache_clear()
    words = [*key.split(" "), *(["random"] if ("..." in sum(refused.SYNONYMS[key], ())) else [])]
    meant = [word if word != "..." else "random" for flag in refused.SYNONYMS[key] for word in flag]
    with caplog.at_level(logging.WARNING):
        assert parse_values(words) == parse_values(words) == parse_values(meant)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [key]


def test_switch_that_is_a_synonym_takes_no_value() -> None:
    with pytest.raises(OptionError, match="--offload is a switch and takes no value"):
        parse_config([*MODEL, "--offload", "1"])
