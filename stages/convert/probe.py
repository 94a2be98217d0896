"""Does a converted model say the same as the original? Logits of a few tokens: Megatron, from the converted files, against Hugging Face's.

Both compute in fp32 on this machine, one after the other; a model that does not fit is not compared, and that is said.
"""

from __future__ import annotations

import gc
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.megatron.parallel import init_parallel, shutdown_parallel
from engines.megatron.shape import ModelShape

NUM_TOKENS = 48
TOLERANCE = 1e-3  # of log-probabilities; two ways to the same fp32 sums differ by 1e-6 in a tiny model and 1e-4 in a large one
BYTES_EACH = 10  # a parameter, its gradient's place in Megatron's buffer, and a quarter more
OPTIMIZER: dict[str, Any] = dict(lr=0.0, min_lr=0.0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=0.0,
                                 lr_decay_style="constant", lr_warmup_iters=0, lr_decay_iters=None)  # fmt: skip


@dataclass(frozen=True)
class Probe:
    """What came of the comparison."""

    difference: float | None = None  # largest, of log-probabilities; None: not compared
    reason: str = ""  # why not

    def __str__(self) -> str:
        if self.difference is None:
            return f"not compared: {self.reason}"
        return f"log-probabilities of {NUM_TOKENS} tokens differ by at most {self.difference:.1e}"


@dataclass
class _Pack:
    """One sequence, as the engine takes it."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [2]
    max_seqlen: int


def compare_logits(converted: Path, hf_dir: Path) -> Probe:
    """Compare a converted model with the Hugging Face directory it was made of.

    Raises:
        ValueError: they differ.
    """
    shape = ModelShape.from_hf(hf_dir)
    needed, available = shape.num_parameters * BYTES_EACH, _available_bytes()
    if available is not None and available < needed:
        return Probe(reason=f"it takes {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free")
    if json.loads((hf_dir / "config.json").read_text()).get("quantization_config"):
        return Probe(reason="Hugging Face computes with the fp8 weights themselves, not with what they stand for")
    token_ids = (torch.arange(NUM_TOKENS) * 7919 + 13) % shape.vocab_size  # [T], spread over the vocabulary
    expected = _hugging_face(hf_dir, token_ids)
    gc.collect()
    found = _megatron(converted, shape, token_ids)
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{converted}: log-probabilities differ by {difference:.1e} from Hugging Face's, at most {TOLERANCE:.0e} was expected: "
            "please report this as a bug"
        )
    return Probe(difference)


def _hugging_face(directory: Path, token_ids: Tensor) -> Tensor:
    """[T, V] log-probabilities."""
    import transformers

    config = json.loads((directory / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    # the class is given by name: some of the hub's model types (kimi_k2) are not transformers' own
    fields = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    model = model_class.from_pretrained(
        directory, config=model_class.config_class(**fields), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(token_ids[None]).logits[0].log_softmax(-1)


def _megatron(directory: Path, shape: ModelShape, token_ids: Tensor) -> Tensor:
    """[T, V] log-probabilities."""
    pack = _Pack(token_ids, torch.arange(NUM_TOKENS), torch.tensor([0, NUM_TOKENS], dtype=torch.int32), NUM_TOKENS)
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        init_parallel(0, 1, f"file://{scratch}/world", threads=torch.get_num_threads())
        try:
            from engines.megatron.engine import MegatronEngine

            engine = MegatronEngine(shape, dtype="fp32", optimizer=OPTIMIZER)
            engine.load_weights(directory)
            outputs = engine.forward_backward(
                [pack],
                lambda hidden, head, _: (None, {"logprobs": head(hidden).float().log_softmax(-1).cpu()}),
                forward_only=True,
            )
            return outputs[0]["logprobs"]
        finally:
            shutdown_parallel()


def _available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", path.read_text()) if path.exists() else None
    return int(found[1]) * 1024 if found else None
