"""The parts of scaling.py: models, GPUs, samples, and options with which they fit GPUs of 80 GB."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from long_tail import PERCENTILE_99

LONG_TAIL = Path(__file__).with_name("long_tail.py")
GROUPS = ("dense", "weak", "moe", "llama", "images", "apart", "tail", "kills")
# Options with which `penstock doctor --plan` says that a model fits GPUs of 80 GB: 1.7b one of them, 4b two, 8b four,
# 30b-a3b eight (or four of 139 GiB), qwen2.5-vl-3b one, and qwen3-vl-4b two. Micro-batches of 2 to 4 whole sequences;
# 1.7b as measured in docs/benchmarks.md.
MEMORY = {
    "1.7b": "--max-tokens-per-gpu 16384 --sglang-mem-fraction-static 0.8",
    "4b": "--max-tokens-per-gpu 4352 --sglang-mem-fraction-static 0.75",
    "8b": "--max-tokens-per-gpu 8704 --sglang-mem-fraction-static 0.75",
    "llama-8b": "--max-tokens-per-gpu 8448 --sglang-mem-fraction-static 0.75",
    "qwen2.5-vl-3b": "--max-tokens-per-gpu 3584 --sglang-mem-fraction-static 0.7",
    "tiny-vl": "--max-tokens-per-gpu 3584 --sglang-mem-fraction-static 0.1",
    "qwen3-vl-4b": "--max-tokens-per-gpu 3584 --sglang-mem-fraction-static 0.7",
    # Without the reference model, whose copies (77 GiB) would leave too little of a host's memory to the optimizer.
    "30b-a3b": "--max-tokens-per-gpu 8448 --sglang-mem-fraction-static 0.75 --optimizer-cpu-offload --no-use-kl-loss "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
DENSE = {"1.7b": 1, "4b": 2, "8b": 4}  # model -> smallest number of GPUs of 80 GB that it fits
COLOCATE = "--colocate --rollout-num-gpus-per-engine 1"
TENSOR_2 = "--tensor-model-parallel-size 2 --sequence-parallel"


@dataclass(frozen=True)
class Part:
    """One run.

    Attributes:
        group: one of GROUPS.
        model: name in `gpu_models`.
        gpus: GPUs of the run.
        length: maximum number of response tokens; all responses have it.
        options: further options of `penstock train`, without those of MEMORY.
        samples: samples of a prompt.
        prompts: prompts of a round.
        warm_up: rounds before the measured ones, in which kernels are compiled.
        measured: number of measured rounds.
        engine_gpus: GPUs of an engine.
        note: distinguishes the part from others of its group.
    """

    group: str
    model: str
    gpus: int
    length: int
    options: str
    samples: int = 8
    prompts: int = 64
    warm_up: int = 1
    measured: int = 2
    engine_gpus: int = 1
    note: str = ""

    @property
    def name(self) -> str:
        """Return the name of the run and of its store."""
        return "-".join(filter(None, (self.group, self.model, str(self.gpus), self.note)))

    @property
    def rounds(self) -> int:
        """Return the number of rounds."""
        return self.warm_up + self.measured


def all_parts(gpus: int) -> Iterator[Part]:
    """Yield the parts of a host with this number of GPUs."""
    numbers = [number for number in (1, 2, 4, 8) if number <= gpus]
    for model, smallest in DENSE.items():
        for number in numbers:
            if number >= smallest:
                layout = TENSOR_2 if model == "8b" else ""
                yield Part("dense", model, number, 2048, f"{COLOCATE} {ranks(number)} {layout}")
    for number in numbers[1:]:
        yield Part("weak", "1.7b", number, 2048, f"{COLOCATE} {ranks(number)}", prompts=64 * number)
    if gpus == 4:  # GPUs of 139 GiB, and 512 GiB of host memory
        options = f"{COLOCATE} {ranks(4)} --expert-model-parallel-size 4"
        yield Part("moe", "30b-a3b", 4, 2048, options, note="ep4", measured=1)
    if gpus >= 8:
        wide = f"--colocate --rollout-num-gpus-per-engine 2 {ranks(8)} --expert-model-parallel-size"
        yield Part("moe", "30b-a3b", 8, 4096, f"{wide} 8", engine_gpus=2, note="ep8")
        yield Part("moe", "30b-a3b", 8, 4096, f"{wide} 4 {TENSOR_2}", engine_gpus=2, note="tp2ep4")
        yield Part("llama", "llama-8b", 8, 4096, f"{COLOCATE} {ranks(8)} {TENSOR_2}")
    yield from parts_with_images(gpus)
    yield from parts_apart(gpus)
    yield from parts_with_long_tail(gpus)
    yield Part(
        "kills",
        "1.7b",
        numbers[-1],
        512,
        f"{COLOCATE} {ranks(numbers[-1])} --deterministic-mode",
        samples=4,
        measured=3,
    )


def parts_with_images(gpus: int) -> Iterator[Part]:
    """Yield the parts of vision-language models, with one picture of 448 x 448 pixels in each prompt: data parallel and
    tensor parallel on two GPUs; and a part with kills."""
    model = "qwen2.5-vl-3b"
    yield Part("images", model, 1, 512, f"{COLOCATE} {ranks(1)}", prompts=32)
    if gpus >= 2:
        wide = f"--colocate --rollout-num-gpus-per-engine 2 {ranks(2)} {TENSOR_2}"
        yield Part("images", model, 2, 512, f"{COLOCATE} {ranks(2)}", prompts=32, note="dp2")
        yield Part("images", model, 2, 512, wide, prompts=32, engine_gpus=2, note="tp2")
        yield Part("images", "qwen3-vl-4b", 2, 512, f"{COLOCATE} {ranks(2)}", prompts=32)
    number = min(gpus, 2)
    options = f"{COLOCATE} {ranks(number)} --deterministic-mode"
    model = model if gpus >= 2 else "tiny-vl"  # the checkpoint of the large model needs 53 GB of disk
    yield Part("kills", model, number, 128, options, samples=4, prompts=16, measured=3)


def parts_apart(gpus: int) -> Iterator[Part]:
    """Yield the parts with half, and with a quarter, of the GPUs for the engines."""
    for engines in sorted({gpus // 2, gpus // 4} - {0}, reverse=True):
        trainer = gpus - engines
        model = "4b" if trainer >= DENSE["4b"] else "1.7b"
        for staleness in (1, 2):
            options = f"--rollout-num-gpus {engines} --update-weight-transport nccl {ranks(trainer)}"
            options += f" --async-mode streaming --max-staleness {staleness}"
            yield Part("apart", model, gpus, 2048, options, note=f"{trainer}and{engines}-stale{staleness}")


def parts_with_long_tail(gpus: int) -> Iterator[Part]:
    """Yield the parts whose lengths have a long tail: synchronous, with trainer and engines on the same GPUs; and with
    trainer and engines apart and one round of staleness, by rounds generated ahead and by streaming."""
    generate = f"--custom-generate-function-path {LONG_TAIL}"
    yield Part("tail", "1.7b", gpus, PERCENTILE_99, f"{COLOCATE} {ranks(gpus)} {generate}", note="synchronous")
    for engines in sorted({gpus // 2, gpus // 4} - {0}, reverse=True):
        apart = f"--rollout-num-gpus {engines} --update-weight-transport nccl {ranks(gpus - engines)} {generate}"
        # Streaming needs SGLang 0.5.21.
        for mode, words in {
            "ahead1": "--async-buffer-size 1",
            "stale1": "--async-mode streaming --max-staleness 1",
        }.items():
            note = f"{gpus - engines}and{engines}-{mode}"
            yield Part("tail", "1.7b", gpus, PERCENTILE_99, f"{apart} {words}", note=note, warm_up=2, measured=4)


def ranks(number: int) -> str:
    """Return the option of a trainer with this number of ranks."""
    return f"--actor-num-gpus-per-node {number}"
