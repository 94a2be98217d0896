"""Print what the installed SGLang computes for GPUs of several sizes, as JSON; started by `test_sglang_launch.py`.

Each row: MiB of a GPU, GPUs of an engine, server flags, largest decode batch with a CUDA graph, and the MiB that SGLang
reserves for graphs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

spec = importlib.util.spec_from_file_location("launch", Path(__file__).parents[2] / "engines/sglang/launch.py")
assert spec and spec.loader
spec.loader.exec_module(importlib.util.module_from_spec(spec))  # makes SGLang importable without CUDA

from sglang.srt.arg_groups import memory_hook  # noqa: E402
from sglang.srt.arg_groups.cuda_graph_hook import parse_cuda_graph_config  # noqa: E402
from sglang.srt.arg_groups.overrides import resolving_view  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

SIZES = (15_360, 20_479, 20_480, 24_564, 35_839, 35_840, 46_068, 61_440, 81_559, 183_359)
rows = []
memory_hook.use_mla_backend = lambda args: False  # it would read the model's config
for mib in SIZES:
    memory_hook.get_device_memory_capacity = lambda device, mib=mib: mib
    for gpus in (1, 2, 4, 8):
        for flags in ({}, {"enable_dp_attention": True, "dp_size": gpus}):
            fixed = {"model_path": "", "device": "cuda", "mem_fraction_static": 0.5, "disable_prefill_cuda_graph": True}
            args = ServerArgs(**fixed, tp_size=gpus, **flags)
            parse_cuda_graph_config(args)
            memory_hook.handle_gpu_memory_settings(args)
            limit = resolving_view(args).cuda_graph_config.decode.max_bs
            rows.append((mib, gpus, flags, limit, memory_hook.reserve_for_graph_mb(args)))
print(json.dumps(rows))
