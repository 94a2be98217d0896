"""The SGLang implementation of `EngineBackend`: client, server, command-line flags, router and preflight checks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.engines.backends import (
    Capability,
    EngineBackend,
    EngineFacts,
    EngineMemory,
    RequestRouter,
    estimate_engine_memory,
    stores_quantized_weights,
)
from penstock.engines.families.entries import read_config
from penstock.engines.generation import EngineUrls
from penstock.engines.network import HIGHEST, is_free, reserve_free_port
from penstock.engines.options import EngineOptions
from penstock.engines.serving.endpoints import engine_url
from penstock.engines.serving.server import EngineServer
from penstock.engines.sglang import checks, control, older_release, passthrough
from penstock.engines.sglang.checks import draft_model, is_speculative
from penstock.engines.sglang.older_release import STREAMING, VISION, to_current_flag
from penstock.engines.sglang.passthrough import check_router_args, check_sglang_args, to_command_line
from penstock.engines.weights.fp8_blocks import BLOCK, find_unsupported_entry, fp8_weights, mean_bytes_per_weight
from penstock.storage.errors import EngineError, ModelError, check_rules
from penstock.storage.secret_references import resolve_secrets

if TYPE_CHECKING:
    from penstock.engines.families.shape import ModelShape
    from penstock.engines.sglang.client import SGLangClient

LAUNCHER = Path(__file__).with_name("launch.py")  # a script; do not import it: its top-level code patches the process
STATIC_SHARE = 0.85  # assumed without --sglang-mem-fraction-static: SGLang 0.5 chooses about 0.83 to 0.9 on 80 GiB
# Entries of config.json that must be equal for a model to load another model's weights.
MODEL_SIZES = (
    *("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "moe_intermediate_size", "num_experts", "n_routed_experts", "kv_lora_rank"),
    *("q_lora_rank", "tie_word_embeddings"),
)


def default_args(options: EngineOptions, *, has_gpus: bool) -> dict[str, Any]:
    """Return the server flags that apply unless the user gives other values. On CPUs engines compute in the data type
    of the trained weights. On GPUs they compute in bf16: SGLang's GPU kernels for normalization and attention do not
    support fp32, and with fp8 weights only 16-bit types are possible. (SGLang's own default is the checkpoint's type,
    or fp16 for an fp32 checkpoint.)"""
    is_fp32 = not has_gpus and options.params_dtype != "bf16"
    quantized = options.spec.args.get("quantization") or stores_quantized_weights(options)
    return {"dtype": "float32" if is_fp32 and not quantized else "bfloat16"}


class SGLangServer(EngineServer):
    """An `EngineServer` that runs SGLang through `launch.py`."""

    name = "sglang"
    address_variables = ("SGLANG_HOST_IP",)
    # Variables that make SGLang open further ports, replace its HTTP server or run other code, which the checks of its
    # flags would not see: those of its dumper and of its tests, and names that end with a kind of address.
    not_inherited = re.compile(r"DUMPER_.*|SGLANG_TEST_.*|SGLANG_(.*_)?(PORT|PORT_BASE|ADDR|HOST|IP|URL|SERVER)")
    # Searched in the log, because a server that cannot bind its port does not exit: a thread waits for its HTTP server.
    bind_error = r"bind on address \('[^']*', {port}\b.*in use"
    # Offset 10000 is for gRPC (0.5.15.post1 does not start if this port exceeds 65535); 233 to 240 are for attention
    # with data parallelism.
    derived_ports = (10_000, *range(233, 241))
    highest_port = HIGHEST - max(derived_ports)

    def command(self, port: int) -> list[str]:
        spec = self.spec
        ours: dict[str, object] = {
            "model_path": spec.model_path,
            "host": self._host,
            "port": port,
            "tp_size": spec.tensor_parallel,
            "weight_version": spec.weight_version,
        }
        if spec.num_nodes > 1:
            ours |= {"nnodes": spec.num_nodes, "node_rank": self.node_rank, "dist_init_addr": self.rendezvous}
        else:
            # The rendezvous of the ranks, set here because SGLang does not reserve the port that it chooses.
            ours["nccl_port"] = reserve_free_port()
        configured = {name: value for name, value in spec.args.items() if name != "api_key"}
        return [spec.python or sys.executable, str(LAUNCHER), *to_command_line(ours), *to_command_line(configured)]

    def is_ready(self) -> bool:
        # A process with another node rank than 0 answers when its ranks have loaded the model.
        return control.get_succeeds(self.url(), "/health", 10)  # generates a token, which takes about a second


class SGLangBackend(EngineBackend):
    """The implementation of `EngineBackend` for SGLang."""

    title = "SGLang"
    help = (
        "All flags of the installed SGLang, such as --sglang-mem-fraction-static 0.8 (fraction of GPU memory) and "
        "--sglang-context-length 8192 (tokens); `python -m sglang.launch_server --help` lists them. The flags of "
        "SGLang's router have the prefix --router-."
    )
    server_class = SGLangServer
    capabilities = frozenset(Capability)
    packages: ClassVar = {"sglang": "", "sglang-router": "0.3."}
    processes: ClassVar = {
        "sglang/launch.py": "API key; none on ports between its processes",
        "launch_router.py": "API key; none on its metrics, states and model names",
    }
    shared_memory = r"sglang_loads_.+\.shm"
    context_flag = "--sglang-context-length"
    speculation_flag = "--sglang-speculative-algorithm"
    path_flags = checks.DRAFT_MODEL
    flag_tables = staticmethod(passthrough.flag_tables)
    check_sharding = staticmethod(checks.check_fp8_widths)
    graph_warning = staticmethod(checks.graph_warning)
    reason_against_adapters = staticmethod(checks.reason_against_adapters)
    find_biasing_params = staticmethod(passthrough.find_biasing_params)

    def facts(self, args: Mapping[str, Any]) -> EngineFacts:
        length = args.get("context_length")
        return EngineFacts(
            context_length=length if isinstance(length, int) and length > 0 else None,
            quantization=args.get("quantization"),
            replicates_attention=bool(args.get("enable_dp_attention")),
            speculates=is_speculative(args),
            draft_model=draft_model(args),
        )

    def check_args(self, args: Mapping[str, Any], *, router: bool = False) -> dict[str, Any]:
        return check_router_args(args) if router else check_sglang_args(args)

    def start_check(self) -> tuple[list[str], str]:
        advice = f"without CUDA torchvision must be in {sys.prefix}/sglang-site, not in site-packages"
        return [str(LAUNCHER), "--help"], advice

    def connect(self, urls: EngineUrls, timeout: float = 600, **options: Any) -> SGLangClient:
        from penstock.engines.sglang.client import SGLangClient

        return SGLangClient(urls, timeout, **options)

    def server_args(self, options: EngineOptions, *, has_gpus: bool) -> dict[str, Any]:
        self.check_gpus(options, has_gpus=has_gpus)
        offload = options.offload and has_gpus
        switches = {
            "enable_return_routed_experts": options.return_experts,
            "enable_fp32_lm_head": options.fp32_head,
            "enable_deterministic_inference": options.sampling_seeds,
            "enable_memory_saver": offload,
            # Weight updates do not restore draft layers or, if only adapters are sent, the model's own weights.
            "enable_draft_weights_cpu_backup": offload and is_speculative(check_sglang_args(options.spec.args)),
            "enable_weights_cpu_backup": offload and options.adapters is not None,
        }
        own = options.spec.args
        if options.spec.python is None:  # otherwise the names are those of another installation
            known = set(passthrough.sglang_flags())
            own = dict(to_current_flag(key.replace("-", "_"), value, known) for key, value in own.items())
        args = default_args(options, has_gpus=has_gpus) | own
        args |= {name: True for name, is_on in switches.items() if is_on}
        if adapters := options.adapters:
            lora = {"enable_lora": True, "max_lora_rank": adapters.rank, "lora_target_modules": list(adapters.modules)}
            # Health checks, which have no adapter, count as one more.
            args = {**lora, "max_loras_per_batch": 1 + adapters.max_versions, **args}
        if options.vision is not None:
            args = checks.vision_args() | args
        return checks.without_prefill_graphs(args) if has_gpus and options.spec.python is None else args

    def create_router(self, options: EngineOptions) -> RequestRouter | None:
        if options.router is None:
            return None
        from penstock.engines.sglang.router import SGLangRouter

        args = check_router_args(resolve_secrets(options.router))
        return SGLangRouter(args, options.spec.log_dir, max_restarts=options.router_restarts)

    def check_options(self, options: EngineOptions) -> None:
        spec, routed, trains_vision = options.spec, options.router is not None, options.vision == "trained"
        if not options.external and spec.python is None:  # otherwise the server's SGLang is not the one installed here
            checks.check_model(read_config(Path(spec.model_path) / "config.json"))
            for option, is_given in {STREAMING: options.in_flight, VISION: trains_vision}.items():
                if is_given:
                    older_release.check_release(option)
        args = check_sglang_args(spec.args)
        if options.router is not None:
            check_router_args(options.router)
        passthrough.check_sampling(options.sampling, options.sampling_seeds, args, routed=routed)
        checks.check_speculative(args, options)
        for address in options.external:
            engine_url(address)
        rules = (
            (
                options.external and trains_vision,
                "--no-freeze-vision needs engines that the run starts, because external engines "
                "(--rollout-external-engine-addrs) would use the embeddings of images again after a weight update: "
                "omit one of the options",
            ),
            (
                options.external and options.in_flight == "in_place",
                "--pause-generation-mode in_place needs engines that the run starts, because external engines "
                "(--rollout-external-engine-addrs) would use a KV cache of earlier weights: use "
                "--pause-generation-mode retract, or omit --rollout-external-engine-addrs",
            ),
            (
                options.return_experts and routed,
                "--use-rollout-routing-replay cannot be combined with --use-router, because SGLang's router drops the "
                "request for routed experts: omit --use-router, or --use-rollout-routing-replay",
            ),
            (
                spec.port and not is_free(spec.port),
                f"port {spec.port} of --engine-port is in use: give another port, or omit the option to use a free one",
            ),
        )
        check_rules(rules, EngineError)

    def check_gpus(self, options: EngineOptions, *, has_gpus: bool) -> None:
        if has_gpus or options.external:
            return
        drafts = is_speculative(check_sglang_args(options.spec.args))
        rules = (
            (
                is_given,
                f"{option} was given, but no GPU was found for the engines, and SGLang {reason}: omit the option, or "
                "use a machine with GPUs",
            )
            for option, is_given, reason in (
                ("--rollout-sampling-seeds", options.sampling_seeds, "samples reproducibly only on GPUs"),
                (self.speculation_flag, drafts, "ignores the temperature when it verifies draft tokens on a CPU"),
            )
        )
        check_rules(rules)

    def check_weight_updates(self, options: EngineOptions, capabilities: list[tuple[int, int]] | None) -> None:
        directory = Path(options.spec.model_path)
        quantization = read_config(directory / "config.json").get("quantization_config")
        copy = (
            "make an fp8 copy with `penstock convert --hf-checkpoint` and `penstock convert --load --export-dtype fp8` "
            "(docs/convert.md)"
        )
        # SGLang would copy new bf16 weights into its fp8 parameters without new scales.
        online = options.spec.args.get("quantization")
        if online is not None and not (online == "fp8" and quantization):
            raise EngineError(
                f"--sglang-quantization {online} quantizes the weights while the engine loads them, and weight updates "
                f"cannot replace such weights: omit the option; for fp8 rollouts {copy} and give it as --hf-checkpoint"
            )
        if quantization and (difference := find_unsupported_entry(quantization)):
            raise ModelError(
                f"{directory} has quantized weights (quantization_config with {difference}), but the trainer can send "
                f"engines only unquantized weights, or fp8 (e4m3) weights with one scale per {BLOCK} x {BLOCK} block "
                f"and dynamic activation scales: use a bf16 checkpoint, or {copy}"
            )
        if capabilities is None or not fp8_weights(options.spec.model_path):
            return
        # SGLang's parameters have the checkpoint's layout on Ada and Hopper only: on earlier GPUs, where its kernels
        # compute in bf16, they have another layout, and on later GPUs the scales have another layout.
        if not capabilities or not all((8, 9) <= capability < (10, 0) for capability in capabilities):
            names = ", ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))
            found = f"GPUs of compute capability {names}" if names else "no GPU"
            raise EngineError(
                f"engines with the fp8 weights of --hf-checkpoint {directory} need GPUs of compute capability 8.9 or "
                f"9.0 (Ada, Hopper); found {found}: hide other GPUs with CUDA_VISIBLE_DEVICES, or use a bf16 checkpoint"
            )

    def estimate_memory(self, options: EngineOptions, shape: ModelShape, gpu_bytes: int) -> EngineMemory:
        args = check_sglang_args(options.spec.args)
        share = args.get("mem_fraction_static")
        if share is not None and not (type(share) in (int, float) and 0 < share < 1):
            raise EngineError(f"--sglang-mem-fraction-static takes a number between 0 and 1; found {str(share)[:80]!r}")
        dtype = (default_args(options, has_gpus=True) | args)["dtype"]
        bytes_per_element = 4 if dtype in ("float", "float32") else 2
        bytes_per_weight: float = bytes_per_element
        if stores_quantized_weights(options):
            bytes_per_weight = mean_bytes_per_weight(shape)
        elif args.get("quantization"):
            bytes_per_weight = 1
        return estimate_engine_memory(
            shape,
            options.gpus_per_engine,
            round((share or STATIC_SHARE) * gpu_bytes),
            bytes_per_weight=bytes_per_weight,
            bytes_per_kv_element=1 if str(args.get("kv_cache_dtype", "auto")).startswith("fp8") else bytes_per_element,
            num_draft_layers=shape.num_mtp_layers if is_speculative(args) and draft_model(args) is None else 0,
            share_flag="--sglang-mem-fraction-static",
        )

    def check_external_server(self, url: str, model_path: str, args: Mapping[str, Any]) -> None:
        release, _ = control.release_and_tp_size(url)
        if release < older_release.OLDEST:
            raise EngineError(
                f"the external engine at {url} runs SGLang {'.'.join(map(str, release))}, but Penstock needs "
                "0.5.15.post1 or later: upgrade SGLang there"
            )
        if args.get("enable_lora"):
            checks.check_external_adapters(url, args)
        info = control.call_server(url, "/model_info")
        # After a weight update with transport "disk", `model_path` is the update's temporary directory, now removed.
        config = Path(str(info["model_path"])) / "config.json"
        if config.is_file():
            served = json.loads(config.read_text(encoding="utf-8"))
        else:
            served = {"architectures": info["architectures"]} if info.get("architectures") else {}
        required = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        is_quantized = [bool(values.get("quantization_config")) for values in (served, required)]
        fp32_head = "enable_fp32_lm_head"
        rules = [
            (
                args.get(fp32_head) and not control.call_server(url, "/server_info").get(fp32_head),
                f"the external engine at {url} computes its logits in the model's data type, but --fp32-lm-head needs "
                "fp32: start the engine with --enable-fp32-lm-head, or omit --fp32-lm-head",
            ),
            (
                config.is_file() and is_quantized[0] != is_quantized[1],
                f"either the engine at {url} or --hf-checkpoint {model_path} has quantized weights, but not both: "
                "start the engine with the model of --hf-checkpoint",
            ),
        ]
        for name in MODEL_SIZES:
            own = required.get(name)
            rules.append(
                (
                    served.get(name, own) != own,
                    f"the engine at {url} serves a model with {name} {served.get(name)!r}, but --hf-checkpoint "
                    f"{model_path} has {own!r}: start the engine with --hf-checkpoint's model, or name another engine "
                    "in --rollout-external-engine-addrs",
                )
            )
        check_rules(rules, EngineError)
