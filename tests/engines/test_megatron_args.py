"""Option names come from the source of the installed megatron-core, without importing it."""

import subprocess
import sys

import pytest

from penstock.engines.megatron.options.args import ALIASES, megatron_flags, normalize_megatron_args
from penstock.storage.errors import OptionError


def test_flags_are_the_fields_of_megatrons_dataclasses() -> None:
    flags = megatron_flags()
    for name, owner in {
        "recompute_granularity": "TransformerConfig",
        "sequence_parallel": "ModelParallelConfig",
        "adam_beta2": "OptimizerConfig",
        "overlap_grad_reduce": "DistributedDataParallelConfig",
        "num_experts": "alias",
    }.items():
        assert flags[name].owner == owner
    assert flags["mtp_num_layers"].annotation == "Optional[int]"


def test_every_alias_sets_fields_and_hides_none() -> None:
    flags = megatron_flags()
    for alias, target in ALIASES.items():
        assert flags[alias].owner == "alias"
        assert all(flags[name].owner != "alias" for name in target)


def test_normalize_resolves_every_spelling() -> None:
    options = {"--recompute-activations": True, "ddp_bucket_size": 7, "no_rope_fusion": False, "fp8_margin": 1}
    assert normalize_megatron_args(options) == {"recompute_granularity": "selective", "bucket_size": 7, "fp8_margin": 1}


def test_unknown_option_error_names_the_closest_option() -> None:
    with pytest.raises(OptionError, match=r"'recompute_granularty'.*'recompute_granularity'"):
        normalize_megatron_args({"recompute_granularty": "full"})


def test_reading_options_does_not_import_torch() -> None:
    code = (
        "import sys; from penstock.engines.megatron.options.args import megatron_flags; megatron_flags(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
