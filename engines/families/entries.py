"""Read the entries of a Hugging Face `config.json`: check types, apply defaults, read RoPE settings, and refuse values
that Penstock does not support. Imports neither torch nor transformers, so that preflight checks are fast.

An unsupported entry raises a ModelError. It is never ignored, because Penstock would then train a different model
without any error.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from penstock.engines.families.shape import Llama3Scaling, Rotary, YarnScaling
from penstock.storage.disk import read_file
from penstock.storage.errors import ModelError, check_rules

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # OWNER/NAME
LARGEST = 2**31 - 1  # maximum of integer entries: Megatron's kernels cannot index more rows or columns
LARGEST_NUMBER = 1e30  # maximum of other numeric entries; excludes NaN and infinity
MAX_LAYERS = 10_000
MAX_CONFIG_BYTES, MAX_JSON_BYTES = 16 << 20, 256 << 20  # limits for config.json, other files (tokenizers: up to 40 MB)
EntryType = tuple[str, Callable[[Any], bool]]  # (description of valid values, function that checks a value)


def integer_between(low: int, high: int = LARGEST) -> EntryType:
    """Return the type of a config.json entry that must be an integer from `low` to `high`, both included."""
    upper = f" and at most {high}" if high < LARGEST else ""
    return f"an integer of at least {low}{upper}", lambda value: type(value) is int and low <= value <= high


NUMBER: EntryType = ("a number", lambda value: type(value) in (int, float) and abs(value) < LARGEST_NUMBER)
POSITIVE: EntryType = ("a positive number", lambda value: type(value) in (int, float) and 0 < value < LARGEST_NUMBER)
FRACTION: EntryType = ("a number above 0 and at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1)
FLAG: EntryType = ("true or false", lambda value: type(value) is bool)
TEXT: EntryType = ("a string", lambda value: isinstance(value, str))
TABLE: EntryType = ("an object", lambda value: isinstance(value, dict))
TEXTS: EntryType = (
    "a list of strings",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
LAYERS: EntryType = (
    "a list of layer numbers",
    lambda value: isinstance(value, list) and all(type(item) is int and item >= 0 for item in value),
)

TYPES: dict[str, EntryType] = {  # types of config.json's entries; null is valid, too, except for those in REQUIRED
    "num_hidden_layers": integer_between(1, MAX_LAYERS),
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "original_max_position_embeddings", "moe_intermediate_size",
            "num_experts_per_tok", "n_routed_experts", "num_local_experts", "q_lora_rank", "kv_lora_rank",
            "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
        ),
        integer_between(1),
    ),
    **dict.fromkeys(
        (
            "num_experts", "n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers", "n_group",
            "topk_group", "decoder_sparse_step", "max_window_layers", "sliding_window",
        ),
        integer_between(0),
    ),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "routed_scaling_factor"), POSITIVE),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), NUMBER),
    "partial_rotary_factor": FRACTION,
    **dict.fromkeys(
        (
            "tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "use_qk_norm",
            "rope_interleave", "is_causal",
        ),
        FLAG,
    ),
    **dict.fromkeys(("hidden_act", "scoring_func", "topk_method", "rope_type", "type", "model_type"), TEXT),
    **dict.fromkeys(("architectures", "layer_types", "mlp_layer_types"), TEXTS),
    "mlp_only_layers": LAYERS,
    **dict.fromkeys(("rope_parameters", "rope_scaling", "text_config", "vision_config"), TABLE),
}  # fmt: skip

REQUIRED = {  # entries that must not be null: transformers has no default for them
    "num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps", "hidden_act", "moe_intermediate_size", "num_experts_per_tok",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "routed_scaling_factor",
    "is_causal", "image_token_id",
}  # fmt: skip

# entries of a vision-language model that count at the top level, also where `text_config` repeats them
OUTER = ("architectures", "model_type", "tie_word_embeddings", "image_token_id", "vision_config")

# Entries that belong to other architectures -> the only value, besides null, that has no effect; other values are
# refused. For the architectures supported here transformers ignores these entries, but inference engines apply some.
FOREIGN: dict[str, Any] = {
    **dict.fromkeys(
        (
            "final_logit_softcapping", "attn_logit_softcapping", "attn_logit_cap", "query_pre_attn_scalar",
            "attention_multiplier", "attention_chunk_size", "swiglu_limit", "index_topk", "compression_config",
            "sparse_attention_config", "clip_qkv",
        ),
        None,
    ),
    **dict.fromkeys(
        (
            "logit_scale", "logits_scaling", "final_logits_scaling", "output_multiplier_scale", "embedding_multiplier",
            "embedding_multiplier_scale", "scale_emb", "lm_head_multiplier", "residual_multiplier", "mup_width_scale",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "alibi", "use_alibi", "use_mup", "parallel_residual", "use_parallel_residual", "learnable_sink",
            "add_swa_attention_sink_bias", "add_full_attention_sink_bias", "mla_nope", "use_mla_nope",
            "use_ngram_embedding", "is_encoder_decoder", "add_cross_attention", "bidirectional",
            "use_bidirectional_attention", "bias",
        ),
        False,
    ),
    "rope_is_neox_style": True,
}  # fmt: skip

# name of an entry in hub checkpoints -> name that transformers 5 writes
SPELLINGS = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts"}


def check_not_hub_id(flag: str, path: str | Path) -> None:
    """Raise ModelError if `path`, the value of `flag`, does not exist and looks like a name on the Hugging Face hub
    (OWNER/NAME): Penstock does not download models or data."""
    directory, here = Path(path), Path.cwd()
    hub_id = str(directory.relative_to(here) if directory.is_relative_to(here) else directory)
    is_data = flag.endswith("prompt-data")
    if is_data and directory.suffix:
        return  # the name of a file, not OWNER/NAME
    if _HUB_ID.fullmatch(hub_id) and not directory.parent.exists():
        what, kind = ("data", " --repo-type dataset") if is_data else ("models", "")
        raise ModelError(
            f"{flag} {hub_id} does not exist and Penstock does not download {what}: run `hf download {hub_id}{kind} "
            f"--local-dir {directory.name}` and give {flag} {directory.name}{'/FILE' * is_data}"
        )


def describe_gguf(model: Path) -> str:
    """Return an error message if `model`, which has no config.json, is a GGUF file or a directory with one; else ""."""
    files = [model] if model.suffix.lower() == ".gguf" and model.is_file() else sorted(model.glob("*.gguf"))
    if not files:
        return ""
    return (
        f"{files[0]} is GGUF, but Penstock needs config.json, *.safetensors and the tokenizer: download the model that "
        "it was made from, or write its weights with transformers (from_pretrained(DIRECTORY, gguf_file=NAME) and "
        "save_pretrained) and add that model's tokenizer"
    )


def read_config(path: Path, flag: str = "--hf-checkpoint") -> dict[str, Any]:
    """Return the entries of a config.json, whose directory was given to `flag`. Check before that the model's directory
    has no pipes or devices, whose reading might never end, and that its JSON files and chat templates fit into memory.
    """
    directory = path.parent
    check_not_hub_id(flag, directory)
    if not path.exists():
        missing = f"give {flag} a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
        raise ModelError(describe_gguf(directory) or f"{path} does not exist: {missing}")
    for file in sorted(directory.iterdir()):
        try:
            status = file.stat()
        except OSError:  # a broken link: reported where the file is read
            continue
        rules = (
            (
                not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)),
                f"{file} is a pipe or a device instead of a file: remove it from the model's directory",
            ),
            (
                file.suffix in (".json", ".jinja") and status.st_size > MAX_JSON_BYTES,
                f"{file} has {status.st_size} bytes, more than {MAX_JSON_BYTES}: download it again",
            ),
        )
        check_rules(rules, ModelError)
    values: Any = None
    try:
        values = json.loads(read_file(path, MAX_CONFIG_BYTES).decode("utf-8"))
        problem = f"contains a JSON {type(values).__name__} instead of an object: download it again"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): make it readable for this user"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON ({error}): download it again"
    if not isinstance(values, dict):
        raise ModelError(f"{path} {problem}")
    return values


class ConfigEntries:
    """The entries of one config.json, with type checks. `entries[name]` returns the value of an entry; for an absent
    entry it returns the value in `defaults` (those of transformers' config class), or None without a default. `types`
    has the types of entries that are not in `TYPES`.
    """

    def __init__(
        self, values: dict[str, Any], source: str, defaults: dict[str, Any], types: dict[str, EntryType] | None = None
    ) -> None:
        self.values, self.source, self.defaults = values, source, defaults
        self.types = TYPES | (types or {})

    def __getitem__(self, name: str) -> Any:
        other = SPELLINGS.get(name, name)
        if name in self.values and other in self.values and self.values[name] != self.values[other]:
            both = f"{name} {to_short_json(self.values[name])} and {other} {to_short_json(self.values[other])}"
            self.refuse_contradiction(both)
        value = self.values.get(name, self.values.get(other, self.defaults.get(name)))
        if name not in self.values and other not in self.values:
            return value
        needed, fits = self.types.get(name, ("", lambda value: True))
        if name in REQUIRED if value is None else not fits(value):
            self.refuse(f"{name} {to_short_json(value)}", f"but this entry must be {needed}", "correct config.json")
        return value

    def refuse(self, found: str, needed: str, do: str = "use another checkpoint") -> NoReturn:
        """Raise a ModelError about config.json: what was found, what Penstock needs, and what the user can do."""
        raise ModelError(f"{self.source} says {found}, {needed}: {do}")

    def refuse_contradiction(self, found: str) -> NoReturn:
        """Raise a ModelError about entries of config.json that contradict each other."""
        self.refuse(found, "which contradict each other", "correct config.json")


def merge_text_config(config: ConfigEntries) -> dict[str, Any]:
    """Return the entries of a config.json with those of `text_config` at the top level, where the language model of a
    vision-language model has them in older files."""
    text = config["text_config"]
    if not text:
        return config.values
    return {**config.values, **{name: value for name, value in text.items() if name not in OUTER}}


def to_short_json(value: Any) -> str:
    """Return a value as JSON, truncated to 60 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def rotary_from_config(config: ConfigEntries, fraction: float = 1.0, interleaved: bool = False) -> Rotary:
    """Return the RoPE settings of a config.json: its entries `rope_theta` and `rope_scaling` or, since transformers 5,
    `rope_parameters`.

    This architecture applies RoPE to `fraction` of each head's dimensions; if that is below 1, the entry
    `partial_rotary_factor` overrides it.
    """
    settings = config["rope_scaling"] or config["rope_parameters"] or {}
    if any(isinstance(value, dict) for value in settings.values()):
        config.refuse(
            f"rope_parameters for {', '.join(settings)}", "but Penstock supports only the same RoPE in all layers"
        )

    rope = ConfigEntries(settings, config.source, {}, config.types)

    def read_setting(name: str) -> Any:  # from the top level or the RoPE settings
        top, inner = config[name], rope[name]
        if top is not None and inner is not None and top != inner:
            config.refuse_contradiction(f"{name} {top} at the top level and {inner} in the RoPE settings")
        return top if inner is None else inner

    factor = read_setting("partial_rotary_factor")
    if factor not in (None, fraction) and fraction == 1:
        config.refuse(f"partial_rotary_factor {factor}", "but Penstock supports only 1 for this architecture")
    return Rotary(
        base=read_setting("rope_theta") or 10000.0,
        fraction=fraction if factor is None else factor,
        interleaved=interleaved,
        scaling=_rope_scaling(config, rope),
    )


def _rope_scaling(config: ConfigEntries, rope: ConfigEntries) -> Llama3Scaling | YarnScaling | None:
    """Return the RoPE scaling that `rope`, the RoPE settings within a config.json, describes; None without scaling."""
    kind = rope["rope_type"] or rope["type"] or "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn"):
        config.refuse(f"rope_type {kind!r}", "but Penstock supports only 'default', 'llama3' and 'yarn'")
    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    if missing := [name for name in needed if rope[name] is None]:
        config.refuse(f"rope_type {kind!r} without {missing[0]}", "which this rope_type needs", f"add {missing[0]}")
    # transformers 5.12.1 (`standardize_rope_params`): the top-level entry takes precedence over the RoPE settings
    inner, top = rope["original_max_position_embeddings"], config["original_max_position_embeddings"]
    original = top or inner or config["max_position_embeddings"]
    if kind == "llama3":
        return Llama3Scaling(**{name: rope[name] for name in needed}, original_max_positions=original)
    if rope["attention_factor"] is not None or not rope.values.get("truncate", True):
        config.refuse(
            "attention_factor or truncate in the YaRN settings",
            "but Penstock computes the attention factor and always truncates the correction range",
        )
    return YarnScaling(
        factor=rope["factor"],
        original_max_positions=original,
        beta_fast=rope["beta_fast"] or 32.0,
        beta_slow=rope["beta_slow"] or 1.0,
        mscale=rope["mscale"] or 0.0,  # without both entries the attention factor depends on `factor` only
        mscale_all_dim=rope["mscale_all_dim"] or 0.0,
    )


