"""Compare the speed of Penstock's training step with a plain Megatron-core loop, on the same packed micro-batches and
model, in one process.

    python benchmarks/train.py                               # a small model on this machine's CPU
    python benchmarks/train.py --device cuda                 # Qwen3-0.6B in bf16, micro-batches of 8 x 2,048 tokens

Penstock's step is `train_rollout` with GRPO, including log-probs, entropy and metrics; its speed is the metric
`perf/actor_train_tok_per_s`. The plain loop uses Megatron-core without TransformerEngine: its GPT model with Penstock's
attention (Megatron's does not support packed sequences), its cross-entropy over all logits, gradient buffers, optimizer
and schedule. Its micro-batches are moved to the device before the measurement. First, both run one SFT step from the
same weights, and must get the same loss and gradient norm. Then they are measured alternately.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Work:
    """Sizes of the model and of the micro-batches of one optimizer step."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    length: int  # tokens of a sequence
    num_sequences: int  # sequences of a micro-batch
    dtype: Literal["fp32", "bf16"]


MODELS = {
    "tiny": Work(2, 128, 4, 2, 32, 384, 64, length=12, num_sequences=256, dtype="fp32"),  # the demo's model
    # The LM head has a quarter of the parameters, as in 0.6b.
    "small": Work(4, 256, 4, 2, 64, 768, 4096, length=256, num_sequences=8, dtype="fp32"),
    "0.6b": Work(28, 1024, 16, 8, 128, 3072, 151936, length=2048, num_sequences=8, dtype="bf16"),
    "1.7b": Work(28, 2048, 16, 8, 128, 6144, 151936, length=2048, num_sequences=4, dtype="bf16"),
}
Step = Callable[[], tuple[float, Any]]  # run one optimizer step; return its seconds and its metrics
OPTIMIZER: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1, "adam_beta2": 0.98, "clip_grad": 1.0}
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative; the two loops round logits and gradients at different points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=MODELS, help="default: small on a CPU, 0.6b on a GPU")
    parser.add_argument("--packs", type=int, default=2, help="micro-batches per optimizer step")
    parser.add_argument("--turns", type=int, default=10, help="measured optimizer steps of each loop")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=3,
        help="optimizer steps of each loop before the measurement, in which kernels are compiled",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--chunk", type=int, help="--log-probs-chunk-size; default: its default")
    parser.add_argument("--profile", action="store_true", help="print a profile of one more step of each loop")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Both loops share the allocator's cache.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    work = MODELS[options.model or ("small" if options.device == "cpu" else "0.6b")]

    from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        init_parallel(0, 1, f"file://{Path(scratch) / 'world'}", threads=options.threads)
        try:
            compare_loops(work, options)
        finally:
            shutdown_parallel()


def compare_loops(work: Work, options: argparse.Namespace) -> None:
    """Check that both loops compute the same SFT step, then measure them alternately and print the speeds."""
    import torch

    assert torch.cuda.is_available() == (options.device == "cuda"), "no CUDA device is visible"
    batch = make_batch(work, options.packs)
    penstock = PenstockLoop(work, batch, options.chunk)
    plain = PlainLoop(work, batch, penstock)
    steps: dict[str, Step] = {"penstock": penstock.step, "plain": plain.step}
    (loss, norm), (plain_loss, plain_norm) = penstock.sft_step(), plain.step()[1]
    print(f"{torch.__version__}, {penstock.engine.fingerprint()['device']}, {work}")
    print("one SFT step of both loops, penstock and plain: ", end="")
    print(f"loss {loss:.6f} and {plain_loss:.6f}, gradient norm {norm:.6f} and {plain_norm:.6f}")
    assert np.allclose((loss, norm), (plain_loss, plain_norm), rtol=TOLERANCE[work.dtype]), (
        "the two loops compute different losses or gradients"
    )

    seconds: dict[str, list[float]] = {"penstock": [], "plain": []}
    whole: list[float] = []  # seconds of train_rollout, including planning and packing
    peaks = dict.fromkeys(steps, 0.0)
    for turn in range(options.warm_up + options.turns):
        for name in ("penstock", "plain") if turn % 2 else ("plain", "penstock"):
            step_seconds, wall, peak = measure(steps[name])
            if turn >= options.warm_up:
                seconds[name].append(step_seconds)
                peaks[name] = max(peaks[name], peak)
                whole += [wall] if name == "penstock" else []
    print_speeds(len(batch.token_ids), seconds, whole, peaks)
    if options.profile:
        for name, step in steps.items():
            print_profile(name, step)


