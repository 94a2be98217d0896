"""Options of converting and exporting models."""

from __future__ import annotations

from typing import Literal

from penstock.storage.config import StageConfig, option

ExportDtype = Literal["float32", "bfloat16", "float16", "fp8"]
Mtp = Literal["skip", "keep"]


class ConvertConfig(StageConfig):
    """Options of the model that a run starts from, and of exports."""

    hf_checkpoint: str = option("", mutability="schedule")
    """Hugging Face directory with config.json, *.safetensors and the tokenizer. The engines start with these weights;
    so does the policy, unless --load or --ref-load is given."""

    load: str | None = option(None, mutability="schedule")
    """Start weights of the policy: a Hugging Face directory, a torch_dist directory of Megatron, or a run's checkpoint
    (STORE/RUN or STORE/RUN/VERSION). If it is equal to --save or has no checkpoint, the policy starts from --ref-load,
    else from --hf-checkpoint."""

    model_family_path: str | None = option(None, mutability="schedule")
    """FILE.py or module that defines a model family: its entries of config.json and its tensor names. Its code is
    executed."""

    export_dtype: ExportDtype | None = option(None, mutability="schedule")
    """Dtype of exported weights; default: dtype of the checkpoint. fp8: e4m3, one scale per 128 x 128 block."""

    mtp: Mtp = option("skip", mutability="schedule")
    """Tensors of multi-token prediction layers, which are not trained: skip them, or copy them into every export
    (always if the engines draft with them)."""

    convert_ranks: int = option(1, mutability="placement", ge=1)
    """Number of processes of a conversion; use several if the disk is faster than one process."""

    convert_save: str | None = option(None, mutability="placement")
    """`penstock convert --save`: directory or URI for the result, instead of the store."""

    convert_load: str | None = option(None, mutability="placement")
    """`penstock convert --load`: checkpoint to export: a torch_dist directory, or RUN or RUN/VERSION in the store."""

    origin_hf_dir: str | None = option(None, mutability="placement")
    """For --load: Hugging Face directory with config.json and tokenizer, if the checkpoint does not have them."""

    export_vocab_size: int | None = option(None, mutability="placement", ge=1)
    """For --load: vocabulary rows of embedding and LM head to export; default: config.json's vocab_size."""

    megatron_names: Literal["local", "te"] | None = option(None, mutability="placement")
    """For --save: tensor names as in Megatron's local layers (local) or TransformerEngine's layers (te). With --load:
    export in torch_dist format."""

    megatron_iteration: bool = option(False, mutability="placement")
    """For --load RUN with --megatron-names: name the result as a trainer does, iter_0000020 after 20 rounds, instead of
    `release`."""

    convert_verify: bool = option(False, mutability="placement")
    """`penstock convert --verify`: read the result back, compare it with the source bit for bit, and print a report."""

    check_logits: bool = option(True, mutability="placement")
    """At a model's first conversion, compare logits of a few tokens with transformers (large models: a few layers)."""

    convert_timeout: float = option(7200.0, mutability="placement", gt=0)
    """Seconds after which a conversion or an export is cancelled and retried."""
