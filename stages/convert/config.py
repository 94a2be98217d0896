"""What people may say about models going in and out."""

from __future__ import annotations

from typing import Literal

from storage.config import StageConfig, option


class ConvertConfig(StageConfig):
    """Where the model comes from, and how it leaves."""

    hf_checkpoint: str = option("", change="schedule")
    """Hugging Face directory with config.json, *.safetensors and the tokenizer; the run starts from these weights."""

    export_dtype: Literal["float32", "bfloat16", "float16"] | None = option(None, change="schedule")
    """Number type of exported weights; by default the one they were trained in."""

    convert_timeout: float = option(7200.0, change="placement", gt=0)
    """Seconds after which a conversion or an export is given up and tried again."""