def measure(step: Step) -> tuple[float, float, float]:
    """Return the seconds that the step reports, the seconds of the whole call, and the peak GPU memory in GiB above the
    memory that was allocated before."""
    import torch

    before = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    step_seconds = step()[0]
    wall = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
    return step_seconds, wall, peak / 2**30


def print_speeds(tokens: int, seconds: dict[str, list[float]], whole: list[float], peaks: dict[str, float]) -> None:
    """Print tokens per second of each loop and their ratio, from the seconds of every step.

    Args:
        tokens: tokens of an optimizer step.
        seconds: loop -> seconds of each step.
        whole: seconds of each call of `train_rollout`.
        peaks: loop -> peak GPU memory in GiB above weights and optimizer.
    """
    speeds = {name: [tokens / step_seconds for step_seconds in values] for name, values in seconds.items()}
    speeds["penstock, with planning and packing"] = [tokens / step_seconds for step_seconds in whole]
    for name, values in speeds.items():
        memory = f", {peaks[name]:.1f} GiB above weights and optimizer" if peaks.get(name) else ""
        print(
            f"{name:<36}{statistics.median(values):12,.0f} tokens/s   "
            f"({min(values):,.0f} to {max(values):,.0f}){memory}"
        )
    ratio, whole_ratio = (
        statistics.median(plain / own for plain, own in zip(seconds["plain"], values, strict=True))
        for values in (seconds["penstock"], whole)
    )
    print(f"{'median ratio penstock / plain':<36}{ratio:12.3f}   (with planning and packing: {whole_ratio:.3f})")


def print_profile(name: str, step: Step) -> None:
    """Print the operators of one optimizer step that take the most time."""
    import torch
    from torch.profiler import ProfilerActivity

    device = "cuda" if torch.cuda.is_available() else "cpu"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    averages = profiler.key_averages()
    table = averages.table(sort_by=f"self_{device}_time_total", row_limit=30, max_name_column_width=70)
    print(f"\n{name}\n{table}")


# ---- the data and the model ------------------------------------------------------------------------------------------


def make_batch(work: Work, num_packs: int) -> Any:
    """Return a rollout of random samples in groups of eight; all tokens are trained except the first of each sample."""
    from penstock.stages.train.batching import Batch
    from penstock.storage.samples.sample import Sample, to_table

    rng = np.random.default_rng(0)
    samples = [
        Sample(
            *(f"{i}", f"{i // 8}", f"{i}", 0),
            token_ids=rng.integers(work.vocab, size=work.length).tolist(),
            loss_mask=[1] * work.length,
            rollout_logprobs=[-float(np.log(work.vocab))] * work.length,
            reward=float(rng.integers(2)),
        )
        for i in range(num_packs * work.num_sequences)
    ]
    return Batch.from_table(to_table(samples), needs_rewards=True)


def model_shape(work: Work) -> Any:
    from penstock.engines.families.shape import ModelShape, Rotary

    return ModelShape(
        architecture="Qwen3ForCausalLM",
        family="qwen3",
        num_layers=work.layers,
        hidden_size=work.hidden,
        ffn_hidden_size=work.ffn,
        num_attention_heads=work.heads,
        num_query_groups=work.groups,
        head_dim=work.head_dim,
        vocab_size=work.vocab,
        max_position_embeddings=work.length,
        rotary=Rotary(base=1e6),
        norm_epsilon=1e-6,
        qk_layernorm=True,
        qkv_bias=False,
        tied_embeddings=True,
    )


class PenstockLoop:
    """Penstock's trainer on one rank, without Ray."""

    def __init__(self, work: Work, batch: Any, chunk: int | None) -> None:
        from penstock.engines.megatron.engine import MegatronEngine
        from penstock.engines.training import EngineBuild
        from penstock.stages.train.config import TrainConfig

        chosen: dict[str, Any] = {} if chunk is None else {"log_probs_chunk_size": chunk}
        self.batch, self.capacity = batch, work.length * work.num_sequences
        self.config = TrainConfig(params_dtype=work.dtype, max_tokens_per_gpu=self.capacity, **OPTIMIZER, **chosen)
        self.engine = MegatronEngine(EngineBuild(model_shape(work), work.dtype, self.config.optimizer_options))

    def step(self) -> tuple[float, Any]:
        """Train one GRPO round with one optimizer step, and return the seconds of the update and the metrics."""
        metrics = self.train(self.config)
        return len(self.batch.token_ids) / metrics["perf/actor_train_tok_per_s"], metrics

    def sft_step(self) -> tuple[float, float]:
        """Train one optimizer step with the SFT loss, as the plain loop does, and return loss and gradient norm."""
        metrics = self.train(self.config.model_copy(update={"loss_type": "sft_loss", "calculate_per_token_loss": True}))
        return metrics["train/loss"], metrics["train/grad_norm"]

    def train(self, config: Any) -> dict[str, float]:
        from penstock.stages.train.step import Models, train_rollout

        return train_rollout(Models(policy=self.engine), self.batch, config, temperature=1.0).metrics


