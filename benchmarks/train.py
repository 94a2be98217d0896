"""Our train step against a bare Megatron-core loop: the same packs, model, optimizer and process, in turns.

    python benchmarks/train.py                               # a small model on this machine's CPU
    python benchmarks/train.py --device cuda       # Qwen3-0.6B's shape in bf16, packs of 8 sequences of 2,048 tokens

Ours is `train_rollout` with GRPO, log-probs, entropy and metrics included, at the tokens per second that it reports
itself. The bare loop is what one would write with Megatron-core alone where TransformerEngine is absent: its GPT model
with our attention (its own refuses packs), its cross-entropy over whole logits, its gradient buffers, optimizer and
schedule; its packs are ready on the device before the clock starts. Before anything is timed both make one step of
supervised fine-tuning from the same weights: loss and norm of the gradient must agree.
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
    """A model, and the packs of one optimizer step."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    length: int  # tokens of a sequence
    num_sequences: int  # of a pack
    dtype: Literal["fp32", "bf16"]


MODELS = {
    "tiny": Work(2, 128, 4, 2, 32, 384, 64, length=12, num_sequences=256, dtype="fp32"),  # the demo's
    "small": Work(
        4, 256, 4, 2, 64, 768, 4096, length=256, num_sequences=8, dtype="fp32"
    ),  # 0.6b's share of the head: a quarter
    "0.6b": Work(28, 1024, 16, 8, 128, 3072, 151936, length=2048, num_sequences=8, dtype="bf16"),
    "1.7b": Work(28, 2048, 16, 8, 128, 6144, 151936, length=2048, num_sequences=4, dtype="bf16"),
}
Turn = Callable[[], tuple[float, Any]]  # one optimizer step: its seconds, and what came of it
OPTIMIZER: dict[str, Any] = {"lr": 1e-6, "weight_decay": 0.1, "adam_beta2": 0.98, "clip_grad": 1.0}
AGREE = {"fp32": 1e-4, "bf16": 2e-2}  # relative; the two round logits and their gradients at different places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=MODELS, help="default: small on a CPU, 0.6b on a GPU")
    parser.add_argument("--packs", type=int, default=2, help="micro-batches of an optimizer step")
    parser.add_argument("--turns", type=int, default=10, help="timed steps of each")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="steps of each before them; the first ones compile kernels"
    )
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--chunk", type=int, help="--log-probs-chunk-size, if not the default")
    parser.add_argument("--profile", action="store_true", help="print where the time of one more step of each goes")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # two users of one cache
    work = MODELS[options.model or ("small" if options.device == "cpu" else "0.6b")]

    from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel

    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        init_parallel(0, 1, f"file://{Path(scratch) / 'world'}", threads=options.threads)
        try:
            compare(work, options)
        finally:
            shutdown_parallel()


def compare(work: Work, options: argparse.Namespace) -> None:
    """Check that both do the same, then time them in turns."""
    import torch

    assert torch.cuda.is_available() == (options.device == "cuda"), "no CUDA device is visible"
    batch = rollout(work, options.packs)
    ours = Ours(work, batch, options.chunk)
    bare = Bare(work, batch, ours)
    turns: dict[str, Turn] = {"ours": ours.turn, "bare": bare.turn}
    (our_loss, our_norm), (bare_loss, bare_norm) = ours.fine_tune(), bare.turn()[1]
    print(f"{torch.__version__}, {ours.engine.fingerprint()['device']}, {work}")
    print(f"one step of fine-tuning: loss {our_loss:.6f} and {bare_loss:.6f}, norm {our_norm:.6f} and {bare_norm:.6f}")
    assert np.allclose((our_loss, our_norm), (bare_loss, bare_norm), rtol=AGREE[work.dtype]), (
        "the two do not do the same work"
    )

    seconds: dict[str, list[float]] = {"ours": [], "bare": []}
    whole: list[float] = []  # calls of train_rollout, planning and packing included
    peaks = dict.fromkeys(turns, 0.0)
    for turn in range(options.warm_up + options.turns):
        for name in ("ours", "bare") if turn % 2 else ("bare", "ours"):
            taken, wall, peak = measured(turns[name])
            if turn >= options.warm_up:
                seconds[name].append(taken)
                peaks[name] = max(peaks[name], peak)
                whole += [wall] if name == "ours" else []
    report(len(batch.token_ids), seconds, whole, peaks)
    if options.profile:
        for name, turn_of in turns.items():
            profile(name, turn_of)


def measured(turn: Turn) -> tuple[float, float, float]:
    """Seconds of the step by its own account, seconds of the whole call, and GiB at the GPU's peak above what lay
    there before."""
    import torch

    before = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    taken = turn()[0]
    wall = time.perf_counter() - start
    return taken, wall, (torch.cuda.max_memory_allocated() - before) / 2**30 if torch.cuda.is_available() else 0.0


def report(tokens: int, seconds: dict[str, list[float]], whole: list[float], peaks: dict[str, float]) -> None:
    speeds = {name: [tokens / taken for taken in values] for name, values in seconds.items()}
    speeds["ours, planning and packing included"] = [tokens / taken for taken in whole]
    for name, values in speeds.items():
        memory = f", {peaks[name]:.1f} GiB above weights and optimizer" if peaks.get(name) else ""
        print(
            f"{name:<36}{statistics.median(values):12,.0f} tokens/s   "
            f"({min(values):,.0f} to {max(values):,.0f}){memory}"
        )
    ratio, whole_ratio = (
        statistics.median(bare / own for bare, own in zip(seconds["bare"], values, strict=True))
        for values in (seconds["ours"], whole)
    )
    print(f"{'ratio, median of the turns':<36}{ratio:12.3f}   (whole call: {whole_ratio:.3f})")


