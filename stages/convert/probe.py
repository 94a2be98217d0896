"""Compare logits of a converted model with transformers': the meaning of names, shapes and config.json, which bits cannot tell.

Both sides compute a few tokens in fp32 on this machine, one after the other. Small models are compared whole, of large ones a part
(`part.py`), so time and memory are bounded; a part that does not fit into memory is not compared, and that is recorded.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engines.megatron.hf_config import read_config
from engines.megatron.parallel import device, init_parallel, shutdown_parallel
from engines.megatron.shape import ModelShape
from engines.megatron.stored import stored_model
from stages.convert.hf_files import HFWeights
from stages.convert.part import Part, part_of
from stages.convert.source_check import expected_shapes
from stages.convert.torch_dist_files import TorchDistWeights
from storage.errors import ModelError, PenstockError

NUM_TOKENS = 48
TOLERANCE = 1e-3  # of log-probabilities; two ways to the same fp32 sums differ by 1e-6 in a tiny model and 1e-4 in a large one
BYTES_EACH = 10  # of memory for a parameter: its fp32 value, what it was read from, and a quarter more
UNUSED = {"sklearn.metrics": "roc_curve"}  # transformers' models import it for assisted generation: 0.9 s of processor time


@dataclass(frozen=True)
class Probe:
    """The result of a comparison."""

    difference: float | None = None  # largest, of log-probabilities; None: not compared
    reason: str = ""  # why not
    part: str = "the whole model"

    def __str__(self) -> str:
        if self.difference is None:
            return f"not compared: {self.reason}"
        return f"log-probabilities of {NUM_TOKENS} tokens through {self.part} differ by at most {self.difference:.1e}"


@dataclass
class _Pack:
    """One sequence, as the engine takes it."""

    token_ids: Tensor  # [T]
    position_ids: Tensor  # [T]
    cu_seqlens: Tensor  # [2]
    max_seqlen: int


def compare_logits(converted: Path, hf_dir: Path, part: Part | None = None) -> Probe:
    """Compare a converted model with the Hugging Face directory it was made of.

    Args:
        converted: torch_dist checkpoint.
        hf_dir: its source.
        part: what to compute; by default as much as `part_of` says.

    Raises:
        ModelError: they differ, or transformers cannot load the source.
    """
    part = part or part_of(read_config(hf_dir / "config.json"))
    needed, available = part.shape.num_parameters * BYTES_EACH, _available_bytes()
    if available is not None and available < needed:
        return Probe(reason=f"it takes {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free")
    token_ids = (torch.arange(NUM_TOKENS) * 7919 + 13) % part.shape.vocab_size  # [T], spread over the vocabulary
    try:
        expected = _hugging_face(hf_dir, part, token_ids)
    except PenstockError:
        raise
    except Exception as error:  # whatever transformers raises for a model that it does not accept
        reason = " ".join(str(error).split())[:120]
        raise ModelError(f"{hf_dir}: transformers cannot load this model ({reason}): correct config.json") from error
    difference = float((_megatron(converted, ModelShape.from_hf(hf_dir), part, token_ids) - expected).abs().max())
    if not difference <= TOLERANCE:
        raise ModelError(
            f"{converted}: log-probabilities through {part} differ by {difference:.1e} from transformers', at most {TOLERANCE:.0e} is "
            "expected: please report this as a bug"
        )
    return Probe(difference, part=str(part))


@torch.no_grad()
def _hugging_face(directory: Path, part: Part, token_ids: Tensor) -> Tensor:
    """[T, V] log-probabilities."""
    with _without(UNUSED):
        import transformers
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model_class = getattr(transformers, part.shape.architecture)
    # the class is given by name: some of the hub's model types (kimi_k2) are not transformers' own
    config = model_class.config_class(**{key: value for key, value in part.values.items() if key != "model_type"})
    with HFWeights(directory) as weights:
        tensors = {
            name: weights.fetch(part.source(name), shape[0]).float() for name, shape in expected_shapes(part.shape).items()
        }
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped products want rows of a multiple of 16 bytes
        output_loading_info=True,
    )
    missing = sorted(set(report["missing_keys"]) - ({"lm_head.weight"} if part.shape.tied_embeddings else set()))
    if missing or report["unexpected_keys"]:
        raise ValueError(f"{len(missing)} weights missing, {len(report['unexpected_keys'])} unexpected")
    return model.eval()(token_ids[None]).logits[0].log_softmax(-1)


@torch.no_grad()
def _megatron(directory: Path, shape: ModelShape, part: Part, token_ids: Tensor) -> Tensor:
    """[T, V] log-probabilities."""
    weights = TorchDistWeights(directory, stored_model(shape))
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        init_parallel(0, 1, f"file://{scratch}/world", threads=torch.get_num_threads())
        try:
            from engines.megatron.model import build_model
            from engines.megatron.packing import pack_stream
            from engines.megatron.weights import local_parameters

            [model] = build_model(part.shape)
            for name, tensor in local_parameters(model):
                with weights.lent(part.source(name)) as whole:
                    tensor.copy_(whole[: tensor.shape[0]])
            pack = _Pack(token_ids, torch.arange(NUM_TOKENS), torch.tensor([0, NUM_TOKENS], dtype=torch.int32), NUM_TOKENS)
            return model.head(model.eval()(pack_stream(pack, device()))).log_softmax(-1).cpu()
        finally:
            shutdown_parallel()


@contextmanager
def _without(unused: dict[str, str]) -> Iterator[None]:
    """In this block, importing a name of `unused` (module -> name) gives None and does not import its package."""
    hidden = {name for name in unused if name not in sys.modules}
    for name in hidden:
        module: Any = ModuleType(name)
        setattr(module, unused[name], None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def _available_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not say."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", path.read_text()) if path.exists() else None
    return int(found[1]) * 1024 if found else None
