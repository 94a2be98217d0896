"""Check the options of speculative decoding (`--sglang-speculative-*`) before an engine starts.

Draft tokens come from the multi-token prediction (MTP) layer of --hf-checkpoint or from a separate draft model. Both
keep the weights with which the engine started: weight updates replace the target model only
(docs/design/0021-speculative-decoding.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engines.families.entries import read_config
from penstock.engines.options import EngineOptions
from penstock.engines.weights.hf_headers import stored_tensors, weight_files
from penstock.storage.errors import EngineError, ModelError

ALGORITHMS = ("NEXTN", "EAGLE", "EAGLE3")
# Architectures whose MTP layer SGLang loads from the model's own directory.
MTP_ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM")
PREFIX = "speculative_"
DRAFT_MODEL = ("speculative_draft_model_path", "speculative_draft_model")  # two spellings of one flag
SIZES = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def is_speculative(args: Mapping[str, Any]) -> bool:
    """Return whether these server flags (underscores in their names) enable speculative decoding."""
    return args.get("speculative_algorithm") is not None


def drafts_with_mtp_layer(args: Mapping[str, Any]) -> bool:
    """Return whether these server flags make the engine draft with the MTP layer of --hf-checkpoint."""
    return is_speculative(args) and draft_model(args) is None


def check_speculative(args: Mapping[str, Any], options: EngineOptions) -> None:
    """Check the flags of speculative decoding against the model and the other options."""
    if not is_speculative(args):
        if unused := sorted(name for name in args if name.startswith(PREFIX)):
            raise EngineError(f"{_flag(unused[0])} has no effect without --sglang-speculative-algorithm: give NEXTN")
        return
    algorithm = str(args["speculative_algorithm"])
    if algorithm.upper() not in ALGORITHMS:
        raise EngineError(
            f"--sglang-speculative-algorithm {algorithm[:40]} is not supported: give NEXTN to draft with the model's "
            "own MTP layer, or EAGLE or EAGLE3 with --sglang-speculative-draft-model-path"
        )
    steps, topk, tokens = (args.get(name) for name in SIZES)
    default = (steps, topk, tokens) == (None, None, None) or args.get("speculative_adaptive")
    if not default and (steps is None or topk is None or (topk != 1 and tokens is None)):  # SGLang fails at start
        raise EngineError(
            f"{', '.join(map(_flag, SIZES))} depend on each other: give all of them, or none to use SGLang's defaults"
        )
    _check_sampling(args, options)
    if draft := draft_model(args):
        if not (Path(draft) / "config.json").is_file():
            raise EngineError(f"--sglang-speculative-draft-model-path {draft} is not a model directory: download it")
        if options.transport == "disk":  # SGLang loads the directory of an update into both models
            raise EngineError(
                "--update-weight-transport disk would load the policy's weights into the draft model of "
                "--sglang-speculative-draft-model-path, too: give --update-weight-transport nccl"
            )
    elif algorithm.upper() == "EAGLE3":
        raise EngineError(
            "--sglang-speculative-algorithm EAGLE3 needs a draft model: give --sglang-speculative-draft-model-path, "
            "or NEXTN to draft with the model's own MTP layer"
        )
    else:
        _check_mtp_layer(Path(options.spec.model_path))


def draft_model(args: Mapping[str, Any]) -> str | None:
    """Return the directory of the separate draft model, or None."""
    return next((str(args[name]) for name in DRAFT_MODEL if args.get(name) is not None), None)


def _check_sampling(args: Mapping[str, Any], options: EngineOptions) -> None:
    """Check that the engine samples from the target model's distribution, with the parameters that it is given."""
    for name in THRESHOLDS:
        if args.get(name, 1.0) != 1.0:
            raise EngineError(
                f"{_flag(name)} {args[name]} accepts draft tokens that the policy would not sample, so their log-probs "
                "are not those of the sampling distribution: omit the option, or give 1.0"
            )
    if options.sampling_seeds:
        raise EngineError(
            "--rollout-sampling-seeds cannot be combined with --sglang-speculative-algorithm, because SGLang verifies "
            "draft tokens without the seeds of the requests: omit --rollout-sampling-seeds, or the algorithm"
        )
    if options.sampling.get("min_p"):
        raise EngineError(
            "--rollout-sampling min_p has no effect with --sglang-speculative-algorithm, because SGLang verifies draft "
            "tokens without it: omit min_p, or the algorithm"
        )
    if options.return_experts and args.get("speculative_eagle_topk", 1) != 1:
        raise EngineError(
            "--use-rollout-routing-replay needs --sglang-speculative-eagle-topk 1, because SGLang does not move the "
            "routed experts of an accepted branch: give 1"
        )


def _check_mtp_layer(directory: Path) -> None:
    """Check that a Hugging Face directory has the one MTP layer that SGLang drafts with."""
    config = read_config(directory / "config.json")
    [architecture, *_], count = config["architectures"], config.get("num_nextn_predict_layers") or 0
    if architecture not in MTP_ARCHITECTURES or count == 0:
        raise ModelError(
            f"{directory} ({architecture}, num_nextn_predict_layers {count}) has no multi-token prediction layer for "
            "--sglang-speculative-algorithm: give EAGLE or EAGLE3 with --sglang-speculative-draft-model-path, or omit "
            "--sglang-speculative-algorithm"
        )
    if count != 1:
        raise ModelError(
            f"{directory} has {count} multi-token prediction layers (num_nextn_predict_layers), but SGLang drafts with "
            "exactly one: omit --sglang-speculative-algorithm"
        )
    tensor = f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"
    if tensor not in stored_tensors(directory, weight_files(directory)):
        raise ModelError(
            f"{directory} lacks {tensor}, a tensor of the multi-token prediction layer that config.json has "
            "(num_nextn_predict_layers 1): use the original checkpoint, or an export made with --mtp keep"
        )


def _flag(name: str) -> str:
    return f"--sglang-{name.replace('_', '-')}"