def profile(name: str, turn: Turn) -> None:
    import torch
    from torch.profiler import ProfilerActivity

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    ) as profiler:
        turn()
    print(
        f"\n{name}\n"
        + profiler.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=30, max_name_column_width=70)
    )


# ---- the work --------------------------------------------------------------------------------------------------------


def rollout(work: Work, num_packs: int) -> Any:
    """Random samples in groups of eight, every token trained but the first of each, which nothing predicts."""
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
    return Batch.from_table(to_table(samples), graded=True)


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


class Ours:
    """The trainer of one rank, without Ray."""

    def __init__(self, work: Work, batch: Any, chunk: int | None) -> None:
        from penstock.engines.megatron.engine import MegatronEngine
        from penstock.stages.train.config import TrainConfig

        chosen: dict[str, Any] = {} if chunk is None else {"log_probs_chunk_size": chunk}
        self.batch, self.capacity = batch, work.length * work.num_sequences
        self.config = TrainConfig(params_dtype=work.dtype, max_tokens_per_gpu=self.capacity, **OPTIMIZER, **chosen)
        self.engine = MegatronEngine(model_shape(work), dtype=work.dtype, optimizer=self.config.optimizer_options)

    def turn(self) -> tuple[float, Any]:
        """One round of GRPO with one optimizer step. Seconds of its update, and all metrics."""
        metrics = self.train(self.config)
        return len(self.batch.token_ids) / metrics["perf/actor_train_tok_per_s"], metrics

    def fine_tune(self) -> tuple[float, float]:
        """One step of the loss that the bare loop has. Loss and norm of the gradient."""
        metrics = self.train(self.config.model_copy(update={"loss_type": "sft_loss", "calculate_per_token_loss": True}))
        return metrics["train/loss"], metrics["train/grad_norm"]

    def train(self, config: Any) -> dict[str, float]:
        from penstock.stages.train.step import Models, train_rollout

        return train_rollout(Models(policy=self.engine), self.batch, config, temperature=1.0).metrics


# ---- the bare loop ---------------------------------------------------------------------------------------------------


class Bare:
    """Megatron-core by its own functions, with the weights that ours has now."""

    def __init__(self, work: Work, batch: Any, ours: Ours) -> None:
        from penstock.engines.megatron.model.layers import block_spec
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
        embedding = {
            "position_embedding_type": "none",
            "share_embeddings_and_output_weights": True,
        }  # our attention turns
        model = GPTModel(config, block_spec(shape, config, None), work.vocab, work.length, **embedding).to(
            ours.engine.device
        )
        model.load_state_dict(ours.engine.chunks[0].state_dict())
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
            **{
                "lr_decay_style": "constant",
                "start_wd": 0.1,
                "end_wd": 0.1,
                "wd_incr_steps": 0,
                "wd_incr_style": "constant",
            },
        )
        self.packs = [
            pack(work, tokens, shape, ours.engine)
            for tokens in np.split(batch.token_ids, len(batch.token_ids) // ours.capacity)
        ]
        self.synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def turn(self) -> tuple[float, tuple[float, float]]:
        """One optimizer step. Its seconds; mean loss of a token and norm of the gradient."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(self.packs),
            model=[self.model],
            num_microbatches=len(self.packs),
            seq_length=self.packs[0][0].shape[1],
            micro_batch_size=1,
            forward_only=False,
        )
        updated, norm, _ = self.optimizer.step()
        assert updated
        self.schedule.step(1)
        loss = float(sum(total for total, _ in sums)) / float(sum(count for _, count in sums))
        self.synchronize()
        return time.perf_counter() - start, (loss, float(norm))


def pack(work: Work, tokens: np.ndarray, shape: Any, engine: Any) -> tuple[Any, ...]:
    """A micro-batch on the device: tokens, positions, labels and mask of the loss, [1, t] each, and what our
    attention needs."""
    import torch

    from penstock.engines.megatron.model.rotary import rope_cos_sin, rope_dim
    from penstock.engines.megatron.packing import pack_stream
    from penstock.stages.train.batching import PackedMicrobatch

    ids = torch.from_numpy(tokens)
    starts = torch.arange(0, len(ids) + 1, work.length, dtype=torch.int32)
    positions = torch.arange(len(ids)) % work.length
    parts: dict[str, Any] = dict.fromkeys(PackedMicrobatch.__dataclass_fields__)
    parts |= {"token_ids": ids, "position_ids": positions, "cu_seqlens": starts, "max_seqlen": work.length}
    stream = pack_stream(PackedMicrobatch(**parts), engine.device, bucketed=engine.device.type == "cpu")
    stream.cos_sin = rope_cos_sin(stream.positions, rope_dim(shape), shape.rotary)
    labels, counted = (
        ids.roll(-1),
        (positions != work.length - 1).float(),
    )  # the last of a sequence has nothing to predict
    return (*(x[None].to(engine.device) for x in (ids, positions, labels, counted)), stream)


def forward_step(packs: Iterator[tuple[Any, ...]], model: Any) -> tuple[Any, Any]:
    ids, positions, labels, counted, stream = next(packs)
    return model(ids, positions, None, labels=labels, packed_seq_params=stream), partial(mean_loss, counted)


def mean_loss(counted: Any, losses: Any) -> tuple[Any, ...]:
    """Sum and number; Megatron divides the gradients of a step by the step's number (`calculate_per_token_loss`)."""
    loss, number = (losses * counted).sum(), counted.sum().int()
    return loss, number, (loss.detach(), number)


if __name__ == "__main__":
    main()
