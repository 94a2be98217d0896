"""Whether a model can lie over ranks as somebody wants it to: what Megatron-core would only say when the ranks have started, or never.

No torch here, so preflight can ask.
"""

from __future__ import annotations

from engines.megatron.shape import ModelShape


def check_fit(
    shape: ModelShape, tensor: int = 1, expert: int = 1, expert_tensor: int | None = None, sequence_parallel: bool = False
) -> None:
    """Check parallel sizes against a model.

    Args:
        shape: of the model.
        tensor: ranks that share every matrix.
        expert: ranks that share the experts of a layer.
        expert_tensor: ranks that share every expert's matrices; None: `tensor`.
        sequence_parallel: whether tensor-parallel ranks share norms and residuals.

    Raises:
        ValueError: they do not fit.
    """
    _divides(shape.num_attention_heads, "attention heads", tensor, "--tensor-model-parallel-size")
    if shape.latent is None and max(shape.num_query_groups, tensor) % min(shape.num_query_groups, tensor):
        found = f"--tensor-model-parallel-size {tensor}, but the model has {shape.num_query_groups} key heads"
        raise ValueError(f"{found}: one number must divide the other")
    if shape.experts is None or shape.experts.num_dense_layers:
        _divides(shape.ffn_hidden_size, "rows of the MLP", tensor, "--tensor-model-parallel-size")
    if shape.experts is None:
        if expert > 1:
            found = f"--expert-model-parallel-size {expert}, but the {shape.architecture} of this checkpoint has no experts"
            raise ValueError(f"{found}: drop the option")
    else:
        _divides(shape.experts.num_experts, "experts", expert, "--expert-model-parallel-size")
        _divides(shape.experts.shared_ffn_hidden_size, "rows of the shared experts", tensor, "--tensor-model-parallel-size")
        ranks, option = (
            (tensor, "--tensor-model-parallel-size")
            if expert_tensor is None
            else (expert_tensor, "--expert-tensor-parallel-size")
        )
        _divides(shape.experts.ffn_hidden_size, "rows of an expert", ranks, option)
    if (shape.experts or shape.latent) and tensor > 1 and not sequence_parallel:
        found = f"{shape.architecture} over {tensor} tensor-parallel ranks needs sequence parallelism"
        raise ValueError(f"{found} (gradients of its replicated parts would not be summed): add --sequence-parallel")


def _divides(number: int, what: str, ranks: int, option: str) -> None:
    if number % ranks:
        raise ValueError(f"{option} {ranks} does not divide the model's {number} {what}: use a divisor of {number}")