# ---- the plain loop --------------------------------------------------------------------------------------------------


class PlainLoop:
    """A training loop of Megatron-core's own functions. It starts from a copy of Penstock's current weights."""

    def __init__(self, work: Work, batch: Any, penstock: PenstockLoop) -> None:
        from penstock.engines.megatron.model.layers import transformer_block_spec
        from penstock.engines.megatron.model.transformer_config import transformer_config

        # isort: split
        import torch
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        shape = model_shape(work)
        config = transformer_config(shape, dtype=work.dtype)
        # No position embedding, since Penstock's attention applies RoPE.
        embedding = {"position_embedding_type": "none", "share_embeddings_and_output_weights": True}
        model = GPTModel(config, transformer_block_spec(shape, config, None), work.vocab, work.length, **embedding)
        model = model.to(penstock.engine.device)
        model.load_state_dict(penstock.engine.chunks[0].state_dict())
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, buffers, model)
        bf16 = work.dtype == "bf16"
        settings = OptimizerConfig(
            bf16=bf16, params_dtype=config.params_dtype, use_distributed_optimizer=True, **OPTIMIZER
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        for inner in self.optimizer.chained_optimizers:
            for group in inner.optimizer.param_groups:
                group["fused"] = True
        config.grad_scale_func, config.finalize_model_grads_func = self.optimizer.scale_loss, finalize_model_grads
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            **{"init_lr": 0.0, "max_lr": OPTIMIZER["lr"], "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 1},
            **{"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 0},
            **{"lr_decay_style": "constant", "wd_incr_style": "constant"},
        )
        self.microbatches = [
            make_microbatch(work, tokens, shape, penstock.engine)
            for tokens in np.split(batch.token_ids, len(batch.token_ids) // penstock.capacity)
        ]
        self.synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def step(self) -> tuple[float, tuple[float, float]]:
        """Run one optimizer step, and return its seconds, and (mean loss per token, gradient norm)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(self.microbatches),
            model=[self.model],
            num_microbatches=len(self.microbatches),
            seq_length=self.microbatches[0][0].shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = self.optimizer.step()
        assert updated
        self.schedule.step(1)
        loss = float(sum(total for total, _ in sums)) / float(sum(count for _, count in sums))
        self.synchronize()
        return time.perf_counter() - start, (loss, float(norm))


def make_microbatch(work: Work, tokens: np.ndarray, shape: Any, engine: Any) -> tuple[Any, ...]:
    """Return a micro-batch on the device: tokens, positions, labels and loss mask, [1, t] each, and the packed stream
    that Penstock's attention needs."""
    import torch

    from penstock.engines.megatron.model.norm_and_rope import rope_cos_sin, rope_dim
    from penstock.engines.megatron.packing import pack_stream
    from penstock.stages.train.batching import PackedMicrobatch

    ids = torch.from_numpy(tokens)
    starts = torch.arange(0, len(ids) + 1, work.length, dtype=torch.int32)
    positions = torch.arange(len(ids)) % work.length
    parts: dict[str, Any] = dict.fromkeys(PackedMicrobatch.__dataclass_fields__)
    parts |= {"token_ids": ids, "position_ids": positions, "cu_seqlens": starts, "max_seqlen": work.length}
    stream = pack_stream(PackedMicrobatch(**parts), engine.device, kernel=engine.attention_kernel)
    stream.cos_sin = rope_cos_sin(stream.positions, rope_dim(shape), shape.rotary)
    labels, counted = ids.roll(-1), (positions != work.length - 1).float()  # the last token has no label
    return (*(x[None].to(engine.device) for x in (ids, positions, labels, counted)), stream)


def forward_step(microbatches: Iterator[tuple[Any, ...]], model: Any) -> tuple[Any, Any]:
    """Run the model on the next micro-batch, and return its losses [1, t] and the function that reduces them."""
    ids, positions, labels, counted, stream = next(microbatches)
    return model(ids, positions, None, labels=labels, packed_seq_params=stream), partial(sum_losses, counted)


def sum_losses(counted: Any, losses: Any) -> tuple[Any, ...]:
    """Return the sum of the losses of counted tokens, the number of these tokens, and both again for the report.
    Megatron divides the gradients of a step by the number of the step's tokens (`calculate_per_token_loss`)."""
    loss, number = (losses * counted).sum(), counted.sum().int()
    return loss, number, (loss.detach(), number)


if __name__ == "__main__":
    main()
