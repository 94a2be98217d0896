"""Load tiny models one after another into the real SGLang on CPU; started by `test_sglang_families.py`.

usage: sglang_families.py DIRECTORY    and on stdin, line by line, the models: NAME CHECKPOINT OTHER_CHECKPOINT

Starting one server per model would take far longer: here SGLang is imported once, with the shims of
`engines/sglang/launch.py`, and every model gets a forked child, because SGLang's settings are global to a process. The
child uses SGLang's ModelRunner like its scheduler: load a checkpoint, prefill with log-probs of the prompts, decode
with log-probs of the samples, load the weights of another checkpoint in buckets by their Hugging Face names, and
generate again. The results, or the traceback, are written to DIRECTORY/NAME.json.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import traceback
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("launch", ROOT / "engines/sglang/launch.py")
assert spec and spec.loader
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)  # ends this process with its parent, and opens the door to SGLang

import sglang.srt.models.registry  # noqa: E402 F401  (else every child would import the models)
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.benchmark import one_batch  # noqa: E402
from sglang.srt.configs.device_config import DeviceConfig  # noqa: E402
from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch  # noqa: E402
from sglang.srt.model_loader.loader import get_model_loader  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, get_schedule, publish  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402
from sglang.srt.server_args import PortArgs, prepare_server_args  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from penstock.engines.sglang.weight_update import FlatBucket, split_into_buckets  # noqa: E402

NUM_NEW_TOKENS = 6
BUCKET_BYTES = 4096  # many buckets, also several for one layer
CHILD_SECONDS = 120  # a stuck child ends


def prompts(vocab_size: int) -> list[list[int]]:
    """Return prompts of two lengths, one long enough to test scaled RoPE."""
    return [[(7 * i * i + 3 * i + 2) % vocab_size for i in range(length)] for length in (40, 7)]


def load(checkpoint: str) -> Any:
    """Return SGLang's ModelRunner of a checkpoint, created as in its own one-batch benchmark."""
    flags = [*launch.CPU_FLAGS, "--max-total-tokens", "1024", "--random-seed", "0", "--log-level", "error"]
    args = prepare_server_args([*flags, "--model-path", checkpoint])
    args.resolve_once()
    one_batch._set_envs_and_config(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch.initialize_moe_config()
    one_batch.initialize_fp8_gemm_config()
    one_batch.initialize_fp4_gemm_config()
    return one_batch.load_model(args, PortArgs.init_new(args), 0, 0)[0].torch_runner


@torch.no_grad()
def generate(runner: Any) -> dict[str, Any]:
    """Prefill and decode all prompts as one batch, with the log-probs that SGLang returns with them."""
    requests = [request(number, tokens) for number, tokens in enumerate(prompts(runner.model_config.vocab_size))]
    pools = {
        "req_to_token_pool": runner.req_to_token_pool,
        "token_to_kv_pool_allocator": runner.token_to_kv_pool_allocator,
    }
    batch = ScheduleBatch.init_new(
        reqs=requests,
        **pools,
        tree_cache=one_batch.TreeCacheNamespace(
            page_size=get_schedule().page_size,
            device=runner.device,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        ),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu
    tokens, output = forward(runner, batch)
    lengths = [len(request.origin_input_ids) for request in requests]
    of_prompts = [
        part[:-1].tolist() for part in output.input_token_logprobs.split(lengths)
    ]  # the last has no next token
    generated, logprobs = [tokens], [output.next_token_logprobs]
    for _ in range(NUM_NEW_TOKENS - 1):
        batch.input_ids = tokens.long()
        batch.prepare_for_decode()
        tokens, output = forward(runner, batch)
        generated.append(tokens)
        logprobs.append(output.next_token_logprobs)
    for pool in pools.values():
        pool.clear()
    return {
        "prompt_logprobs": of_prompts,
        "generated": torch.stack(generated, 1).tolist(),
        "generated_logprobs": torch.stack(logprobs, 1).tolist(),
    }


def request(number: int, tokens: list[int]) -> Req:
    """Return a request for log-probs of a prompt, as SGLang's scheduler would create it."""
    req = Req(
        rid=str(number),
        origin_input_text="",
        origin_input_ids=array("q", tokens),
        sampling_params=SamplingParams(temperature=1.0, max_new_tokens=NUM_NEW_TOKENS),
        return_logprob=True,
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.set_extend_range(0, len(tokens))
    return req


def forward(runner: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Run the model once; return the sampled tokens, [B], and SGLang's output with the log-probs."""
    forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
    output = runner.forward(forward_batch).logits_output
    return runner.sample(output, forward_batch), output


def update(runner: Any, checkpoint: Path) -> None:
    """Load new weights as SGLang's scheduler does after an update, but without passing them between processes."""
    updater = runner.weight_updater
    updater.begin_weight_update()
    for bucket, _ in split_into_buckets(load_file(checkpoint / "model.safetensors").items(), BUCKET_BYTES):
        flat = FlatBucket(bucket)
        content = {"flattened_tensor": flat.flat, "metadata": flat.metadata}
        done, message = updater.update_weights_from_tensor(content, load_format="flattened_bucket")
        assert done, message
    updater.end_weight_update(run_post_load=False)


@torch.no_grad()  # as in the scheduler
def checksums_around_reset(runner: Any, checkpoint: Path) -> list[dict[str, str]]:
    """Return the checksums of all tensors as they are, with random values, and after loading the weights again."""
    options = {"allow_quant_error": False, "skip_tensor_list": None, "role": "target"}
    results = [runner.check_weights(action="checksum", **options)]
    runner.check_weights(action="reset_tensors", **options)
    results.append(runner.check_weights(action="checksum", **options))
    update(runner, checkpoint)
    results.append(runner.check_weights(action="checksum", **options))
    return [result["checksums"] for result in results]


@torch.no_grad()
def draft_around_update(runner: Any, checkpoint: str) -> dict[str, Any]:
    """Load the draft model (MTP layer) of a checkpoint, and do what an update over disk to this checkpoint does: load
    the tensors of the model into both. Return which draft tensors changed, and whether the MTP layer was loaded."""
    config = ModelConfig.from_server_args(
        runner.server_args, model_path=checkpoint, model_revision=None, is_draft_model=True
    )
    draft = get_model_loader(LoadConfig(), config).load_model(model_config=config, device_config=DeviceConfig("cpu", 0))
    draft.set_embed_and_head(*runner.model.get_embed_and_head())
    before = {name: tensor.clone() for name, tensor in draft.named_parameters()}
    weights, mtp = (
        load_file(Path(checkpoint) / "model.safetensors"),
        f"model.layers.{config.hf_config.num_hidden_layers}.",
    )
    draft.load_weights(iter([(name, 2 * tensor) for name, tensor in weights.items() if not name.startswith(mtp)]))
    update(runner, Path(checkpoint))
    after = dict(draft.named_parameters())
    return {
        "loaded": torch.equal(after["model.eh_proj.weight"], weights[mtp + "eh_proj.weight"]),
        "changed": sorted(name for name, tensor in after.items() if not torch.equal(tensor, before[name])),
        "shared": torch.equal(after["lm_head.weight"][: len(weights["lm_head.weight"])], weights["lm_head.weight"]),
    }


def answer(checkpoint: str, other_checkpoint: str) -> dict[str, Any]:
    """Generate with one model before and after a weight update."""
    runner = load(checkpoint)
    model, predicts = type(runner.model), getattr(runner.model_config.hf_config, "num_nextn_predict_layers", 0)
    passes = [generate(runner)]
    update(runner, Path(other_checkpoint))
    passes.append(generate(runner))
    return {
        "model": f"{model.__module__}.{model.__name__}",
        "prompts": prompts(runner.model_config.vocab_size),
        "passes": passes,
        "checksums": checksums_around_reset(runner, Path(other_checkpoint)),
        "draft": draft_around_update(runner, checkpoint) if predicts else None,
    }


def in_child(file: Path, checkpoint: str, other_checkpoint: str) -> None:
    """Write the answer to a file; does not return."""
    launch.die_with_parent()
    signal.alarm(CHILD_SECONDS)
    try:
        content = answer(checkpoint, other_checkpoint)
    except BaseException:
        content = {"error": traceback.format_exc()}
    file.write_text(json.dumps(content))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    # SGLang collects garbage while it loads: over all that was imported it takes 0.35 s, longer than the rest
    gc.freeze()
    for line in sys.stdin:
        name, *checkpoints = line.split()
        file = Path(sys.argv[1]) / f"{name}.json"
        child = os.fork()
        if child == 0:
            in_child(file, *checkpoints)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            file.write_text(json.dumps({"error": f"its process ended with {code}"}))
