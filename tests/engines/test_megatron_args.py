"""Option names are read from the installed megatron-core, and importing nothing of it."""

import subprocess
import sys

import pytest

from engines.megatron.args import ALIASES, check_megatron_args, megatron_flags


def test_flags_are_the_fields_of_all_four_dataclasses() -> None:
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


def test_every_alias_leads_to_a_field_and_hides_none() -> None:
    flags = megatron_flags()
    for alias, target in ALIASES.items():
        assert flags[alias].owner == "alias"
        assert all(flags[name].owner != "alias" for name in target)


def test_check_resolves_spellings() -> None:
    given = {"--recompute-activations": True, "ddp_bucket_size": 7, "no_rope_fusion": False, "fp8_margin": 1}
    assert check_megatron_args(given) == {"recompute_granularity": "selective", "bucket_size": 7, "fp8_margin": 1}


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'recompute_granularty': did you mean 'recompute_granularity'"):
        check_megatron_args({"recompute_granularty": "full"})


def test_no_torch_is_imported() -> None:
    code = "import sys; from engines.megatron.args import megatron_flags; megatron_flags(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
