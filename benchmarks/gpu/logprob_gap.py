"""Find where the difference of the log-probs of engine and trainer comes from: on the same sampled tokens, compare the
log-probs of the engine, of the trainer and of transformers, with an LM head in bf16 and in fp32.

    python benchmarks/gpu/logprob_gap.py DIRECTORY --model MODEL --data DATA [-- OPTIONS]

MODEL and DATA are those of examples/smollm2 (see real_model.py). The engine generates one round with its head in bf16,
and one with `--fp32-lm-head`, each of usual responses and of 256 forced tokens. OPTIONS are further
options of `penstock train`. All use the same weights, rounded to bf16. The reference is transformers computing in fp32
with these; the difference of transformers in bf16 from it is the floor of every implementation in bf16. A set's
figures are means and quantiles of absolute differences over its tokens, in nats.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engines.families import read_shape
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime import environment
from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_table
from penstock.storage.store import Store

sys.path.insert(0, str(Path(__file__).parent.parent))

from learning import read_commit
from report import make_parser, parse_options, write_report

LONG = ["--rollout-max-response-len", "256", "--rollout-sampling", "ignore_eos=true"]
HEAD = ["--fp32-lm-head"]
SETS = {"bf16 head": [], "fp32 head": HEAD, "bf16 head, 256 tokens": LONG, "fp32 head, 256 tokens": [*LONG, *HEAD]}
BATCH = 16  # sequences of a forward pass of transformers


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("directory", type=Path, help="directory for stores and logs")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="directory that examples/smollm2/data.py wrote")
    options = parse_options(parser)
    options.directory.mkdir(parents=True, exist_ok=True)
    environment.set_default_variables()
    penstock("convert", options, ["--hf-checkpoint", options.model, "--save", options.directory / "converted"]).wait()
    for name in SETS:
        if generate(name, options).wait():
            raise SystemExit(f"the engine did not generate: see the logs in {options.directory}")
    figures = {"mean absolute differences": compare_all(options)}
    options.model = options.data = None  # do not report paths of this machine
    write_report(options, figures)
    return 0


def slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def penstock(command: str, options: Any, words: list[Any]) -> subprocess.Popen[bytes]:
    """Start a command with its output in a log."""
    with (options.directory / f"{command}-{len(list(options.directory.glob('*.log')))}.log").open("wb") as log:
        line = [sys.executable, "-m", "penstock", command, *map(str, words)]
        return subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)


def train_words(name: str, options: Any) -> list[Any]:
    """Return the options of the round of a set."""
    files = ["--hf-checkpoint", options.model, "--prompt-data", options.data / "train.jsonl"]
    where = ["--config", "examples/smollm2/run.toml", "--run", slug(name), "--store", options.directory / slug(name)]
    return [*where, *files, "--num-rollout", "1", *SETS[name], *options.train_options]


def generate(name: str, options: Any) -> subprocess.Popen[bytes]:
    """Start the generation for an entry of SETS, without a trainer."""
    return penstock("train", options, [*train_words(name, options), "--debug-rollout-only"])


def compare_all(options: Any) -> dict[str, Any]:
    """Return the log-prob differences of each entry of SETS."""
    from penstock.engines.megatron.engine import MegatronEngine
    from penstock.engines.megatron.parallel import init_parallel, shutdown_parallel
    from penstock.engines.training import EngineBuild
    from penstock.stages.train.batching import Batch

    config = parse_config([str(word) for word in train_words(next(iter(SETS)), options)]).train
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        init_parallel(0, 1, f"file://{scratch}/rendezvous")
        build = EngineBuild(read_shape(options.model), config.params_dtype, config.optimizer_options, seed=1)
        engine = MegatronEngine(build)
        engine.load_weights(options.directory / "converted" / "release")
        result = {}
        for name in SETS:
            store = Store(str(options.directory / slug(name)))
            table = read_table(store, read_commit(store, RunKeys(slug(name)).rollout_prefix(0)))
            batch = Batch.from_table(table, needs_rewards=False)
            logprobs = {"engine": torch.from_numpy(batch.rollout_logprobs[batch.trained_positions]).double()}
            logprobs |= trainer_logprobs(engine, batch, config)
            for dtype in (torch.bfloat16, torch.float32):
                logprobs |= transformers_logprobs(options.model, batch, dtype)
            result[name] = {"tokens": len(batch.trained_positions), **differences(logprobs)}
            print(name, result[name], file=sys.stderr, flush=True)
        shutdown_parallel()
    return result


@torch.no_grad()
def trainer_logprobs(engine: Any, batch: Any, config: Any) -> dict[str, Tensor]:
    """Return the trainer's log-probs [N], with its head and with the same head in fp32."""
    from penstock.stages.train.microbatches import plan_steps
    from penstock.stages.train.step import forward_all_tokens, policy_logprobs

    steps = plan_steps(engine, batch, config)
    weight = engine.chunks[0].shared_embedding_or_output_weight().float()

    def with_head(choose: Callable[[Any], Any]) -> Tensor:
        def forward(hidden: Tensor, head: Any, packed: Any) -> Tensor:
            return policy_logprobs(hidden, choose(head), packed, engine, config, 1.0)[0]

        return forward_all_tokens(engine, steps, len(batch.trained_positions), forward)

    return {
        "trainer": with_head(lambda head: head),
        "trainer, fp32 head": with_head(lambda _: lambda hidden: hidden.float() @ weight.T),
    }


@torch.no_grad()
def transformers_logprobs(path: Path, batch: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the log-probs [N] of transformers with the weights rounded to bf16, computed in `dtype`; in bf16 also with
    the head in fp32."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).to(dtype).eval()
    head = model.lm_head.weight
    heads = {"": head} if dtype is torch.float32 else {"": head, ", fp32 head": head.float()}
    results: dict[str, list[Tensor]] = {name: [] for name in heads}
    for first in range(0, len(batch.offsets) - 1, BATCH):
        rows = range(first, min(first + BATCH, len(batch.offsets) - 1))
        sequences = [torch.from_numpy(batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]]) for i in rows]
        # padding on the right, which attention ignores
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device)
        hidden = model.model(padded, use_cache=False).last_hidden_state[:, :-1]
        for name, weight in heads.items():
            logits = (hidden.to(weight.dtype) @ weight.T).float()
            values = logits.log_softmax(-1).gather(-1, padded[:, 1:, None])[..., 0]
            for k, i in enumerate(rows):
                trained = torch.from_numpy(batch.loss_mask[batch.offsets[i] + 1 : batch.offsets[i + 1]])
                results[name].append(values[k, : len(trained)].cpu()[trained].double())
    label = "transformers fp32" if dtype is torch.float32 else "transformers bf16"
    return {f"{label}{name}": torch.cat(values) for name, values in results.items()}


def differences(logprobs: dict[str, Tensor]) -> dict[str, Any]:
    """Return the differences from the reference, and those of the engine from all others."""
    reference, engine = logprobs["transformers fp32"], logprobs["engine"]
    others = [name for name in logprobs if name != "engine"]
    return {
        "from transformers fp32": {
            name: describe(values - reference) for name, values in logprobs.items() if values is not reference
        },
        "from the engine (the gap)": {name: describe(logprobs[name] - engine) for name in others},
    }


def describe(difference: Tensor) -> dict[str, float]:
    values = difference.abs()
    quantiles = {f"quantile {q}": values.quantile(q) for q in (0.5, 0.99)}
    numbers = {"mean": values.mean(), **quantiles, "max": values.max()}
    return {name: round(float(value), 6) for name, value in numbers.items()}


if __name__ == "__main__":
    sys.exit(main())
