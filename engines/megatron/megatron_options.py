"""The options of Megatron-core that have an effect here: `[train.megatron]` in a file, its flags on the command line.
All other options of Megatron are fixed by the checkpoint, by Penstock's own options or by its kernels. Does not import
megatron or torch.

A field is None if it is not given: `transformer_config.py` and `optimizer.py` have the defaults. The mutability
"placement" means that an option only moves, delays or recomputes data and changes no bit of a result, so a resumed run
may change it (tested by tests/engines/test_megatron_optimizer.py and gather_ranks.py). `overlap_grad_reduce` and
`bucket_size` do not have it, because they can change the order in which gradients are summed over more than two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import model_serializer

from penstock.storage.config import StageConfig, option
from penstock.storage.errors import check_rules

# The value of --recompute-modules that changes results: it sums the gradients of a norm's input in another order.
ROUNDING_MODULE = "layernorm"
RecomputableModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class MegatronOptions(StageConfig):
    """The section [train.megatron]. Its serialized form has only the options that were given."""

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local", "fa4", "torch"] | None = option(None)
    """Attention kernel."""
    num_layers_in_first_pipeline_stage: int | None = option(None)
    """Layers of the first pipeline stage."""
    num_layers_in_last_pipeline_stage: int | None = option(None)
    """Layers of the last pipeline stage."""
    account_for_embedding_in_pipeline_split: bool | None = option(None)
    """Count the embedding as a layer when layers are split over stages."""
    account_for_loss_in_pipeline_split: bool | None = option(None)
    """Count the LM head as a layer when layers are split over stages."""
    recompute_granularity: Literal["full", "selective"] | None = option(None, mutability="placement")
    """Activation recomputation: full or selective."""
    recompute_method: Literal["uniform", "block"] | None = option(None, mutability="placement")
    """With full recomputation: recompute all layers in blocks (uniform), or the first layers of a stage (block)."""
    recompute_num_layers: int | None = option(None, mutability="placement", ge=1)
    """With full recomputation: layers per block (uniform), or number of recomputed layers (block)."""
    recompute_modules: list[RecomputableModule] | None = option(None, mutability="placement")
    """With selective recomputation: the modules that are recomputed."""
    bias_activation_fusion: bool | None = option(None)
    """Fuse the activation of the MLP; on GPUs."""
    bias_dropout_fusion: bool | None = option(None)
    """Compile the residual addition."""
    gradient_accumulation_fusion: bool | None = option(None)
    """Accumulate weight gradients in the GEMM; on GPUs."""
    moe_grouped_gemm: bool | None = option(None)
    """Compute the experts of a rank by grouped GEMMs."""
    moe_permute_fusion: bool | None = option(None)
    """Compute the experts of a rank by grouped GEMMs, with fused permutation."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = option(None)
    """Data type of the router's scores: fp32 or fp64."""
    bf16: bool | None = option(None)
    """Train in bf16, as --params-dtype bf16."""
    overlap_param_gather: bool | None = option(None, mutability="placement")
    """Overlap the all-gather of parameters with the forward pass."""
    overlap_grad_reduce: bool | None = option(None)
    """Overlap the reduction of gradients with the backward pass."""
    grad_reduce_in_fp32: bool | None = option(None)
    """Reduce gradients in fp32."""
    bucket_size: int | None = option(None, ge=1)
    """Gradient elements per reduction."""
    check_for_nan_in_grad: bool | None = option(None)
    """Fail on a NaN gradient before weights are updated."""
    optimizer_cpu_offload: bool | None = option(None, mutability="placement")
    """Keep optimizer states and main weights in host memory."""
    optimizer_offload_fraction: float | None = option(None, mutability="placement", ge=0, le=1)
    """Share of the optimizer states in host memory."""

    @model_serializer(mode="wrap")
    def _dump_given(self, dump: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}

    @property
    def rounding_modules(self) -> list[str] | None:
        """Return the --recompute-modules that change how sums are rounded, which a resumed run must have too, or
        None."""
        return [name for name in self.recompute_modules or () if name == ROUNDING_MODULE] or None

    def check(self) -> None:
        """Raise OptionError if an option has no effect together with the other options."""
        is_full, has_block = self.recompute_granularity == "full", (self.recompute_method, self.recompute_num_layers)
        rules = (
            (
                self.bucket_size is not None and not self.overlap_grad_reduce,
                "--ddp-bucket-size has an effect only with --overlap-grad-reduce: add this option, or drop "
                "--ddp-bucket-size",
            ),
            (
                self.moe_permute_fusion and self.moe_grouped_gemm is False,
                "--moe-permute-fusion permutes tokens for grouped GEMMs, which --no-moe-grouped-gemm turns off: omit "
                "one of the two options",
            ),
            (
                is_full and None in has_block,
                "--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers: "
                "add them",
            ),
            (
                not is_full and has_block != (None, None),
                "--recompute-method and --recompute-num-layers have an effect only with --recompute-granularity full: "
                "add this option, or drop both",
            ),
            (
                self.recompute_modules and self.recompute_granularity != "selective",
                "--recompute-modules has an effect only with --recompute-granularity selective: add this option, or "
                "omit --recompute-modules",
            ),
        )
        check_rules(rules)
