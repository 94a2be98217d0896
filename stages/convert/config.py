"""What people may say about models going in and out."""

from __future__ import annotations

from typing import Literal

from storage.config import StageConfig, option


class ConvertConfig(StageConfig):
    """Where the model comes from, and how it leaves."""

    hf_checkpoint: str = option("", change="schedule")
    """Hugging Face directory with config.json, *.safetensors and the tokenizer; the run starts from these weights."""

    export_dtype: Literal["float32", "bfloat16", "float16", "fp8"] | None = option(None, change="schedule")
    """Number type of exported weights; by default the one they were trained in. fp8 is e4m3 in blocks of 128 x 128, for fp8 rollouts."""

    mtp: Literal["skip", "keep"] = option("skip", change="schedule")
    """Tensors of multi-token prediction layers, which are not trained: leave them out, or carry them through to every export."""

    convert_ranks: int = option(1, change="placement", ge=1)
    """Processes that share the work of a conversion; more of them where the disk is faster than one."""

    convert_save: str | None = option(None, change="placement")
    """`penstock convert --save`: directory or URI for the result, in place of the store."""

    convert_load: str | None = option(None, change="placement")
    """`penstock convert --load`: what to make a Hugging Face directory of: a torch_dist directory, or RUN or RUN/VERSION of the store."""

    origin_hf_dir: str | None = option(None, change="placement")
    """For --load: the Hugging Face directory whose config.json and tokenizer the result gets; a converted model has its own."""

    export_vocab_size: int | None = option(None, change="placement", ge=1)
    """For --load: rows of embedding and head to keep, where that is not config.json's vocab_size."""

    megatron_names: Literal["local", "te"] | None = option(None, change="placement")
    """For --save: torch_dist under the names of Megatron's local layers or of TransformerEngine's; with --load in place of Hugging Face files."""

    convert_verify: bool = option(False, change="placement")
    """`penstock convert --verify`: read the result back bit for bit, and report what was compared."""

    check_logits: bool = option(True, change="placement")
    """Compare a few logits with transformers' when a model is converted for the first time; of large models, a few layers'."""

    convert_timeout: float = option(7200.0, change="placement", gt=0)
    """Seconds after which a conversion or an export is given up and tried again."""
