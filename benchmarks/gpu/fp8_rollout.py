"""Compare the generated tokens per second of an engine with fp8 weights and one with bf16 weights, on one GPU.

    python benchmarks/gpu/fp8_rollout.py DIRECTORY --model 30b-a3b --layers 8 --requests 16 64 [-- SGLANG OPTIONS]

Both engines answer the same requests, one after the other, with the same random weights: the fp8 copy is made as weight
updates make it. Each engine also gets two weight updates of the bf16 weights over CUDA IPC, the second of which is
timed. SGLANG OPTIONS are options of `penstock train`, such as --sglang-fp8-gemm-runner-backend triton.

Floor: a decoding step reads all weights of a dense model at least once; `floor` is the seconds that this takes at the
measured bandwidth of a copy on the GPU. A mixture of experts reads only the experts that are used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.engines.backends import connect
from penstock.engines.cluster import Cluster
from penstock.engines.generation import EngineClient, WeightTransport
from penstock.engines.serving.pool import EnginePool
from penstock.engines.serving.server import ServerSpec
from penstock.engines.sglang.weight_sender import write_weights
from penstock.engines.weights.fp8_blocks import QUANTIZATION, fp8_weights, quantize_weights, should_quantize
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_models import PROMPT_TOKENS, QWEN3, make_mixture_of_experts, make_model

MODELS = [*QWEN3, "30b-a3b"]
REPETITIONS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", choices=MODELS, default="4b")
    parser.add_argument("--layers", type=int, default=8, help="depth of 30b-a3b")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[32, 256], help="numbers of responses generated at the same time"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens of a response")
    options, engine_options = parser.parse_known_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU: SGLang cannot serve block-quantized fp8 weights on this CPU")
    environment.set_default_variables()
    options.directory.mkdir(parents=True, exist_ok=True)
    with torch.device("cuda"):  # draw the random weights on the GPU
        if options.model == "30b-a3b":
            plain = options.directory / f"30b-a3b-{options.layers}"
            if not (plain / "config.json").exists():
                make_mixture_of_experts(plain, options.layers)
        else:
            plain = make_model(options.model, options.directory)
    models = {"bf16": plain, "fp8": make_fp8_copy(plain)}
    words = ["--run", "r", "--hf-checkpoint", str(plain), *(word for word in engine_options if word != "--")]
    args = {"mem_fraction_static": 0.6, **parse_config(words).rollout.engine_options}
    report: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "sglang")},
        "model": plain.name,
        "settings": {"requests": options.requests, "prompt": PROMPT_TOKENS, "length": options.length, "sglang": args},
        "copy_gb_per_s": measure_copy(),
        "engines": {},
    }
    cluster = Cluster.start()
    for name, model in models.items():
        report["engines"][name] = measure_engine(cluster, model, plain, args, options)
        weight_bytes = report["engines"][name]["weight_bytes"]
        report["engines"][name]["floor"] = round(weight_bytes / report["copy_gb_per_s"] / 1e9, 5)
        print(json.dumps(report, indent=1), flush=True)
    cluster.stop()
    plain_speeds, fp8_speeds = (report["engines"][name]["tokens_per_second"] for name in models)
    report["speedup"] = {num: round(fp8_speeds[num] / speed, 3) for num, speed in plain_speeds.items()}
    (options.directory / "fp8_rollout.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    return 0


def read_weights(model: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every weight of a Hugging Face directory, on the GPU."""
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cuda") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def make_fp8_copy(plain: Path) -> Path:
    """Write the model with block-quantized projections to a directory beside it, and return that directory."""
    target = plain.with_name(f"{plain.name}-fp8")
    if (target / "config.json").exists():
        return target
    shapes = {name: tuple(tensor.shape) for name, tensor in read_weights(plain)}
    names = {name for name, shape in shapes.items() if should_quantize(name, shape)}
    write_weights(target, quantize_weights(read_weights(plain), names), plain, 4 << 30)
    plain_modules = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    kept = [module for module in plain_modules if f"{module}.weight" not in names]
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {**QUANTIZATION, "modules_to_not_convert": kept}
    (target / "config.json").write_text(json.dumps(config))
    return target


def measure_engine(
    cluster: Cluster, model: Path, plain: Path, args: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the measurements of one engine.

    Args:
        cluster: cluster on which the engine runs.
        model: directory that the engine loads.
        plain: directory of the bf16 weights that are sent to the engine.
        args: flags of the server.
        options: options of this script.
    """
    logs = tempfile.mkdtemp(prefix="penstock-bench-")
    pool = EnginePool(cluster, ServerSpec(model_path=str(model), args=args, log_dir=logs))
    try:
        client = connect(pool.urls)
        seconds = {
            num: [asyncio.run(generate(pool.urls, num, options.length)) for _ in range(1 + REPETITIONS)]
            for num in options.requests
        }
        updates = [update(client, model, plain) for _ in range(2)]
    finally:
        pool.stop()
    medians = {num: statistics.median(values[1:]) for num, values in seconds.items()}
    return {
        "weight_bytes": sum(path.stat().st_size for path in model.glob("*.safetensors")),
        "tokens_per_second": {num: round(num * options.length / median) for num, median in medians.items()},
        "seconds": {num: [round(value, 3) for value in values] for num, values in seconds.items()},
        "seconds_per_decoding_step": {num: round(median / options.length, 5) for num, median in medians.items()},
        "update_seconds": round(updates[-1], 3),
    }


async def generate(urls: list[str], num_requests: int, length: int) -> float:
    """Return the seconds in which the engine generates `length` tokens for each of `num_requests` prompts that are not
    in its prefix cache."""
    generator = torch.Generator().manual_seed(time.monotonic_ns())
    prompts = torch.randint(4, 50, (num_requests, PROMPT_TOKENS), generator=generator).tolist()
    sampling = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
    async with connect(urls) as client:
        start = time.perf_counter()
        await client.generate_each(prompts, [sampling] * num_requests)
        return time.perf_counter() - start


def update(client: EngineClient, model: Path, plain: Path) -> float:
    """Return the seconds of a weight update whose bf16 tensors are on the GPU before it starts."""
    weights = list(read_weights(plain))
    torch.cuda.synchronize()
    start = time.perf_counter()
    client.update_weights(weights, "bench/0", WeightTransport(fp8_weights=fp8_weights(str(model))))
    return time.perf_counter() - start


def measure_copy(num_bytes: int = 1 << 32) -> float:
    """Return the bandwidth of a copy on the GPU: GB that are read or written per second."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        target.copy_(source)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    torch.cuda.synchronize()
    return round(2 * 10 * num_bytes / (time.perf_counter() - start) / 1e9, 1)


if __name__ == "__main__":
    sys.exit(main())