def refuse_unsupported(config: ConfigEntries, architecture: str) -> None:
    """Raise ModelError if an entry that any architecture's config.json may have has an unsupported value."""
    if config["is_causal"] is False:
        config.refuse("is_causal false", "but Penstock supports only causal attention", "use a decoder-only checkpoint")
    if (config["hidden_act"] or "silu") != "silu":
        config.refuse(f"hidden_act {config['hidden_act']!r}", "but Penstock supports only 'silu'")
    layers, kinds = config["num_hidden_layers"], config["layer_types"]
    if kinds is not None and len(kinds) != layers:
        config.refuse_contradiction(f"{len(kinds)} layer_types and num_hidden_layers {layers}")
    full_attention = "but Penstock supports only full attention"
    if windows := [kind for kind in kinds or () if kind != "full_attention"]:
        config.refuse(f"layer_types with {windows[0]!r}", full_attention)
    if config["dual_chunk_attention_config"]:
        config.refuse(
            "dual_chunk_attention_config", full_attention, "remove it if no sequence exceeds max_position_embeddings"
        )
    for name, neutral in FOREIGN.items():
        if config[name] not in (None, neutral):
            config.refuse(
                f"{name} {to_short_json(config[name])}", f"which Penstock does not support for {architecture}"
            )


def refuse_sliding_windows(config: ConfigEntries) -> None:
    """Raise ModelError if a layer uses sliding-window attention."""
    full = config["max_window_layers"] or 0  # number of first layers without a window; 0 if absent (Qwen3-MoE)
    if config["use_sliding_window"] and config["sliding_window"] is not None and config["num_hidden_layers"] > full:
        config.refuse(
            "use_sliding_window true",
            "but Penstock supports only full attention",
            "set it to false if no sequence exceeds the window",
        )


def refuse_attention_bias(config: ConfigEntries) -> None:
    """Raise ModelError if config.json says that attention projections have biases."""
    if config["attention_bias"]:
        config.refuse("attention_bias true", "but Penstock does not support attention biases for this architecture")
